//! Tests of `norm`: the slow obvious version beside it, finite differences, bounds in bf16, zero rows, odd sizes, and
//! the same bits with any number of threads.

use half::bf16;

use super::*;
use crate::check::{assert_close, numeric_gradient};
use crate::device::Device;
use crate::dtype::Element;
use crate::rng::{Purpose, Stream};

const EPS: f64 = 1e-5;

fn random<T: Float>(device: &Device, dims: &[usize], seed: u64) -> Tensor<T> {
    let stream = Stream::new(seed, Purpose::Named("norm"));
    let n: usize = dims.iter().product();
    let values: Vec<T> = (0..n as u64).map(|i| T::from_f64(stream.normal(i))).collect();
    Tensor::from_slice(device, dims, &values, Category::Data)
}

fn wide<T: Float>(x: &Tensor<T>) -> Vec<f64> {
    x.to_vec().iter().map(|v| v.to_f64()).collect()
}

fn same_bits<T: Element>(a: &Tensor<T>, b: &Tensor<T>) -> bool {
    bytemuck::cast_slice::<T, u8>(a.data()) == bytemuck::cast_slice::<T, u8>(b.data())
}

fn rms_oracle(x: &[f64], w: &[f64]) -> Vec<f64> {
    let row = |row: &[f64]| {
        let inverse = 1.0 / (row.iter().map(|v| v * v).sum::<f64>() / w.len() as f64 + EPS).sqrt();
        row.iter().zip(w).map(|(v, w)| v * inverse * w).collect::<Vec<_>>()
    };
    x.chunks(w.len()).flat_map(row).collect()
}

fn layer_oracle(x: &[f64], w: &[f64], b: &[f64]) -> Vec<f64> {
    let d = w.len() as f64;
    let row = |row: &[f64]| {
        let mean = row.iter().sum::<f64>() / d;
        let inverse = 1.0 / (row.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / d + EPS).sqrt();
        (0..w.len()).map(|i| (row[i] - mean) * inverse * w[i] + b[i]).collect::<Vec<_>>()
    };
    x.chunks(w.len()).flat_map(row).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

fn check_forward<T: Float>(tolerance: f64) {
    for dims in [&[0, 8][..], &[1, 1], &[5, 33], &[300, 64], &[7, 3, 16], &[2, 5, 3, 100]] {
        let device = Device::cpu(2);
        let d = *dims.last().expect("columns");
        let (x, w, b) = (random::<T>(&device, dims, 1), random(&device, &[d], 2), random(&device, &[d], 3));
        let (y, inv_rms) = rms_forward(&x, &w, EPS);
        assert_eq!((y.dims(), inv_rms.len()), (dims, x.len() / d));
        assert_close("rms", &wide(&y), &rms_oracle(&wide(&x), &wide(&w)), tolerance);
        let (y, ..) = layer_norm_forward(&x, &w, &b, EPS);
        assert_close("layer norm", &wide(&y), &layer_oracle(&wide(&x), &wide(&w), &wide(&b)), tolerance);
    }
}

#[test]
fn forwards_equal_the_oracle() {
    check_forward::<f64>(1e-13);
    check_forward::<f32>(1e-6);
    // One rounding of the result: half a unit of 8 bits.
    check_forward::<bf16>(1.0 / 256.0);
}

#[test]
fn rms_backward_equals_finite_differences() {
    let device = Device::cpu(2);
    for dims in [&[3, 5][..], &[2, 2, 33]] {
        let d = *dims.last().expect("columns");
        let (x, w) = (random::<f64>(&device, dims, 1), random::<f64>(&device, &[d], 2));
        let dy = random::<f64>(&device, dims, 3);
        let (_, inv_rms) = rms_forward(&x, &w, EPS);
        let mut dw = Tensor::full(&device, [d], 0.5, Category::Gradient);
        let dx = rms_backward(&dy, &x, &w, &inv_rms, &mut dw);
        let (xs, ws, dys) = (wide(&x), wide(&w), wide(&dy));
        let numeric = numeric_gradient(&xs, 1e-5, |x| dot(&rms_oracle(x, &ws), &dys));
        assert_close("dx", &wide(&dx), &numeric, 1e-8);
        let numeric: Vec<f64> = numeric_gradient(&ws, 1e-5, |w| dot(&rms_oracle(&xs, w), &dys));
        let added: Vec<f64> = numeric.iter().map(|v| v + 0.5).collect();
        assert_close("dw", &wide(&dw), &added, 1e-8);
    }
}

#[test]
fn layer_norm_backward_equals_finite_differences() {
    let device = Device::cpu(2);
    let dims = [4, 37];
    let (x, w) = (random::<f64>(&device, &dims, 1), random::<f64>(&device, &[37], 2));
    let (b, dy) = (random::<f64>(&device, &[37], 4), random::<f64>(&device, &dims, 3));
    let (_, mean, inv_std) = layer_norm_forward(&x, &w, &b, EPS);
    let mut dw = Tensor::zeros(&device, [37], Category::Gradient);
    let mut db = Tensor::zeros(&device, [37], Category::Gradient);
    let gradients = LayerNormGradients { dw_d: &mut dw, db_d: &mut db };
    let dx = layer_norm_backward(&dy, &x, &w, &mean, &inv_std, gradients);
    let (xs, ws, bs, dys) = (wide(&x), wide(&w), wide(&b), wide(&dy));
    let numeric = numeric_gradient(&xs, 1e-5, |x| dot(&layer_oracle(x, &ws, &bs), &dys));
    assert_close("dx", &wide(&dx), &numeric, 1e-8);
    let numeric = numeric_gradient(&ws, 1e-5, |w| dot(&layer_oracle(&xs, w, &bs), &dys));
    assert_close("dw", &wide(&dw), &numeric, 1e-8);
    let numeric = numeric_gradient(&bs, 1e-5, |b| dot(&layer_oracle(&xs, &ws, b), &dys));
    assert_close("db", &wide(&db), &numeric, 1e-8);
}

fn check_fused_and_sharded<T: Float>() {
    for (rows, d) in [(0, 4), (1, 1), (130, 67), (500, 128)] {
        let mut first: Option<(Tensor<T>, Tensor<T>, Tensor<T::Acc>)> = None;
        for threads in [1, 2, 3] {
            let device = Device::cpu(threads);
            let (x, r) = (random::<T>(&device, &[rows, d], 1), random::<T>(&device, &[rows, d], 2));
            let (w, dy) = (random::<T>(&device, &[d], 3), random::<T>(&device, &[rows, d], 4));
            let sum = crate::ops::elementwise::add(&x, &r);
            let (y, inv) = rms_forward(&sum, &w, EPS);
            let (fused_sum, fused_y, fused_inv) = add_rms_forward(&x, &r, &w, EPS);
            assert!(same_bits(&sum, &fused_sum) && same_bits(&y, &fused_y) && same_bits(&inv, &fused_inv));
            let inverses = inverse_rms(&sum_of_squares(&sum), d, EPS);
            assert!(same_bits(&inv, &inverses) && same_bits(&y, &rms_apply(&sum, &w, &inverses)));
            let zeros = || Tensor::<T::Acc>::zeros(&device, [d], Category::Gradient);
            let (mut dw, mut dw_sharded, mut dw_fused) = (zeros(), zeros(), zeros());
            let dx = rms_backward(&dy, &sum, &w, &inv, &mut dw);
            let dots = rms_backward_dots(&dy, &sum, &w);
            let sharded = rms_apply_backward(&dy, &sum, &w, &inv, &dots, d, &mut dw_sharded);
            assert!(same_bits(&dx, &sharded) && same_bits(&dw, &dw_sharded));
            let both = add_rms_backward(&dy, &r, &sum, &w, &inv, &mut dw_fused);
            assert!(same_bits(&dw, &dw_fused));
            let added: Vec<f64> = wide(&dx).iter().zip(wide(&r)).map(|(a, b)| a + b).collect();
            assert_close(
                "dsum + dx",
                &wide(&both),
                &added,
                if T::DTYPE == bf16::DTYPE { 0.01 } else { 1e-6 },
            );
            if let Some((y1, dx1, dw1)) = &first {
                assert!(same_bits(y1, &y) && same_bits(dx1, &dx) && same_bits(dw1, &dw), "{threads} threads");
            }
            first.get_or_insert((y, dx, dw));
        }
    }
}

#[test]
fn fused_and_sharded_forms_have_the_same_bits_for_any_thread_count() {
    check_fused_and_sharded::<f32>();
    check_fused_and_sharded::<f64>();
    check_fused_and_sharded::<bf16>();
}

#[test]
fn two_column_shards_equal_the_whole_width() {
    use crate::ops::elementwise::{add, concat_columns, take_columns};
    let device = Device::cpu(1);
    let (rows, d, cut) = (9, 20, 7);
    let (x, dy) = (random::<f64>(&device, &[rows, d], 1), random::<f64>(&device, &[rows, d], 2));
    let w = random::<f64>(&device, &[1, d], 3);
    let whole_w = w.clone().reshape([d]);
    let (y, inv) = rms_forward(&x, &whole_w, EPS);
    let mut dw = Tensor::zeros(&device, [d], Category::Gradient);
    let dx = rms_backward(&dy, &x, &whole_w, &inv, &mut dw);
    let shards = [0..cut, cut..d].map(|range| {
        let w = take_columns(&w, range.clone()).reshape([range.len()]);
        (take_columns(&x, range.clone()), take_columns(&dy, range), w)
    });
    let sums = add(&sum_of_squares(&shards[0].0), &sum_of_squares(&shards[1].0));
    let inverses = inverse_rms(&sums, d, EPS);
    let dots = shards.each_ref().map(|(x, dy, w)| rms_backward_dots(dy, x, w));
    let dots = add(&dots[0], &dots[1]);
    let parts = shards.each_ref().map(|(x, dy, w)| {
        let mut dw = Tensor::zeros(&device, [w.len()], Category::Gradient);
        let dx = rms_apply_backward(dy, x, w, &inverses, &dots, d, &mut dw);
        (rms_apply(x, w, &inverses), dx, dw)
    });
    assert_close("y", &wide(&concat_columns(&[&parts[0].0, &parts[1].0])), &wide(&y), 1e-14);
    assert_close("dx", &wide(&concat_columns(&[&parts[0].1, &parts[1].1])), &wide(&dx), 1e-14);
    assert_close("dw", &[wide(&parts[0].2), wide(&parts[1].2)].concat(), &wide(&dw), 1e-14);
}
