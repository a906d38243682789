//! What every dispatcher does: bring token rows to the ranks of their experts, grouped by local expert, and
//! bring the experts' rows back to their tokens; the same for gradients. Each step has a begin and a finish
//! half, so that a caller can compute in between. Nothing of a call lives on the dispatcher: the forward
//! returns a [`Handle`] and the other steps take it, so several micro-batches can be in flight. All ranks of
//! the expert group call the same halves in the same order, also with zero tokens.
//!
//! A token's weight travels with its row and is applied by the expert; combine is a plain sum of a token's
//! rows in rising expert order, in the accumulator, rounded once. Under ETP every member of an expert's ETP
//! group computes on the same rows with its part of the expert's width, and the partial results of a row are
//! added (rounded to the row's type) before that.

use std::marker::PhantomData;
use std::sync::Arc;

use plica_comm::{Group, Mesh};
use plica_kernels::{Float, Tensor};

use crate::error::DispatchError;
use crate::grid::ExpertGrid;
use crate::plan::SendOrder;
use crate::routes::Routes;
use crate::routing::Routing;

/// A step whose first half is done.
#[must_use = "a step that is never finished has no result"]
pub struct Started<R>(Box<dyn FnOnce() -> Result<R, DispatchError> + Send>);

impl<R> Started<R> {
    /// A step that `finish` completes.
    pub fn new(finish: impl FnOnce() -> Result<R, DispatchError> + Send + 'static) -> Started<R> {
        Started(Box::new(finish))
    }

    /// A step that is complete.
    pub fn ready(result: R) -> Started<R>
    where
        R: Send + 'static,
    {
        Started::new(move || Ok(result))
    }

    /// The same step; where `now`, its second half is done at once, so that nothing can be computed in between.
    ///
    /// # Errors
    /// When a collective fails.
    pub fn settled(self, now: bool) -> Result<Started<R>, DispatchError>
    where
        R: Send + 'static,
    {
        if now { Ok(Started::ready(self.finish()?)) } else { Ok(self) }
    }

    /// The second half.
    ///
    /// # Errors
    /// When a collective fails.
    pub fn finish(self) -> Result<R, DispatchError> {
        (self.0)()
    }
}

/// A dispatch whose first half is done.
pub type DispatchStarted<T> = Started<(Dispatched<T>, Handle<T>)>;
/// A combine, or the backward of one, whose first half is done.
pub type CombineStarted<T> = Started<Tensor<T>>;
/// The backward of a dispatch whose first half is done.
pub type DispatchBackwardStarted<T> = Started<(Tensor<T>, Tensor<<T as Float>::Acc>)>;

/// The rows that a rank's experts compute on.
#[derive(Clone, Debug)]
pub struct Dispatched<T: Float> {
    /// Token rows by local expert, inside by source rank, then token rising: [r, d].
    pub x_rd: Tensor<T>,
    /// Weight of each row, 0 for a zero row: `[r]`.
    pub weights_r: Tensor<T::Acc>,
    /// Rows of each local expert.
    pub counts_l: Vec<usize>,
}

#[derive(Debug)]
struct HandleData {
    dispatcher: &'static str,
    tokens: usize,
    k: usize,
    counts_l: Vec<usize>,
    routes: Routes,
}

/// What combine and the backwards need to know of a dispatch: index lists, no rows. Clones are cheap.
#[derive(Clone, Debug)]
pub struct Handle<T: Float> {
    data: Arc<HandleData>,
    element: PhantomData<T>,
}

impl<T: Float> Handle<T> {
    /// The handle of one dispatch.
    pub fn new(
        dispatcher: &'static str,
        order: &SendOrder,
        counts_l: Vec<usize>,
        routes: Routes,
    ) -> Handle<T> {
        let data = HandleData { dispatcher, tokens: order.tokens, k: order.k, counts_l, routes };
        Handle { data: Arc::new(data), element: PhantomData }
    }

    /// Tokens of this rank.
    pub fn tokens(&self) -> usize {
        self.data.tokens
    }

    /// Slots of a token.
    pub fn k(&self) -> usize {
        self.data.k
    }

    /// Rows of each local expert.
    pub fn counts_l(&self) -> &[usize] {
        &self.data.counts_l
    }

    /// Rows that this rank's experts compute on.
    pub fn rows(&self) -> usize {
        self.data.counts_l.iter().sum()
    }

    /// The index lists.
    pub fn routes(&self) -> &Routes {
        &self.data.routes
    }

    /// Checks that rows of the experts belong to this handle.
    ///
    /// # Errors
    /// When there are more or fewer, before anything is sent.
    ///
    /// # Panics
    /// When another dispatcher made the handle.
    pub fn check_rows<U: plica_kernels::Element>(
        &self,
        dispatcher: &'static str,
        rows: &Tensor<U>,
    ) -> Result<(), DispatchError> {
        self.check(dispatcher, "expert rows", rows.rows(), self.rows())
    }

    /// Checks that token rows belong to this handle.
    ///
    /// # Errors
    /// When there are more or fewer, before anything is sent.
    ///
    /// # Panics
    /// When another dispatcher made the handle.
    pub fn check_tokens(&self, dispatcher: &'static str, rows: &Tensor<T>) -> Result<(), DispatchError> {
        self.check(dispatcher, "token rows", rows.rows(), self.tokens())
    }

    fn check(
        &self,
        dispatcher: &'static str,
        what: &'static str,
        found: usize,
        expected: usize,
    ) -> Result<(), DispatchError> {
        assert_eq!(self.data.dispatcher, dispatcher, "a handle goes back to the dispatcher that made it");
        if found == expected { Ok(()) } else { Err(DispatchError::Rows { what, found, expected }) }
    }
}

/// The send order of a rank's tokens, after the checks that need no other rank.
///
/// # Errors
/// When rows and slots differ in number, the experts are not the group's, or the routing is not one.
pub(crate) fn send_order<T: Float>(
    grid: &ExpertGrid,
    x_td: &Tensor<T>,
    routing: &Routing<T::Acc>,
) -> Result<SendOrder, DispatchError> {
    routing.assert_shapes();
    assert_eq!(routing.experts, grid.experts(), "experts of the routing and of the dispatcher");
    if x_td.rows() != routing.tokens() {
        return Err(DispatchError::Rows {
            what: "token rows",
            found: x_td.rows(),
            expected: routing.tokens(),
        });
    }
    let ids_tk = routing.expert_ids_tk.to_vec();
    SendOrder::new(&ids_tk, routing.k(), routing.experts, routing.padding.as_ref())
}

/// Groups of a rank's expert mesh.
#[derive(Clone)]
pub struct ExpertGroups {
    /// Ranks that hold other experts.
    pub ep: Group,
    /// Ranks that hold other parts of the same experts.
    pub etp: Group,
    /// Both; position = ep * ETP + etp.
    pub etp_ep: Group,
    /// Their sizes and the experts.
    pub grid: ExpertGrid,
}

impl ExpertGroups {
    /// The groups of a mesh for a layer of `experts` experts.
    ///
    /// # Errors
    /// When the experts do not divide over EP.
    pub fn new(mesh: &Mesh, experts: usize) -> Result<ExpertGroups, DispatchError> {
        let (ep, etp, etp_ep) = (mesh.ep().clone(), mesh.etp().clone(), mesh.etp_ep().clone());
        let grid = ExpertGrid::new(ep.size(), etp.size(), experts)?;
        assert_eq!(etp_ep.rank(), grid.rank(ep.rank(), etp.rank()), "order of the expert group");
        Ok(ExpertGroups { ep, etp, etp_ep, grid })
    }

    /// Own position in the expert group.
    pub fn rank(&self) -> usize {
        self.etp_ep.rank()
    }
}

/// Brings rows to their experts and back. See the module text for what every implementation promises.
pub trait Dispatcher<T: Float>: Send + Sync {
    /// Name in settings and reports.
    fn name(&self) -> &'static str;

    /// Starts to bring token rows [t, d] to the experts of their routing.
    ///
    /// # Errors
    /// A routing that does not fit the rows or names what is no expert; a collective that failed.
    fn dispatch_begin(
        &self,
        x_td: &Tensor<T>,
        routing: &Routing<T::Acc>,
    ) -> Result<DispatchStarted<T>, DispatchError>;

    /// Starts to bring the experts' rows [r, d] back and to sum them by token.
    ///
    /// # Errors
    /// Rows that are not the handle's; a collective that failed. So for all steps below.
    fn combine_begin(&self, y_rd: &Tensor<T>, handle: &Handle<T>)
    -> Result<CombineStarted<T>, DispatchError>;

    /// Starts to bring the gradient of combine's output [t, d] to the rows of the experts.
    ///
    /// # Errors
    /// As [`Dispatcher::combine_begin`].
    fn combine_backward_begin(
        &self,
        dy_td: &Tensor<T>,
        handle: &Handle<T>,
    ) -> Result<CombineStarted<T>, DispatchError>;

    /// Starts to bring the gradients of the experts' input rows [r, d] and of their weights `[r]` back.
    ///
    /// # Errors
    /// As [`Dispatcher::combine_begin`].
    fn dispatch_backward_begin(
        &self,
        dx_rd: &Tensor<T>,
        dweights_r: &Tensor<T::Acc>,
        handle: &Handle<T>,
    ) -> Result<DispatchBackwardStarted<T>, DispatchError>;

    /// The rows for this rank's experts, and the handle for the way back.
    ///
    /// # Errors
    /// As [`Dispatcher::dispatch_begin`].
    fn dispatch_finish(
        &self,
        started: DispatchStarted<T>,
    ) -> Result<(Dispatched<T>, Handle<T>), DispatchError> {
        started.finish()
    }

    /// Sums of the experts' rows, [t, d]; a token without experts gets zeros.
    ///
    /// # Errors
    /// As [`Dispatcher::combine_begin`].
    fn combine_finish(&self, started: CombineStarted<T>) -> Result<Tensor<T>, DispatchError> {
        started.finish()
    }

    /// Gradient of the experts' output rows, [r, d].
    ///
    /// # Errors
    /// As [`Dispatcher::combine_begin`].
    fn combine_backward_finish(&self, started: CombineStarted<T>) -> Result<Tensor<T>, DispatchError> {
        started.finish()
    }

    /// Gradients of the token rows [t, d] and of the weights [t, k] (0 at empty slots).
    ///
    /// # Errors
    /// As [`Dispatcher::combine_begin`].
    fn dispatch_backward_finish(
        &self,
        started: DispatchBackwardStarted<T>,
    ) -> Result<(Tensor<T>, Tensor<T::Acc>), DispatchError> {
        started.finish()
    }

    /// Both halves of a dispatch.
    ///
    /// # Errors
    /// As [`Dispatcher::dispatch_begin`].
    fn dispatch(
        &self,
        x_td: &Tensor<T>,
        routing: &Routing<T::Acc>,
    ) -> Result<(Dispatched<T>, Handle<T>), DispatchError> {
        self.dispatch_begin(x_td, routing)?.finish()
    }

    /// Both halves of a combine.
    ///
    /// # Errors
    /// As [`Dispatcher::combine_begin`].
    fn combine(&self, y_rd: &Tensor<T>, handle: &Handle<T>) -> Result<Tensor<T>, DispatchError> {
        self.combine_begin(y_rd, handle)?.finish()
    }

    /// Both halves of the backward of combine.
    ///
    /// # Errors
    /// As [`Dispatcher::combine_begin`].
    fn combine_backward(&self, dy_td: &Tensor<T>, handle: &Handle<T>) -> Result<Tensor<T>, DispatchError> {
        self.combine_backward_begin(dy_td, handle)?.finish()
    }

    /// Both halves of the backward of dispatch.
    ///
    /// # Errors
    /// As [`Dispatcher::combine_begin`].
    fn dispatch_backward(
        &self,
        dx_rd: &Tensor<T>,
        dweights_r: &Tensor<T::Acc>,
        handle: &Handle<T>,
    ) -> Result<(Tensor<T>, Tensor<T::Acc>), DispatchError> {
        self.dispatch_backward_begin(dx_rd, dweights_r, handle)?.finish()
    }
}
