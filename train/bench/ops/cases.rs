//! The operations that are measured: elementwise, over parts, cross-entropy and the update here, the others in `rows`
//! and `products`. Bytes are what has to cross the memory at least once: each input read, each output written.

use plica_kernels::ops::adamw::{AdamW, adamw_step_rounded};
use plica_kernels::ops::cross_entropy::{cross_entropy, cross_entropy_in_place};
use plica_kernels::ops::elementwise::{
    accumulate_column_sums, add, add_bias, axpy, cast, copy_range, scale_rows, sum_in_order, sum_of_squares,
    take_columns, transpose2,
};
use plica_kernels::rng::{Purpose, Stream};
use plica_kernels::{Category, Device, Float, Tensor, bf16};

use super::clock::{Clock, Span};
use super::sizes::Sizes;
use super::{products, rows};

/// One repetition of an operation.
pub(super) type Step = Box<dyn FnMut(&Clock) -> Span>;

/// An operation at its size.
pub(super) struct Work {
    pub op: &'static str,
    pub types: &'static str,
    pub sizes: Vec<(&'static str, usize)>,
    pub bytes: u64,
    pub flop: u64,
    /// Makes its inputs.
    pub begin: Box<dyn Fn(&Device) -> Step>,
}

impl Work {
    /// Work that is bound by memory.
    pub(super) fn moving(
        op: &'static str,
        types: &'static str,
        sizes: &[(&'static str, usize)],
        bytes: usize,
        begin: impl Fn(&Device) -> Step + 'static,
    ) -> Work {
        Work { op, types, sizes: sizes.to_vec(), bytes: bytes as u64, flop: 0, begin: Box::new(begin) }
    }

    /// Work that forms products of `flop` operations.
    pub(super) fn forming(self, flop: usize) -> Work {
        Work { flop: flop as u64, ..self }
    }
}

/// Repeats `f`; what it returns is dropped inside the span, where a GPU queues the freeing.
pub(super) fn repeated<R>(mut f: impl FnMut() -> R + 'static) -> Step {
    Box::new(move |clock| clock.span(|| drop(f())))
}

/// Repeats `f` on what `prepare` makes anew outside of the span.
pub(super) fn prepared<S, R>(
    mut prepare: impl FnMut() -> S + 'static,
    mut f: impl FnMut(S) -> R + 'static,
) -> Step {
    Box::new(move |clock| {
        let state = prepare();
        clock.span(|| drop(f(state)))
    })
}

/// Normal values; a block of them is drawn on the host and repeated.
pub(super) fn values<T: Float>(device: &Device, shape: &[usize], seed: u64) -> Tensor<T> {
    const BLOCK: usize = 1 << 16;
    let draws = Stream::new(seed, Purpose::Named("bench ops"));
    let mut out = Tensor::empty(device, shape, Category::Activation);
    let n = out.len();
    let block: Vec<T> = (0..BLOCK.min(n) as u64).map(|i| T::from_f64(draws.normal(i))).collect();
    let block = Tensor::from_slice(device, [block.len()], &block, Category::Workspace);
    for start in (0..n).step_by(BLOCK) {
        copy_range(&mut out, start, &block, 0..BLOCK.min(n - start));
    }
    out
}

/// Whole numbers below `bound`.
pub(super) fn below(device: &Device, count: usize, bound: usize) -> Tensor<i32> {
    let draws = Stream::new(9, Purpose::Named("bench ops ids"));
    let ids: Vec<i32> = (0..count as u64).map(|i| draws.below(i, bound as u64) as i32).collect();
    Tensor::from_slice(device, [count], &ids, Category::Data)
}

/// Everything that is measured.
pub(super) fn all(sizes: &Sizes) -> Vec<Work> {
    let mut works = elementwise(sizes);
    works.extend(over_many(sizes));
    works.extend(training(sizes));
    works.extend(rows::all(sizes));
    works.extend(products::all(sizes));
    works
}

fn elementwise(sizes: &Sizes) -> Vec<Work> {
    let Sizes { rows, width, .. } = *sizes;
    let (n, shape) = (rows * width, [rows, width]);
    let named = [("rows", rows), ("width", width)];
    let moving = |op, types, bytes, begin: fn(&Device, [usize; 2]) -> Step| {
        Work::moving(op, types, &named, bytes, move |device| begin(device, shape))
    };
    vec![
        moving("add", "bf16", 6 * n, |device, shape| {
            let (a, b) = (values::<bf16>(device, &shape, 1), values::<bf16>(device, &shape, 2));
            repeated(move || add(&a, &b))
        }),
        moving("axpy", "bf16", 6 * n, |device, shape| {
            let (mut y, x) = (values::<bf16>(device, &shape, 1), values::<bf16>(device, &shape, 2));
            repeated(move || axpy(&mut y, 1e-3, &x))
        }),
        moving("cast", "f32 to bf16", 6 * n, |device, shape| {
            let x = values::<f32>(device, &shape, 1);
            repeated(move || cast::<f32, bf16>(&x))
        }),
        moving("scale_rows", "bf16", 4 * n + 4 * rows, |device, shape| {
            let (x, w) = (values::<bf16>(device, &shape, 1), values::<f32>(device, &shape[..1], 2));
            repeated(move || scale_rows(&x, &w))
        }),
        moving("add_bias", "bf16", 4 * n, |device, shape| {
            let (mut x, bias) = (values::<bf16>(device, &shape, 1), values::<bf16>(device, &shape[1..], 2));
            repeated(move || add_bias(&mut x, &bias))
        }),
        moving("take_columns, half", "bf16", 2 * n, |device, shape| {
            let x = values::<bf16>(device, &shape, 1);
            repeated(move || take_columns(&x, 0..shape[1] / 2))
        }),
        moving("transpose2", "bf16", 4 * n, |device, shape| {
            let x = values::<bf16>(device, &shape, 1);
            repeated(move || transpose2(&x))
        }),
    ]
}

fn over_many(sizes: &Sizes) -> Vec<Work> {
    let Sizes { rows, width, .. } = *sizes;
    let (n, shape) = (rows * width, [rows, width]);
    let named = [("rows", rows), ("width", width)];
    vec![
        Work::moving("sum_in_order, 4 parts", "bf16", &named, 10 * n, move |device| {
            let parts: Vec<_> = (1..5).map(|seed| values::<bf16>(device, &shape, seed)).collect();
            let device = device.clone();
            repeated(move || {
                let parts: Vec<&Tensor<bf16>> = parts.iter().collect();
                sum_in_order(&device, &parts, 0..n, Category::CommBuffer)
            })
        }),
        Work::moving("accumulate_column_sums", "bf16", &named, 2 * n, move |device| {
            let x = values::<bf16>(device, &shape, 1);
            let mut sums = Tensor::<f32>::zeros(device, [width], Category::Gradient);
            repeated(move || accumulate_column_sums(&mut sums, &x))
        }),
        Work::moving("sum_of_squares, read by the host", "f32", &named, 4 * n, move |device| {
            let x = values::<f32>(device, &shape, 1);
            repeated(move || sum_of_squares(&x))
        }),
    ]
}

fn training(sizes: &Sizes) -> Vec<Work> {
    let Sizes { rows, vocab, params, .. } = *sizes;
    let (shape, named) = ([rows, vocab], [("rows", rows), ("vocab", vocab)]);
    vec![
        Work::moving("cross_entropy", "f32", &named, 4 * rows * vocab, move |device| {
            let (logits, targets) = (values::<f32>(device, &shape, 1), below(device, rows, vocab));
            repeated(move || cross_entropy(&logits, &targets))
        }),
        Work::moving("cross_entropy_in_place", "f32", &named, 8 * rows * vocab, move |device| {
            let (logits, targets) = (values::<f32>(device, &shape, 1), below(device, rows, vocab));
            prepared(
                move || logits.duplicate(Category::Activation),
                move |logits| cross_entropy_in_place(logits, &targets, vocab, 1e-4),
            )
        }),
        Work::moving(
            "adamw_step_rounded",
            "f32 and bf16",
            &[("params", params)],
            30 * params,
            move |device| {
                let state = |seed| values::<f32>(device, &[params], seed);
                let (mut master, mut m, grad) = (state(1), state(2), state(3));
                let mut v = Tensor::<f32>::full(device, [params], 0.5, Category::OptimizerState);
                let mut weight = Tensor::<bf16>::zeros(device, [params], Category::Parameter);
                let settings = AdamW {
                    lr: 1e-3,
                    beta1: 0.9,
                    beta2: 0.95,
                    eps: 1e-8,
                    weight_decay: 0.1,
                    step: 10,
                    clip_coefficient: 0.5,
                };
                repeated(move || {
                    adamw_step_rounded(&mut master, &mut m, &mut v, &grad, &settings, &mut weight);
                })
            },
        ),
    ]
}
