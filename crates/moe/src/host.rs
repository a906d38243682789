//! Small tensors of the router as host values: in place where the device's memory is the host's, else a copy.
//! Decisions about tokens are made on the host; activations never come through here.

use std::borrow::Cow;

use plica_kernels::{Category, Device, Element, Shape, Tensor};

/// The values on the host.
pub(crate) fn on_host<E: Element>(x: &Tensor<E>) -> Cow<'_, [E]> {
    x.host().map_or_else(|| Cow::Owned(x.to_vec()), Cow::Borrowed)
}

/// An activation from host values.
pub(crate) fn to_device<E: Element>(device: &Device, shape: impl Into<Shape>, values: &[E]) -> Tensor<E> {
    Tensor::from_slice(device, shape, values, Category::Activation)
}
