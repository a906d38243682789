//! Moving rows and weights by index lists: all bits equal the CPU's, since copies are exact and sums have one order.

use super::twin::{Twin, same};
use super::{Cases, case};
use crate::dtype::{Element, Float};
use crate::ledger::Category;
use crate::ops::permute::{
    CsrIndex, EMPTY_ROW, gather_rows, gather_rows_into, gather_weights, scatter_sum, scatter_sum_sources,
    scatter_weights,
};
use crate::rng::{Purpose, Stream};
use crate::tensor::Tensor;
use crate::{Device, bf16};

/// Rows of x, listed rows, row length: none of each, odd lengths, packs of 16 bytes, rows that fill a block.
const SIZES: [(usize, usize, usize); 8] =
    [(4, 0, 8), (0, 3, 8), (1, 1, 1), (37, 90, 3), (20, 64, 16), (50, 33, 72), (6, 9, 4100), (700, 900, 1)];

/// An index of `n` rows below `rows`, some of them empty; all empty where there are no rows.
fn index(n: usize, rows: usize, seed: u64) -> Vec<u32> {
    let stream = Stream::new(seed, Purpose::Named("permute"));
    let one = |i: u64| match stream.below(i, rows as u64 + 1 + rows as u64 / 8) as usize {
        row if row < rows => row as u32,
        _ => EMPTY_ROW,
    };
    (0..n as u64).map(one).collect()
}

fn gathers<T: Float>(cases: &mut Cases) {
    case(cases, format!("permute: gather_rows {}", T::DTYPE), |twin| {
        for (rows, n, len) in SIZES {
            let x = twin.normal::<T>([rows, len], 1);
            let list = index(n, rows, 2);
            same("gather", &gather_rows(&x.cpu, &list), &gather_rows(&x.gpu, &list))?;
            // Into the middle of a larger buffer, from a view that starts anywhere.
            let Some(last) = rows.checked_sub(1) else { continue };
            let list = index(n, last, 3);
            let into = |device: &Device, x: &Tensor<T>| {
                let mut y = Tensor::full(device, [n + 5, len], T::from_f64(7.0), Category::Activation);
                gather_rows_into(&mut y, 3, &x.slice_rows(1..rows), &list);
                y
            };
            same("gather into", &into(&twin.cpu, &x.cpu), &into(&twin.gpu, &x.gpu))?;
        }
        Ok(())
    });
}

fn sums<T: Float>(cases: &mut Cases) {
    case(cases, format!("permute: scatter_sum {}", T::DTYPE), |twin| {
        for (targets, n, len) in SIZES {
            let y = twin.normal::<T>([n, len], 4);
            let lists = CsrIndex::inverse(&index(n, targets, 5), targets);
            same("sum", &scatter_sum(&y.cpu, &lists), &scatter_sum(&y.gpu, &lists))?;
            if n > 1 {
                let lists = CsrIndex::inverse(&index(n - 1, targets, 6), targets);
                let (cpu, gpu) = (y.cpu.slice_rows(1..n), y.gpu.slice_rows(1..n));
                same("sum of a view", &scatter_sum(&cpu, &lists), &scatter_sum(&gpu, &lists))?;
            }
        }
        Ok(())
    });
    case(cases, format!("permute: scatter_sum_sources {}", T::DTYPE), |twin| {
        for (targets, n, len) in SIZES {
            sum_of_sources::<T>(twin, targets, n, len)?;
        }
        Ok(())
    });
}

/// Two tensors and an empty one between them, numbered through.
fn sum_of_sources<T: Float>(twin: &Twin, targets: usize, n: usize, len: usize) -> Result<(), String> {
    let parts = [twin.normal::<T>([n, len], 7), twin.normal::<T>([0, len], 8), twin.normal::<T>([n, len], 9)];
    let lists = CsrIndex::inverse(&index(2 * n, targets, 10), targets);
    let cpu: Vec<&Tensor<T>> = parts.iter().map(|p| &p.cpu).collect();
    let gpu: Vec<&Tensor<T>> = parts.iter().map(|p| &p.gpu).collect();
    let (cpu, gpu) =
        (scatter_sum_sources(&twin.cpu, &cpu, &lists), scatter_sum_sources(&twin.gpu, &gpu, &lists));
    same("sum of sources", &cpu, &gpu)
}

fn weights<T: Element>(cases: &mut Cases, value: impl Fn(u64) -> T + Send + Sync + 'static) {
    case(cases, format!("permute: gather and scatter weights {}", T::DTYPE), move |twin| {
        for (t, k) in [(0, 2), (1, 1), (67, 4), (400, 3)] {
            let values: Vec<T> = (0..(t * k) as u64).map(&value).collect();
            let w = twin.values([t, k], &values);
            let list = index(2 * t, t * k, 11);
            same("gather", &gather_weights(&w.cpu, &list), &gather_weights(&w.gpu, &list))?;
            // Each slot at most once: every third slot, from the last, and empty ones between.
            let slots = (0..t * k).rev().map(|i| if i % 3 == 1 { i as u32 } else { EMPTY_ROW });
            let slots: Vec<u32> = slots.collect();
            let dy = twin.values([t * k], &values);
            let (cpu, gpu) =
                (scatter_weights(&dy.cpu, &slots, [t, k]), scatter_weights(&dy.gpu, &slots, [t, k]));
            same("scatter", &cpu, &gpu)?;
        }
        Ok(())
    });
}

/// The cases of this family.
pub(super) fn cases(cases: &mut Cases) {
    gathers::<f32>(cases);
    gathers::<f64>(cases);
    gathers::<bf16>(cases);
    sums::<f32>(cases);
    sums::<f64>(cases);
    sums::<bf16>(cases);
    weights::<f32>(cases, |i| i as f32 - 7.5);
    weights::<f64>(cases, |i| i as f64 - 7.5);
    weights::<i32>(cases, |i| i as i32);
    weights::<u8>(cases, |i| i as u8);
}
