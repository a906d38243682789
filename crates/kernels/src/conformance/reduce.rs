//! Reductions: over tensors in a stated order (the same bits), over all elements, rows and columns.

use super::twin::{close, same};
use super::{Cases, Twin, case};
use crate::dtype::Float;
use crate::ledger::Category;
use crate::ops::elementwise::{
    Extreme, Summable, accumulate_column_sums, extreme_in_order, is_finite, reduce_max, row_dot,
    sum_in_order, sum_of_squares, sums_of_squares,
};
use crate::rng::{Purpose, Stream};
use crate::{Tensor, bf16};

type Values<T> = fn(&Stream, u64) -> T;

fn over_tensors<T: Summable>(twin: &Twin, of: Values<T>) -> Result<(), String> {
    for (n, count) in [(0, 2), (1, 1), (37, 3), (5003, 2), (700, 9)] {
        let parts: Vec<_> = (0..count)
            .map(|part| {
                let stream = Stream::new(part, Purpose::Named("conformance parts"));
                twin.values([n], &(0..n as u64).map(|i| of(&stream, i)).collect::<Vec<T>>())
            })
            .collect();
        let cpu: Vec<&Tensor<T>> = parts.iter().map(|p| &p.cpu).collect();
        let gpu: Vec<&Tensor<T>> = parts.iter().map(|p| &p.gpu).collect();
        for range in [0..n, n / 3..n, 16.min(n)..n] {
            let sum = |device, parts: &[&Tensor<T>]| {
                sum_in_order(device, parts, range.clone(), Category::CommBuffer)
            };
            same("sum_in_order", &sum(&twin.cpu, &cpu), &sum(&twin.gpu, &gpu))?;
            for extreme in [Extreme::Max, Extreme::Min] {
                let found = |device, parts: &[&Tensor<T>]| {
                    extreme_in_order(device, parts, range.clone(), extreme, Category::CommBuffer)
                };
                same("extreme_in_order", &found(&twin.cpu, &cpu), &found(&twin.gpu, &gpu))?;
            }
        }
    }
    Ok(())
}

/// A NaN in the first, the middle or the last part, infinities and both zeros beside it.
fn odd_values<T: Float + Summable>(twin: &Twin) -> Result<(), String> {
    let part = |values: [f64; 9]| twin.values([9], &values.map(T::from_f64));
    let (nan, big) = (f64::NAN, f64::INFINITY);
    let parts = [
        part([nan, 1.0, 1.0, big, -0.0, 0.0, -big, 1.0, 2.0]),
        part([1.0, nan, 1.0, -big, 0.0, -0.0, -big, 1.0, big]),
        part([2.0, 2.0, nan, 1.0, -0.0, 0.0, 5.0, nan, 1.0]),
    ];
    let cpu: Vec<&Tensor<T>> = parts.iter().map(|p| &p.cpu).collect();
    let gpu: Vec<&Tensor<T>> = parts.iter().map(|p| &p.gpu).collect();
    for extreme in [Extreme::Max, Extreme::Min] {
        let found = |device, parts: &[&Tensor<T>]| {
            extreme_in_order(device, parts, 0..9, extreme, Category::CommBuffer)
        };
        same("extreme of odd values", &found(&twin.cpu, &cpu), &found(&twin.gpu, &gpu))?;
    }
    let sum = |device, parts: &[&Tensor<T>]| sum_in_order(device, parts, 0..9, Category::CommBuffer);
    close("sum of odd values", &sum(&twin.cpu, &cpu), &sum(&twin.gpu, &gpu), 0.0)
}

fn equal<V: PartialEq + std::fmt::Display>(what: &str, cpu: V, gpu: V) -> Result<(), String> {
    if cpu == gpu { Ok(()) } else { Err(format!("{what}: {gpu}, on the CPU {cpu}")) }
}

fn near(what: &str, cpu: f64, gpu: f64) -> Result<(), String> {
    let same = (cpu.is_nan() && gpu.is_nan()) || (cpu - gpu).abs() <= 1e-13 * cpu.abs();
    if same { Ok(()) } else { Err(format!("{what}: {gpu}, on the CPU {cpu}")) }
}

fn whole<T: Float>(twin: &Twin) -> Result<(), String> {
    let mut all = Vec::new();
    for n in [0, 1, 40, 8200, 20_011] {
        let x = twin.normal::<T>([n], 1);
        near("sum_of_squares", sum_of_squares(&x.cpu), sum_of_squares(&x.gpu))?;
        equal("reduce_max", reduce_max(&x.cpu), reduce_max(&x.gpu))?;
        equal("is_finite", is_finite(&x.cpu), is_finite(&x.gpu))?;
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            for at in [0, n / 2, n.saturating_sub(1)].into_iter().filter(|at| *at < n) {
                let mut values = x.cpu.to_vec();
                values[at] = T::from_f64(bad);
                let x = twin.values([n], &values);
                equal("is_finite", is_finite(&x.cpu), is_finite(&x.gpu))?;
                near("reduce_max", reduce_max(&x.cpu).to_f64(), reduce_max(&x.gpu).to_f64()).or_else(
                    |e| {
                        if reduce_max(&x.cpu) == reduce_max(&x.gpu) { Ok(()) } else { Err(e) }
                    },
                )?;
            }
        }
        all.push(x);
    }
    let cpu = sums_of_squares(&all.iter().map(|x| &x.cpu).collect::<Vec<_>>());
    let gpu = sums_of_squares(&all.iter().map(|x| &x.gpu).collect::<Vec<_>>());
    equal("number of sums", cpu.len(), gpu.len())?;
    cpu.iter().zip(&gpu).try_for_each(|(cpu, gpu)| near("sums_of_squares", *cpu, *gpu))
}

fn rows_and_columns<T: Float>(twin: &Twin) -> Result<(), String> {
    for (t, d) in [(0, 8), (1, 1), (70, 33), (9, 512), (300, 24), (130, 300)] {
        for first in [0, 1] {
            let (a, b) = (twin.normal::<T>([t + 1, d], 2), twin.normal::<T>([t + 1, d], 3));
            let rows = first..t + first;
            let of = |x: &Tensor<T>| x.slice_rows(rows.clone());
            let dot = row_dot(&of(&a.cpu), &of(&b.cpu));
            close("row_dot", &dot, &row_dot(&of(&a.gpu), &of(&b.gpu)), 4.0)?;
            let sums = twin.normal::<T::Acc>([d], 4);
            let added = |sums: &Tensor<T::Acc>, x: &Tensor<T>| {
                let mut sums = sums.duplicate(Category::Gradient);
                accumulate_column_sums(&mut sums, &of(x));
                sums
            };
            close("column sums", &added(&sums.cpu, &a.cpu), &added(&sums.gpu, &a.gpu), 4.0)?;
        }
    }
    Ok(())
}

fn summed<T: Summable>(cases: &mut Cases, of: Values<T>) {
    case(cases, format!("reduce: over tensors {}", T::DTYPE), move |twin| over_tensors(twin, of));
}

fn of_type<T: Float + Summable>(cases: &mut Cases) {
    summed::<T>(cases, |stream, i| T::from_f64(stream.normal(i)));
    case(cases, format!("reduce: odd values {}", T::DTYPE), odd_values::<T>);
    case(cases, format!("reduce: whole tensor {}", T::DTYPE), whole::<T>);
    case(cases, format!("reduce: rows and columns {}", T::DTYPE), rows_and_columns::<T>);
}

/// The cases of this family.
pub(super) fn cases(cases: &mut Cases) {
    of_type::<f32>(cases);
    of_type::<f64>(cases);
    of_type::<bf16>(cases);
    summed::<i32>(cases, |stream, i| (stream.bits(i) as i32) >> 8);
    summed::<i64>(cases, |stream, i| (stream.bits(i) as i64) >> 8);
    summed::<u8>(cases, |stream, i| (stream.bits(i) % 28) as u8);
}
