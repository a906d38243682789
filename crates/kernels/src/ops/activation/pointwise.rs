//! Nonlinearities of one operand: SiLU and GELU, element by element in the accumulator type, rounded once.

use num_traits::One as _;

use super::cuda;
use crate::dtype::{Float, Real};
use crate::ledger::Category;
use crate::ops::fastmath::FastMath;
use crate::tensor::Tensor;

/// Elements that are worth a task of their own.
const GRAIN: usize = 1 << 13;

/// y = f(x) for every element.
fn map<T: Float>(x: &Tensor<T>, f: impl Fn(T::Acc) -> T::Acc + Sync) -> Tensor<T> {
    let mut y = Tensor::empty(x.device(), x.shape(), Category::Activation);
    let values = x.data();
    x.device().pool().for_rows_mut(y.data_mut(), 1, GRAIN, |first, out| {
        for (y, x) in out.iter_mut().zip(&values[first..]) {
            *y = T::from_acc(f(x.to_acc()));
        }
    });
    y
}

/// dx = dy * slope(x) for every element.
fn map_backward<T: Float>(
    dy: &Tensor<T>,
    x: &Tensor<T>,
    slope: impl Fn(T::Acc) -> T::Acc + Sync,
) -> Tensor<T> {
    assert_eq!(dy.shape(), x.shape(), "gradient and input of an activation");
    let mut dx = Tensor::empty(x.device(), x.shape(), Category::Activation);
    let (values, gradients) = (x.data(), dy.data());
    x.device().pool().for_rows_mut(dx.data_mut(), 1, GRAIN, |first, out| {
        for ((dx, x), dy) in out.iter_mut().zip(&values[first..]).zip(&gradients[first..]) {
            *dx = T::from_acc(dy.to_acc() * slope(x.to_acc()));
        }
    });
    dx
}

/// silu(x) = x sigmoid(x), element by element.
pub fn silu_forward<T: Float>(x: &Tensor<T>) -> Tensor<T> {
    if let Some(gpu) = x.device().gpu() {
        return cuda::pointwise_forward(gpu, "silu", x);
    }
    map(x, |x| x * x.sigmoid())
}

/// Gradient of [`silu_forward`].
///
/// # Panics
/// When the shapes differ.
pub fn silu_backward<T: Float>(dy: &Tensor<T>, x: &Tensor<T>) -> Tensor<T> {
    if let Some(gpu) = x.device().gpu() {
        return cuda::pointwise_backward(gpu, "silu", dy, x);
    }
    map_backward(dy, x, |x| {
        let sigmoid = x.sigmoid();
        sigmoid + x * sigmoid * (T::Acc::one() - sigmoid)
    })
}

/// Which GELU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gelu {
    /// x Phi(x), Phi the normal distribution.
    Exact,
    /// x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
    Tanh,
}

fn constant<A: Real>(x: f64) -> A {
    A::from_f64(x)
}

impl Gelu {
    /// What its kernels are called.
    fn kernel(self) -> &'static str {
        match self {
            Gelu::Exact => "gelu_exact",
            Gelu::Tanh => "gelu_tanh",
        }
    }

    #[inline(always)]
    fn value<A: Real>(self, x: A) -> A {
        let half: A = constant(0.5);
        match self {
            Gelu::Exact => half * x * (A::one() + (x * A::FRAC_1_SQRT_2()).error_function()),
            Gelu::Tanh => half * x * (A::one() + Self::inner(x).fast_tanh()),
        }
    }

    #[inline(always)]
    fn inner<A: Real>(x: A) -> A {
        constant::<A>((2.0 / std::f64::consts::PI).sqrt()) * (x + constant::<A>(0.044_715) * x * x * x)
    }

    #[inline(always)]
    fn slope<A: Real>(self, x: A) -> A {
        let (half, one): (A, A) = (constant(0.5), A::one());
        match self {
            Gelu::Exact => {
                let density = constant::<A>(1.0 / std::f64::consts::TAU.sqrt()) * (-half * x * x).fast_exp();
                half * (one + (x * A::FRAC_1_SQRT_2()).error_function()) + x * density
            }
            Gelu::Tanh => {
                let t = Self::inner(x).fast_tanh();
                let scale: A = constant((2.0 / std::f64::consts::PI).sqrt());
                let by_x = scale * (one + constant::<A>(3.0 * 0.044_715) * x * x);
                half * (one + t) + half * x * (one - t * t) * by_x
            }
        }
    }
}

/// gelu(x), element by element.
pub fn gelu_forward<T: Float>(x: &Tensor<T>, kind: Gelu) -> Tensor<T> {
    if let Some(gpu) = x.device().gpu() {
        return cuda::pointwise_forward(gpu, kind.kernel(), x);
    }
    map(x, |x| kind.value(x))
}

/// Gradient of [`gelu_forward`].
///
/// # Panics
/// When the shapes differ.
pub fn gelu_backward<T: Float>(dy: &Tensor<T>, x: &Tensor<T>, kind: Gelu) -> Tensor<T> {
    if let Some(gpu) = x.device().gpu() {
        return cuda::pointwise_backward(gpu, kind.kernel(), dy, x);
    }
    map_backward(dy, x, |x| kind.slope(x))
}
