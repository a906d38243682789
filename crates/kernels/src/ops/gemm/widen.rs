//! Operands in the accumulator type: the tensor's own memory where it already is, a workspace copy otherwise;
//! and results rounded back.

use std::ops::Deref;

use crate::dtype::Float;
use crate::ledger::Category;
use crate::tensor::Tensor;

/// Rows of a conversion that are worth a task of their own, in elements.
const GRAIN: usize = 1 << 14;

/// The values of a tensor in its accumulator type.
pub(crate) enum Widened<'a, T: Float> {
    /// The tensor's own memory.
    Same(&'a [T::Acc]),
    /// A widened copy.
    Copy(Tensor<T::Acc>),
}

impl<T: Float> Deref for Widened<'_, T> {
    type Target = [T::Acc];

    fn deref(&self) -> &[T::Acc] {
        match self {
            Widened::Same(values) => values,
            Widened::Copy(tensor) => tensor.data(),
        }
    }
}

/// Whether `T` is its own accumulator.
pub(crate) fn is_accumulator<T: Float>() -> bool {
    T::DTYPE == <T::Acc as crate::dtype::Element>::DTYPE
}

/// The values of `x` in the accumulator type.
pub(crate) fn widened<T: Float>(x: &Tensor<T>) -> Widened<'_, T> {
    if is_accumulator::<T>() {
        return Widened::Same(bytemuck::cast_slice(x.data()));
    }
    let mut copy = Tensor::empty(x.device(), x.shape(), Category::Workspace);
    widen_into(copy.data_mut(), x);
    Widened::Copy(copy)
}

/// Writes the widened values of `x`.
pub(crate) fn widen_into<T: Float>(out: &mut [T::Acc], x: &Tensor<T>) {
    let values = x.data();
    x.device().pool().for_rows_mut(out, 1, GRAIN, |first, out| {
        for (wide, narrow) in out.iter_mut().zip(&values[first..]) {
            *wide = narrow.to_acc();
        }
    });
}

/// Writes the rounded values of `x`.
pub(crate) fn round_into<T: Float>(out: &mut Tensor<T>, x: &Tensor<T::Acc>) {
    if let Some(gpu) = x.device().gpu() {
        return crate::ops::elementwise::cast_into(gpu, out, x);
    }
    let values = x.data();
    x.device().pool().for_rows_mut(out.data_mut(), 1, GRAIN, |first, rows| {
        for (narrow, wide) in rows.iter_mut().zip(&values[first..]) {
            *narrow = T::from_acc(*wide);
        }
    });
}

/// The tensor itself, seen in its accumulator type, where that is its own type.
pub(crate) fn as_accumulator<T: Float>(x: &mut Tensor<T>) -> Option<&mut Tensor<T::Acc>> {
    (x as &mut dyn std::any::Any).downcast_mut()
}

/// Rounds a result to `T`; keeps its memory where `T` is the accumulator.
pub(crate) fn rounded<T: Float>(x: Tensor<T::Acc>) -> Tensor<T> {
    if is_accumulator::<T>() {
        let mut holder = Some(x);
        let same = (&mut holder as &mut dyn std::any::Any).downcast_mut::<Option<Tensor<T>>>();
        return same.and_then(Option::take).expect("one type under two names");
    }
    let x = x.with_category(Category::Workspace);
    if x.device().gpu().is_some() {
        return crate::ops::elementwise::cast(&x);
    }
    let mut out = Tensor::empty(x.device(), x.shape(), Category::Activation);
    round_into(&mut out, &x);
    out
}
