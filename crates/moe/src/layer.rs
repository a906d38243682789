//! The mixture-of-experts layer in the feed-forward slot: y_t = sum over the kept experts e of token t of
//! weight_te * expert_e(x_t), plus the shared experts. Rows are this TP rank's tokens [t, d].
//!
//! Router, then the rows travel to their experts, the routed experts compute on the rows that arrived, the results
//! travel back and are summed ([`forward`]); backward in the mirrored order ([`backward`]). Each stretch of travel has
//! arithmetic of this layer beside it, and the passes stop there, so that a caller can put in more. Recomputation
//! keeps the choice of experts: of the activation (made again from gate and up), or of
//! the whole layer (dispatch and experts run again; x and the choice are kept). The layer changes nothing in
//! a forward; its bias moves between steps.

use std::sync::Arc;

use plica_dense::{
    BackwardSegment, Cx, Error, FeedForward, ForwardSegment, Init, ParamSpecs, Place, Segment, Trainable,
};
use plica_dispatch::{Dispatcher, Handle};
use plica_kernels::ops::elementwise;
use plica_kernels::{Float, Tensor};

use crate::bias::update_bias;
use crate::config::{ExpertBias, MoeConfig};
use crate::error::MoeError;
use crate::experts::{Experts, ExpertsSaved};
use crate::report::MoeReport;
use crate::router::{Choice, Router, RouterSaved};
use crate::shared::{Shared, SharedSaved};

pub mod backward;
pub mod forward;

pub use backward::MoeBackward;
pub use forward::MoeForward;

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
    type Forward<'a> = MoeForward<T>;
    type Backward<'a> = MoeBackward<T>;

    fn forward_begin<'a>(
        &self,
        x_td: &Tensor<T>,
        cx: &mut Cx<'a, T>,
    ) -> Result<ForwardSegment<'a, T, Self>, Error> {
        Ok(Segment::Travelling(self.to_experts(x_td, cx)?))
    }

    fn forward_resume<'a>(
        &self,
        forward: MoeForward<T>,
        cx: &mut Cx<'a, T>,
    ) -> Result<ForwardSegment<'a, T, Self>, Error> {
        Ok(match forward {
            MoeForward::Dispatching(arriving) => Segment::Travelling(self.through_experts(*arriving, cx)?),
            MoeForward::Combining(arriving) => Segment::Done(self.joined(*arriving, cx)?),
        })
    }

    fn keep(&self, saved: &MoeSaved<T>) -> MoeKept {
        MoeKept { choice: saved.router.choice().clone() }
    }

    /// The router's part; dispatch and experts are run again by the backward.
    fn forward_again(&self, x_td: &Tensor<T>, kept: &MoeKept, cx: &mut Cx<T>) -> Result<MoeSaved<T>, Error> {
        let (_, router) = self.router.forward_again(x_td, &kept.choice, cx);
        Ok(MoeSaved { router, body: None })
    }

    fn backward_begin<'a>(
        &self,
        saved: MoeSaved<T>,
        dy_td: &Tensor<T>,
        cx: &mut Cx<'a, T>,
    ) -> Result<BackwardSegment<'a, T, Self>, Error> {
        let MoeSaved { router, body } = saved;
        Ok(Segment::Travelling(match body {
            Some(body) => self.gradients_to_experts(router, body, dy_td, cx)?,
            None => self.to_experts_again(router, dy_td, cx)?,
        }))
    }

    fn backward_resume<'a>(
        &self,
        backward: MoeBackward<T>,
        cx: &mut Cx<'a, T>,
    ) -> Result<BackwardSegment<'a, T, Self>, Error> {
        Ok(match backward {
            MoeBackward::Again(arriving) => Segment::Travelling(self.again(arriving, cx)?),
            MoeBackward::Combining(arriving) => Segment::Travelling(self.back_through_experts(arriving, cx)?),
            MoeBackward::Dispatching(arriving) => Segment::Done(self.back_to_tokens(arriving, cx)?),
        })
    }
}
