//! A dense row-major tensor: a shared buffer, an offset and a shape. Clones and row views share the buffer and
//! cost nothing; writing needs the only handle of a buffer (a shared one is a programmer's mistake). Every
//! buffer stands in the ledger under one category until its last handle is dropped.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::block::Block;
use crate::device::{Device, DeviceKind};
use crate::dtype::Element;
use crate::ledger::{Category, OutOfMemory};
use crate::shape::Shape;

/// Where a buffer's elements are.
#[derive(Debug)]
enum Memory {
    /// In host memory, until the buffer is dropped.
    Host(Option<Block>),
    /// At this address of the device's GPU.
    Gpu(u64),
}

#[derive(Debug)]
struct Buffer {
    memory: Memory,
    bytes: u64,
    category: AtomicU8,
    device: Device,
}

impl Buffer {
    fn category(&self) -> Category {
        Category::ALL[self.category.load(Ordering::Relaxed) as usize]
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.device.ledger().remove(self.category(), self.bytes);
        match &mut self.memory {
            Memory::Host(block) => {
                if let Some(block) = block.take() {
                    self.device.cache().put(block);
                }
            }
            Memory::Gpu(address) => {
                let gpu = self.device.gpu().expect("a device that gave its memory");
                gpu.runtime().free(*address, self.bytes as usize);
            }
        }
    }
}

/// A dense row-major tensor on a device.
#[derive(Clone)]
pub struct Tensor<T: Element> {
    buffer: Arc<Buffer>,
    offset: usize,
    shape: Shape,
    element: std::marker::PhantomData<T>,
}

impl<T: Element> Tensor<T> {
    /// A tensor whose contents are unspecified (NaN in debug builds): the caller writes every element.
    ///
    /// Unwinds with [`crate::ledger::OutOfMemory`] when the device's budget refuses it.
    pub fn empty(device: &Device, shape: impl Into<Shape>, category: Category) -> Tensor<T> {
        let shape = shape.into();
        let bytes = (shape.len() * size_of::<T>()) as u64;
        let named = |mut error: Box<OutOfMemory>| -> ! {
            error.reserved_bytes = device.reserved_bytes();
            error.largest_reserved_bytes = device.cache().largest_bytes();
            error.tensor = format!("{} {:?}", T::DTYPE, shape.dims());
            // Without the panic hook: it would print a payload that it cannot name before the message.
            std::panic::resume_unwind(error)
        };
        if let Err(error) = device.ledger().add(category, bytes) {
            named(error);
        }
        let memory = match device.gpu() {
            None => Memory::Host(Some(device.cache().take(bytes as usize))),
            Some(gpu) => match gpu.runtime().allocate(bytes as usize) {
                Ok(Some(address)) => Memory::Gpu(address),
                refused => {
                    device.ledger().remove(category, bytes);
                    match refused {
                        Err(error) => error.unwind(),
                        Ok(_) => named(Box::new(device.ledger().refusal(
                            category,
                            bytes,
                            gpu.description().memory_bytes,
                        ))),
                    }
                }
            },
        };
        let buffer =
            Buffer { memory, bytes, category: AtomicU8::new(category as u8), device: device.clone() };
        let mut tensor =
            Tensor { buffer: Arc::new(buffer), offset: 0, shape, element: std::marker::PhantomData };
        if cfg!(debug_assertions) {
            match device.gpu() {
                None => tensor.data_mut().fill(T::POISON),
                // NaN in every float type.
                Some(gpu) => gpu.fill(tensor.address_mut(), 0xFF, bytes as usize),
            }
        }
        tensor
    }

    /// A tensor of zeros.
    pub fn zeros(device: &Device, shape: impl Into<Shape>, category: Category) -> Tensor<T> {
        Tensor::full(device, shape, T::default(), category)
    }

    /// A tensor of one value.
    pub fn full(device: &Device, shape: impl Into<Shape>, value: T, category: Category) -> Tensor<T> {
        let mut tensor = Tensor::empty(device, shape, category);
        match device.gpu() {
            None => tensor.data_mut().fill(value),
            Some(gpu) => crate::ops::elementwise::fill_on_gpu(gpu, &mut tensor, value),
        }
        tensor
    }

    /// Copies host values in.
    ///
    /// # Panics
    /// When the number of values is not the shape's.
    pub fn from_slice(
        device: &Device,
        shape: impl Into<Shape>,
        values: &[T],
        category: Category,
    ) -> Tensor<T> {
        let mut tensor = Tensor::empty(device, shape, category);
        assert_eq!(tensor.len(), values.len(), "values for shape {:?}", tensor.shape);
        match device.gpu() {
            None => tensor.data_mut().copy_from_slice(values),
            Some(gpu) => gpu.copy_in(tensor.address_mut(), bytemuck::cast_slice(values)),
        }
        tensor
    }

    /// Copies the values out to the host; a GPU finishes its queued work first.
    pub fn to_vec(&self) -> Vec<T> {
        let Some(gpu) = self.device().gpu() else { return self.data().to_vec() };
        let mut values = vec![T::default(); self.len()];
        gpu.copy_out(bytemuck::cast_slice_mut(&mut values), self.address());
        values
    }

    /// Replaces all values by host values.
    ///
    /// # Panics
    /// When their number differs, or the buffer is shared.
    pub fn write(&mut self, values: &[T]) {
        assert_eq!(self.len(), values.len(), "values for shape {:?}", self.shape);
        match self.device().gpu().cloned() {
            None => self.data_mut().copy_from_slice(values),
            Some(gpu) => gpu.copy_in(self.address_mut(), bytemuck::cast_slice(values)),
        }
    }

    /// Replaces the flat elements from `start` on by host values.
    ///
    /// # Panics
    /// When there are not as many, or the buffer is shared.
    pub fn write_at(&mut self, start: usize, values: &[T]) {
        assert!(start + values.len() <= self.len(), "{} values from {start} of {}", values.len(), self.len());
        match self.device().gpu().cloned() {
            None => self.data_mut()[start..start + values.len()].copy_from_slice(values),
            Some(gpu) => {
                gpu.copy_in(
                    self.address_mut() + (start * size_of::<T>()) as u64,
                    bytemuck::cast_slice(values),
                );
            }
        }
    }

    /// Copies the flat elements from `start` on out to the host; a GPU finishes its queued work first.
    ///
    /// # Panics
    /// When there are not as many.
    pub fn read_at(&self, start: usize, values: &mut [T]) {
        assert!(start + values.len() <= self.len(), "{} values from {start} of {}", values.len(), self.len());
        match self.device().gpu() {
            None => values.copy_from_slice(&self.data()[start..start + values.len()]),
            Some(gpu) => {
                let from = self.address() + (start * size_of::<T>()) as u64;
                gpu.copy_out(bytemuck::cast_slice_mut(values), from);
            }
        }
    }

    /// The same values on another device, under the same category; through the host where the kinds differ.
    pub fn to_device(&self, device: &Device) -> Tensor<T> {
        if self.device().kind() == device.kind() {
            let mut copy = Tensor::empty(device, self.shape, self.category());
            crate::ops::elementwise::copy_range(&mut copy, 0, self, 0..self.len());
            return copy;
        }
        Tensor::from_slice(device, self.shape, &self.to_vec(), self.category())
    }

    /// The only value of a one-element tensor.
    ///
    /// # Panics
    /// When there is not exactly one element.
    pub fn item(&self) -> T {
        assert_eq!(self.len(), 1, "one element, shape {:?}", self.shape);
        self.to_vec()[0]
    }

    /// The values in place, where they are in host memory; `None` on another device.
    pub fn host(&self) -> Option<&[T]> {
        match self.device().kind() {
            DeviceKind::Cpu => Some(self.data()),
            DeviceKind::Cuda => None,
        }
    }

    /// The values in place for writing, where they are in host memory; `None` on another device.
    ///
    /// # Panics
    /// When the buffer is shared.
    pub fn host_mut(&mut self) -> Option<&mut [T]> {
        match self.device().kind() {
            DeviceKind::Cpu => Some(self.data_mut()),
            DeviceKind::Cuda => None,
        }
    }

    /// The device that holds the values.
    pub fn device(&self) -> &Device {
        &self.buffer.device
    }

    /// Sizes of the dims.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Sizes of the dims, outermost first.
    pub fn dims(&self) -> &[usize] {
        self.shape.dims()
    }

    /// Size of one dim.
    pub fn dim(&self, dim: usize) -> usize {
        self.shape.dims()[dim]
    }

    /// Size of the outermost dim.
    pub fn rows(&self) -> usize {
        self.shape.dims()[0]
    }

    /// Elements of one row.
    pub fn row_len(&self) -> usize {
        self.shape.row_len()
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.len()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of the elements of this view.
    pub fn size_bytes(&self) -> u64 {
        (self.len() * size_of::<T>()) as u64
    }

    /// Category that the buffer stands under in the ledger.
    pub fn category(&self) -> Category {
        self.buffer.category()
    }

    /// Moves the buffer to another category of the ledger (all handles of it).
    pub fn with_category(self, category: Category) -> Tensor<T> {
        let old = self.buffer.category.swap(category as u8, Ordering::Relaxed);
        let old = Category::ALL[old as usize];
        self.device().ledger().recategorize(old, category, self.buffer.bytes);
        self
    }

    /// The same elements under another shape.
    ///
    /// # Panics
    /// When the number of elements differs.
    pub fn reshape(mut self, shape: impl Into<Shape>) -> Tensor<T> {
        let shape = shape.into();
        assert_eq!(self.len(), shape.len(), "reshape {:?} to {shape:?}", self.shape);
        self.shape = shape;
        self
    }

    /// A view of some rows (outermost dim); shares the buffer.
    ///
    /// # Panics
    /// When the rows are out of range.
    pub fn slice_rows(&self, rows: Range<usize>) -> Tensor<T> {
        assert!(rows.start <= rows.end && rows.end <= self.rows(), "rows {rows:?} of {}", self.rows());
        let mut view = self.clone();
        view.offset += rows.start * self.row_len();
        view.shape = self.shape.with_rows(rows.len());
        view
    }

    /// Whether this handle is the only one of its buffer, so that it may be written.
    pub fn is_unique(&self) -> bool {
        Arc::strong_count(&self.buffer) == 1
    }

    /// A copy in a buffer of its own.
    pub fn duplicate(&self, category: Category) -> Tensor<T> {
        let mut copy = Tensor::empty(self.device(), self.shape, category);
        match self.device().gpu() {
            None => copy.data_mut().copy_from_slice(self.data()),
            Some(gpu) => gpu.copy(copy.address_mut(), self.address(), self.size_bytes() as usize),
        }
        copy
    }

    /// Address of the first element on the device's GPU, for kernels and for libraries that move device memory.
    ///
    /// # Panics
    /// On the CPU.
    pub fn address(&self) -> u64 {
        let Memory::Gpu(start) = self.buffer.memory else { panic!("a tensor of a GPU, got one of the host") };
        start + (self.offset * size_of::<T>()) as u64
    }

    /// The address for writing.
    ///
    /// # Panics
    /// On the CPU, or when the buffer is shared.
    pub fn address_mut(&mut self) -> u64 {
        assert!(self.is_unique(), "writing needs the only handle of a buffer");
        self.address()
    }

    fn block(buffer: &Buffer) -> &Block {
        match &buffer.memory {
            Memory::Host(block) => block.as_ref().expect("a live buffer has its block"),
            Memory::Gpu(_) => panic!("an operation of the CPU on a tensor of a GPU"),
        }
    }

    pub(crate) fn data(&self) -> &[T] {
        let block = Self::block(&self.buffer);
        // SAFETY: the block is aligned to 64 bytes, holds initialised bytes of a `Pod` type, and is at least
        // `offset + len` elements long (checked when the view was made); no `&mut` exists while `&self` does,
        // since `data_mut` needs the only handle.
        unsafe { std::slice::from_raw_parts(block.pointer().cast::<T>().add(self.offset), self.len()) }
    }

    pub(crate) fn data_mut(&mut self) -> &mut [T] {
        let (offset, len) = (self.offset, self.shape.len());
        let buffer = Arc::get_mut(&mut self.buffer).expect("writing needs the only handle of a buffer");
        let block = Self::block(buffer);
        // SAFETY: as in `data`; `Arc::get_mut` proves that no other handle exists.
        unsafe { std::slice::from_raw_parts_mut(block.pointer().cast::<T>().add(offset), len) }
    }
}

impl<T: Element> std::fmt::Debug for Tensor<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let shown = self.len().min(6);
        let Some(values) = self.host() else { return write!(f, "{}{:?} on a GPU", T::DTYPE, self.shape) };
        write!(f, "{}{:?} {:?}", T::DTYPE, self.shape, &values[..shown])?;
        if shown < self.len() { f.write_str(" ..") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::naming;

    #[test]
    fn views_share_and_the_ledger_counts_once() {
        let device = Device::cpu(1);
        let x = Tensor::<f32>::from_slice(&device, [3, 2], &[0., 1., 2., 3., 4., 5.], Category::Activation);
        let view = x.slice_rows(1..3);
        assert_eq!(view.to_vec(), [2., 3., 4., 5.]);
        assert_eq!(device.ledger().now().get(Category::Activation), 24);
        assert!(!x.is_unique());
        drop(view);
        let x = x.with_category(Category::Parameter);
        assert_eq!(device.live()[Category::Parameter as usize], 24);
        drop(x);
        assert_eq!(device.ledger().now().total_bytes(), 0);
        assert!(device.reserved_bytes() > 0);
    }

    #[test]
    fn zero_rows_are_ordinary() {
        let device = Device::cpu(1);
        let x = Tensor::<f64>::zeros(&device, [0, 7], Category::Data);
        assert_eq!((x.rows(), x.row_len(), x.len()), (0, 7, 0));
        assert!(x.slice_rows(0..0).to_vec().is_empty());
    }

    fn kept_zeros(device: &Device, shape: [usize; 2]) -> Tensor<u8> {
        Tensor::zeros(device, shape, Category::Workspace)
    }

    #[test]
    fn a_budget_unwinds_with_the_reason() {
        let device = Device::cpu_with_budget(1, Some(1000));
        let _kept = Tensor::<u8>::zeros(&device, [600], Category::Parameter);
        let grab = || Tensor::<u8>::zeros(&device, [401], Category::Workspace);
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(grab));
        let error = *caught.unwrap_err().downcast::<crate::ledger::OutOfMemory>().expect("typed");
        assert_eq!((error.requested_bytes, error.live_bytes), (401, 600));
        let grab = || {
            naming(
                || "layer 3".into(),
                || naming(|| "experts".into(), || drop(kept_zeros(&device, [20, 21]))),
            )
        };
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(grab));
        let error = caught.unwrap_err().downcast::<crate::ledger::OutOfMemory>().expect("typed");
        assert!(
            error
                .to_string()
                .contains("420 bytes of workspace asked for (u8 [20, 21], experts, layer 3), 600")
        );
        // Other panics pass.
        let other =
            std::panic::catch_unwind(|| naming(|| "x".into(), || std::panic::resume_unwind(Box::new(7u8))));
        assert_eq!(*other.unwrap_err().downcast::<u8>().expect("the payload"), 7);
    }
}
