//! Everything that the in-process backend does, through the typed handle.

use plica_kernels::{Category, Tensor};

use crate::{CommError, LaunchOptions, Purpose, Reduce, run_ranks};

#[test]
fn ranks_sum_gather_and_exchange() {
    let sums = run_ranks(4, LaunchOptions::default(), |ctx| -> Result<Vec<f32>, CommError> {
        let x = Tensor::from_slice(&ctx.device, [4, 1], &[(1 << ctx.rank) as f32; 4], Category::Activation);
        let sum = ctx.world.all_reduce(Purpose::Metrics, &x, Reduce::Sum)?;
        let part = ctx.world.reduce_scatter(Purpose::Metrics, &x)?;
        let all = ctx.world.all_gather(Purpose::Metrics, &part)?;
        let turned = ctx.world.all_to_all(Purpose::Dispatch, &all, &[1; 4], &[1; 4])?;
        assert_eq!(sum.to_vec(), turned.to_vec());
        assert!(x.is_unique(), "nobody reads the input any more");
        Ok(sum.to_vec())
    });
    assert_eq!(sums.expect("no rank fails"), vec![vec![15.0; 4]; 4]);
}
