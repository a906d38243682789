//! Noise on a router's input: each element times 1 + epsilon u, u uniform in [-1, 1), one draw an element, by its index
//! in the global batch. Source: Switch Transformer, arXiv 2101.03961, section 2.2; counters as in [`crate::rng`].

use crate::arguments;
use crate::cuda::{Gpu, source::JITTER};
use crate::dtype::Float;
use crate::ledger::Category;
use crate::ops::elementwise::grain_rows;
use crate::rng::Stream;
use crate::tensor::Tensor;

/// Threads of a block, which takes a row at a time.
const THREADS: u32 = 256;

/// `x_td` times its noise; row t is the token of index `indices_t[t]`. Also the backward, from the gradient of the
/// product to that of x.
///
/// # Panics
/// When there is not one index a row.
pub fn jitter<T: Float>(x_td: &Tensor<T>, indices_t: &[u64], stream: &Stream, epsilon: f64) -> Tensor<T> {
    assert_eq!(x_td.rows(), indices_t.len(), "one index a row");
    let width = x_td.row_len();
    let mut y_td = Tensor::empty(x_td.device(), x_td.shape(), Category::Activation);
    if let Some(gpu) = x_td.device().gpu() {
        launch(gpu, x_td, indices_t, stream, epsilon, &mut y_td);
        return y_td;
    }
    let x = x_td.data();
    x_td.device().pool().for_rows_mut(y_td.data_mut(), width, grain_rows(8 * width), |first, rows| {
        for (t, row) in rows.chunks_exact_mut(width).enumerate() {
            let start = indices_t[first + t] * width as u64;
            let values = &x[(first + t) * width..][..width];
            for (j, (y, x)) in row.iter_mut().zip(values).enumerate() {
                let u = 2.0 * stream.uniform(start + j as u64) - 1.0;
                *y = T::from_acc(x.to_acc() * T::Acc::from_f64(1.0 + epsilon * u));
            }
        }
    });
    y_td
}

fn launch<T: Float>(
    gpu: &Gpu,
    x_td: &Tensor<T>,
    indices_t: &[u64],
    stream: &Stream,
    epsilon: f64,
    y_td: &mut Tensor<T>,
) {
    let (rows, width, device) = (x_td.rows(), x_td.row_len(), x_td.device());
    let indices = bytemuck::cast_slice::<u64, i64>(indices_t);
    let indices = Tensor::from_slice(device, [rows], indices, Category::Workspace);
    let (purpose, seed) = stream.purpose_and_seed();
    let arguments = arguments![x_td, &indices, y_td, rows, width, purpose, seed, epsilon];
    gpu.launch(&JITTER, &format!("jitter_{}", T::DTYPE), Gpu::blocks(rows, 1), THREADS, &arguments);
}
