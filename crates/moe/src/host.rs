//! Small tensors of the router as host values: in place where the device's memory is the host's, else a copy.
//! What is decided on the host although the logits may be elsewhere: choices that see whole sequences (Sinkhorn, expert
//! choice), rules of a user's own and forced balance, and drops in scopes that several ranks share. The plain top-k, its
//! weights, its drops within a rank, and the sums and gradients of the losses stay on the device
//! ([`plica_kernels::ops::router`]); expert ids come to the host for the plan of the dispatch. Activations never come
//! through here.

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
