//! The router: logits = x W^T in the accumulator type from this rank's own token rows [t, d] and a dense
//! weight [E, d] that is the same on all ranks (its gradient is a sum over TP, DP and CP); then selection,
//! weights, capacity and the sums of the balance losses. The rows of different TP and CP ranks are different
//! tokens. The forward returns the routing and a [`Choice`] of integers; recomputation
//! weighs the stored choice again and never selects. The backward takes the gradient of the weights, adds
//! those of the balance losses and of the z-loss on the logits, and goes back through W (and the jitter) to
//! x.

use plica_dense::{BatchScale, Cx, Init, ParamId, ParamSpec, ParamSpecs, Phase, Trainable};
use plica_dispatch::{Capacity, Padding, Routing};
use plica_kernels::ops::router::{self, Chosen};
use plica_kernels::ops::{elementwise, gemm};
use plica_kernels::{Category, Float, Tensor};

use crate::balance::BalanceCoefficients;
use crate::choose::{AfterDrop, Chooser, counts_of, drop_by_capacity};
use crate::config::{CapacityScope, MoeConfig, Selection};
use crate::error::MoeError;
use crate::host::{on_host, to_device};
use crate::jitter::Jitter;
use crate::report::MoeReport;
use crate::score::ScoreFunction;
use crate::select::{Configured, Select};
use crate::weighting::Weigh;

mod losses;

/// The router of one layer.
pub struct Router<T: Float> {
    weight: ParamId,
    layer: usize,
    experts: usize,
    top_k: usize,
    score: ScoreFunction,
    balance: BalanceCoefficients,
    jitter_epsilon: f64,
    capacity: Option<(Capacity, CapacityScope)>,
    select: Box<dyn Select<T::Acc>>,
    weigh: Box<dyn Weigh<T::Acc>>,
    bias_e: Option<Vec<f64>>,
    carry_non_finite: bool,
}

/// The decisions of one forward: what recomputation reuses.
#[derive(Clone, Debug)]
pub struct Choice {
    chosen_ids_tk: Tensor<i32>,
    kept_ids_tk: Tensor<i32>,
    padding: Option<Padding>,
    /// Derivative of the micro-batch and sequence losses by the normalised scores, [s, e].
    slopes_se: Vec<f64>,
    /// The same of the global loss, `[e]`, once the counts of the global batch are known.
    global_slopes_e: Option<Vec<f64>>,
    z_slope: f64,
    scale: BatchScale,
}

/// What a forward keeps.
#[derive(Debug)]
pub struct RouterSaved<T: Float> {
    x_td: Tensor<T>,
    logits_te: Tensor<T::Acc>,
    choice: Choice,
}

impl<T: Float> RouterSaved<T> {
    /// The decisions.
    pub fn choice(&self) -> &Choice {
        &self.choice
    }

    /// Logits [t, e] of this rank's tokens.
    pub fn logits_te(&self) -> &Tensor<T::Acc> {
        &self.logits_te
    }

    pub(crate) fn choice_mut(&mut self) -> &mut Choice {
        &mut self.choice
    }

    pub(crate) fn x_td(&self) -> &Tensor<T> {
        &self.x_td
    }
}

impl Choice {
    /// Experts [t, k] of this rank's tokens before dropping, -1 = none.
    pub fn chosen_ids_tk(&self) -> &Tensor<i32> {
        &self.chosen_ids_tk
    }

    /// Experts [t, k] after dropping.
    pub fn kept_ids_tk(&self) -> &Tensor<i32> {
        &self.kept_ids_tk
    }

    /// The sizes of the global batch.
    pub fn scale(&self) -> &BatchScale {
        &self.scale
    }

    fn k(&self) -> usize {
        self.chosen_ids_tk.dim(1)
    }
}

impl<T: Trainable> Router<T> {
    /// Declares `NAME` [E, d] and the router of a valid configuration.
    pub fn new(
        specs: &mut ParamSpecs,
        name: &str,
        layer: usize,
        width: usize,
        config: &MoeConfig,
        init: Init,
    ) -> Router<T> {
        let spec = ParamSpec::replicated(name, &[config.experts, width], true, init);
        // Expert choice has taken its capacity into account when it picked.
        let drops = config.selection != Selection::ExpertChoice;
        Router {
            weight: specs.add(spec),
            layer,
            experts: config.experts,
            top_k: config.top_k,
            score: config.weighting.score,
            balance: config.balance,
            jitter_epsilon: config.jitter_epsilon,
            capacity: config.capacity.filter(|_| drops).map(|c| (c, config.capacity_scope)),
            select: Box::new(Configured::new(config)),
            weigh: Box::new(config.weighting),
            bias_e: config.expert_bias.map(|_| vec![0.0; config.experts]),
            carry_non_finite: config.carry_non_finite,
        }
    }

    /// Replaces the selection rule.
    pub fn set_select(&mut self, select: Box<dyn Select<T::Acc>>) {
        self.select = select;
    }

    /// Replaces the weighting rule.
    pub fn set_weigh(&mut self, weigh: Box<dyn Weigh<T::Acc>>) {
        self.weigh = weigh;
    }

    /// Handle of the weight [E, d].
    pub fn parameter(&self) -> ParamId {
        self.weight
    }

    /// The selection bias, where there is one: a buffer, saved with the model, changed between steps only.
    pub fn bias_e(&self) -> Option<&[f64]> {
        self.bias_e.as_deref()
    }

    /// The selection bias for writing.
    pub fn bias_mut(&mut self) -> Option<&mut [f64]> {
        self.bias_e.as_deref_mut()
    }

    fn jitter(&self, cx: &Cx<T>) -> Option<Jitter> {
        let noisy = self.jitter_epsilon > 0.0 && cx.tokens.training;
        noisy.then(|| Jitter::new(cx.seed, self.layer, cx.step, self.jitter_epsilon))
    }

    fn logits(&self, x_td: &Tensor<T>, cx: &Cx<T>) -> Tensor<T::Acc> {
        let noisy = self.jitter(cx).map(|jitter| jitter.apply(x_td, cx.tokens.local_indices()));
        gemm::matmul_nt_acc(noisy.as_ref().unwrap_or(x_td), &*cx.weight(self.weight))
    }

    /// Makes the logits of tokens that cannot be ranked equal, where the layer carries them on; whether there were
    /// any. The rows of such tokens hold what made them so, and the report says it.
    fn level_unrankable(&self, logits_te: &mut Tensor<T::Acc>, cx: &Cx<T>) -> bool {
        let carries = self.carry_non_finite && cx.tokens.training;
        carries && router::level_unrankable(logits_te, cx.tokens.local_padding())
    }

    /// Weights [t, k] of the chosen experts: on the device by a rule that it knows, else on the host.
    fn weights(&self, logits_te: &Tensor<T::Acc>, expert_ids_tk: &Tensor<i32>) -> Tensor<T::Acc> {
        if let Some(rule) = self.weigh.known() {
            return router::weights_forward(logits_te, &rule, expert_ids_tk);
        }
        let (logits, ids) = (on_host(logits_te), on_host(expert_ids_tk));
        let weights = self.weigh.weights_forward(&logits, self.experts, &ids, expert_ids_tk.dim(1));
        to_device(logits_te.device(), expert_ids_tk.shape(), &weights)
    }

    /// Routing of this rank's tokens, what the backward needs, and what was counted.
    ///
    /// # Errors
    /// [`MoeError::NotFinite`], an invalid selection, or a failed collective.
    pub fn forward(
        &self,
        x_td: &Tensor<T>,
        cx: &Cx<T>,
    ) -> Result<(Routing<T::Acc>, RouterSaved<T>, MoeReport), MoeError> {
        assert_eq!(x_td.rows(), cx.tokens.local_range().len(), "token rows of this rank");
        let _phase = cx.phase(Phase::Router);
        let mut logits_te = self.logits(x_td, cx);
        let carried = self.level_unrankable(&mut logits_te, cx);
        let chooser = Chooser {
            select: &*self.select,
            experts: self.experts,
            top_k: self.top_k,
            bias_e: self.bias_e.as_deref(),
            layer: self.layer,
        };
        let chosen = chooser.choose(&logits_te, cx)?;
        let weights_tk = self.weights(&logits_te, &chosen.expert_ids_tk);
        let after = match &self.capacity {
            None => None,
            Some((capacity, scope)) => {
                Some(drop_by_capacity(&chosen, &weights_tk, self.experts, (capacity, *scope), cx)?)
            }
        };
        let mut report =
            MoeReport { counts_e: counts_of(&chosen.host_ids_tk, self.experts), ..MoeReport::default() };
        let Chosen { expert_ids_tk: chosen_ids_tk, .. } = chosen;
        let (kept_ids_tk, padding) = match after {
            None => {
                report.kept_e = report.counts_e.clone();
                (chosen_ids_tk.clone(), None)
            }
            Some(AfterDrop { kept, padding }) => {
                report.kept_e = counts_of(&kept.host_ids_tk, self.experts);
                (kept.expert_ids_tk, padding)
            }
        };
        let slopes_se = self.balance_forward(&logits_te, &mut report, cx)?;
        if carried {
            report.z_sum = f64::NAN;
        }
        let choice = Choice {
            kept_ids_tk,
            chosen_ids_tk,
            padding,
            slopes_se,
            global_slopes_e: None,
            z_slope: self.z_slope(&report, cx),
            scale: cx.tokens.scale,
        };
        let routing = self.routing(&choice, weights_tk);
        Ok((routing, RouterSaved { x_td: x_td.clone(), logits_te, choice }, report))
    }

    /// The routing of a choice and the weights of its slots; the weight of a dropped slot is 0.
    fn routing(&self, choice: &Choice, weights_tk: Tensor<T::Acc>) -> Routing<T::Acc> {
        let weights_tk = router::empty_slots_weigh_nothing(weights_tk, &choice.kept_ids_tk);
        let routing = Routing::new(self.experts, choice.kept_ids_tk.clone(), weights_tk);
        match &choice.padding {
            Some(padding) => routing.with_padding(padding.clone()),
            None => routing,
        }
    }

    /// The routing and `Saved` of a stored choice.
    pub(crate) fn forward_again(
        &self,
        x_td: &Tensor<T>,
        choice: &Choice,
        cx: &Cx<T>,
    ) -> (Routing<T::Acc>, RouterSaved<T>) {
        let _phase = cx.phase(Phase::Router);
        let saved =
            RouterSaved { x_td: x_td.clone(), logits_te: self.logits(x_td, cx), choice: choice.clone() };
        (self.routing_of(&saved), saved)
    }

    /// The routing that `saved` belongs to, weighed again.
    pub(crate) fn routing_of(&self, saved: &RouterSaved<T>) -> Routing<T::Acc> {
        self.routing(&saved.choice, self.weights(&saved.logits_te, &saved.choice.chosen_ids_tk))
    }

    /// Adds to `dx_td` what comes back through the router; `dweights_tk` is the gradient of the weights.
    ///
    /// # Errors
    /// [`MoeError::GlobalCounts`] when the global balance loss is on and its counts were not given.
    pub(crate) fn backward(
        &self,
        saved: RouterSaved<T>,
        dweights_tk: &Tensor<T::Acc>,
        mut dx_td: Tensor<T>,
        cx: &mut Cx<T>,
    ) -> Result<Tensor<T>, MoeError> {
        let _phase = cx.phase(Phase::Router);
        let RouterSaved { x_td, logits_te, choice } = saved;
        let dlogits_te = self.logits_backward(&logits_te, &choice, dweights_tk, cx)?;
        if !dx_td.is_unique() {
            dx_td = dx_td.duplicate(Category::Activation);
        }
        let x_td = match self.jitter(cx) {
            None => {
                gemm::matmul_nn_add(&mut dx_td, &dlogits_te, &*cx.weight(self.weight));
                x_td
            }
            Some(jitter) => {
                let dnoisy: Tensor<T> = gemm::matmul_nn(&dlogits_te, &*cx.weight(self.weight));
                let indices_t = cx.tokens.local_indices();
                elementwise::add_assign(&mut dx_td, &jitter.apply(&dnoisy, indices_t));
                jitter.apply(&x_td, indices_t)
            }
        };
        cx.weight_grad(self.weight, move |grad| gemm::accumulate_tn(grad, &dlogits_te, &x_td));
        Ok(dx_td)
    }
}
