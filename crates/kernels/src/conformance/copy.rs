//! Copies: ranges, rows, columns, transposition, of elements of every size.

use super::twin::{Pair, same};
use super::{Cases, Twin, case};
use crate::dtype::Element;
use crate::ledger::Category;
use crate::ops::elementwise::{
    concat_columns, concat_rows, copy_range, copy_rows, put_columns, take_columns, transpose2,
};
use crate::rng::{Purpose, Stream};
use crate::{Tensor, bf16};

/// Values of any bits that are a value of `T`.
fn drawn<T: Element>(twin: &Twin, shape: [usize; 2], seed: u64, of: fn(u64) -> T) -> Pair<T> {
    let stream = Stream::new(seed, Purpose::Named("conformance copies"));
    let values: Vec<T> = (0..(shape[0] * shape[1]) as u64).map(|i| of(stream.bits(i))).collect();
    twin.values(shape, &values)
}

fn ranges<T: Element>(twin: &Twin, of: fn(u64) -> T) -> Result<(), String> {
    for (n, start, count) in [(0, 0, 0), (1, 0, 1), (40, 3, 0), (40, 3, 31), (5003, 1, 5001)] {
        let (from, to) = (drawn(twin, [n, 1], 1, of), drawn(twin, [n + 5, 1], 2, of));
        let copied = |from: &Tensor<T>, to: &Tensor<T>| {
            let mut to = to.duplicate(Category::Activation);
            copy_range(&mut to, 4, from, start..start + count);
            to
        };
        same("copy_range", &copied(&from.cpu, &to.cpu), &copied(&from.gpu, &to.gpu))?;
    }
    for (t, d) in [(0, 3), (1, 1), (7, 5), (60, 64)] {
        let (a, b) = (drawn(twin, [t, d], 3, of), drawn(twin, [t + 2, d], 4, of));
        let stacked = concat_rows(&[&a.cpu, &b.cpu, &a.cpu]);
        same("concat_rows", &stacked, &concat_rows(&[&a.gpu, &b.gpu, &a.gpu]))?;
        let copied = |from: &Tensor<T>, to: &Tensor<T>| {
            let mut to = to.duplicate(Category::Activation);
            copy_rows(&mut to, 1, from, t / 2..t);
            to
        };
        same("copy_rows", &copied(&a.cpu, &b.cpu), &copied(&a.gpu, &b.gpu))?;
        let moved = a.gpu.to_device(&twin.gpu);
        same("to_device", &a.cpu, &moved)?;
    }
    Ok(())
}

fn columns<T: Element>(twin: &Twin, of: fn(u64) -> T) -> Result<(), String> {
    for (t, widths) in [(0, [3, 4]), (1, [1, 1]), (5, [0, 7]), (33, [5, 12]), (9, [64, 128]), (300, [16, 32])]
    {
        let (a, b) = (drawn(twin, [t, widths[0]], 5, of), drawn(twin, [t, widths[1]], 6, of));
        let whole = concat_columns(&[&a.cpu, &b.cpu]);
        let on_gpu = concat_columns(&[&a.gpu, &b.gpu]);
        same("concat_columns", &whole, &on_gpu)?;
        for range in [0..widths[0], widths[0]..widths[0] + widths[1], 1..widths[1]] {
            let taken = take_columns(&whole, range.clone());
            same("take_columns", &taken, &take_columns(&on_gpu, range))?;
        }
        let put = |to: &Tensor<T>, from: &Tensor<T>| {
            let mut to = to.duplicate(Category::Activation);
            put_columns(&mut to, widths[1] / 2, from);
            to
        };
        if t > 0 {
            same("put_columns", &put(&whole, &a.cpu), &put(&on_gpu, &a.gpu))?;
        }
    }
    Ok(())
}

fn transposes<T: Element>(twin: &Twin, of: fn(u64) -> T) -> Result<(), String> {
    for shape in [[0, 5], [5, 0], [1, 1], [31, 33], [64, 32], [100, 7], [1, 70]] {
        let x = drawn(twin, shape, 8, of);
        same("transpose2", &transpose2(&x.cpu), &transpose2(&x.gpu))?;
    }
    Ok(())
}

fn of_type<T: Element>(cases: &mut Cases, of: fn(u64) -> T) {
    case(cases, format!("copy: ranges {}", T::DTYPE), move |twin| ranges(twin, of));
    case(cases, format!("copy: columns {}", T::DTYPE), move |twin| columns(twin, of));
    case(cases, format!("copy: transpose {}", T::DTYPE), move |twin| transposes(twin, of));
}

/// The cases of this family.
pub(super) fn cases(cases: &mut Cases) {
    of_type::<u8>(cases, |bits| bits as u8);
    of_type::<bf16>(cases, |bits| bf16::from_bits(bits as u16));
    of_type::<i32>(cases, |bits| bits as i32);
    of_type::<f64>(cases, |bits| f64::from(bits as u32));
}
