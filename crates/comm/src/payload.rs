//! A tensor whose element type is known only at run time, as it passes through the object-safe part of the
//! crate, and the trait of the element types that ranks can send.

use std::ops::Range;

use plica_kernels::cuda::Stream;
use plica_kernels::ops::elementwise::{
    Extreme, Summable, copy_range, extreme_in_order, extreme_slices_in_order, sum_in_order,
    sum_slices_in_order,
};
use plica_kernels::{Category, DType, Device, Element, Shape, Tensor, bf16};

use crate::communicator::Reduce;

/// A tensor of any element type.
#[derive(Clone, Debug)]
pub enum Payload {
    /// 32-bit floats.
    F32(Tensor<f32>),
    /// 64-bit floats.
    F64(Tensor<f64>),
    /// 16-bit brain floats.
    Bf16(Tensor<bf16>),
    /// 32-bit integers.
    I32(Tensor<i32>),
    /// 64-bit integers.
    I64(Tensor<i64>),
    /// Bytes.
    U8(Tensor<u8>),
}

/// An element type that ranks can send.
pub trait Message: Element + Summable {
    /// Forgets the element type.
    fn wrap(tensor: Tensor<Self>) -> Payload;
    /// The tensor of a payload.
    ///
    /// # Panics
    /// When the payload holds another element type.
    fn unwrap(payload: Payload) -> Tensor<Self>;
    /// The tensor inside a payload.
    ///
    /// # Panics
    /// When the payload holds another element type.
    fn peek(payload: &Payload) -> &Tensor<Self>;
}

macro_rules! message {
    ($($t:ty => $variant:ident),*) => {$(
        impl Message for $t {
            fn wrap(tensor: Tensor<$t>) -> Payload {
                Payload::$variant(tensor)
            }
            fn unwrap(payload: Payload) -> Tensor<$t> {
                match payload {
                    Payload::$variant(tensor) => tensor,
                    other => panic!("a payload of {} read as {}", other.dtype(), <$t>::DTYPE),
                }
            }
            fn peek(payload: &Payload) -> &Tensor<$t> {
                match payload {
                    Payload::$variant(tensor) => tensor,
                    other => panic!("a payload of {} read as {}", other.dtype(), <$t>::DTYPE),
                }
            }
        }
    )*};
}
message!(f32 => F32, f64 => F64, bf16 => Bf16, i32 => I32, i64 => I64, u8 => U8);

macro_rules! with_tensor {
    ($payload:expr, $x:ident => $body:expr) => {
        match $payload {
            Payload::F32($x) => $body,
            Payload::F64($x) => $body,
            Payload::Bf16($x) => $body,
            Payload::I32($x) => $body,
            Payload::I64($x) => $body,
            Payload::U8($x) => $body,
        }
    };
}

macro_rules! with_dtype {
    ($dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            DType::F32 => {
                type $t = f32;
                $body
            }
            DType::F64 => {
                type $t = f64;
                $body
            }
            DType::Bf16 => {
                type $t = bf16;
                $body
            }
            DType::I32 => {
                type $t = i32;
                $body
            }
            DType::I64 => {
                type $t = i64;
                $body
            }
            DType::U8 => {
                type $t = u8;
                $body
            }
        }
    };
}

impl Payload {
    /// Element type.
    pub fn dtype(&self) -> DType {
        match self {
            Payload::F32(_) => DType::F32,
            Payload::F64(_) => DType::F64,
            Payload::Bf16(_) => DType::Bf16,
            Payload::I32(_) => DType::I32,
            Payload::I64(_) => DType::I64,
            Payload::U8(_) => DType::U8,
        }
    }

    /// Shape.
    pub fn shape(&self) -> Shape {
        with_tensor!(self, x => x.shape())
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape().len()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of the elements.
    pub fn size_bytes(&self) -> u64 {
        with_tensor!(self, x => x.size_bytes())
    }

    /// A tensor whose contents are unspecified; see [`Tensor::empty`].
    pub(crate) fn empty(device: &Device, shape: Shape, dtype: DType, category: Category) -> Payload {
        with_dtype!(dtype, T => T::wrap(Tensor::<T>::empty(device, shape, category)))
    }

    /// The elements as bytes in host memory.
    ///
    /// # Panics
    /// On a device whose memory the host cannot read.
    pub(crate) fn bytes(&self) -> &[u8] {
        with_tensor!(self, x => bytemuck::cast_slice(x.host().expect("memory that the host can read")))
    }

    /// The elements as bytes in host memory, for writing.
    ///
    /// # Panics
    /// When the buffer is shared, or on a device whose memory the host cannot write.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        with_tensor!(self, x => {
            bytemuck::cast_slice_mut(x.host_mut().expect("memory that the host can write"))
        })
    }

    /// Address of the first element on its GPU.
    ///
    /// # Panics
    /// On the CPU.
    #[cfg(feature = "nccl")]
    pub(crate) fn address(&self) -> u64 {
        with_tensor!(self, x => x.address())
    }

    /// The address for writing.
    ///
    /// # Panics
    /// On the CPU, or when the buffer is shared.
    #[cfg(feature = "nccl")]
    pub(crate) fn address_mut(&mut self) -> u64 {
        with_tensor!(self, x => x.address_mut())
    }

    /// The device that holds the elements.
    pub(crate) fn device(&self) -> &Device {
        with_tensor!(self, x => x.device())
    }

    /// Waits until what was queued to write the elements is done, where they are on a GPU: another device may read
    /// them then.
    pub(crate) fn settle(&self) {
        settle(self.device());
    }

    /// The same elements in a buffer of another device.
    pub(crate) fn copied_to(&self, device: &Device) -> Payload {
        let whole = [(self, 0..self.len())];
        Payload::concat(device, self.shape(), self.dtype(), &whole)
    }

    /// A view of the same elements under another shape.
    pub(crate) fn reshape(self, shape: Shape) -> Payload {
        with_tensor!(self, x => Message::wrap(x.reshape(shape)))
    }

    /// The element ranges of `parts`, one after another, in a new communication buffer of that shape.
    pub(crate) fn concat(
        device: &Device,
        shape: Shape,
        dtype: DType,
        parts: &[(&Payload, Range<usize>)],
    ) -> Payload {
        with_dtype!(dtype, T => {
            let mut out = Tensor::<T>::empty(device, shape, Category::CommBuffer);
            let mut start = 0;
            for (part, range) in parts {
                put_range(&mut out, start, T::peek(part), range.clone());
                start += range.len();
            }
            assert_eq!(start, out.len(), "parts fill the output");
            T::wrap(out)
        })
    }

    /// The parts reduced element by element in their order over the flat elements `range`: `[range.len()]`.
    pub(crate) fn reduce(device: &Device, parts: &[&Payload], range: Range<usize>, op: Reduce) -> Payload {
        with_dtype!(parts[0].dtype(), T => {
            let parts: Vec<Tensor<T>> =
                parts.iter().map(|part| readable(device, T::peek(part), range.clone())).collect();
            let parts: Vec<&Tensor<T>> = parts.iter().collect();
            let range = 0..range.len();
            let out = match op {
                Reduce::Sum => sum_in_order(device, &parts, range, Category::CommBuffer),
                Reduce::Max => extreme_in_order(device, &parts, range, Extreme::Max, Category::CommBuffer),
                Reduce::Min => extreme_in_order(device, &parts, range, Extreme::Min, Category::CommBuffer),
            };
            T::wrap(out)
        })
    }
}

/// Waits for everything queued on a GPU's compute stream; nothing on a CPU.
pub(crate) fn settle(device: &Device) {
    if let Some(gpu) = device.gpu() {
        gpu.synchronize(Stream::Compute);
    }
}

/// Copies elements `range` of `source` to those of `out` from `start` on, whatever devices the two are on. Between host
/// and GPU it waits.
fn put_range<T: Message>(out: &mut Tensor<T>, start: usize, source: &Tensor<T>, range: Range<usize>) {
    if out.device().kind() == source.device().kind() {
        return copy_range(out, start, source, range);
    }
    let len = range.len();
    match (source.host(), out.host_mut()) {
        (Some(from), _) => out.write_at(start, &from[range]),
        (None, Some(to)) => source.read_at(range.start, &mut to[start..start + len]),
        (None, None) => unreachable!("one of two kinds is the host"),
    }
}

/// Flat elements `range` of a tensor where kernels of `device` can read them: in place, or a copy of what another card or
/// memory of the other kind holds.
fn readable<T: Message>(device: &Device, x: &Tensor<T>, range: Range<usize>) -> Tensor<T> {
    let ordinal = |device: &Device| device.gpu().map(|gpu| gpu.description().ordinal);
    if ordinal(device) == ordinal(x.device()) {
        return x.clone().reshape([x.len()]).slice_rows(range);
    }
    let mut copy = Tensor::empty(device, [range.len()], Category::CommBuffer);
    put_range(&mut copy, 0, x, range);
    copy
}

/// `parts`, slices of elements of one type as bytes, reduced element by element in their order into `out`; the
/// same bits as [`Payload::reduce`].
pub(crate) fn reduce_bytes(dtype: DType, out: &mut [u8], parts: &[&[u8]], op: Reduce) {
    with_dtype!(dtype, T => {
        let parts: Vec<&[T]> = parts.iter().map(|part| bytemuck::cast_slice(part)).collect();
        let out: &mut [T] = bytemuck::cast_slice_mut(out);
        match op {
            Reduce::Sum => sum_slices_in_order(out, &parts),
            Reduce::Max => extreme_slices_in_order(out, &parts, Extreme::Max),
            Reduce::Min => extreme_slices_in_order(out, &parts, Extreme::Min),
        }
    })
}
