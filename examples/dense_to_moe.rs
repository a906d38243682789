//! A trainer that knows residual blocks only, and takes whatever fills their feed-forward slot: the same code
//! trains a dense MLP and a mixture-of-experts layer. The task is a sequence with a rule (the next token is
//! 3 · token + 1 mod 17), so the loss falls from about ln 17 = 2.83 towards 0.
//!
//! `cargo run --release --example dense_to_moe`

use std::sync::Arc;

use plica_comm::Mesh;
use plica_dense::{
    Attention, AttentionConfig, Block, ContextMethod, Cx, Embedding, Error, FeedForward, Grads, Head, Init,
    Mlp, Norm, Optimizer, OptimizerConfig, ParamSpecs, Params, Phases, Place, QkNorm, RecomputePolicy,
    TokenBatch, TokenInfo, reduce_gradients,
};
use plica_dispatch::DispatcherKind;
use plica_kernels::Device;
use plica_kernels::ops::rope::{RopeTable, rope_frequencies};
use plica_moe::{MoeConfig, MoeLayer, MoeSpec};

const WIDTH: usize = 32;
const WORDS: usize = 17;
const SEQUENCE: usize = 16;
const STEPS: u64 = 40;
const INIT: Init = Init::Normal { std: 0.1 };

/// Four sequences that follow the rule, each from another start.
fn batch() -> TokenBatch {
    let next = |token: i32| (3 * token + 1) % WORDS as i32;
    let starts = [0, 2, 5, 11];
    let ids: Vec<i32> = starts
        .iter()
        .flat_map(|start| std::iter::successors(Some(*start), |token| Some(next(*token))).take(SEQUENCE))
        .collect();
    let targets = ids.iter().map(|id| next(*id)).collect();
    TokenBatch::whole(SEQUENCE, ids, targets)
}

/// Trains embedding, one block and a head on one rank; `slot` makes the layer of the block. Returns the losses.
fn train<F: FeedForward<f32>>(
    slot: impl FnOnce(&mut ParamSpecs, &Mesh, &Place) -> Result<F, Error>,
) -> Result<Vec<f64>, Error> {
    let device = Device::cpu(1);
    let mesh = Mesh::single(&device);
    let place = Place::new(mesh.layout(), mesh.rank());
    let mut specs = ParamSpecs::new();
    let attention = AttentionConfig {
        width: WIDTH,
        heads: 2,
        kv_heads: 2,
        head_dim: 16,
        qk_norm: QkNorm::None,
        norm_eps: 1e-5,
        window: None,
        context: ContextMethod::Ring,
        init: INIT,
        output_init: INIT,
    };
    let rope =
        Arc::new(RopeTable::<f32>::new(&device, &rope_frequencies(16, 10_000.0, None), 0..SEQUENCE as i32));
    let embedding = Embedding::new(&mut specs, "embedding", WORDS, WIDTH, INIT);
    let block = Block {
        attention_norm: Norm::new(&mut specs, "attention_norm", WIDTH, 1e-5),
        attention: Attention::new(&mut specs, "attention", attention, rope, &place)?,
        feed_forward_norm: Norm::new(&mut specs, "feed_forward_norm", WIDTH, 1e-5),
        feed_forward: slot(&mut specs, &mesh, &place)?,
    };
    let head = Head::new(&mut specs, "head", WORDS, WIDTH, INIT);
    let mut params = Params::new(&specs, &place, &device, 1)?;
    let mut grads = Grads::zeros(&params);
    let mut optimizer = Optimizer::new(OptimizerConfig::default(), &params);
    let (tokens, phases) = (TokenInfo::new(&device, &batch(), &place)?, Phases::new());

    let mut losses = Vec::new();
    for step in 0..STEPS {
        grads.clear();
        let mut cx = Cx {
            mesh: &mesh,
            device: &device,
            params: &params,
            grads: &mut grads,
            tokens: &tokens,
            phases: &phases,
            seed: 1,
            step,
            recompute: RecomputePolicy::NONE,
        };
        let x_td = embedding.forward(&cx)?;
        let (y_td, saved, _report) = block.forward(&x_td, &mut cx)?;
        let (loss, dy_td) = head.forward_backward(&y_td, &mut cx)?;
        let dx_td = block.backward(saved, &dy_td, &mut cx)?;
        embedding.backward(&dx_td, &mut cx)?;
        reduce_gradients(&params, &mut grads, &mesh, &phases)?;
        optimizer.step(&mut params, &grads, &mesh, &phases, 1e-2)?;
        losses.push(loss.mean());
    }
    Ok(losses)
}

/// Both layers in the slot, compared.
pub fn main() -> anyhow::Result<()> {
    let dense = train(|specs, _, place| Mlp::new(specs, "mlp", (WIDTH, 64), (INIT, INIT), place))?;
    let moe = train(|specs, mesh, place| {
        let spec = MoeSpec { name: "moe", layer: 0, width: WIDTH, init: INIT, down_init: INIT };
        let dispatcher = plica_dispatch::build(DispatcherKind::Direct, mesh, 4).map_err(Error::slot)?;
        Ok(MoeLayer::new(specs, &spec, &MoeConfig::new(4, 2, 32), place, dispatcher)?)
    })?;
    println!("step   dense MLP   4 experts, 2 a token");
    for step in (0..STEPS as usize).step_by(10).chain([STEPS as usize - 1]) {
        println!("{:>4}   {:>9.4}   {:>9.4}", step + 1, dense[step], moe[step]);
    }
    for (name, losses) in [("dense", &dense), ("moe", &moe)] {
        let (first, last) = (losses[0], losses[losses.len() - 1]);
        anyhow::ensure!((2.0..4.0).contains(&first) && last < 0.5 * first, "{name}: {first} -> {last}");
    }
    Ok(())
}
