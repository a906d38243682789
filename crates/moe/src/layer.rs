//! The mixture-of-experts layer in the feed-forward slot: y_t = sum over the kept experts e of token t of
//! weight_te * expert_e(x_t), plus the shared experts. Rows are this TP rank's tokens [t, d].
//!
//! Router, then the rows start to travel to their experts, the shared experts compute meanwhile, the routed
//! experts compute on the rows that arrived, the results travel back and are summed. Backward in the mirrored
//! order. Recomputation keeps the choice of experts: of the activation (made again from gate and up), or of
//! the whole layer (dispatch and experts run again; x and the choice are kept). The layer changes nothing in
//! a forward; its bias moves between steps.

use std::sync::Arc;

use plica_dense::{Cx, Error, FeedForward, Init, ParamSpecs, Phase, Place, Trainable};
use plica_dispatch::{Dispatcher, Handle, Routing};
use plica_kernels::ops::elementwise;
use plica_kernels::{Float, Tensor};

use crate::bias::update_bias;
use crate::config::{ExpertBias, MoeConfig};
use crate::error::MoeError;
use crate::experts::{Experts, ExpertsSaved};
use crate::report::MoeReport;
use crate::router::{Choice, Router, RouterSaved};
use crate::shared::{Shared, SharedSaved};

/// Names, sizes and initial values of one layer.
#[derive(Clone, Debug)]
pub struct MoeSpec<'a> {
    /// Prefix of the parameters, e.g. `layers.3.moe`.
    pub name: &'a str,
    /// Index of the layer, for draws and messages.
    pub layer: usize,
    /// Width of a token, d.
    pub width: usize,
    /// Initial values of router, gate and up.
    pub init: Init,
    /// Initial values of the down projections.
    pub down_init: Init,
}

/// A mixture-of-experts layer.
pub struct MoeLayer<T: Trainable> {
    config: MoeConfig,
    router: Router<T>,
    experts: Experts,
    shared: Option<Shared>,
    dispatcher: Arc<dyn Dispatcher<T>>,
}

/// What a forward keeps.
#[derive(Debug)]
pub struct MoeSaved<T: Float> {
    router: RouterSaved<T>,
    /// Absent where the whole layer is recomputed.
    body: Option<Body<T>>,
}

/// What the backward of everything behind the router needs.
#[derive(Debug)]
struct Body<T: Float> {
    handle: Handle<T>,
    experts: ExpertsSaved<T>,
    shared: Option<SharedSaved<T>>,
}

/// What recomputation reuses: the decisions.
#[derive(Clone, Debug)]
pub struct MoeKept {
    choice: Choice,
}

impl MoeKept {
    /// The decisions.
    pub fn choice(&self) -> &Choice {
        &self.choice
    }
}

impl<T: Float> MoeSaved<T> {
    /// The decisions.
    pub fn choice(&self) -> &Choice {
        self.router.choice()
    }
}

impl<T: Trainable> MoeLayer<T> {
    /// Declares the parameters `NAME.router`, `NAME.experts.*` and `NAME.shared.*`.
    ///
    /// # Errors
    /// [`MoeError::Config`] for a configuration that cannot work, [`MoeError::Dense`] for one that does not
    /// divide over the layout.
    pub fn new(
        specs: &mut ParamSpecs,
        spec: &MoeSpec<'_>,
        config: &MoeConfig,
        place: &Place,
        dispatcher: Arc<dyn Dispatcher<T>>,
    ) -> Result<MoeLayer<T>, MoeError> {
        config.validate()?;
        let MoeSpec { name, layer, width, init, down_init } = *spec;
        let router = Router::new(specs, &format!("{name}.router"), layer, width, config, init);
        let sizes = (config.experts, width, config.ffn);
        let experts = Experts::new(specs, &format!("{name}.experts"), sizes, (init, down_init), place)?;
        let shared = config
            .shared
            .map(|shared| {
                Shared::new(specs, &format!("{name}.shared"), width, shared, (init, down_init), place)
            })
            .transpose()?;
        Ok(MoeLayer { config: config.clone(), router, experts, shared, dispatcher })
    }

    /// The configuration.
    pub fn config(&self) -> &MoeConfig {
        &self.config
    }

    /// The router.
    pub fn router(&self) -> &Router<T> {
        &self.router
    }

    /// The router, to plug in rules of one's own or to restore the bias.
    pub fn router_mut(&mut self) -> &mut Router<T> {
        &mut self.router
    }

    /// The routed experts.
    pub fn experts(&self) -> &Experts {
        &self.experts
    }

    /// Moves the expert bias, where there is one, against the counts of the whole global batch (before
    /// dropping, summed over micro-batches and ranks: [`MoeReport::counts_e`]).
    pub fn update_bias(&mut self, counts_e: &[i64]) {
        if let (Some(ExpertBias { rate, centred }), Some(bias_e)) =
            (self.config.expert_bias, self.router.bias_mut())
        {
            update_bias(bias_e, counts_e, rate, centred);
        }
    }

    /// Gives a forward the plain top-K counts of the whole global batch ([`MoeReport::balance_counts_e`]
    /// summed over micro-batches and ranks). The global balance loss needs them before the backward.
    pub fn set_global_counts(&self, saved: &mut MoeSaved<T>, counts_e: &[i64]) {
        self.router.set_global_counts(saved.router.choice_mut(), counts_e);
    }

    /// The same for a forward of which only the decisions were kept.
    pub fn set_global_counts_kept(&self, kept: &mut MoeKept, counts_e: &[i64]) {
        self.router.set_global_counts(&mut kept.choice, counts_e);
    }

    /// Everything behind the router: the output rows [t, d] and what the backward needs.
    fn run(
        &self,
        x_td: &Tensor<T>,
        routing: &Routing<T::Acc>,
        cx: &mut Cx<T>,
    ) -> Result<(Tensor<T>, Body<T>), MoeError> {
        let phase = cx.phase(Phase::Dispatch);
        let started = self.dispatcher.dispatch_begin(x_td, routing)?;
        drop(phase);
        let shared = self.shared.as_ref().map(|shared| shared.forward(x_td, cx)).transpose()?;
        let phase = cx.phase(Phase::Dispatch);
        let (rows, handle) = self.dispatcher.dispatch_finish(started)?;
        drop(phase);
        let phase = cx.phase(Phase::Experts);
        let (y_rd, experts) = self.experts.forward(rows, cx);
        drop(phase);
        let phase = cx.phase(Phase::Combine);
        let y_td = self.dispatcher.combine(&y_rd, &handle)?;
        drop((phase, y_rd));
        let Some((shared_td, shared)) = shared else {
            return Ok((y_td, Body { handle, experts, shared: None }));
        };
        Ok((sum(y_td, &shared_td), Body { handle, experts, shared: Some(shared) }))
    }

    /// The same without the output: what the backward needs, made again.
    fn run_again(&self, saved: &RouterSaved<T>, cx: &mut Cx<T>) -> Result<Body<T>, MoeError> {
        let routing = self.router.routing_of(saved, cx);
        let phase = cx.phase(Phase::Dispatch);
        let started = self.dispatcher.dispatch_begin(saved.x_td(), &routing)?;
        drop(phase);
        let shared = self.shared.as_ref().map(|shared| shared.forward_again(saved.x_td(), cx)).transpose()?;
        let phase = cx.phase(Phase::Dispatch);
        let (rows, handle) = self.dispatcher.dispatch_finish(started)?;
        drop(phase);
        let _phase = cx.phase(Phase::Experts);
        let experts = self.experts.forward_to_activation(rows, cx);
        Ok(Body { handle, experts, shared })
    }

    fn back(&self, saved: MoeSaved<T>, dy_td: &Tensor<T>, cx: &mut Cx<T>) -> Result<Tensor<T>, MoeError> {
        let MoeSaved { router, body } = saved;
        let Body { handle, experts, shared } = match body {
            Some(body) => body,
            None => self.run_again(&router, cx)?,
        };
        let phase = cx.phase(Phase::Combine);
        let started = self.dispatcher.combine_backward_begin(dy_td, &handle)?;
        drop(phase);
        let dshared_td = match (&self.shared, shared) {
            (Some(layer), Some(saved)) => Some(layer.backward(saved, dy_td, cx)?),
            _ => None,
        };
        let phase = cx.phase(Phase::Combine);
        let dy_rd = self.dispatcher.combine_backward_finish(started)?;
        drop(phase);
        let phase = cx.phase(Phase::Experts);
        let (dx_rd, dweights_r) = self.experts.backward(experts, dy_rd, cx);
        drop(phase);
        let phase = cx.phase(Phase::Dispatch);
        let (dx_td, dweights_tk) = self.dispatcher.dispatch_backward(&dx_rd, &dweights_r, &handle)?;
        drop((phase, dx_rd, dweights_r, handle));
        let dx_td = match dshared_td {
            Some(dshared_td) => sum(dx_td, &dshared_td),
            None => dx_td,
        };
        self.router.backward(router, &dweights_tk, dx_td, cx)
    }
}

/// `a + b`, in the buffer of `a` where nobody else holds it.
fn sum<T: Float>(mut a: Tensor<T>, b: &Tensor<T>) -> Tensor<T> {
    if a.is_unique() {
        elementwise::add_assign(&mut a, b);
        return a;
    }
    elementwise::add(&a, b)
}

impl<T: Trainable> FeedForward<T> for MoeLayer<T> {
    type Saved = MoeSaved<T>;
    type Kept = MoeKept;
    type Report = MoeReport;

    fn forward(
        &self,
        x_td: &Tensor<T>,
        cx: &mut Cx<T>,
    ) -> Result<(Tensor<T>, MoeSaved<T>, MoeReport), Error> {
        let (routing, router, mut report) = self.router.forward(x_td, cx)?;
        let (y_td, body) = self.run(x_td, &routing, cx)?;
        report.received_rows = body.handle.rows() as u64;
        let body = (!cx.recompute.moe).then_some(body);
        Ok((y_td, MoeSaved { router, body }, report))
    }

    fn keep(&self, saved: &MoeSaved<T>) -> MoeKept {
        MoeKept { choice: saved.router.choice().clone() }
    }

    fn forward_again(&self, x_td: &Tensor<T>, kept: &MoeKept, cx: &mut Cx<T>) -> Result<MoeSaved<T>, Error> {
        let (_, router) = self.router.forward_again(x_td, &kept.choice, cx);
        let body = match cx.recompute.moe {
            true => None,
            false => Some(self.run_again(&router, cx)?),
        };
        Ok(MoeSaved { router, body })
    }

    fn backward(&self, saved: MoeSaved<T>, dy_td: &Tensor<T>, cx: &mut Cx<T>) -> Result<Tensor<T>, Error> {
        Ok(self.back(saved, dy_td, cx)?)
    }
}
