//! Elementwise arithmetic, copies and reductions.

use super::twin::{close, same};
use super::{Cases, case};
use crate::dtype::{Element, Float};
use crate::ledger::Category;
use crate::ops::elementwise::{add, mul};
use crate::{Tensor, bf16};

/// Nothing, one, a ragged end, several blocks.
const SIZES: [usize; 5] = [0, 1, 37, 512, 5003];

fn of_type<T: Float>(cases: &mut Cases) {
    case(cases, format!("elementwise: add, mul {}", T::DTYPE), |twin| {
        for n in SIZES {
            let (a, b) = (twin.normal::<T>([n], 1), twin.normal::<T>([n], 2));
            same("add", &add(&a.cpu, &b.cpu), &add(&a.gpu, &b.gpu))?;
            close("mul", &mul(&a.cpu, &b.cpu), &mul(&a.gpu, &b.gpu), 1.0)?;
        }
        Ok(())
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
