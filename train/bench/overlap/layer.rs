//! An MoE layer with shared experts over EP = 2, forward and backward, routed evenly: rows travel beside the shared
//! experts, and gradients of rows beside weight gradients.

use std::time::Instant;

use plica_comm::{Mesh, Purpose, RankContext, run_ranks};
use plica_dense::{
    Cx, FeedForward, Grads, Init, Overlap, ParamSpecs, Params, Phase, Phases, Place, PutOffKey,
    RecomputePolicy, ShardOptions, TokenBatch, TokenInfo,
};
use plica_dispatch::DispatcherKind;
use plica_folding::{Layout, LayoutSpec};
use plica_kernels::rng::{Purpose as Draw, Stream};
use plica_kernels::{Category, Tensor};
use plica_moe::config::{Selection, SharedExperts};
use plica_moe::{MoeConfig, MoeLayer, MoeSpec};

use super::{Measured, OverlapBench, Part, Sample, Travel};

const TOKENS: usize = 1024;
const WIDTH: usize = 512;
const EXPERTS: usize = 8;
const TOP_K: usize = 2;
const FFN: usize = 128;
const SHARED_FFN: usize = 1024;

pub(super) fn measure(bench: &OverlapBench, part: Part) -> anyhow::Result<Measured> {
    let ranks = run_ranks(2, bench.launch(part), |context| rank(&context, bench, part))?;
    let setting = format!(
        "EP = 2, {TOKENS} tokens a rank of {WIDTH}, {TOP_K} of {EXPERTS} experts of {FFN}, shared {SHARED_FFN}, f32"
    );
    Ok(Measured { setting, samples: ranks.into_iter().next().expect("rank 0") })
}

/// The layer on one rank, with and without overlap.
struct Side<'a> {
    context: &'a RankContext,
    mesh: Mesh,
    layer: MoeLayer<f32>,
    /// Without and with overlap.
    params: [Params<f32>; 2],
    tokens: TokenInfo,
    x_td: Tensor<f32>,
    phases: Phases,
}

/// Seconds of a forward and of a backward, and in each those of the shared experts.
struct Times {
    seconds: [f64; 2],
    shared: [f64; 2],
    travel: [Travel; 2],
    /// Of the weight gradients, where they were put off.
    weight_gradients: f64,
}

fn rank(context: &RankContext, bench: &OverlapBench, part: Part) -> anyhow::Result<Vec<Sample>> {
    let side = Side::new(context)?;
    let mut samples = Vec::new();
    for repetition in 0..=bench.repetitions {
        let off = side.pass(bench, part, 0, false)?;
        let on = side.pass(bench, part, 1, false)?;
        let put_off = side.pass(bench, part, 0, true)?;
        // What depends on no travel: the shared experts; in the backward weight gradients too, theirs among them.
        let beside = [off.shared[0], put_off.shared[1] + put_off.weight_gradients];
        // The first time warms caches and memory.
        if repetition > 0 {
            samples.push(Sample {
                off: off.seconds.iter().sum(),
                on: on.seconds.iter().sum(),
                travel: off.travel.iter().map(|travel| travel.whole).sum(),
                hidable: (0..2).map(|pass| off.travel[pass].whole.min(beside[pass])).sum(),
                covered: on.travel.iter().map(|travel| travel.whole - travel.waited).sum(),
            });
        }
    }
    Ok(samples)
}

impl<'a> Side<'a> {
    fn new(context: &'a RankContext) -> anyhow::Result<Side<'a>> {
        let layout = Layout::new(&LayoutSpec { world: 2, ep: 2, ..LayoutSpec::default() })?;
        let (device, place) = (&context.device, Place::new(&layout, context.rank));
        let mesh = Mesh::new(&context.world, layout)?;
        let config = MoeConfig {
            selection: Selection::ForcedBalanced,
            shared: Some(SharedExperts { ffn: SHARED_FFN, gate: false }),
            ..MoeConfig::new(EXPERTS, TOP_K, FFN)
        };
        let dispatcher = plica_dispatch::build::<f32>(DispatcherKind::AllToAll, &mesh, EXPERTS)?;
        let init = Init::Normal { std: 0.02 };
        let spec = MoeSpec { name: "moe", layer: 0, width: WIDTH, init, down_init: init };
        let mut specs = ParamSpecs::new();
        let layer = MoeLayer::new(&mut specs, &spec, &config, &place, dispatcher)?;
        let params = |overlap| {
            let shard = ShardOptions { overlap, ..ShardOptions::default() };
            Params::sharded(&specs, &mesh, device, 1, &shard)
        };
        let params = [params(Overlap::Never)?, params(Overlap::Auto)?];
        let ids = vec![0; TOKENS];
        let tokens = TokenInfo::new(device, &TokenBatch::whole(TOKENS, ids.clone(), ids), &place)?;
        let draw = Stream::new(1, Draw::Named("rows of the overlap benchmark"));
        let values: Vec<f32> = (0..(TOKENS * WIDTH) as u64).map(|i| draw.normal(i) as f32).collect();
        let x_td = Tensor::from_slice(device, [TOKENS, WIDTH], &values, Category::Activation);
        Ok(Side { context, mesh, layer, params, tokens, x_td, phases: Phases::new() })
    }

    fn barrier(&self) -> anyhow::Result<Instant> {
        self.context.world.barrier(Purpose::Control)?;
        Ok(Instant::now())
    }

    /// Forward and backward; the time until both ranks are through each.
    fn pass(&self, bench: &OverlapBench, part: Part, params: usize, put_off: bool) -> anyhow::Result<Times> {
        let params = &self.params[params];
        let mut grads = Grads::zeros(params);
        grads.put_off(put_off.then(PutOffKey::default));
        let mut cx = Cx {
            mesh: &self.mesh,
            device: &self.context.device,
            params,
            grads: &mut grads,
            tokens: &self.tokens,
            phases: &self.phases,
            seed: 1,
            step: 0,
            recompute: RecomputePolicy::NONE,
        };
        let recorder = &self.context.recorder;
        let measured = |started: Instant| -> anyhow::Result<(f64, f64, Travel)> {
            let seconds = (self.barrier()? - started).as_secs_f64();
            let shared = self.phases.take_ns()[Phase::SharedExpert as usize] as f64 / 1e9;
            Ok((seconds, shared, bench.travel(&recorder.take_trace(), part)))
        };
        self.phases.take_ns();
        let started = self.barrier()?;
        recorder.start_trace();
        let (_, saved, _) = self.layer.forward(&self.x_td, &mut cx)?;
        let forward = measured(started)?;
        let started = self.barrier()?;
        recorder.start_trace();
        self.layer.backward(saved, &self.x_td, &mut cx)?;
        let backward = measured(started)?;
        let started = Instant::now();
        grads.run_waiting(usize::MAX);
        let weight_gradients = started.elapsed().as_secs_f64();
        Ok(Times {
            seconds: [forward.0, backward.0],
            shared: [forward.1, backward.1],
            travel: [forward.2, backward.2],
            weight_gradients,
        })
    }
}
