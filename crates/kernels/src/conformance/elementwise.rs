//! Elementwise arithmetic, casts and fills.

use super::twin::{Pair, close, same};
use super::{Cases, Twin, case};
use crate::dtype::{Element, Float};
use crate::ledger::Category;
use crate::ops::elementwise::{
    accumulate, add, add_assign, add_bias, axpy, cast, mul, rounded, scale, scale_in_place, scale_rows, zero,
};
use crate::{Tensor, bf16};

/// Nothing, one, a ragged end, several blocks.
const SIZES: [usize; 5] = [0, 1, 37, 512, 5003];

/// `n` values, and the same ones at an address that is no multiple of 16.
fn placed<T: Float>(twin: &Twin, n: usize, seed: u64) -> [Pair<T>; 2] {
    let all = twin.normal::<T>([n + 1], seed);
    let view = |x: &Tensor<T>| x.slice_rows(1..n + 1);
    [twin.normal([n], seed), Pair { cpu: view(&all.cpu), gpu: view(&all.gpu) }]
}

/// `f` on copies of both, which it changes.
fn changed<T: Float>(x: &Pair<T>, f: impl Fn(&mut Tensor<T>, bool)) -> Pair<T> {
    let mut copy =
        Pair { cpu: x.cpu.duplicate(Category::Activation), gpu: x.gpu.duplicate(Category::Activation) };
    f(&mut copy.cpu, false);
    f(&mut copy.gpu, true);
    copy
}

fn pointwise<T: Float>(twin: &Twin) -> Result<(), String> {
    for n in SIZES {
        for (a, b) in placed::<T>(twin, n, 1).into_iter().zip(placed::<T>(twin, n, 2)) {
            let b_of = |gpu: bool| if gpu { &b.gpu } else { &b.cpu };
            same("add", &add(&a.cpu, &b.cpu), &add(&a.gpu, &b.gpu))?;
            same("mul", &mul(&a.cpu, &b.cpu), &mul(&a.gpu, &b.gpu))?;
            same("scale", &scale(&a.cpu, 0.3), &scale(&a.gpu, 0.3))?;
            let y = changed(&a, |y, gpu| add_assign(y, b_of(gpu)));
            same("add_assign", &y.cpu, &y.gpu)?;
            let y = changed(&a, |y, gpu| axpy(y, -0.7, b_of(gpu)));
            same("axpy", &y.cpu, &y.gpu)?;
            let y = changed(&a, |y, _| scale_in_place(y, 1.1));
            same("scale_in_place", &y.cpu, &y.gpu)?;
            let y = changed(&a, |y, _| zero(y));
            same("zero", &y.cpu, &y.gpu)?;
            let sums = twin.normal::<T::Acc>([n], 3);
            let sums = changed(&sums, |sums, gpu| accumulate(sums, b_of(gpu)));
            same("accumulate", &sums.cpu, &sums.gpu)?;
            same("rounded", &rounded::<T>(sums.cpu), &rounded::<T>(sums.gpu))?;
        }
    }
    Ok(())
}

fn rows<T: Float>(twin: &Twin) -> Result<(), String> {
    for (t, d) in [(0, 8), (1, 1), (3, 7), (40, 33), (9, 512), (300, 24)] {
        let all = twin.normal::<T>([t + 1, d], 4);
        for first in [0, 1] {
            let x =
                Pair { cpu: all.cpu.slice_rows(first..t + first), gpu: all.gpu.slice_rows(first..t + first) };
            let weights = twin.normal::<T::Acc>([t], 5);
            let bias = twin.normal::<T>([d], 6);
            let scaled = scale_rows(&x.cpu, &weights.cpu);
            same("scale_rows", &scaled, &scale_rows(&x.gpu, &weights.gpu))?;
            let y = changed(&x, |y, gpu| add_bias(y, if gpu { &bias.gpu } else { &bias.cpu }));
            same("add_bias", &y.cpu, &y.gpu)?;
        }
    }
    Ok(())
}

fn casts<T: Float, U: Float>(twin: &Twin) -> Result<(), String> {
    // Ties, numbers that two roundings change, the ends of the ranges.
    let hard =
        [0.0, -0.0, 1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, 1.00390625000001, 3e38, -1e-40, 1e300, -1e300];
    let hard =
        hard.into_iter().chain([f64::INFINITY, f64::NEG_INFINITY]).map(T::from_f64).collect::<Vec<_>>();
    let x = twin.values([hard.len()], &hard);
    same("cast", &cast::<T, U>(&x.cpu), &cast::<T, U>(&x.gpu))?;
    let x = twin.values([1], &[T::from_f64(f64::NAN)]);
    close("cast of NaN", &cast::<T, U>(&x.cpu), &cast::<T, U>(&x.gpu), 0.0)?;
    for n in SIZES {
        for x in placed::<T>(twin, n, 7) {
            same("cast", &cast::<T, U>(&x.cpu), &cast::<T, U>(&x.gpu))?;
        }
    }
    Ok(())
}

fn of_type<T: Float>(cases: &mut Cases) {
    case(cases, format!("elementwise: pointwise {}", T::DTYPE), pointwise::<T>);
    case(cases, format!("elementwise: rows {}", T::DTYPE), rows::<T>);
    case(cases, format!("elementwise: casts {}", T::DTYPE), |twin| {
        casts::<T, f32>(twin)?;
        casts::<T, f64>(twin)?;
        casts::<T, bf16>(twin)
    });
}

fn fills<T: Element>(cases: &mut Cases, value: T) {
    case(cases, format!("elementwise: fill {}", T::DTYPE), move |twin| {
        for n in SIZES {
            let full = |device| Tensor::<T>::full(device, [n], value, Category::Data);
            same("full", &full(&twin.cpu), &full(&twin.gpu))?;
        }
        Ok(())
    });
}

/// The cases of this family.
pub(super) fn cases(cases: &mut Cases) {
    of_type::<f32>(cases);
    of_type::<f64>(cases);
    of_type::<bf16>(cases);
    fills(cases, 7u8);
    fills(cases, -3i32);
    fills(cases, 1i64 << 40);
    fills(cases, bf16::from_f32(1.5));
}
