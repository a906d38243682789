//! Tests of `permute`: the slow obvious version beside it, finite differences, bounds in bf16, zero rows, odd sizes, and
//! the same bits with any number of threads.

use half::bf16;

use super::*;
use crate::check::{assert_close, numeric_gradient};
use crate::rng::{Purpose, Stream};

fn random<T: Float>(device: &Device, dims: &[usize], seed: u64) -> Tensor<T> {
    let stream = Stream::new(seed, Purpose::Named("permute"));
    let n: usize = dims.iter().product();
    let values: Vec<T> = (0..n as u64).map(|i| T::from_f64(stream.normal(i))).collect();
    Tensor::from_slice(device, dims, &values, Category::Data)
}

fn random_index(seed: u64, n: usize, below: usize) -> Vec<u32> {
    let stream = Stream::new(seed, Purpose::Named("permute index"));
    (0..n as u64)
        .map(|i| match stream.below(i, below as u64 + 1) {
            v if v == below as u64 => EMPTY_ROW,
            v => v as u32,
        })
        .collect()
}

fn scatter_oracle<T: Float>(y: &Tensor<T>, index: &CsrIndex) -> Vec<T> {
    let d = y.row_len();
    let mut out = Vec::new();
    for t in 0..index.targets_count() {
        for c in 0..d {
            let values = index.list(t).iter().map(|&r| y.data()[r as usize * d + c].to_acc());
            out.push(T::from_acc(values.reduce(|a, b| a + b).unwrap_or_default()));
        }
    }
    out
}

fn check<T: Float>() {
    for (tokens, n, d) in [(1, 0, 3), (5, 17, 1), (300, 900, 67), (40, 200, 128)] {
        let index = random_index(3, n, tokens);
        let csr = CsrIndex::inverse(&index, tokens);
        for threads in [1, 2, 3] {
            let device = Device::cpu(threads);
            let x = random::<T>(&device, &[tokens, d], 1);
            let y = gather_rows(&x, &index);
            for (i, row) in y.data().chunks_exact(d).enumerate() {
                if index[i] == EMPTY_ROW {
                    assert!(row.iter().all(|v| v.to_f64() == 0.0));
                } else {
                    let start = index[i] as usize * d;
                    assert_eq!(row, &x.data()[start..start + d]);
                }
            }
            let y = random::<T>(&device, &[n, d], 2);
            assert_eq!(scatter_sum(&y, &csr).to_vec(), scatter_oracle(&y, &csr), "{tokens} {n} {d}");
            let cut = n / 3;
            let (front, back) = (y.slice_rows(0..cut), y.slice_rows(cut..n));
            let sum = scatter_sum_sources(&device, &[&front, &back], &csr);
            assert_eq!(sum.to_vec(), scatter_oracle(&y, &csr));
        }
    }
}

#[test]
fn gather_and_sum_equal_one_element_at_a_time() {
    check::<f32>();
    check::<f64>();
    check::<bf16>();
}

#[test]
fn the_listed_order_decides_the_bits() {
    let device = Device::cpu(1);
    let y = Tensor::from_slice(&device, [3, 1], &[1e8f32, -1e8, 1.0], Category::Data);
    let sum = |rows: Vec<u32>| scatter_sum(&y, &CsrIndex { offsets: vec![0, 3], rows }).item();
    assert_eq!((sum(vec![0, 1, 2]), sum(vec![0, 2, 1])), (1.0, 0.0));
}

#[test]
fn a_token_sums_in_the_accumulator_and_rounds_once() {
    let device = Device::cpu(1);
    let values = [1.0, 1.0 / 256.0, 1.0 / 256.0].map(bf16::from_f32);
    let y = Tensor::from_slice(&device, [3, 1], &values, Category::Data);
    let csr = CsrIndex { offsets: vec![0, 3], rows: vec![0, 1, 2] };
    assert_eq!(scatter_sum(&y, &csr).item().to_f32(), 1.0 + 1.0 / 128.0);
}

#[test]
fn each_is_the_backward_of_the_other() {
    let device = Device::cpu(1);
    let (tokens, d) = (4, 2);
    let index = [2, 0, EMPTY_ROW, 2, 3, 2];
    let upstream = random::<f64>(&device, &[index.len(), d], 5);
    let csr = CsrIndex::inverse(&index, tokens);
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
    let x = random::<f64>(&device, &[tokens, d], 6);
    let numeric = numeric_gradient(&x.to_vec(), 1e-4, |x| {
        let x = Tensor::from_slice(&device, [tokens, d], x, Category::Data);
        dot(&gather_rows(&x, &index).to_vec(), &upstream.to_vec())
    });
    assert_close("gather", &scatter_sum(&upstream, &csr).to_vec(), &numeric, 1e-9);
    let upstream = random::<f64>(&device, &[tokens, d], 7);
    let y = random::<f64>(&device, &[index.len(), d], 8);
    let numeric = numeric_gradient(&y.to_vec(), 1e-4, |y| {
        let y = Tensor::from_slice(&device, [index.len(), d], y, Category::Data);
        dot(&scatter_sum(&y, &csr).to_vec(), &upstream.to_vec())
    });
    let back = csr.targets(index.len());
    assert_eq!(back, index);
    assert_close("sum", &gather_rows(&upstream, &back).to_vec(), &numeric, 1e-9);
}

#[test]
fn gathers_land_in_a_part_of_a_larger_buffer() {
    let device = Device::cpu(2);
    let x = random::<f32>(&device, &[3, 4], 1);
    let mut buffer = Tensor::zeros(&device, [5, 4], Category::CommBuffer);
    gather_rows_into(&mut buffer, 2, &x, &[1, 1]);
    let expected = [vec![0.0; 8], x.slice_rows(1..2).to_vec().repeat(2), vec![0.0; 4]].concat();
    assert_eq!(buffer.to_vec(), expected);
}

#[test]
fn weights_go_out_and_their_gradients_come_back() {
    let device = Device::cpu(1);
    let w = Tensor::from_slice(&device, [2, 3], &[0.0f32, 1.0, 2.0, 3.0, 4.0, 5.0], Category::Data);
    let index = [4, EMPTY_ROW, 0];
    let y = gather_weights(&w, &index);
    assert_eq!(y.to_vec(), [4.0, 0.0, 0.0]);
    let dy = Tensor::from_slice(&device, [3], &[7.0f32, 8.0, 9.0], Category::Data);
    assert_eq!(scatter_weights(&dy, &index, [2, 3]).to_vec(), [9.0, 0.0, 0.0, 0.0, 7.0, 0.0]);
}
