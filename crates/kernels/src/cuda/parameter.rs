//! Arguments of kernels. Each is stored in 8 bytes, of which a kernel reads as many as its parameter has: a tensor is
//! a pointer (`T*`), `usize` an `i64`, the other numbers are themselves. A missing tensor is a null pointer.

use crate::dtype::Element;
use crate::tensor::Tensor;

/// One argument as bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(8))]
pub struct Argument(pub [u8; 8]);

/// What can be an argument of a kernel.
pub trait Parameter {
    /// Its bytes.
    fn argument(self) -> Argument;
}

macro_rules! numbers {
    ($($t:ty),*) => {$(
        impl Parameter for $t {
            fn argument(self) -> Argument {
                let mut bytes = [0; 8];
                bytes[..size_of::<$t>()].copy_from_slice(&self.to_ne_bytes());
                Argument(bytes)
            }
        }
    )*};
}
numbers!(i32, u32, i64, u64, f32, f64);

impl Parameter for usize {
    fn argument(self) -> Argument {
        (self as i64).argument()
    }
}

impl<T: Element> Parameter for &Tensor<T> {
    fn argument(self) -> Argument {
        self.address().argument()
    }
}

impl<T: Element> Parameter for &mut Tensor<T> {
    fn argument(self) -> Argument {
        self.address_mut().argument()
    }
}

impl<P: Parameter> Parameter for Option<P> {
    fn argument(self) -> Argument {
        self.map_or(0u64.argument(), Parameter::argument)
    }
}

/// The arguments of a launch, in the order of the kernel's parameters.
#[macro_export]
macro_rules! arguments {
    ($($value:expr),* $(,)?) => { [$($crate::cuda::Parameter::argument($value)),*] };
}
