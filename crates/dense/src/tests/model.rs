//! A small dense model of the crate's own layers, and a run of a few steps of it under any layout, gathered
//! into layout-free tensors.

use std::collections::BTreeMap;
use std::sync::Arc;

use plica_comm::{LaunchOptions, Mesh, Purpose, RankContext, run_ranks};
use plica_folding::axis::Axis;
use plica_folding::layout::{Layout, LayoutSpec};
use plica_folding::owner::even_range;
use plica_kernels::ledger::Snapshot;
use plica_kernels::ops::rope::{RopeTable, rope_frequencies};
use plica_kernels::{Category, Device, Float, Tensor};

use crate::param::{Held, Piece, PutOffKey};
use crate::shard::{Pass, UnitWalk};
use crate::*;

/// Sizes and choices of the test model.
#[derive(Clone, Copy, Debug)]
pub struct ModelConfig {
    pub vocabulary: usize,
    pub width: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub ffn: usize,
    pub qk_norm: QkNorm,
    pub window: Option<usize>,
    pub context: ContextMethod,
    pub tied: bool,
}

impl Default for ModelConfig {
    fn default() -> ModelConfig {
        ModelConfig {
            vocabulary: 10,
            width: 8,
            layers: 2,
            heads: 8,
            kv_heads: 4,
            head_dim: 4,
            ffn: 12,
            qk_norm: QkNorm::None,
            window: None,
            context: ContextMethod::Ring,
            tied: false,
        }
    }
}

pub const NORM_EPS: f64 = 1e-5;
pub const THETA: f64 = 100.0;
const MAX_POSITIONS: i32 = 4096;

/// The layers.
pub struct Model<T: Float> {
    pub embedding: Embedding,
    pub blocks: Vec<Block<T, Mlp>>,
    pub norm: Norm,
    pub head: Head,
}

impl<T: Trainable> Model<T> {
    pub fn new(c: &ModelConfig, place: &Place, device: &Device) -> Result<(Model<T>, ParamSpecs), Error> {
        let mut specs = ParamSpecs::new();
        let init = Init::Normal { std: 0.4 };
        let config = AttentionConfig {
            width: c.width,
            heads: c.heads,
            kv_heads: c.kv_heads,
            head_dim: c.head_dim,
            qk_norm: c.qk_norm,
            norm_eps: NORM_EPS,
            window: c.window,
            context: c.context,
            init,
            output_init: init,
        };
        config.check("layers.0.attention", place)?;
        let frequencies = rope_frequencies(c.head_dim, THETA, None);
        let rope = Arc::new(RopeTable::new(device, &frequencies, 0..MAX_POSITIONS));
        let embedding = Embedding::new(&mut specs, "embedding", c.vocabulary, c.width, init);
        let mut blocks = Vec::new();
        for layer in 0..c.layers {
            let name = |part: &str| format!("layers.{layer}.{part}");
            blocks.push(Block {
                attention_norm: Norm::new(&mut specs, &name("attention_norm"), c.width, NORM_EPS),
                attention: Attention::new(&mut specs, &name("attention"), config, rope.clone(), place)?,
                feed_forward_norm: Norm::new(&mut specs, &name("feed_forward_norm"), c.width, NORM_EPS),
                feed_forward: Mlp::new(&mut specs, &name("mlp"), (c.width, c.ffn), (init, init), place)?,
            });
        }
        let norm = Norm::new(&mut specs, "norm", c.width, NORM_EPS);
        let head = match c.tied {
            true => Head::tied(&embedding, c.vocabulary),
            false => Head::new(&mut specs, "head", c.vocabulary, c.width, init),
        };
        Ok((Model { embedding, blocks, norm, head }, specs))
    }

    /// Forward and backward of one micro-batch; gradients are added up.
    pub fn micro_step<'a>(&self, cx: &mut Cx<'a, T>) -> Result<LossSum, Error> {
        let plan = cx.params.sharding().clone();
        let unit = |id| plan.unit_of(id);
        let table = cx.gather(unit(self.embedding.table()), Pass::Once)?;
        let mut x = self.embedding.forward(cx)?;
        drop(table);
        let mut tape = Tape::new();
        let mut walk = UnitWalk::new(Pass::Forward);
        for block in &self.blocks {
            walk.enter(block.attention_norm.weight(), cx)?;
            let (y, saved, ()) = block.forward(&x, cx)?;
            tape.push(saved);
            x = y;
        }
        walk.leave(cx)?;
        let gathered = [self.norm.weight(), self.head.table()].map(|id| cx.gather(unit(id), Pass::Backward));
        let (y, saved) = self.norm.forward(&x, cx);
        drop(x);
        let (loss, dy) = self.head.forward_backward(&y, cx)?;
        let mut dx = self.norm.backward(saved, &dy, cx);
        drop(gathered);
        cx.reduce_unit(unit(self.norm.weight()))?;
        let mut walk = UnitWalk::new(Pass::Backward);
        for block in self.blocks.iter().rev() {
            walk.enter(block.attention_norm.weight(), cx)?;
            let saved = tape.pop().expect("a layer on the tape for every block");
            dx = block.backward(saved, &dx, cx)?;
        }
        walk.leave(cx)?;
        self.embedding.backward(&dx, cx)?;
        cx.reduce_unit(unit(self.embedding.table()))?;
        Ok(loss)
    }

    /// Loss without gradients, and all logits.
    pub fn evaluate(&self, cx: &mut Cx<T>) -> Result<(LossSum, Tensor<T::Acc>), Error> {
        let mut x = self.embedding.forward(cx)?;
        for block in &self.blocks {
            x = block.forward(&x, cx)?.0;
        }
        let (y, _) = self.norm.forward(&x, cx);
        Ok((self.head.forward(&y, cx)?, self.head.logits(&y, cx)?))
    }
}

/// One sequence of the global batch.
#[derive(Clone, Debug)]
pub struct Sequence {
    pub ids: Vec<i32>,
    pub targets: Vec<i32>,
    /// Lengths of its documents.
    pub documents: Vec<usize>,
}

/// `count` sequences of `length` tokens, some targets ignored, two documents in every other one.
pub fn sequences(count: usize, length: usize, vocabulary: usize, seed: u64) -> Vec<Sequence> {
    let stream = plica_kernels::rng::Stream::new(seed, plica_kernels::rng::Purpose::Named("sequences"));
    (0..count)
        .map(|s| {
            let draw = |i: usize| stream.below((s * (length + 1) + i) as u64, vocabulary as u64) as i32;
            let ids: Vec<i32> = (0..length).map(draw).collect();
            let ignored = |i: usize| (i * 7 + s * 3) % 5 < s % 3;
            let targets =
                (0..length).map(|i| if ignored(i) { tokens::IGNORED } else { draw(i + 1) }).collect();
            let first = length / 3 + s % 2;
            let documents = if s % 2 == 1 { vec![first, length - first] } else { vec![length] };
            Sequence { ids, targets, documents }
        })
        .collect()
}

/// A micro-batch of some of the sequences.
pub fn batch_of(all: &[Sequence], range: std::ops::Range<usize>) -> TokenBatch {
    let valid = |s: &[Sequence]| -> usize {
        s.iter().map(|s| s.targets.iter().filter(|t| **t != tokens::IGNORED).count()).sum()
    };
    let own = &all[range.clone()];
    let mut documents = vec![0];
    for length in own.iter().flat_map(|s| &s.documents) {
        documents.push(documents[documents.len() - 1] + length);
    }
    let sequence = all[0].ids.len();
    let ids: Vec<i32> = own.iter().flat_map(|s| s.ids.clone()).collect();
    TokenBatch {
        documents,
        padding: vec![false; ids.len()],
        targets: own.iter().flat_map(|s| s.targets.clone()).collect(),
        sequence,
        first_token: (range.start * sequence) as u64,
        global_valid_targets: valid(all) as u64,
        training: true,
        ids,
        ..TokenBatch::default()
    }
}

/// How a run is cut and what it does on the way.
#[derive(Clone, Debug)]
pub struct Run {
    pub layout: LayoutSpec,
    pub steps: usize,
    /// Sequences of a micro-batch.
    pub micro_batch: usize,
    pub recompute: RecomputePolicy,
    pub put_off: bool,
    pub shard: ShardOptions,
    pub chunk_elements: Option<usize>,
}

impl Run {
    pub fn one(steps: usize) -> Run {
        Run {
            layout: LayoutSpec::default(),
            steps,
            micro_batch: 2,
            recompute: RecomputePolicy::NONE,
            put_off: false,
            shard: ShardOptions::default(),
            chunk_elements: None,
        }
    }

    pub fn of(tp: usize, dp: usize, steps: usize) -> Run {
        Run::with_context(tp, 1, dp, steps)
    }

    pub fn with_context(tp: usize, cp: usize, dp: usize, steps: usize) -> Run {
        let layout = LayoutSpec { world: tp * cp * dp, tp, cp, ..LayoutSpec::default() };
        Run { layout, ..Run::one(steps) }
    }
}

/// A complete layout-free tensor by name.
pub type Named = BTreeMap<String, Vec<f64>>;

/// What one rank hands back.
#[derive(Debug)]
pub struct RankOutcome {
    pub losses: Vec<f64>,
    pub norms: Vec<f64>,
    pub grads: Vec<(String, Piece, Vec<f64>)>,
    pub weights: Vec<(String, Piece, Vec<f64>)>,
    pub live: Vec<Snapshot>,
    pub tensor_parallel_bytes: u64,
    pub reduce_bytes: u64,
    /// At the moment when the sum over all categories was largest.
    pub peak_activation_bytes: u64,
}

/// What a run comes to.
#[derive(Debug)]
pub struct Outcome {
    pub losses: Vec<f64>,
    pub norms: Vec<f64>,
    /// Reduced gradients of the first step.
    pub grads: Named,
    pub weights: Named,
    pub ranks: Vec<RankOutcome>,
}

/// Lays the ranks' pieces together; replicas must have the same bits.
fn complete(parts: impl Iterator<Item = (String, Piece, Vec<f64>)>) -> Named {
    let mut all = Named::new();
    for (name, piece, values) in parts {
        let size = piece.shape.iter().product();
        let data = all.entry(name.clone()).or_insert_with(|| vec![f64::NAN; size]);
        for (old, new) in piece.select(data).iter().zip(&values) {
            assert!(old.is_nan() || old == new, "replicas of {name} differ: {old} and {new}");
        }
        piece.place(data, &values);
    }
    for (name, values) in &all {
        assert!(values.iter().all(|x| x.is_finite()), "{name} has an element on no rank, or none finite");
    }
    all
}

fn pieces_of<T: Float, A: Float>(
    params: &Params<T>,
    held: impl Fn(ParamId) -> Held<A>,
) -> Vec<(String, Piece, Vec<f64>)> {
    let mut all = Vec::new();
    for id in params.ids() {
        let held = held(id);
        for piece in held.pieces {
            let values = piece.copy_out(&held.tensor).iter().map(|x| x.to_f64()).collect();
            all.push((piece.name.clone(), piece, values));
        }
    }
    all
}

/// Runs the model; losses are the means over the global batch.
pub fn run<T: Trainable>(config: &ModelConfig, run: &Run, batches: &[Vec<Sequence>]) -> Outcome {
    let options = LaunchOptions::default();
    let ranks = run_ranks(run.layout.world, options, |context| rank_run::<T>(config, run, batches, context))
        .unwrap_or_else(|error| panic!("{:?}: {error}", run.layout));
    for rank in &ranks {
        assert_eq!((&rank.losses, &rank.norms), (&ranks[0].losses, &ranks[0].norms), "the same on all ranks");
    }
    Outcome {
        losses: ranks[0].losses.clone(),
        norms: ranks[0].norms.clone(),
        grads: complete(ranks.iter().flat_map(|r| r.grads.clone())),
        weights: complete(ranks.iter().flat_map(|r| r.weights.clone())),
        ranks,
    }
}

/// What a rank needs to run steps.
pub struct Rank<T: Float> {
    pub mesh: Mesh,
    pub place: Place,
    pub model: Model<T>,
    pub params: Params<T>,
    pub grads: Grads<T>,
    pub phases: Phases,
}

impl<T: Trainable> Rank<T> {
    pub fn new(config: &ModelConfig, layout: &LayoutSpec, context: &RankContext) -> Result<Rank<T>, Error> {
        Rank::sharded(config, layout, context, &ShardOptions::default())
    }

    pub fn sharded(
        config: &ModelConfig,
        layout: &LayoutSpec,
        context: &RankContext,
        shard: &ShardOptions,
    ) -> Result<Rank<T>, Error> {
        let layout = Layout::new(layout).unwrap_or_else(|error| panic!("{error}"));
        let place = Place::new(&layout, context.rank);
        let mesh = Mesh::new(&context.world, layout)?;
        let (model, specs) = Model::new(config, &place, &context.device)?;
        let params = Params::sharded(&specs, &mesh, &context.device, 11, shard)?;
        let grads = Grads::zeros(&params);
        Ok(Rank { mesh, place, model, params, grads, phases: Phases::new() })
    }

    /// Calls `f` with the surroundings of a micro-batch.
    pub fn with_cx<R>(
        &mut self,
        batch: &TokenBatch,
        recompute: RecomputePolicy,
        f: impl FnOnce(&Model<T>, &mut Cx<T>) -> Result<R, Error>,
    ) -> Result<R, Error> {
        let device = self.params.device().clone();
        let tokens = TokenInfo::new(&device, batch, &self.place)?;
        let mut cx = Cx {
            mesh: &self.mesh,
            device: &device,
            params: &self.params,
            grads: &mut self.grads,
            tokens: &tokens,
            phases: &self.phases,
            seed: 11,
            step: 0,
            recompute,
        };
        f(&self.model, &mut cx)
    }

    /// Forward and backward of one micro-batch.
    pub fn micro_step(&mut self, batch: &TokenBatch, recompute: RecomputePolicy) -> Result<LossSum, Error> {
        self.with_cx(batch, recompute, |model, cx| model.micro_step(cx)?.reduced(cx))
    }
}

fn rank_run<T: Trainable>(
    config: &ModelConfig,
    run: &Run,
    batches: &[Vec<Sequence>],
    context: RankContext,
) -> Result<RankOutcome, Error> {
    let mut rank = Rank::<T>::sharded(config, &run.layout, &context, &run.shard)?;
    if let Some(elements) = run.chunk_elements {
        rank.model.head = rank.model.head.with_chunk_elements(elements);
    }
    let optimizer_config = OptimizerConfig { max_grad_norm: Some(0.5), ..OptimizerConfig::default() };
    let mut optimizer = Optimizer::new(optimizer_config, &rank.params);
    rank.grads.put_off(run.put_off.then(PutOffKey::default));
    let mut outcome = RankOutcome {
        losses: Vec::new(),
        norms: Vec::new(),
        grads: Vec::new(),
        weights: Vec::new(),
        live: vec![context.device.ledger().now()],
        tensor_parallel_bytes: 0,
        reduce_bytes: 0,
        peak_activation_bytes: 0,
    };
    for step in 0..run.steps {
        let all = &batches[step % batches.len()];
        let own = even_range(all.len(), rank.place.size(Axis::Dp), rank.place.coordinate(Axis::Dp));
        let mut loss = LossSum::default();
        context.recorder.reset_traffic();
        // All ranks take as many micro-batches as the fullest, some perhaps without tokens.
        let most = all.len().div_ceil(rank.place.size(Axis::Dp));
        let micros = most.div_ceil(run.micro_batch);
        for micro in 0..micros {
            rank.grads.synchronise(run.shard.sync_each_micro_batch || micro + 1 == micros);
            let start = (own.start + micro * run.micro_batch).min(own.end);
            let end = (start + run.micro_batch).min(own.end);
            loss.add(rank.micro_step(&batch_of(all, start..end), run.recompute)?);
        }
        outcome.tensor_parallel_bytes = context.recorder.by_purpose(Purpose::TensorParallel).sent_bytes;
        reduce_gradients(&rank.params, &mut rank.grads, &rank.mesh, &rank.phases)?;
        outcome.reduce_bytes = context.recorder.by_purpose(Purpose::ReduceGradients).sent_bytes;
        if step == 0 {
            outcome.grads = pieces_of(&rank.params, |id| rank.grads.held(&rank.params, id));
        }
        outcome.losses.push(loss.mean());
        let norm = gradient_norm(&rank.params, &rank.grads, &rank.mesh)?;
        let report = optimizer.step(&mut rank.params, &rank.grads, &rank.mesh, &rank.phases, 0.01)?;
        assert_eq!(report.grad_norm, norm);
        outcome.norms.push(norm);
        rank.grads.clear();
        outcome.live.push(context.device.ledger().now());
    }
    outcome.peak_activation_bytes = context.device.ledger().peak().get(Category::Activation);
    outcome.weights = pieces_of(&rank.params, |id| rank.params.held(id));
    Ok(outcome)
}

/// Largest difference relative to max(|b|) of each tensor, and where.
pub fn worst(a: &Named, b: &Named) -> (f64, String) {
    assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>(), "names");
    let mut worst = (0.0, String::new());
    for (name, x) in a {
        let y = &b[name];
        let scale = y.iter().fold(1e-30f64, |m, v| m.max(v.abs()));
        let (difference, _) = plica_kernels::check::max_difference(x, y);
        if difference / scale > worst.0 {
            worst = (difference / scale, name.clone());
        }
    }
    worst
}
