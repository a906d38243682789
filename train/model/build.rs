//! From the configuration to layers: one visible order, names that know no layout. Initial weights are normal
//! draws with the configured deviation, output projections divided by sqrt(2 · layers) (GPT-2's rule).

use std::sync::Arc;

use plica_comm::Mesh;
use plica_dense::attention::AttentionConfig;
use plica_dense::{
    Attention, Block, ContextMethod, Embedding, Error, Head, Init, Mlp, Norm, ParamSpec, ParamSpecs, Place,
    QkNorm, Trainable,
};
use plica_dispatch::{
    AllGather, AllToAll, Capacity, Direct, Dispatcher, ExpertGroups, Factor, Local, Policy,
};
use plica_kernels::Device;
use plica_kernels::ops::rope::{RopeTable, rope_frequencies};
use plica_moe::balance::BalanceCoefficients;
use plica_moe::config::{ExpertBias, SharedExperts};
use plica_moe::score::ScoreFunction;
use plica_moe::topk::GroupLimit;
use plica_moe::weighting::{SoftmaxOrder, Weighting};
use plica_moe::{MoeConfig, MoeLayer, MoeSpec};

use super::Model;
use super::chunk::{Chunk, Output};
use super::feed_forward::FeedForwardLayer;
use super::part::Part;
use crate::config::{
    self, Balance, CapacityScope, Dispatch, DropPolicy, Force, ModelConfig, Score, ScoreOrder,
};
use crate::pipeline::PipelinePlan;

/// What a model is built from.
#[derive(Clone, Copy, Debug)]
pub struct ModelPlan<'a> {
    /// The decoder.
    pub model: &'a ModelConfig,
    /// Its MoE layers, if there are any.
    pub moe: Option<&'a config::MoeConfig>,
    /// Longest sequence; positions are below it.
    pub seq_len: usize,
    /// How the ranks of the context axis share attention.
    pub context: config::ContextMethod,
    /// How the model is cut over a pipeline; none: every rank holds all layers.
    pub pipeline: Option<&'a PipelinePlan>,
}

/// Declares the parameters of a rank's parts and builds their layers.
///
/// # Errors
/// Sizes that do not fit the layout.
pub fn build<T: Trainable>(
    plan: &ModelPlan<'_>,
    mesh: &Mesh,
    device: &Device,
    specs: &mut ParamSpecs,
) -> Result<Model<T>, Error> {
    let parts = match plan.pipeline {
        Some(pipeline) => pipeline.parts_of(mesh.coordinates().pp),
        None => vec![Part::whole(plan.model.layers)],
    };
    Ok(Model { chunks: chunks(plan, &parts, mesh, device, specs)? })
}

/// What every rank of the pipeline declares, in the order of its handles; `own` is this rank's.
///
/// # Errors
/// Sizes that do not fit the layout.
pub fn declare_all(
    plan: &ModelPlan<'_>,
    mesh: &Mesh,
    device: &Device,
    own: &ParamSpecs,
) -> Result<Vec<Vec<ParamSpec>>, Error> {
    let Some(pipeline) = plan.pipeline else { return Ok(vec![own.list().to_vec()]) };
    let ranks = 0..pipeline.schedule().ranks().len();
    let specs = ranks.map(|rank_pp| {
        let mut specs = ParamSpecs::new();
        chunks::<f32>(plan, &pipeline.parts_of(rank_pp), mesh, device, &mut specs)?;
        Ok(specs.list().to_vec())
    });
    specs.collect()
}

fn chunks<T: Trainable>(
    plan: &ModelPlan<'_>,
    parts: &[Part],
    mesh: &Mesh,
    device: &Device,
    specs: &mut ParamSpecs,
) -> Result<Vec<Chunk<T>>, Error> {
    let mut builder = Builder::new(plan, mesh, device, specs);
    let mut chunks: Vec<Chunk<T>> = Vec::new();
    for part in parts {
        let held = chunks.first().and_then(|first| first.embedding);
        chunks.push(builder.chunk(part, held)?);
    }
    Ok(chunks)
}

/// What every layer is built with.
struct Builder<'a, T: Trainable> {
    plan: &'a ModelPlan<'a>,
    mesh: &'a Mesh,
    place: Place,
    rope: Arc<RopeTable<T::Acc>>,
    specs: &'a mut ParamSpecs,
}

impl<'a, T: Trainable> Builder<'a, T> {
    fn new(
        plan: &'a ModelPlan<'a>,
        mesh: &'a Mesh,
        device: &Device,
        specs: &'a mut ParamSpecs,
    ) -> Builder<'a, T> {
        let frequencies = rope_frequencies(plan.model.head_dim, plan.model.rope_theta, None);
        let rope = Arc::new(RopeTable::<T::Acc>::new(device, &frequencies, 0..plan.seq_len as i32));
        Builder { plan, mesh, place: Place::new(mesh.layout(), mesh.rank()), rope, specs }
    }

    fn init(&self) -> Init {
        Init::Normal { std: self.plan.model.init_std }
    }

    /// Of the projections back into the residual stream.
    fn output_init(&self) -> Init {
        Init::Normal { std: self.plan.model.init_std / (2.0 * self.plan.model.layers.max(1) as f64).sqrt() }
    }

    /// The layers of a part; `held` is the embedding that the rank holds already, for a tied head.
    fn chunk(&mut self, part: &Part, held: Option<Embedding>) -> Result<Chunk<T>, Error> {
        let model = self.plan.model;
        let (vocab, width, init) = (model.vocab, model.d_model, self.init());
        let first = self.specs.list().len();
        let embedding = part.first.then(|| Embedding::new(self.specs, "embedding", vocab, width, init));
        let blocks = part.layers.clone().map(|layer| self.block(layer)).collect::<Result<_, _>>()?;
        let output = part.last.then(|| {
            let final_norm = Norm::new(self.specs, "final_norm", width, model.norm_eps);
            let head = match (model.tie_embeddings, embedding.or(held)) {
                (false, _) => Head::new(self.specs, "head", vocab, width, init),
                (true, Some(embedding)) => Head::tied(&embedding, vocab),
                (true, None) => Head::tied_copy(self.specs, "embedding", vocab, width, init),
            };
            Output { final_norm, head }
        });
        let parameters = first..self.specs.list().len();
        Ok(Chunk { stage: part.stage, layers: part.layers.clone(), embedding, blocks, output, parameters })
    }

    fn block(&mut self, layer: usize) -> Result<Block<T, FeedForwardLayer<T>>, Error> {
        let model = self.plan.model;
        let (init, output_init) = (self.init(), self.output_init());
        let name = |part: &str| format!("layers.{layer}.{part}");
        let specs = &mut *self.specs;
        let norm =
            |specs: &mut ParamSpecs, part| Norm::new(specs, &name(part), model.d_model, model.norm_eps);
        let attention_norm = norm(specs, "attention_norm");
        let context = match self.plan.context {
            config::ContextMethod::Ring => ContextMethod::Ring,
            config::ContextMethod::AllGather => ContextMethod::AllGather,
            config::ContextMethod::Ulysses => ContextMethod::Ulysses,
        };
        let config = AttentionConfig { context, ..attention_config(model, init, output_init) };
        let attention = Attention::new(specs, &name("attention"), config, self.rope.clone(), &self.place)?;
        let feed_forward_norm = norm(specs, "feed_forward_norm");
        let feed_forward = match self.plan.moe.filter(|_| !model.dense[layer]) {
            None => FeedForwardLayer::Dense(Mlp::new(
                specs,
                &name("mlp"),
                (model.d_model, model.ffn),
                (init, output_init),
                &self.place,
            )?),
            Some(moe) => {
                let name = name("moe");
                let spec = MoeSpec { name: &name, layer, width: model.d_model, init, down_init: output_init };
                let dispatcher = dispatcher(moe, self.mesh)?;
                let layer = MoeLayer::new(specs, &spec, &moe_config(moe), &self.place, dispatcher)?;
                FeedForwardLayer::Moe(Box::new(layer))
            }
        };
        Ok(Block { attention_norm, attention, feed_forward_norm, feed_forward })
    }
}

/// The attention of a layer in the words of `plica-dense`, with the default way of sharing sequences.
pub fn attention_config(model: &ModelConfig, init: Init, output_init: Init) -> AttentionConfig {
    AttentionConfig {
        width: model.d_model,
        heads: model.heads,
        kv_heads: model.kv_heads,
        head_dim: model.head_dim,
        qk_norm: match model.qk_norm {
            config::QkNorm::None => QkNorm::None,
            config::QkNorm::Head => QkNorm::Head,
            config::QkNorm::Full => QkNorm::Full,
        },
        norm_eps: model.norm_eps,
        window: None,
        context: ContextMethod::default(),
        init,
        output_init,
    }
}

/// The transport that the configuration names; "auto" takes the cheapest that the layout allows.
fn dispatcher<T: Trainable>(moe: &config::MoeConfig, mesh: &Mesh) -> Result<Arc<dyn Dispatcher<T>>, Error> {
    let alone = mesh.layout().ep() * mesh.layout().etp() == 1;
    let groups = || ExpertGroups::new(mesh, moe.experts).map_err(Error::slot);
    Ok(match moe.dispatcher {
        Dispatch::Auto | Dispatch::Local if alone => Arc::new(Local::new(moe.experts).map_err(Error::slot)?),
        Dispatch::Local => {
            return Err(Error::Setting(format!(
                "moe.dispatcher = local: experts are cut over ep {} and etp {}; choose auto, direct, all-to-all \
                 or all-gather",
                mesh.layout().ep(),
                mesh.layout().etp()
            )));
        }
        Dispatch::Auto if mesh.etp_ep().shares_memory() => {
            Arc::new(Direct::new(groups()?).map_err(Error::slot)?)
        }
        Dispatch::Direct => Arc::new(Direct::new(groups()?).map_err(Error::slot)?),
        Dispatch::AllGather => Arc::new(AllGather::new(groups()?)),
        Dispatch::Auto | Dispatch::AllToAll => Arc::new(AllToAll::new(groups()?)),
    })
}

/// The layer's configuration in the words of `plica-moe`.
pub fn moe_config(moe: &config::MoeConfig) -> MoeConfig {
    let coefficient = |which| moe.balance.iter().filter(|(b, _)| *b == which).map(|(_, c)| c).sum::<f64>();
    MoeConfig {
        weighting: Weighting {
            score: match moe.score {
                Score::Softmax => ScoreFunction::Softmax,
                Score::Sigmoid => ScoreFunction::Sigmoid,
            },
            softmax_order: match moe.order {
                ScoreOrder::ScoreFirst => SoftmaxOrder::BeforeTopK,
                ScoreOrder::SelectFirst => SoftmaxOrder::AfterTopK,
            },
            renormalize: moe.renormalise,
            scaling_factor: moe.scaling,
        },
        groups: (moe.groups > 1).then_some(GroupLimit {
            groups: moe.groups,
            keep: moe.group_top_k,
            score_k: 2.min(moe.experts / moe.groups),
        }),
        selection: match (moe.force, moe.selection) {
            (Force::Balanced, _) => plica_moe::config::Selection::ForcedBalanced,
            (Force::Biased(std), _) => plica_moe::config::Selection::ForcedBiased { std, fresh: false },
            (Force::None, config::Selection::TopK) => plica_moe::config::Selection::TopK,
            (Force::None, config::Selection::Sinkhorn) => plica_moe::config::Selection::Sinkhorn,
            (Force::None, config::Selection::ExpertChoice) => plica_moe::config::Selection::ExpertChoice,
        },
        expert_bias: (moe.bias_update_rate > 0.0)
            .then_some(ExpertBias { rate: moe.bias_update_rate, centred: false }),
        jitter_epsilon: moe.jitter,
        balance: BalanceCoefficients {
            micro: coefficient(Balance::Micro),
            sequence: coefficient(Balance::Sequence),
            global: coefficient(Balance::Global),
            z: moe.z_loss,
        },
        capacity: moe.capacity.as_ref().map(|capacity| Capacity {
            factor: capacity.factor.to_string().parse::<Factor>().expect("a checked decimal"),
            min: capacity.min,
            policy: match capacity.policy {
                DropPolicy::Probability => Policy::Probability,
                DropPolicy::Position => Policy::Position,
                DropPolicy::Choice => Policy::Choice,
            },
            pad: capacity.pad,
        }),
        capacity_scope: match moe.capacity.as_ref().map(|c| c.scope) {
            Some(CapacityScope::Rank) => plica_moe::config::CapacityScope::Rank,
            _ => plica_moe::config::CapacityScope::Sequence,
        },
        shared: (moe.shared_ffn > 0).then_some(SharedExperts { ffn: moe.shared_ffn, gate: false }),
        // A step that is not finite is found where all ranks find it, and left out or ends the run there.
        carry_non_finite: true,
        ..MoeConfig::new(moe.experts, moe.top_k, moe.ffn)
    }
}
