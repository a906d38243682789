//! Matrix products. Most values are small integers, whose sums are exact in any order: results must then be the
//! same whatever the tiles, and a wrong index shows at once. Normal values show the precision.

use super::twin::{Pair, Twin, close};
use super::{Cases, case};
use crate::cuda::Gpu;
use crate::dtype::Float;
use crate::ledger::Category;
use crate::ops::gemm::cuda::{Layout, Operation, operand, result};
use crate::ops::gemm::{accumulate_tn, matmul_nn, matmul_nn_add, matmul_nt, matmul_nt_acc};
use crate::rng::{Purpose, Stream};
use crate::shape::Shape;
use crate::{Tensor, bf16};

/// (m, n, k): empty, single, odd, multiples of 8 (16-byte rows of bf16), several tiles, several blocks.
const SIZES: [(usize, usize, usize); 11] = [
    (0, 3, 4),
    (3, 0, 4),
    (3, 4, 0),
    (1, 1, 1),
    (1, 37, 19),
    (37, 1, 19),
    (16, 8, 8),
    (5, 64, 72),
    (70, 66, 33),
    (136, 24, 104),
    (131, 143, 9),
];

/// The same values; a zero may have either sign, which depends on what a sum starts from.
pub(super) fn exact<T: Float>(what: &str, cpu: &Tensor<T>, gpu: &Tensor<T>) -> Result<(), String> {
    close(what, cpu, gpu, 0.0)
}

/// Integers from -3 to 3; `shift` elements before the first one, so that its address is no multiple of 16.
pub(super) fn whole<T: Float>(twin: &Twin, shape: impl Into<Shape>, seed: u64, shift: usize) -> Pair<T> {
    let shape = shape.into();
    let stream = Stream::new(seed, Purpose::Named("conformance"));
    let value = |i: u64| T::from_f64((stream.uniform(i) * 7.0).floor() - 3.0);
    let values: Vec<T> = (0..(shape.len() + shift) as u64).map(value).collect();
    let all = twin.values([values.len()], &values);
    let view = |x: Tensor<T>| x.slice_rows(shift..values.len()).reshape(shape);
    Pair { cpu: view(all.cpu), gpu: view(all.gpu) }
}

/// A result to add to, on both: written in place, so in a buffer of its own.
pub(super) fn base<T: Float>(twin: &Twin, shape: impl Into<Shape>) -> Pair<T> {
    whole(twin, shape, 9, 0)
}

/// The public functions, `T` with `U`.
fn public<T: Float, U: Float<Acc = T::Acc>>(cases: &mut Cases) {
    case(cases, format!("gemm: nt, nn, tn {} {}", T::DTYPE, U::DTYPE), |twin| {
        for (i, (m, n, k)) in SIZES.into_iter().enumerate() {
            let at = |what: &str| format!("{what} {m} x {n} x {k}");
            let shift = i % 2;
            let (x, w) = (whole::<T>(twin, [m, k], 1, shift), whole::<U>(twin, [n, k], 2, shift));
            exact(&at("nt"), &matmul_nt(&x.cpu, &w.cpu), &matmul_nt(&x.gpu, &w.gpu))?;
            exact(&at("nt acc"), &matmul_nt_acc(&x.cpu, &w.cpu), &matmul_nt_acc(&x.gpu, &w.gpu))?;
            let dy = whole::<T>(twin, [m, n], 3, shift);
            exact(&at("nn"), &matmul_nn(&dy.cpu, &w.cpu), &matmul_nn(&dy.gpu, &w.gpu))?;
            let mut dx = base::<T>(twin, [m, k]);
            matmul_nn_add(&mut dx.cpu, &dy.cpu, &w.cpu);
            matmul_nn_add(&mut dx.gpu, &dy.gpu, &w.gpu);
            exact(&at("nn add"), &dx.cpu, &dx.gpu)?;
            let (dy, mut grad) = (whole::<U>(twin, [m, n], 4, shift), base::<T::Acc>(twin, [n, k]));
            accumulate_tn::<U, T>(&mut grad.cpu, &dy.cpu, &x.cpu);
            accumulate_tn::<U, T>(&mut grad.gpu, &dy.gpu, &x.gpu);
            exact(&at("tn"), &grad.cpu, &grad.gpu)?;
        }
        Ok(())
    });
}

/// Precision: normal values and a long inner dim.
fn precise<T: Float>(cases: &mut Cases) {
    case(cases, format!("gemm: precision {}", T::DTYPE), |twin| {
        let (m, n, k) = (33, 40, 520);
        let (x, w) = (twin.normal::<T>([m, k], 1), twin.normal::<T>([n, k], 2));
        // In the accumulator: f32 sums of exact products, also of bf16.
        let (cpu, gpu) = (matmul_nt_acc(&x.cpu, &w.cpu), matmul_nt_acc(&x.gpu, &w.gpu));
        close("nt acc", &cpu, &gpu, 1.0)?;
        // Rounded once: what the accumulator says, rounded.
        let rounded: Vec<T> = gpu.to_vec().into_iter().map(T::from_acc).collect();
        let rounded = Tensor::from_slice(&twin.cpu, [m, n], &rounded, Category::Data);
        let bound = if T::DTYPE == crate::DType::Bf16 { 0.5 } else { 1.0 };
        close("nt", &rounded, &matmul_nt(&x.gpu, &w.gpu), bound)?;
        let (dx_cpu, dx_gpu) = (matmul_nn(&cpu, &w.cpu), matmul_nn(&gpu, &w.gpu));
        close("nn", &dx_cpu, &dx_gpu, 1.0)
    });
}

/// Our own kernels of every layout, also where a library would do the product; those of tensor cores in both heights.
fn own<T: Float, U: Float<Acc = T::Acc>, V: Float<Acc = T::Acc>>(cases: &mut Cases) {
    let name = format!("gemm: own kernels {} {} {}", T::DTYPE, U::DTYPE, V::DTYPE);
    case(cases, name, |twin| {
        for (i, (m, n, k)) in [(150, 40, 41), (129, 136, 72), (3, 4, 0), (8, 264, 16)].into_iter().enumerate()
        {
            for height in [64, 128] {
                for layout in [Layout::Nt, Layout::Nn, Layout::Tn] {
                    one_own::<T, U, V>(twin, layout, (m, n, k), height, i % 2)?;
                }
            }
        }
        Ok(())
    });
}

fn one_own<T: Float, U: Float<Acc = T::Acc>, V: Float<Acc = T::Acc>>(
    twin: &Twin,
    layout: Layout,
    (m, n, k): (usize, usize, usize),
    height: usize,
    shift: usize,
) -> Result<(), String> {
    // Weight gradients are sums in the accumulator only.
    if layout == Layout::Tn && V::DTYPE == crate::DType::Bf16 {
        return Ok(());
    }
    let (a_shape, b_shape) = match layout {
        Layout::Nt => ([m, k], [n, k]),
        Layout::Nn => ([m, k], [k, n]),
        Layout::Tn => ([k, m], [k, n]),
    };
    let (a, b) = (whole::<T>(twin, a_shape, 1, shift), whole::<U>(twin, b_shape, 2, shift));
    let gpu: &Gpu = twin.gpu.gpu().ok_or("no GPU")?;
    for accumulate in [false, true] {
        let mut c = base::<V>(twin, [m, n]);
        let (at, bt, ct) = (operand(&a.gpu), operand(&b.gpu), result(&mut c.gpu));
        Operation { layout, a: at, b: bt, c: ct, m, n, k, accumulate }.run_tiles(gpu, None, height);
        let product: Tensor<T::Acc> = match layout {
            Layout::Nt => matmul_nt_acc(&a.cpu, &b.cpu),
            Layout::Nn => {
                let mut out = Tensor::<T::Acc>::zeros(&twin.cpu, [m, n], Category::Activation);
                matmul_nn_add(&mut out, &a.cpu, &b.cpu);
                out
            }
            Layout::Tn => {
                let mut out = Tensor::<T::Acc>::zeros(&twin.cpu, [m, n], Category::Activation);
                accumulate_tn::<T, U>(&mut out, &a.cpu, &b.cpu);
                out
            }
        };
        let sums = product.to_vec().into_iter().zip(c.cpu.to_vec());
        let expected: Vec<V> =
            sums.map(|(p, old)| V::from_acc(if accumulate { old.to_acc() + p } else { p })).collect();
        let expected = Tensor::from_slice(&twin.cpu, [m, n], &expected, Category::Data);
        exact(&format!("{layout:?} {m} x {n} x {k}, {height}, {accumulate}"), &expected, &c.gpu)?;
    }
    Ok(())
}

/// The cases of this family.
pub(super) fn cases(cases: &mut Cases) {
    public::<f32, f32>(cases);
    public::<f64, f64>(cases);
    public::<bf16, bf16>(cases);
    public::<bf16, f32>(cases);
    public::<f32, bf16>(cases);
    precise::<f32>(cases);
    precise::<f64>(cases);
    precise::<bf16>(cases);
    own::<f32, f32, f32>(cases);
    own::<f64, f64, f64>(cases);
    own::<bf16, bf16, bf16>(cases);
    own::<bf16, bf16, f32>(cases);
}
