//! A mixture-of-experts layer alone: first on one rank, then over two in-process ranks with expert parallelism
//! (each rank has one of two sequences and two of four experts). Outputs, input gradients and the norm of the
//! summed weight gradients agree; the second run moves rows between the ranks.
//!
//! `cargo run --release --example moe_layer`

use plica_comm::{LaunchOptions, Mesh, Purpose, RankContext, run_ranks};
use plica_dense::{
    BatchScale, Cx, FeedForward, Grads, Init, ParamSpecs, Params, Phases, Place, RecomputePolicy, TokenBatch,
    TokenInfo, gradient_norm, reduce_gradients, tokens::IGNORED,
};
use plica_dispatch::DispatcherKind;
use plica_folding::{Layout, LayoutSpec, even_range};
use plica_kernels::rng::{Purpose as Draw, Stream};
use plica_kernels::{Category, Tensor};
use plica_moe::{MoeConfig, MoeLayer, MoeSpec};

const WIDTH: usize = 16;
const EXPERTS: usize = 4;
const SEQUENCE: usize = 8;
const SEQUENCES: usize = 2;

/// What one rank has to show.
struct Part {
    /// Output rows of its tokens.
    y_td: Vec<f64>,
    /// Gradient of its input rows.
    dx_td: Vec<f64>,
    /// Norm of all weight gradients.
    norm: f64,
    /// Bytes of token rows that left the rank.
    sent_bytes: u64,
}

/// One rank: declare the layer, draw its weights, run it forward and backward on this rank's tokens.
fn rank(context: RankContext, layout: &Layout) -> anyhow::Result<Part> {
    let mesh = Mesh::new(&context.world, layout.clone())?;
    let (device, place) = (&context.device, Place::new(layout, context.rank));
    let init = Init::Normal { std: 0.3 };
    let spec = MoeSpec { name: "moe", layer: 0, width: WIDTH, init, down_init: init };
    let config = MoeConfig::new(EXPERTS, 2, 32);
    let dispatcher = plica_dispatch::build::<f64>(DispatcherKind::AllToAll, &mesh, EXPERTS)?;
    let mut specs = ParamSpecs::new();
    let layer = MoeLayer::new(&mut specs, &spec, &config, &place, dispatcher)?;
    // Weights are a function of (seed, name, index): the same on every layout.
    let params = Params::new(&specs, &place, device, 1)?;
    let mut grads = Grads::zeros(&params);

    let own = even_range(SEQUENCES, layout.dp(), mesh.coordinates().dp);
    let rows = own.start * SEQUENCE..own.end * SEQUENCE;
    let micro_batches = layout.dp() as u64;
    let batch = TokenBatch {
        first_token: rows.start as u64,
        scale: BatchScale { micro_batches, sequences: 2, tokens: (SEQUENCES * SEQUENCE) as u64 },
        ..TokenBatch::whole(SEQUENCE, vec![0; rows.len()], vec![IGNORED; rows.len()])
    };
    let tokens = TokenInfo::new(device, &batch, &place)?;
    let draw = Stream::new(7, Draw::Named("example"));
    let x: Vec<f64> = (rows.start * WIDTH..rows.end * WIDTH).map(|i| draw.normal(i as u64)).collect();
    let x_td = Tensor::from_slice(device, [rows.len(), WIDTH], &x, Category::Activation);

    let phases = Phases::new();
    let mut cx = Cx {
        mesh: &mesh,
        device,
        params: &params,
        grads: &mut grads,
        tokens: &tokens,
        phases: &phases,
        seed: 1,
        step: 0,
        recompute: RecomputePolicy::NONE,
    };
    let (y_td, saved, _report) = layer.forward(&x_td, &mut cx)?;
    // As if the loss were half the sum of squares: dy = y.
    let dx_td = layer.backward(saved, &y_td, &mut cx)?;
    reduce_gradients(&params, &mut grads, &mesh, &phases)?;
    Ok(Part {
        y_td: y_td.to_vec(),
        dx_td: dx_td.to_vec(),
        norm: gradient_norm(&params, &grads, &mesh)?,
        sent_bytes: context.recorder.by_purpose(Purpose::Dispatch).sent_bytes,
    })
}

/// All ranks of a layout; rows of the ranks in order are rows of the batch.
fn run(world: usize, ep: usize) -> anyhow::Result<Part> {
    let layout = Layout::new(&LayoutSpec { world, ep, ..LayoutSpec::default() })?;
    let parts = run_ranks(world, LaunchOptions::default(), |context| rank(context, &layout))?;
    Ok(Part {
        y_td: parts.iter().flat_map(|p| p.y_td.clone()).collect(),
        dx_td: parts.iter().flat_map(|p| p.dx_td.clone()).collect(),
        norm: parts[0].norm,
        sent_bytes: parts.iter().map(|p| p.sent_bytes).sum(),
    })
}

/// Both runs, compared.
pub fn main() -> anyhow::Result<()> {
    let (one, two) = (run(1, 1)?, run(2, 2)?);
    let worst = |a: &[f64], b: &[f64]| a.iter().zip(b).fold(0.0f64, |w, (x, y)| w.max((x - y).abs()));
    let (y, dx) = (worst(&one.y_td, &two.y_td), worst(&one.dx_td, &two.dx_td));
    println!("{} tokens, {EXPERTS} experts, 2 a token", SEQUENCES * SEQUENCE);
    println!("largest difference between one rank and EP = 2: outputs {y:.1e}, input gradients {dx:.1e}");
    println!("gradient norm: {:.12} on one rank, {:.12} on two", one.norm, two.norm);
    println!("bytes of dispatch between ranks: {} and {}", one.sent_bytes, two.sent_bytes);
    anyhow::ensure!(one.y_td.len() == two.y_td.len() && y.max(dx) < 1e-12, "the layouts differ");
    anyhow::ensure!((one.norm / two.norm - 1.0).abs() < 1e-12, "the norms differ");
    anyhow::ensure!(one.sent_bytes == 0 && two.sent_bytes > 0, "rows travel between two ranks only");
    Ok(())
}
