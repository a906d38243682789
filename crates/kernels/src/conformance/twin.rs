//! The same values on a CPU device and on a GPU, and the comparison of what comes out.

use crate::device::Device;
use crate::dtype::{DType, Element, Float};
use crate::ledger::Category;
use crate::rng::{Purpose, Stream};
use crate::shape::Shape;
use crate::tensor::Tensor;

/// A CPU device and the GPU beside it.
pub struct Twin {
    /// The one that is trusted.
    pub cpu: Device,
    /// The one that is checked.
    pub gpu: Device,
}

/// A tensor on both.
pub struct Pair<T: Element> {
    /// On the CPU.
    pub cpu: Tensor<T>,
    /// On the GPU.
    pub gpu: Tensor<T>,
}

impl Twin {
    /// `gpu` beside a CPU of its own.
    pub fn new(gpu: &Device) -> Twin {
        Twin { cpu: Device::cpu(1), gpu: gpu.clone() }
    }

    /// The same values on both.
    pub fn values<T: Element>(&self, shape: impl Into<Shape>, values: &[T]) -> Pair<T> {
        let shape = shape.into();
        Pair {
            cpu: Tensor::from_slice(&self.cpu, shape, values, Category::Activation),
            gpu: Tensor::from_slice(&self.gpu, shape, values, Category::Activation),
        }
    }

    /// Normal values from a seed, rounded to `T`.
    pub fn normal<T: Float>(&self, shape: impl Into<Shape>, seed: u64) -> Pair<T> {
        let shape = shape.into();
        let stream = Stream::new(seed, Purpose::Named("conformance"));
        let values: Vec<T> = (0..shape.len() as u64).map(|i| T::from_f64(stream.normal(i))).collect();
        self.values(shape, &values)
    }
}

/// Agreement within rounding: differences relative to the largest value of the tensor, with a bound for the type and
/// `factor` times that where sums are long.
///
/// # Errors
/// The first element that is too far, and both values.
pub fn close<T: Float>(what: &str, cpu: &Tensor<T>, gpu: &Tensor<T>, factor: f64) -> Result<(), String> {
    let bound = factor
        * match T::DTYPE {
            DType::F64 => 1e-13,
            DType::F32 => 1e-6,
            _ => 8e-3,
        };
    if cpu.shape() != gpu.shape() {
        return Err(format!("{what}: shape {:?} instead of {:?}", gpu.shape(), cpu.shape()));
    }
    let (a, b) = (cpu.to_vec(), gpu.to_vec());
    let largest = a.iter().map(|v| v.to_f64().abs()).filter(|v| v.is_finite()).fold(1e-30, f64::max);
    for (i, (a, b)) in a.iter().zip(&b).enumerate() {
        let (a, b) = (a.to_f64(), b.to_f64());
        let equal = a == b || (a.is_nan() && b.is_nan());
        let near = (a - b).abs() <= bound * largest;
        if !equal && !near {
            return Err(format!(
                "{what}: element {i} of {:?} is {b}, on the CPU {a} (largest {largest})",
                cpu.dims()
            ));
        }
    }
    Ok(())
}

/// The same values exactly (NaN equals NaN by its bits only).
///
/// # Errors
/// The first element that differs.
pub fn same<T: Element>(what: &str, cpu: &Tensor<T>, gpu: &Tensor<T>) -> Result<(), String> {
    if cpu.shape() != gpu.shape() {
        return Err(format!("{what}: shape {:?} instead of {:?}", gpu.shape(), cpu.shape()));
    }
    let (a, b) = (cpu.to_vec(), gpu.to_vec());
    match a.iter().zip(&b).position(|(a, b)| bytemuck::bytes_of(a) != bytemuck::bytes_of(b)) {
        Some(i) => Err(format!("{what}: element {i} is {:?}, on the CPU {:?}", b[i], a[i])),
        None => Ok(()),
    }
}
