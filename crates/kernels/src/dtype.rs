//! Element types. `Element` is anything a tensor can hold and a rank can send; `Float` adds arithmetic in an
//! accumulator type (f32 for bf16 and f32, f64 for f64); `Real` is a float that is its own accumulator.

use half::bf16;

/// Name of an element type at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// 32-bit float.
    F32,
    /// 64-bit float.
    F64,
    /// 16-bit brain float: 8 exponent bits, 7 fraction bits.
    Bf16,
    /// 32-bit signed integer (expert ids, token ids, targets).
    I32,
    /// 64-bit signed integer (counts).
    I64,
    /// Byte (masks).
    U8,
}

impl DType {
    /// Bytes of one element.
    pub const fn size_bytes(self) -> usize {
        match self {
            DType::U8 => 1,
            DType::Bf16 => 2,
            DType::F32 | DType::I32 => 4,
            DType::F64 | DType::I64 => 8,
        }
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::Bf16 => "bf16",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::U8 => "u8",
        })
    }
}

/// What a tensor can hold.
pub trait Element: bytemuck::Pod + Send + Sync + std::fmt::Debug + PartialEq + PartialOrd + Default {
    /// Name of the type at run time.
    const DTYPE: DType;
    /// Value that fresh memory is filled with in debug builds, so that an output that an operation forgot to
    /// write shows: NaN for floats, a large negative number for integers.
    const POISON: Self;
}

macro_rules! element {
    ($t:ty, $d:ident, $p:expr) => {
        impl Element for $t {
            const DTYPE: DType = DType::$d;
            const POISON: Self = $p;
        }
    };
}
element!(f32, F32, f32::NAN);
element!(f64, F64, f64::NAN);
element!(bf16, Bf16, bf16::NAN);
element!(i32, I32, i32::MIN / 2);
element!(i64, I64, i64::MIN / 2);
element!(u8, U8, 0xA5);

/// A float that its own arithmetic is done in.
pub trait Real:
    Float<Acc = Self>
    + num_traits::Float
    + num_traits::NumAssign
    + num_traits::FloatConst
    + std::iter::Sum
    + std::fmt::Display
    + crate::ops::fastmath::FastMath
    + crate::cuda::Parameter
{
}
impl Real for f32 {}
impl Real for f64 {}

/// A weight or activation type, with the type that its sums are kept in.
pub trait Float: Element {
    /// Type of sums and statistics: f32 for bf16 and f32, f64 for f64.
    type Acc: Real;
    /// Exact widening to the accumulator.
    fn to_acc(self) -> Self::Acc;
    /// Rounding (to nearest, ties to even) from the accumulator.
    fn from_acc(x: Self::Acc) -> Self;
    /// Exact widening.
    fn to_f64(self) -> f64;
    /// Rounding from f64 (bf16: through f32).
    fn from_f64(x: f64) -> Self;
}

impl Float for f32 {
    type Acc = f32;
    #[inline(always)]
    fn to_acc(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_acc(x: f32) -> f32 {
        x
    }
    #[inline(always)]
    fn to_f64(self) -> f64 {
        f64::from(self)
    }
    #[inline(always)]
    fn from_f64(x: f64) -> f32 {
        x as f32
    }
}

impl Float for f64 {
    type Acc = f64;
    #[inline(always)]
    fn to_acc(self) -> f64 {
        self
    }
    #[inline(always)]
    fn from_acc(x: f64) -> f64 {
        x
    }
    #[inline(always)]
    fn to_f64(self) -> f64 {
        self
    }
    #[inline(always)]
    fn from_f64(x: f64) -> f64 {
        x
    }
}

impl Float for bf16 {
    type Acc = f32;
    #[inline(always)]
    fn to_acc(self) -> f32 {
        // The upper half of an f32: a shift keeps inner loops free of the case distinction for quiet NaN.
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    #[inline(always)]
    fn from_acc(x: f32) -> bf16 {
        bf16::from_f32(x)
    }
    #[inline(always)]
    fn to_f64(self) -> f64 {
        f64::from(self.to_acc())
    }
    #[inline(always)]
    fn from_f64(x: f64) -> bf16 {
        bf16::from_f32(x as f32)
    }
}
