//! A selection rule of one's own. Here a token takes experts in falling order of probability until they hold 60 %
//! of it together, at most 4 (the rule of Huang et al., arXiv 2403.07652): tokens that the router is sure of use
//! one expert, others more. The rule decides each row by itself, so the result does not depend on the layout; the
//! example shows that on one rank and on two (TP = 2 under sequence parallelism: each rank has half of the rows).
//!
//! `cargo run --release --example custom_router`

use plica_comm::{LaunchOptions, Mesh, RankContext, run_ranks};
use plica_dense::{
    Cx, FeedForward, Grads, Init, ParamSpecs, Params, Phases, Place, RecomputePolicy, TokenBatch, TokenInfo,
    tokens::IGNORED,
};
use plica_dispatch::DispatcherKind;
use plica_folding::{Layout, LayoutSpec};
use plica_kernels::rng::{Purpose as Draw, Stream};
use plica_kernels::{Category, Real, Tensor};
use plica_moe::select::{Select, SelectInput, Selected};
use plica_moe::{MoeConfig, MoeError, MoeLayer, MoeSpec};

const WIDTH: usize = 16;
const EXPERTS: usize = 8;
const TOKENS: usize = 32;

/// Experts until their probabilities sum to `share`, at most `most`.
struct UntilShare {
    share: f64,
    most: usize,
}

impl<A: Real> Select<A> for UntilShare {
    fn name(&self) -> &str {
        "until_share"
    }

    fn select(&self, input: &SelectInput<'_, A>) -> Result<Selected, MoeError> {
        // Slots that stay -1 are empty: no row is sent for them.
        let mut expert_ids_tk = vec![-1; input.padding_t.len() * self.most];
        for (t, logits_e) in input.logits_te.chunks_exact(input.experts).enumerate() {
            if input.padding_t[t] {
                continue;
            }
            let logits_e: Vec<f64> = logits_e.iter().map(|l| (*l).to_f64()).collect();
            let largest = logits_e.iter().fold(f64::NEG_INFINITY, |m, l| m.max(*l));
            let total: f64 = logits_e.iter().map(|l| (l - largest).exp()).sum();
            let mut order: Vec<usize> = (0..input.experts).collect();
            // A stable sort: equal logits go to the lower expert.
            order.sort_by(|a, b| logits_e[*b].total_cmp(&logits_e[*a]));
            let mut held = 0.0;
            for (slot, &expert) in order.iter().take(self.most).enumerate() {
                if slot > 0 && held >= self.share {
                    break;
                }
                held += (logits_e[expert] - largest).exp() / total;
                expert_ids_tk[t * self.most + slot] = expert as i32;
            }
        }
        Ok(Selected { k: self.most, expert_ids_tk })
    }
}

/// One rank: output rows of its tokens, and how many tokens of it took 1, 2, 3, 4 experts.
fn rank(context: RankContext, layout: &Layout) -> anyhow::Result<(Vec<f64>, [usize; 4])> {
    let mesh = Mesh::new(&context.world, layout.clone())?;
    let (device, place) = (&context.device, Place::new(layout, context.rank));
    let init = Init::Normal { std: 0.3 };
    let spec = MoeSpec { name: "moe", layer: 0, width: WIDTH, init, down_init: init };
    let dispatcher = plica_dispatch::build::<f64>(DispatcherKind::AllToAll, &mesh, EXPERTS)?;
    let mut specs = ParamSpecs::new();
    let mut layer = MoeLayer::new(&mut specs, &spec, &MoeConfig::new(EXPERTS, 4, 32), &place, dispatcher)?;
    layer.router_mut().set_select(Box::new(UntilShare { share: 0.6, most: 4 }));

    let params = Params::new(&specs, &place, device, 1)?;
    let batch = TokenBatch::whole(TOKENS, vec![0; TOKENS], vec![IGNORED; TOKENS]);
    let tokens = TokenInfo::new(device, &batch, &place)?;
    let (rows, draw) = (tokens.local_range(), Stream::new(7, Draw::Named("example")));
    let x: Vec<f64> = (rows.start * WIDTH..rows.end * WIDTH).map(|i| draw.normal(i as u64)).collect();
    let x_td = Tensor::from_slice(device, [rows.len(), WIDTH], &x, Category::Activation);
    let (mut grads, phases) = (Grads::zeros(&params), Phases::new());
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
    let mut tokens_by_experts = [0; 4];
    for ids in saved.choice().chosen_ids_tk().to_vec().chunks_exact(4) {
        tokens_by_experts[ids.iter().filter(|id| **id >= 0).count() - 1] += 1;
    }
    Ok((y_td.to_vec(), tokens_by_experts))
}

fn run(world: usize, tp: usize) -> anyhow::Result<(Vec<f64>, [usize; 4])> {
    let layout = Layout::new(&LayoutSpec { world, tp, ep: world, etp: Some(1), ..LayoutSpec::default() })?;
    let parts = run_ranks(world, LaunchOptions::default(), |context| rank(context, &layout))?;
    let counts = std::array::from_fn(|i| parts.iter().map(|(_, counts)| counts[i]).sum());
    Ok((parts.into_iter().flat_map(|(rows, _)| rows).collect(), counts))
}

/// Both runs, compared.
pub fn main() -> anyhow::Result<()> {
    let ((one, counts), (two, counts_of_two)) = (run(1, 1)?, run(2, 2)?);
    println!("of {TOKENS} tokens, so many took 1, 2, 3, 4 experts: {counts:?}");
    let worst = one.iter().zip(&two).fold(0.0f64, |w, (a, b)| w.max((a - b).abs()));
    println!("largest difference between one rank and TP = 2, EP = 2: {worst:.1e}");
    anyhow::ensure!(counts == counts_of_two && counts.iter().sum::<usize>() == TOKENS, "choices differ");
    anyhow::ensure!(one.len() == two.len() && worst < 1e-12, "outputs differ");
    anyhow::ensure!(counts.iter().filter(|c| **c > 0).count() > 1, "every token took as many experts");
    Ok(())
}
