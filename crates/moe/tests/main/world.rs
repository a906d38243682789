//! One MoE layer under any layout: the same parameters, tokens and upstream gradients, cut over in-process
//! ranks, forward and backward over several micro-batches, and the results laid together layout-free.

use std::collections::BTreeMap;
use std::ops::Range;

use plica_comm::{LaunchOptions, Mesh, Purpose, RankContext, Reduce, run_ranks};
use plica_dense::{
    BatchScale, Cx, Error, FeedForward, Grads, Init, ParamId, ParamSpecs, Params, Phases, Place,
    RecomputePolicy, TokenBatch, TokenInfo, Trainable, param::Piece,
};
use plica_dispatch::DispatcherKind;
use plica_folding::axis::Axis;
use plica_folding::layout::{Layout, LayoutSpec};
use plica_kernels::rng::{Purpose as Draw, Stream};
use plica_kernels::{Category, Device, Float, Tensor};
use plica_moe::select::Select;
use plica_moe::{MoeConfig, MoeLayer, MoeReport, MoeSpec};

/// Layout-free tensors by name.
pub type Named = BTreeMap<String, Vec<f64>>;

/// A selection rule to plug in.
pub type MakeSelect = fn() -> Box<dyn Select<f64>>;

/// What is computed: the layer and a global batch.
#[derive(Clone)]
pub struct Problem {
    pub config: MoeConfig,
    pub width: usize,
    /// Tokens of a sequence.
    pub sequence: usize,
    /// Micro-batches of the global batch, each a range of sequences. Data-parallel rank r of D takes the even
    /// part r.
    pub micro_batches: Vec<Range<usize>>,
    /// Share of tokens that are padding, at pseudo-random places.
    pub padding_share: f64,
    pub seed: u64,
    /// Values of the router weight; 0 leaves the drawn ones.
    pub router_scale: f64,
    /// Selection bias before the step.
    pub bias_e: Vec<f64>,
    pub select: Option<MakeSelect>,
}

impl Problem {
    pub fn new(config: MoeConfig) -> Problem {
        Problem {
            config,
            width: 6,
            sequence: 5,
            micro_batches: vec![0..2, 2..4, 4..6, 6..8],
            padding_share: 0.2,
            seed: 7,
            router_scale: 1.0,
            bias_e: Vec::new(),
            select: None,
        }
    }

    /// The same problem with micro-batches from each boundary to the next.
    pub fn cut_at(&mut self, boundaries: &[usize]) {
        self.micro_batches = boundaries.windows(2).map(|ends| ends[0]..ends[1]).collect();
    }

    fn draw(&self, what: &str) -> Stream {
        Stream::new(self.seed, Draw::Named(what))
    }

    /// Number of tokens of the global batch.
    pub fn tokens(&self) -> usize {
        self.micro_batches.iter().map(|m| m.end).max().unwrap_or(0) * self.sequence
    }

    /// Padding marks of the global batch.
    pub fn padding(&self) -> Vec<bool> {
        let stream = self.draw("padding");
        (0..self.tokens() as u64).map(|t| stream.uniform(t) < self.padding_share).collect()
    }

    /// Rows `tokens` of a pseudo-random tensor [t, d].
    pub fn rows(&self, what: &str, tokens: Range<usize>) -> Vec<f64> {
        let stream = self.draw(what);
        (tokens.start * self.width..tokens.end * self.width).map(|i| stream.normal(i as u64)).collect()
    }

    /// Rows of some tokens; a row without a token is `fill` throughout.
    pub fn rows_of(&self, what: &str, tokens: &[Option<usize>], fill: f64) -> Vec<f64> {
        let row = |token: &Option<usize>| match token {
            Some(token) => self.rows(what, *token..token + 1),
            None => vec![fill; self.width],
        };
        tokens.iter().flat_map(row).collect()
    }

    pub fn scale(&self) -> BatchScale {
        BatchScale {
            micro_batches: self.micro_batches.len() as u64,
            sequences: self.micro_batches.iter().map(|m| m.len() as u64).sum(),
            tokens: self.padding().iter().filter(|p| !**p).count() as u64,
        }
    }

    pub fn batch(&self, sequences: Range<usize>) -> TokenBatch {
        let tokens = sequences.start * self.sequence..sequences.end * self.sequence;
        let mut batch = TokenBatch::whole(
            self.sequence,
            vec![0; tokens.len()],
            vec![plica_dense::tokens::IGNORED; tokens.len()],
        );
        batch.padding = self.padding()[tokens.clone()].to_vec();
        batch.first_token = tokens.start as u64;
        batch.scale = self.scale();
        batch
    }
}

/// How it is cut.
#[derive(Clone, Debug)]
pub struct Cut {
    pub layout: LayoutSpec,
    pub dispatcher: DispatcherKind,
    pub recompute: RecomputePolicy,
    pub put_off: bool,
}

impl Cut {
    pub fn one() -> Cut {
        Cut {
            layout: LayoutSpec::default(),
            dispatcher: DispatcherKind::AllToAll,
            recompute: RecomputePolicy::NONE,
            put_off: false,
        }
    }

    pub fn of(world: usize, tp: usize, ep: usize, etp: usize, dispatcher: DispatcherKind) -> Cut {
        Cut::with_context(world, tp, 1, ep, etp, dispatcher)
    }

    pub fn with_context(
        world: usize,
        tp: usize,
        cp: usize,
        ep: usize,
        etp: usize,
        dispatcher: DispatcherKind,
    ) -> Cut {
        let layout = LayoutSpec { world, tp, cp, ep, etp: Some(etp), ..LayoutSpec::default() };
        Cut { layout, dispatcher, ..Cut::one() }
    }
}

/// A layer on one rank.
pub struct Rank<T: Trainable> {
    pub mesh: Mesh,
    pub place: Place,
    pub layer: MoeLayer<T>,
    pub params: Params<T>,
    pub grads: Grads<T>,
    pub phases: Phases,
    pub device: Device,
}

impl<T: Trainable> Rank<T> {
    pub fn new(problem: &Problem, cut: &Cut, context: &RankContext) -> Result<Rank<T>, Error> {
        let layout = Layout::new(&cut.layout).unwrap_or_else(|error| panic!("{error}"));
        let place = Place::new(&layout, context.rank);
        let mesh = Mesh::new(&context.world, layout)?;
        let dispatcher = plica_dispatch::build(cut.dispatcher, &mesh, problem.config.experts)
            .map_err(plica_moe::MoeError::from)?;
        let mut specs = ParamSpecs::new();
        let init = Init::Normal { std: 0.6 };
        let spec = MoeSpec { name: "layers.1.moe", layer: 1, width: problem.width, init, down_init: init };
        let mut layer = MoeLayer::new(&mut specs, &spec, &problem.config, &place, dispatcher)?;
        if let Some(bias_e) = layer.router_mut().bias_mut()
            && !problem.bias_e.is_empty()
        {
            bias_e.copy_from_slice(&problem.bias_e);
        }
        let mut params = Params::new(&specs, &place, &context.device, problem.seed)?;
        let router = layer.router().parameter();
        let scaled: Vec<T> = params
            .value(router)
            .to_vec()
            .iter()
            .map(|w: &T| T::from_f64(w.to_f64() * problem.router_scale))
            .collect();
        let weight = params.value_mut(router);
        *weight = Tensor::from_slice(&context.device, weight.shape(), &scaled, weight.category());
        let mut grads = Grads::zeros(&params);
        grads.put_off(cut.put_off.then(plica_dense::PutOffKey::default));
        let device = context.device.clone();
        Ok(Rank { mesh, place, layer, params, grads, phases: Phases::new(), device })
    }

    pub fn cx<'a>(
        &'a mut self,
        tokens: &'a TokenInfo,
        cut: &Cut,
        step: u64,
        seed: u64,
    ) -> (&'a MoeLayer<T>, Cx<'a, T>) {
        let cx = Cx {
            mesh: &self.mesh,
            device: &self.device,
            params: &self.params,
            grads: &mut self.grads,
            tokens,
            phases: &self.phases,
            seed,
            step,
            recompute: cut.recompute,
        };
        (&self.layer, cx)
    }

    pub fn tensor(&self, width: usize, values: &[f64]) -> Tensor<T> {
        let values: Vec<T> = values.iter().map(|&x| T::from_f64(x)).collect();
        Tensor::from_slice(&self.device, [values.len() / width, width], &values, Category::Activation)
    }

    /// Forward and backward over this rank's micro-batches; gradients are left unreduced.
    pub fn step(&mut self, problem: &Problem, cut: &Cut, step: u64) -> Result<RankOutcome, Error> {
        let (parts, part) = (self.place.size(Axis::Dp), self.place.coordinate(Axis::Dp));
        let mine = plica_folding::owner::even_range(problem.micro_batches.len(), parts, part);
        let mut outcome = RankOutcome::default();
        let mut tape = Vec::new();
        for micro in &problem.micro_batches[mine] {
            let tokens = TokenInfo::new(&self.device, &problem.batch(micro.clone()), &self.place)?;
            let first = micro.start * problem.sequence;
            let rows: Vec<Option<usize>> =
                tokens.local_tokens().iter().map(|token| token.map(|token| first + token)).collect();
            let x_td = self.tensor(problem.width, &problem.rows_of("x", &rows, 0.3));
            let (layer, mut cx) = self.cx(&tokens, cut, step, problem.seed);
            let (y_td, saved, report) = layer.forward(&x_td, &mut cx)?;
            outcome.report.add(&report);
            outcome.add_rows(|o| &mut o.y, &rows, &y_td);
            let ids = saved.choice().kept_ids_tk().to_vec();
            let slots = ids.len() / rows.len().max(1);
            for (i, token) in rows.iter().enumerate() {
                let Some(token) = token else { continue };
                append(&mut outcome.ids, *token, &ids[i * slots..(i + 1) * slots], 1);
            }
            let kept = cut.recompute.block.then(|| layer.keep(&saved));
            let saved = kept.is_none().then_some(saved);
            tape.push((tokens, rows, x_td, saved, kept));
        }
        let counts = self.sum_counts(&outcome.report.balance_counts_e, problem.config.experts)?;
        while let Some((tokens, rows, x_td, saved, kept)) = tape.pop() {
            // What only fills a sequence up has no part in any loss.
            let dy_td = self.tensor(problem.width, &problem.rows_of("dy", &rows, 0.0));
            let (layer, mut cx) = self.cx(&tokens, cut, step, problem.seed);
            let saved = match (saved, kept) {
                (Some(mut saved), _) => {
                    layer.set_global_counts(&mut saved, &counts);
                    saved
                }
                (None, Some(mut kept)) => {
                    layer.set_global_counts_kept(&mut kept, &counts);
                    layer.forward_again(&x_td, &kept, &mut cx)?
                }
                _ => unreachable!("one of the two was kept"),
            };
            let dx_td = layer.backward(saved, &dy_td, &mut cx)?;
            outcome.add_rows(|o| &mut o.dx, &rows, &dx_td);
        }
        self.grads.run_waiting(usize::MAX);
        Ok(outcome)
    }

    fn sum_counts(&self, counts_e: &[i64], experts: usize) -> Result<Vec<i64>, Error> {
        // A rank without micro-batches has an empty report.
        let mut own = counts_e.to_vec();
        own.resize(experts, 0);
        let own = Tensor::from_slice(&self.device, [experts], &own, Category::Activation);
        Ok(self.mesh.tp_dp_cp().all_reduce(Purpose::Balance, &own, Reduce::Sum)?.to_vec())
    }

    /// Sums the gradients over the replicas.
    pub fn reduce(&mut self) -> Result<(), Error> {
        let ids: Vec<ParamId> = self.params.ids().collect();
        for id in ids {
            let group = self.mesh.group(self.params.spec(id).reduce_family());
            let sum = group.all_reduce(Purpose::ReduceGradients, self.grads.get(id), Reduce::Sum)?;
            self.grads.set(id, sum.duplicate(Category::Gradient));
        }
        Ok(())
    }
}

/// What one rank computed: pieces of the rows by element offset, gradients by piece.
#[derive(Clone, Debug, Default)]
pub struct RankOutcome {
    pub y: Vec<(usize, Vec<f64>)>,
    pub dx: Vec<(usize, Vec<f64>)>,
    pub ids: Vec<(usize, Vec<i32>)>,
    pub report: MoeReport,
    pub grads: Vec<(Piece, Vec<f64>)>,
}

impl RankOutcome {
    fn add_rows<T: Float>(
        &mut self,
        field: impl Fn(&mut RankOutcome) -> &mut Vec<(usize, Vec<f64>)>,
        tokens: &[Option<usize>],
        rows: &Tensor<T>,
    ) {
        let (values, width) = (rows.to_vec(), rows.row_len());
        for (token, row) in tokens.iter().zip(values.chunks(width)) {
            if let Some(token) = token {
                let row: Vec<f64> = row.iter().map(|x| x.to_f64()).collect();
                append(field(self), *token, &row, width);
            }
        }
    }
}

/// Adds the row of a token to a list of runs of rows; a run begins at its first token times `unit`.
fn append<E: Clone>(runs: &mut Vec<(usize, Vec<E>)>, token: usize, row: &[E], unit: usize) {
    match runs.last_mut() {
        Some((first, values)) if *first / unit + values.len() / row.len() == token => {
            values.extend_from_slice(row);
        }
        _ => runs.push((token * unit, row.to_vec())),
    }
}

/// Everything laid together.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub y: Vec<f64>,
    pub dx: Vec<f64>,
    pub grads: Named,
    pub report: MoeReport,
    pub ranks: Vec<RankOutcome>,
}

pub fn laid<'a>(len: usize, parts: impl Iterator<Item = &'a (usize, Vec<f64>)>) -> Vec<f64> {
    let mut all = vec![f64::NAN; len];
    for (start, values) in parts {
        all[*start..start + values.len()].copy_from_slice(values);
    }
    assert!(all.iter().all(|x| x.is_finite()), "a row on no rank, or not finite");
    all
}

pub fn complete(parts: impl Iterator<Item = (Piece, Vec<f64>)>) -> Named {
    let mut all = Named::new();
    for (piece, values) in parts {
        let data =
            all.entry(piece.name.clone()).or_insert_with(|| vec![f64::NAN; piece.shape.iter().product()]);
        for (old, new) in piece.select(data).iter().zip(&values) {
            assert!(old.is_nan() || old == new, "replicas of {} differ: {old} and {new}", piece.name);
        }
        piece.place(data, &values);
    }
    for (name, values) in &all {
        assert!(values.iter().all(|x| x.is_finite()), "{name}: an element on no rank, or not finite");
    }
    all
}

/// Runs one step of the problem under a cut.
pub fn run<T: Trainable>(problem: &Problem, cut: &Cut) -> Outcome
where
    Box<dyn Select<T::Acc>>: FromMake,
{
    run_with::<T>(LaunchOptions::default(), problem, cut)
}

/// The same with ranks of some options.
pub fn run_with<T: Trainable>(options: LaunchOptions, problem: &Problem, cut: &Cut) -> Outcome
where
    Box<dyn Select<T::Acc>>: FromMake,
{
    let Cut { layout, .. } = cut;
    let body = |context: RankContext| -> Result<RankOutcome, Error> {
        let mut rank = Rank::<T>::new(problem, cut, &context)?;
        if let Some(make) = problem.select {
            rank.layer.router_mut().set_select(FromMake::from_make(make));
        }
        let mut outcome = rank.step(problem, cut, 3)?;
        rank.reduce()?;
        for id in rank.params.ids() {
            for piece in rank.params.pieces(id) {
                let values = piece.copy_out(rank.grads.get(id)).iter().map(|g| g.to_f64()).collect();
                outcome.grads.push((piece.clone(), values));
            }
        }
        Ok(outcome)
    };
    let ranks = run_ranks(layout.world, options, body).unwrap_or_else(|error| panic!("{cut:?}: {error}"));
    let mut report = MoeReport::default();
    ranks.iter().for_each(|rank| report.add(&rank.report));
    let len = problem.tokens() * problem.width;
    Outcome {
        y: laid(len, ranks.iter().flat_map(|r| &r.y)),
        dx: laid(len, ranks.iter().flat_map(|r| &r.dx)),
        grads: complete(ranks.iter().flat_map(|r| r.grads.clone())),
        report,
        ranks,
    }
}

/// Selection rules are made for f64 problems only.
pub trait FromMake {
    fn from_make(make: MakeSelect) -> Self;
}

impl FromMake for Box<dyn Select<f64>> {
    fn from_make(make: MakeSelect) -> Self {
        make()
    }
}

impl FromMake for Box<dyn Select<f32>> {
    fn from_make(_: MakeSelect) -> Self {
        panic!("selection rules are plugged into f64 problems")
    }
}

/// A rank for calls without other ranks.
pub fn alone<T: Trainable>(problem: &Problem) -> Rank<T> {
    let context = RankContext::single(Device::cpu(1));
    Rank::new(problem, &Cut::one(), &context).unwrap_or_else(|error| panic!("{error}"))
}

/// Holds two outcomes together within `tolerance` relative to the largest entry of each tensor.
pub fn assert_same(what: &str, a: &Outcome, b: &Outcome, tolerance: f64) {
    let close = |name: &str, x: &[f64], y: &[f64]| {
        let scale = y.iter().fold(1e-30f64, |m, v| m.max(v.abs()));
        let (difference, i) = plica_kernels::check::max_difference(x, y);
        assert!(
            difference <= tolerance * scale,
            "{what}: {name}[{i}] is {} and should be {} ({:.2e} of the largest)",
            x[i],
            y[i],
            difference / scale
        );
    };
    close("y", &a.y, &b.y);
    close("dx", &a.dx, &b.dx);
    assert_eq!(a.grads.keys().collect::<Vec<_>>(), b.grads.keys().collect::<Vec<_>>(), "{what}: names");
    for (name, grad) in &a.grads {
        close(name, grad, &b.grads[name]);
    }
    assert_eq!(a.report.counts_e, b.report.counts_e, "{what}: counts");
    assert_eq!(a.report.kept_e, b.report.kept_e, "{what}: kept");
    assert_eq!(a.report.balance_counts_e, b.report.balance_counts_e, "{what}: balance counts");
    assert_eq!(a.report.tokens, b.report.tokens, "{what}: tokens");
    let sums = |r: &MoeReport| {
        let mut sums = r.score_sums_e.clone();
        sums.extend([r.micro, r.sequence, r.z_sum, r.entropy_sum]);
        sums
    };
    close("report", &sums(&a.report), &sums(&b.report));
}
