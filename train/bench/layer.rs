//! One mixture-of-experts layer, forward and backward, at the size of the peers' script: 4,096 tokens of width 1024,
//! 32 SwiGLU experts of width 1408, top-4. Routing is given, so that all do the same work: balanced (every expert gets
//! tokens · k / experts), or skewed (30 % of the tokens have expert 0 among their four, the others never; the rest
//! uniform). The router still computes: logits, softmax, renormalised weights, and the gradients of all. Gradients go
//! to the input and to every weight and are cleared in each repetition, inside the measured time. A repetition is
//! timed between two barriers. The roofline is the best matrix product of the same type on the same cores.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::ensure;
use clap::Args;
use plica_comm::launch::{Backend, LaunchOptions, RankContext, run_on};
use plica_comm::{Mesh, Purpose};
use plica_dense::tokens::IGNORED;
use plica_dense::{
    Cx, FeedForward, Grads, Init, ParamSpecs, Params, Phases, Place, RecomputePolicy, TokenBatch, TokenInfo,
    Trainable,
};
use plica_dispatch::{DispatcherKind, build};
use plica_folding::{Layout, LayoutSpec};
use plica_kernels::rng::{Purpose as Draw, Stream};
use plica_kernels::{Category, Device, Real, Tensor, bf16};
use plica_moe::select::{Select, SelectInput, Selected};
use plica_moe::{MoeConfig, MoeError, MoeLayer, MoeSpec};

use super::{Figure, Measuring, best_product, first_device, peak_rss_mib, rate, wait_for};
use crate::device::DeviceChoice;

/// Share of the tokens that choose expert 0 in the skewed case.
const HOT: f64 = 0.3;
/// Largest size of the square product that the roofline is measured with.
const PEAK: usize = 2048;

/// Arguments of `plica bench layer`.
#[derive(Clone, Debug, Args)]
pub struct LayerBench {
    /// Ranks that share the experts; each has tokens / ranks of the tokens.
    #[arg(long, default_value_t = 1, value_name = "N")]
    ep: usize,
    /// Threads of a rank; without it the cores shared out.
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Tokens of all ranks.
    #[arg(long, default_value_t = 4096, value_name = "N")]
    tokens: usize,
    /// Width of a token.
    #[arg(long, default_value_t = 1024, value_name = "N")]
    width: usize,
    /// Width of an expert.
    #[arg(long, default_value_t = 1408, value_name = "N")]
    ffn: usize,
    /// Experts.
    #[arg(long, default_value_t = 32, value_name = "N")]
    experts: usize,
    /// Experts a token.
    #[arg(long, default_value_t = 4, value_name = "K")]
    top_k: usize,
    /// Element types: f32, bf16.
    #[arg(long, value_delimiter = ',', default_values = ["f32", "bf16"], value_name = "LIST")]
    dtype: Vec<String>,
    /// Routings: balanced, skewed.
    #[arg(long, value_delimiter = ',', default_values = ["balanced", "skewed"], value_name = "LIST")]
    routing: Vec<String>,
    /// What the ranks compute on: cpu, cuda, cuda:N.
    #[arg(long, default_value_t, value_name = "DEVICE")]
    device: DeviceChoice,
    /// Measured repetitions, after two.
    #[arg(long, default_value_t = 5, value_name = "N")]
    repetitions: usize,
}

/// Chooses by the number of a token, whatever the logits are.
struct Given {
    skewed: bool,
    tokens: u64,
}

impl Given {
    /// Experts of a token, ascending.
    fn experts(&self, token: u64, experts: usize, k: usize) -> Vec<i32> {
        let mut chosen: Vec<usize> = if self.skewed {
            let draws = Stream::new(7, Draw::Named("skewed routing"));
            // The hot tokens are spread evenly over the batch, so over the ranks too.
            let hot = ((token + 1) as f64 * HOT).floor() > (token as f64 * HOT).floor();
            let mut others: Vec<(u64, usize)> = (1..experts)
                .map(|e| (draws.uniform(token * experts as u64 + e as u64).to_bits(), e))
                .collect();
            others.sort_unstable();
            let first = hot.then_some(0);
            first.into_iter().chain(others.into_iter().map(|(_, e)| e)).take(k).collect()
        } else {
            (0..k as u64).map(|slot| ((token * k as u64 + slot) % experts as u64) as usize).collect()
        };
        chosen.sort_unstable();
        chosen.into_iter().map(|e| e as i32).collect()
    }

    /// Greatest load over the mean.
    fn imbalance(&self, experts: usize, k: usize) -> f64 {
        let mut counts = vec![0u64; experts];
        (0..self.tokens)
            .flat_map(|token| self.experts(token, experts, k))
            .for_each(|e| counts[e as usize] += 1);
        let most = counts.into_iter().max().unwrap_or(0);
        most as f64 * experts as f64 / (self.tokens * k as u64) as f64
    }
}

impl<A: Real> Select<A> for Given {
    fn name(&self) -> &str {
        "given"
    }

    fn select(&self, input: &SelectInput<'_, A>) -> Result<Selected, MoeError> {
        let chosen = input.indices_t.iter().flat_map(|t| self.experts(*t, input.experts, input.top_k));
        Ok(Selected { k: input.top_k, expert_ids_tk: chosen.collect() })
    }
}

impl LayerBench {
    /// Ranks asked for.
    pub fn ranks(&self) -> usize {
        self.ep
    }

    /// Measures every element type with every routing.
    ///
    /// # Errors
    /// Sizes that do not fit, words that are none, or a rank that failed.
    pub fn run(&self, measuring: &Measuring<'_>, backend: &Backend) -> anyhow::Result<Vec<Figure>> {
        let LayerBench { ep, tokens, experts, top_k, .. } = *self;
        ensure!((1..=64).contains(&ep), "--ep {ep}: from 1 to 64");
        ensure!(tokens > 0 && tokens.is_multiple_of(ep), "--tokens {tokens}: a multiple of --ep {ep}");
        ensure!(experts.is_multiple_of(ep), "--experts {experts}: a multiple of --ep {ep}");
        ensure!((1..experts).contains(&top_k), "--top-k {top_k}: from 1 to below --experts {experts}");
        ensure!(
            cfg!(test) || !self.device.is_emulated(),
            "--device emulator: its times say nothing; plica selftest --device emulator tests it"
        );
        ensure!(self.repetitions > 0, "--repetitions 0: at least 1");
        let mut figures = Vec::new();
        for dtype in &self.dtype {
            for routing in &self.routing {
                let skewed = match routing.as_str() {
                    "balanced" => false,
                    "skewed" => true,
                    other => anyhow::bail!("--routing {other}: balanced or skewed"),
                };
                figures.extend(match dtype.as_str() {
                    "f32" => self.measure::<f32>("f32 GEMM", skewed, measuring, backend)?,
                    "bf16" => self.measure::<bf16>("bf16 GEMM", skewed, measuring, backend)?,
                    other => anyhow::bail!("--dtype {other}: f32 or bf16"),
                });
            }
        }
        Ok(figures)
    }

    /// Speed and work of one case; nothing where this process has no rank.
    fn measure<T: Trainable>(
        &self,
        roofline: &'static str,
        skewed: bool,
        measuring: &Measuring<'_>,
        backend: &Backend,
    ) -> anyhow::Result<Vec<Figure>> {
        let cores = measuring.cores;
        let threads = self.threads.unwrap_or((cores / self.ep).max(1));
        let maker = self.device.maker(measuring.kernels)?;
        let options = LaunchOptions {
            threads_per_rank: threads,
            device: maker.clone(),
            deadline: Duration::from_secs(600),
            ..LaunchOptions::default()
        };
        let ranks = run_on(backend, self.ep, options, |context| {
            let card = context.device.gpu().map(|gpu| gpu.description());
            let card = card.map(|card| (card.name.clone(), card.ordinal));
            anyhow::Ok((self.rank::<T>(&context, skewed)?, card))
        })?;
        let cards: BTreeSet<usize> = ranks.iter().filter_map(|(_, card)| Some(card.as_ref()?.1)).collect();
        let Some((seconds, card)) = ranks.into_iter().next() else { return Ok(Vec::new()) };
        let given = Given { skewed, tokens: self.tokens as u64 };
        let dtype = T::DTYPE;
        let place = match &card {
            None => format!("× {threads} thread(s)"),
            Some((name, _)) => format!("on {} × {name}", cards.len()),
        };
        let setting = format!(
            "{dtype}, {} (max/mean {:.2}), {} tokens × {}, {} experts of {}, top-{}, ep {} {place}",
            if skewed { "skewed" } else { "balanced" },
            given.imbalance(self.experts, self.top_k),
            self.tokens,
            self.width,
            self.experts,
            self.ffn,
            self.top_k,
            self.ep,
        );
        let (value, range) = rate(self.tokens as f64, &seconds);
        let (what, peak_rss_mib) = ("MoE layer, forward + backward".to_string(), peak_rss_mib());
        let speed = Figure { what, setting, value, range, unit: "tokens/s", roofline: None, peak_rss_mib };
        let flop = 18.0 * (self.tokens * self.top_k * self.width * self.ffn) as f64;
        let (value, range) = rate(flop / 1e9, &seconds);
        let peak = match card {
            None => best_product::<T>(&Device::cpu((threads * self.ep).min(cores)), PEAK.min(2 * self.width)),
            Some(_) => best_product::<T>(&first_device(&maker)?, 4 * PEAK) * cards.len() as f64,
        };
        let roofline = Some((peak, roofline));
        Ok(vec![speed.clone(), Figure { value, range, unit: "GFLOP/s", roofline, ..speed }])
    }

    /// Seconds of each repetition on one rank.
    fn rank<T: Trainable>(&self, context: &RankContext, skewed: bool) -> anyhow::Result<Vec<f64>> {
        let (ep, device) = (self.ep, &context.device);
        let layout = Layout::new(&LayoutSpec { world: ep, ep, ..LayoutSpec::default() })?;
        let place = Place::new(&layout, context.rank);
        let mesh = Mesh::new(&context.world, layout)?;
        let dispatcher = build(DispatcherKind::AllToAll, &mesh, self.experts)?;
        let init = Init::Normal { std: 0.02 };
        let spec = MoeSpec { name: "layer", layer: 0, width: self.width, init, down_init: init };
        let config = MoeConfig::new(self.experts, self.top_k, self.ffn);
        let mut specs = ParamSpecs::new();
        let mut layer = MoeLayer::<T>::new(&mut specs, &spec, &config, &place, dispatcher)?;
        layer.router_mut().set_select(Box::new(Given { skewed, tokens: self.tokens as u64 }));
        let params = Params::<T>::new(&specs, &place, device, 3)?;
        let (mut grads, phases) = (Grads::zeros(&params), Phases::new());
        let own = self.tokens / ep;
        let mut batch = TokenBatch::whole(own, vec![0; own], vec![IGNORED; own]);
        batch.first_token = (context.rank * own) as u64;
        let tokens = TokenInfo::new(device, &batch, &place)?;
        let [x_td, dy_td] = ["x", "dy"].map(|name| self.rows::<T>(name, batch.first_token, own, device));
        let mut seconds = Vec::new();
        for _ in 0..2 + self.repetitions {
            context.world.barrier(Purpose::Control)?;
            let start = Instant::now();
            grads.clear();
            let mut cx = Cx {
                mesh: &mesh,
                device,
                params: &params,
                grads: &mut grads,
                tokens: &tokens,
                phases: &phases,
                seed: 3,
                step: 0,
                recompute: RecomputePolicy::NONE,
            };
            let (y_td, saved, _) = layer.forward(&x_td, &mut cx)?;
            drop(y_td);
            drop(layer.backward(saved, &dy_td, &mut cx)?);
            wait_for(device);
            context.world.barrier(Purpose::Control)?;
            seconds.push(start.elapsed().as_secs_f64());
        }
        Ok(seconds.split_off(2))
    }

    /// Normal rows [t, d] of this rank's tokens, the same in every layout.
    fn rows<T: Trainable>(&self, name: &str, first: u64, count: usize, device: &Device) -> Tensor<T> {
        let draws = Stream::new(11, Draw::Named(name));
        let width = self.width as u64;
        let values: Vec<T> =
            (first * width..(first + count as u64) * width).map(|i| T::from_f64(draws.normal(i))).collect();
        Tensor::from_slice(device, [count, self.width], &values, Category::Activation)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use std::path::Path;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    use plica_kernels::cuda::store::{KernelStore, MemoryStore};

    use super::*;

    #[derive(Parser)]
    struct Typed {
        #[command(flatten)]
        bench: LayerBench,
    }

    #[test]
    fn the_given_routings_are_those_of_the_peers() {
        let balanced = Given { skewed: false, tokens: 4096 };
        assert_eq!(balanced.imbalance(32, 4), 1.0);
        let skewed = Given { skewed: true, tokens: 4096 };
        let hot = (0..4096).filter(|t| skewed.experts(*t, 32, 4).contains(&0)).count();
        assert_eq!(hot, 1228, "30 % of 4096, rounded down");
        for token in 0..4096 {
            let chosen = skewed.experts(token, 32, 4);
            assert!(chosen.len() == 4 && chosen.windows(2).all(|w| w[0] < w[1]), "{chosen:?}");
        }
        assert!((2.3..2.5).contains(&skewed.imbalance(32, 4)), "{}", skewed.imbalance(32, 4));
    }

    #[test]
    fn a_small_layer_is_measured_in_every_case() {
        let kernels: Arc<dyn KernelStore> = Arc::new(MemoryStore::default());
        let stop = AtomicBool::new(false);
        let measuring = Measuring { cores: 2, cargo_home: Path::new("."), kernels: &kernels, stop: &stop };
        for ep in ["1", "2"] {
            let sizes = ["--tokens", "32", "--width", "16", "--ffn", "8", "--experts", "4", "--top-k", "2"];
            let typed = ["bench", "--ep", ep, "--threads", "1", "--repetitions", "1"];
            let bench = Typed::parse_from(typed.iter().chain(&sizes)).bench;
            let figures = bench.run(&measuring, &Backend::Threads).unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(figures.len(), 8, "two types, two routings, two figures");
            assert!(figures.iter().all(|f| f.value > 0.0 && f.setting.contains(&format!("ep {ep}"))));
        }
        let wrong = Typed::parse_from(["bench", "--ep", "3"]).bench;
        assert!(
            wrong
                .run(&measuring, &Backend::Threads)
                .unwrap_err()
                .to_string()
                .contains("a multiple of --ep 3")
        );
    }
}
