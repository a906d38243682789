//! Tests of `embedding`: the slow obvious version beside it, finite differences, bounds in bf16, zero rows, odd sizes, and
//! the same bits with any number of threads.

use half::bf16;

use super::*;
use crate::check::{assert_close, numeric_gradient};
use crate::device::Device;
use crate::rng::{Purpose, Stream};

fn random<T: Float>(device: &Device, dims: &[usize], seed: u64) -> Tensor<T> {
    let stream = Stream::new(seed, Purpose::Named("embedding"));
    let n: usize = dims.iter().product();
    let values: Vec<T> = (0..n as u64).map(|i| T::from_f64(stream.normal(i))).collect();
    Tensor::from_slice(device, dims, &values, Category::Data)
}

fn ids(device: &Device, n: usize, below: u64) -> Tensor<i32> {
    let stream = Stream::new(5, Purpose::Named("ids"));
    let values: Vec<i32> = (0..n as u64).map(|i| stream.below(i, below) as i32).collect();
    Tensor::from_slice(device, [n], &values, Category::Data)
}

fn check<T: Float>() {
    for (n, d) in [(0, 3), (1, 1), (500, 130), (77, 64)] {
        for threads in [1, 2, 3] {
            let device = Device::cpu(threads);
            let ids = ids(&device, n, 11);
            let table = random::<T>(&device, &[11, d], 1);
            let whole = embedding_forward(&table, &ids, 0);
            let dx = random::<T>(&device, &[n, d], 2);
            let mut expected = vec![T::Acc::from_f64(0.25); 11 * d];
            for (t, &id) in ids.data().iter().enumerate() {
                for c in 0..d {
                    assert_eq!(whole.data()[t * d + c], table.data()[id as usize * d + c]);
                    expected[id as usize * d + c] += dx.data()[t * d + c].to_acc();
                }
            }
            let mut sum = vec![0.0; n * d];
            let mut gradient = Vec::new();
            // The vocabulary cut in slices of 4, 4 and 3 rows.
            for rows in [0..4, 4..8, 8..11] {
                let part = embedding_forward(&table.slice_rows(rows.clone()), &ids, rows.start);
                sum.iter_mut().zip(part.data()).for_each(|(s, v)| *s += v.to_f64());
                let mut dtable =
                    Tensor::full(&device, [rows.len(), d], T::Acc::from_f64(0.25), Category::Gradient);
                embedding_backward(&dx, &ids, rows.start, &mut dtable);
                gradient.extend(dtable.to_vec());
            }
            assert_eq!(sum, whole.data().iter().map(|v| v.to_f64()).collect::<Vec<_>>());
            assert_eq!(gradient, expected, "{threads} threads");
        }
    }
}

#[test]
fn slices_of_the_vocabulary_sum_to_the_whole() {
    check::<f32>();
    check::<f64>();
    check::<bf16>();
}

#[test]
fn backward_equals_finite_differences() {
    let device = Device::cpu(1);
    let ids = Tensor::from_slice(&device, [4], &[2, 0, 2, 7], Category::Data);
    let (table, dx) = (random::<f64>(&device, &[3, 2], 1), random::<f64>(&device, &[4, 2], 2));
    let numeric = numeric_gradient(&table.to_vec(), 1e-4, |table| {
        let table = Tensor::from_slice(&device, [3, 2], table, Category::Data);
        let x = embedding_forward(&table, &ids, 0).to_vec();
        x.iter().zip(dx.data()).map(|(a, b)| a * b).sum()
    });
    let mut gradient = Tensor::zeros(&device, [3, 2], Category::Gradient);
    embedding_backward(&dx, &ids, 0, &mut gradient);
    assert_close("dtable", &gradient.to_vec(), &numeric, 1e-9);
}

#[test]
fn ids_that_are_no_rows_embed_to_zero() {
    let device = Device::cpu(1);
    let table = Tensor::full(&device, [4, 2], 1.0f32, Category::Parameter);
    let ids = Tensor::from_slice(&device, [4], &[-1, 9, 10, 14], Category::Data);
    assert_eq!(embedding_forward(&table, &ids, 10).to_vec(), [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]);
}
