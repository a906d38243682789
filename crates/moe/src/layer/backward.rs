//! The backward of an MoE layer, cut where rows travel. First stretch: the gradients of the sums go to the experts'
//! rows, beside the backward of the shared experts down to their activation. Second stretch: the gradients of the
//! rows come back, beside the weight gradients of the experts' gate and up and the rest of the shared experts. The
//! weight gradient of the experts' down projection stays before the second stretch: put off, it would keep two more
//! tensors of expert rows alive. Where the layer is recomputed, a stretch goes ahead in which the token rows travel to
//! the experts once more. Shapes as in [`super`].

use plica_dense::{Cx, Phase, Trainable};
use plica_dispatch::Handle;
use plica_dispatch::dispatcher::{CombineStarted, DispatchBackwardStarted, DispatchStarted};
use plica_kernels::{Float, Tensor};

use super::{Body, MoeLayer, sum};
use crate::error::MoeError;
use crate::experts::ExpertsSaved;
use crate::router::RouterSaved;
use crate::shared::{Shared, SharedBackward, SharedSaved};

/// A backward whose rows travel.
pub enum MoeBackward<T: Trainable> {
    /// Token rows, to their experts once more.
    Again(Again<T>),
    /// Gradients of the sums, to the rows of the experts.
    Combining(Combining<T>),
    /// Gradients of the experts' rows, back to their tokens.
    Dispatching(Dispatching<T>),
}

/// See [`MoeBackward::Again`].
pub struct Again<T: Trainable> {
    router: RouterSaved<T>,
    dy_td: Tensor<T>,
    rows: DispatchStarted<T>,
    shared: Option<SharedSaved<T>>,
}

/// See [`MoeBackward::Combining`].
pub struct Combining<T: Float> {
    router: RouterSaved<T>,
    handle: Handle<T>,
    experts: ExpertsSaved<T>,
    rows: CombineStarted<T>,
    shared: Option<SharedBackward<T>>,
}

/// See [`MoeBackward::Dispatching`].
pub struct Dispatching<T: Float> {
    router: RouterSaved<T>,
    rows: DispatchBackwardStarted<T>,
    dshared_td: Option<Tensor<T>>,
}

impl<T: Trainable> MoeLayer<T> {
    /// Rows start to their experts once more, and the shared experts get to their activation.
    pub(super) fn to_experts_again(
        &self,
        router: RouterSaved<T>,
        dy_td: &Tensor<T>,
        cx: &mut Cx<T>,
    ) -> Result<MoeBackward<T>, MoeError> {
        let routing = self.router.routing_of(&router);
        let phase = cx.phase(Phase::Dispatch);
        let started = self.dispatcher.dispatch_begin(router.x_td(), &routing)?;
        let rows = started.settled(!cx.overlap().is_on())?;
        drop(phase);
        let again = |shared: &Shared| shared.forward_again(router.x_td(), cx);
        let shared = self.shared.as_ref().map(again).transpose()?;
        Ok(MoeBackward::Again(Again { router, dy_td: dy_td.clone(), rows, shared }))
    }

    /// The experts get to their activation; then as without recomputation.
    pub(super) fn again(
        &self,
        Again { router, dy_td, rows, shared }: Again<T>,
        cx: &mut Cx<T>,
    ) -> Result<MoeBackward<T>, MoeError> {
        let phase = cx.phase(Phase::Dispatch);
        let (rows, handle) = self.dispatcher.dispatch_finish(rows)?;
        drop(phase);
        let phase = cx.phase(Phase::Experts);
        let experts = self.experts.forward_to_activation(rows, cx);
        drop(phase);
        self.gradients_to_experts(router, Body { handle, experts, shared }, &dy_td, cx)
    }

    /// Gradients start to the experts, and the shared experts go back to their activation.
    pub(super) fn gradients_to_experts(
        &self,
        router: RouterSaved<T>,
        Body { handle, experts, shared }: Body<T>,
        dy_td: &Tensor<T>,
        cx: &mut Cx<T>,
    ) -> Result<MoeBackward<T>, MoeError> {
        let phase = cx.phase(Phase::Combine);
        let started = self.dispatcher.combine_backward_begin(dy_td, &handle)?;
        let rows = started.settled(!cx.overlap().is_on())?;
        drop(phase);
        let begin = |(layer, saved): (&Shared, _)| layer.backward_begin(saved, dy_td, cx);
        let shared = self.shared.as_ref().zip(shared).map(begin).transpose()?;
        Ok(MoeBackward::Combining(Combining { router, handle, experts, rows, shared }))
    }

    /// The experts go back; gradients of their rows start to the tokens, and what only weights wait for is made.
    pub(super) fn back_through_experts(
        &self,
        Combining { router, handle, experts, rows, shared }: Combining<T>,
        cx: &mut Cx<T>,
    ) -> Result<MoeBackward<T>, MoeError> {
        let phase = cx.phase(Phase::Combine);
        let dy_rd = self.dispatcher.combine_backward_finish(rows)?;
        drop(phase);
        let phase = cx.phase(Phase::Experts);
        let (dx_rd, dweights_r, rest) = self.experts.backward(experts, dy_rd, cx);
        drop(phase);
        let phase = cx.phase(Phase::Dispatch);
        let started = self.dispatcher.dispatch_backward_begin(&dx_rd, &dweights_r, &handle)?;
        let rows = started.settled(!cx.overlap().is_on())?;
        drop((phase, dx_rd, dweights_r, handle));
        let phase = cx.phase(Phase::Experts);
        self.experts.backward_rest(rest, cx);
        drop(phase);
        let finish = |(layer, begun): (&Shared, _)| layer.backward_finish(begun, cx);
        let dshared_td = self.shared.as_ref().zip(shared).map(finish).transpose()?;
        Ok(MoeBackward::Dispatching(Dispatching { router, rows, dshared_td }))
    }

    /// Gradients are back and summed by token; the router goes back.
    pub(super) fn back_to_tokens(
        &self,
        Dispatching { router, rows, dshared_td }: Dispatching<T>,
        cx: &mut Cx<T>,
    ) -> Result<Tensor<T>, MoeError> {
        let phase = cx.phase(Phase::Dispatch);
        let (dx_td, dweights_tk) = self.dispatcher.dispatch_backward_finish(rows)?;
        drop(phase);
        let dx_td = match dshared_td {
            Some(dshared_td) => sum(dx_td, &dshared_td),
            None => dx_td,
        };
        self.router.backward(router, &dweights_tk, dx_td, cx)
    }
}
