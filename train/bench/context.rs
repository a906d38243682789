//! Attention of ranks that share sequences against one rank that has them whole: forward and backward of the core
//! (no projections), one thread a rank. Both are measured in turn in the same ranks, so that a disturbance of the
//! machine meets both. A rate is tokens of the sequences over the time until the slowest rank is done; the roofline
//! is the rate of one rank times the number of ranks. Where the system tells how long a thread has computed, a second
//! figure compares these times, one rank's with the slowest rank's: what the ways themselves cost, also on a machine
//! that has other work to do.

use std::time::Instant;

use clap::Args;
use plica_comm::launch::{LaunchOptions, RankContext, run_ranks};
use plica_comm::{Mesh, Purpose, Reduce};
use plica_dense::context::{Heads, Mask};
use plica_dense::{
    ContextMethod, Cx, Error, Grads, ParamSpecs, Params, Phases, Place, RecomputePolicy, TokenBatch,
    TokenInfo,
};
use plica_folding::{Layout, LayoutSpec};
use plica_kernels::rng::{Purpose as Draw, Stream};
use plica_kernels::{Category, Tensor};

use super::{Figure, rate};
use crate::trace::LinkArguments;

/// Arguments of `plica bench context`.
#[derive(Debug, Args)]
pub struct ContextBench {
    /// Ranks that share a sequence.
    #[arg(long, default_value_t = 2, value_name = "N")]
    ranks: usize,
    /// Tokens of a sequence; may be repeated.
    #[arg(long = "tokens", default_values_t = [8192, 32768], value_name = "N")]
    tokens: Vec<usize>,
    /// Query heads.
    #[arg(long, default_value_t = 4, value_name = "N")]
    heads: usize,
    /// Key/value heads.
    #[arg(long, default_value_t = 2, value_name = "N")]
    kv_heads: usize,
    /// Width of a head.
    #[arg(long, default_value_t = 64, value_name = "N")]
    head_dim: usize,
    /// Repetitions.
    #[arg(long, default_value_t = 3, value_name = "N")]
    repetitions: usize,
    #[command(flatten)]
    links: LinkArguments,
}

/// The ways in the order of the table.
const METHODS: [(&str, ContextMethod); 3] = [
    ("ring", ContextMethod::Ring),
    ("all-gather", ContextMethod::AllGather),
    ("ulysses", ContextMethod::Ulysses),
];

/// Seconds of each repetition, and seconds of computing of the slowest rank.
#[derive(Clone, Debug, Default)]
struct Times {
    seconds: Vec<f64>,
    busy: Vec<f64>,
}

/// Of one rank, then of each method.
type All = [Times; 1 + METHODS.len()];

/// Seconds that the calling thread has computed, where the system tells it.
fn busy_seconds() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    let ns: f64 = text.split_whitespace().next()?.parse().ok()?;
    Some(ns / 1e9)
}

/// Middle value.
fn median(values: &[f64]) -> f64 {
    rate(1.0, &values.iter().map(|x| 1.0 / x).collect::<Vec<_>>()).0
}

impl ContextBench {
    /// Measures.
    ///
    /// # Errors
    /// Sizes that do not fit, or a rank that failed.
    pub fn run(&self) -> anyhow::Result<Vec<Figure>> {
        let ContextBench { ranks, heads, kv_heads, head_dim, .. } = *self;
        anyhow::ensure!((2..=64).contains(&ranks), "--ranks {ranks}: from 2 to 64");
        anyhow::ensure!(self.repetitions > 0, "--repetitions 0: at least 1");
        anyhow::ensure!(
            kv_heads > 0 && heads.is_multiple_of(kv_heads) && head_dim > 0,
            "--heads {heads}, --kv-heads {kv_heads}: query heads are a multiple of key/value heads"
        );
        let mut figures = Vec::new();
        for &tokens in &self.tokens {
            let options = LaunchOptions {
                threads_per_rank: 1,
                record: self.links.record(),
                ..LaunchOptions::default()
            };
            let measured = run_ranks(ranks, options, |context| self.rank(&context, tokens))?;
            let times = measured.into_iter().next().expect("rank 0");
            figures.extend(self.figures(tokens, &times));
        }
        Ok(figures)
    }

    fn figures(&self, tokens: usize, times: &All) -> Vec<Figure> {
        let shape = format!("{tokens} tokens, {}/{} heads of {}", self.heads, self.kv_heads, self.head_dim);
        let figure = |what: String, ranks: usize, seconds: &[f64], roofline| {
            let (value, range) = rate(tokens as f64, seconds);
            let setting = format!("{shape}, {ranks} rank(s)");
            Figure { what, setting, value, range, unit: "tok/s", roofline, peak_rss_mib: None }
        };
        let one = figure("attention, whole".into(), 1, &times[0].seconds, None);
        let all = one.value * self.ranks as f64;
        let mut figures = vec![one];
        for ((name, method), shared) in METHODS.iter().zip(&times[1..]) {
            if !self.fits(*method) {
                continue;
            }
            let what = format!("attention, {name}");
            figures.push(figure(what, self.ranks, &shared.seconds, Some((all, "ranks x whole"))));
            if shared.busy.iter().chain(&times[0].busy).all(|seconds| *seconds > 0.0) {
                let (value, range) = rate(median(&times[0].busy), &shared.busy);
                figures.push(Figure {
                    what: format!("attention, {name}: computing"),
                    setting: format!("{shape}, {} rank(s)", self.ranks),
                    value,
                    range,
                    unit: "x less",
                    roofline: Some((self.ranks as f64, "ranks")),
                    peak_rss_mib: None,
                });
            }
        }
        figures
    }

    fn fits(&self, method: ContextMethod) -> bool {
        method != ContextMethod::Ulysses || self.kv_heads.is_multiple_of(self.ranks)
    }

    /// One rank's part; rank 0 measures the whole sequence while the others wait.
    fn rank(&self, context: &RankContext, tokens: usize) -> Result<All, Error> {
        let alone = Side::new(self, context, tokens, &Layout::one(), 0, Mesh::single(&context.device))?;
        let spec = LayoutSpec { world: self.ranks, cp: self.ranks, ..LayoutSpec::default() };
        let layout = Layout::new(&spec).map_err(|e| Error::Setting(e.to_string()))?;
        let mesh = Mesh::new(&context.world, layout.clone())?;
        let shared = Side::new(self, context, tokens, &layout, context.rank, mesh)?;
        let mut all = All::default();
        for repetition in 0..=self.repetitions {
            for (i, times) in all.iter_mut().enumerate() {
                context.world.barrier(Purpose::Control)?;
                let (start, busy) = (Instant::now(), busy_seconds().unwrap_or(0.0));
                match i.checked_sub(1).map(|i| METHODS[i].1) {
                    None if context.rank == 0 => alone.pass(ContextMethod::Ring)?,
                    Some(method) if self.fits(method) => shared.pass(method)?,
                    _ => {}
                }
                let own = [busy_seconds().unwrap_or(0.0) - busy];
                let busy =
                    context.world.all_reduce_f64(Purpose::Control, &context.device, &own, Reduce::Max)?;
                // The first time warms caches and memory.
                if repetition > 0 {
                    times.seconds.push(start.elapsed().as_secs_f64());
                    times.busy.push(busy[0]);
                }
            }
        }
        Ok(all)
    }
}

/// A layout's rows of queries, keys and values on this rank.
struct Side {
    mesh: Mesh,
    place: Place,
    tokens: TokenInfo,
    heads: Heads<f32>,
    dout_thd: Tensor<f32>,
}

impl Side {
    fn new(
        bench: &ContextBench,
        context: &RankContext,
        tokens: usize,
        layout: &Layout,
        rank: usize,
        mesh: Mesh,
    ) -> Result<Side, Error> {
        let place = Place::new(layout, rank);
        let batch = TokenBatch::whole(tokens, vec![0; tokens], vec![0; tokens]);
        let tokens = TokenInfo::new(&context.device, &batch, &place)?;
        let rows = |name: &str, heads: usize| {
            let draw = Stream::new(1, Draw::Named(name));
            let shape = [tokens.len(), heads, bench.head_dim];
            let values: Vec<f32> =
                (0..shape.iter().product::<usize>() as u64).map(|i| draw.normal(i) as f32).collect();
            Tensor::from_slice(&context.device, shape, &values, Category::Activation)
        };
        let heads = Heads {
            q_thd: rows("q", bench.heads),
            k_thd: rows("k", bench.kv_heads),
            v_thd: rows("v", bench.kv_heads),
        };
        Ok(Side { dout_thd: rows("dout", bench.heads), heads, mesh, place, tokens })
    }

    /// Forward and backward.
    fn pass(&self, method: ContextMethod) -> Result<(), Error> {
        let device = self.heads.q_thd.device();
        let params = Params::<f32>::new(&ParamSpecs::new(), &self.place, device, 1)?;
        let (mut grads, phases) = (Grads::zeros(&params), Phases::new());
        let cx = Cx {
            mesh: &self.mesh,
            device,
            params: &params,
            grads: &mut grads,
            tokens: &self.tokens,
            phases: &phases,
            seed: 1,
            step: 0,
            recompute: RecomputePolicy::NONE,
        };
        let way = method.attention(self.place.size(plica_folding::Axis::Cp));
        let mask = Mask { scale: 0.125, window: None };
        let (_, saved) = way.forward(self.heads.clone(), &mask, &cx)?;
        way.backward(saved, self.dout_thd.clone(), &mask, &cx)?;
        Ok(())
    }
}
