//! Grouped products against one plain product a group.

use super::*;
use crate::check::assert_close;
use crate::device::Device;
use crate::ops::gemm::tests::{normal, wide};
use crate::ops::gemm::{accumulate_tn, matmul_nn, matmul_nt};

const COUNTS: [&[usize]; 6] =
    [&[0, 0, 0], &[1, 0, 0], &[0, 300, 0], &[3, 1, 2], &[0, 65, 130, 7, 0], &[40, 0, 33, 290]];

fn against_plain<T: Float>(error: f64) {
    let device = Device::cpu(2);
    for counts in COUNTS {
        let (n, k, experts, r) = (37, 24, counts.len(), counts.iter().sum());
        let x = normal::<T>(&device, &[r, k], 1);
        let w = normal::<T>(&device, &[experts, n, k], 2);
        let dy = normal::<T>(&device, &[r, n], 3);
        let mut grad = normal::<T::Acc>(&device, &[experts, n, k], 4);
        let before = grad.duplicate(Category::Data);
        let (y, dx) = (grouped_nt(&x, &w, counts), grouped_nn(&dy, &w, counts));
        grouped_accumulate_tn(&mut grad, &dy, &x, counts);
        let mut first = 0;
        for (e, count) in counts.iter().enumerate() {
            let rows = first..first + count;
            let (xe, dye) = (x.slice_rows(rows.clone()), dy.slice_rows(rows.clone()));
            let we = w.slice_rows(e..e + 1).reshape([n, k]);
            assert_close("nt", &wide(&y.slice_rows(rows.clone())), &wide(&matmul_nt(&xe, &we)), error);
            assert_close("nn", &wide(&dx.slice_rows(rows.clone())), &wide(&matmul_nn(&dye, &we)), error);
            let mut expected = before.slice_rows(e..e + 1).reshape([n, k]).duplicate(Category::Gradient);
            if *count > 0 {
                accumulate_tn(&mut expected, &dye, &xe);
                assert_close("tn", &wide(&grad.slice_rows(e..e + 1)), &wide(&expected), 1e-5);
            } else {
                assert_eq!(
                    grad.slice_rows(e..e + 1).to_vec(),
                    expected.to_vec(),
                    "empty expert keeps its bits"
                );
            }
            first += count;
        }
    }
}

#[test]
fn every_group_has_its_own_weights() {
    against_plain::<f32>(1e-5);
    against_plain::<f64>(1e-13);
    against_plain::<half::bf16>(1.0 / 128.0);
}

#[test]
fn bits_do_not_depend_on_threads() {
    let run = |threads: usize| {
        let device = Device::cpu(threads);
        let counts = [0, 400, 3, 120];
        let x = normal::<f32>(&device, &[523, 70], 1);
        let w = normal::<f32>(&device, &[4, 90, 70], 2);
        let y = grouped_nt(&x, &w, &counts);
        let mut grad = Tensor::<f32>::zeros(&device, [4, 90, 70], Category::Gradient);
        grouped_accumulate_tn(&mut grad, &y, &x, &counts);
        let dx = grouped_nn(&y, &w, &counts);
        (y.to_vec(), grad.to_vec(), dx.to_vec())
    };
    let one = run(1);
    assert!(one == run(2) && one == run(3));
}
