//! The forward of an MoE layer, cut where rows travel. First stretch: to the experts, beside gate and up of the shared
//! experts. Second stretch: back, beside their down projection. So whichever stretch is the longer one has something
//! to hide behind, and TP's collectives of the shared experts run inside. Shapes as in [`super`].

use plica_dense::{Cx, Phase, Trainable};
use plica_dispatch::Handle;
use plica_dispatch::dispatcher::{CombineStarted, DispatchStarted};
use plica_kernels::{Float, Tensor};

use super::{Body, MoeLayer, MoeSaved, sum};
use crate::error::MoeError;
use crate::experts::ExpertsSaved;
use crate::report::MoeReport;
use crate::router::RouterSaved;
use crate::shared::{Shared, SharedForward, SharedSaved};

/// A forward whose rows travel.
pub enum MoeForward<T: Trainable> {
    /// Token rows, to their experts.
    Dispatching(Box<Dispatching<T>>),
    /// Rows of the experts, back to their tokens.
    Combining(Box<Combining<T>>),
}

/// See [`MoeForward::Dispatching`].
pub struct Dispatching<T: Trainable> {
    router: RouterSaved<T>,
    report: MoeReport,
    rows: DispatchStarted<T>,
    shared: Option<SharedForward<T>>,
}

/// See [`MoeForward::Combining`].
pub struct Combining<T: Float> {
    router: RouterSaved<T>,
    report: MoeReport,
    handle: Handle<T>,
    experts: ExpertsSaved<T>,
    rows: CombineStarted<T>,
    shared: Option<(Tensor<T>, SharedSaved<T>)>,
}

impl<T: Trainable> MoeLayer<T> {
    /// Routes; rows start to their experts, and the shared experts get to their activation.
    pub(super) fn to_experts(&self, x_td: &Tensor<T>, cx: &mut Cx<T>) -> Result<MoeForward<T>, MoeError> {
        let (routing, router, report) = self.router.forward(x_td, cx)?;
        let phase = cx.phase(Phase::Dispatch);
        let rows = self.dispatcher.dispatch_begin(x_td, &routing)?.settled(!cx.overlap().is_on())?;
        drop(phase);
        let shared = self.shared.as_ref().map(|shared| shared.forward_begin(x_td, cx)).transpose()?;
        let dispatching = Dispatching { router, report, rows, shared };
        Ok(MoeForward::Dispatching(Box::new(dispatching)))
    }

    /// The experts compute; their rows start back, and the shared experts end.
    pub(super) fn through_experts(
        &self,
        Dispatching { router, mut report, rows, shared }: Dispatching<T>,
        cx: &mut Cx<T>,
    ) -> Result<MoeForward<T>, MoeError> {
        let phase = cx.phase(Phase::Dispatch);
        let (rows, handle) = self.dispatcher.dispatch_finish(rows)?;
        drop(phase);
        report.received_rows = handle.rows() as u64;
        let phase = cx.phase(Phase::Experts);
        let (y_rd, experts) = self.experts.forward(rows, cx);
        drop(phase);
        let phase = cx.phase(Phase::Combine);
        let rows = self.dispatcher.combine_begin(&y_rd, &handle)?.settled(!cx.overlap().is_on())?;
        drop((phase, y_rd));
        let finish = |(layer, begun): (&Shared, _)| layer.forward_finish(begun, cx);
        let shared = self.shared.as_ref().zip(shared).map(finish).transpose()?;
        let combining = Combining { router, report, handle, experts, rows, shared };
        Ok(MoeForward::Combining(Box::new(combining)))
    }

    /// Rows are back and summed by token.
    pub(super) fn joined(
        &self,
        Combining { router, report, handle, experts, rows, shared }: Combining<T>,
        cx: &Cx<T>,
    ) -> Result<(Tensor<T>, MoeSaved<T>, MoeReport), MoeError> {
        let phase = cx.phase(Phase::Combine);
        let y_td = self.dispatcher.combine_finish(rows)?;
        drop(phase);
        let (y_td, shared) = match shared {
            None => (y_td, None),
            Some((shared_td, saved)) => (sum(y_td, &shared_td), Some(saved)),
        };
        let body = (!cx.recompute.moe).then_some(Body { handle, experts, shared });
        Ok((y_td, MoeSaved { router, body }, report))
    }
}
