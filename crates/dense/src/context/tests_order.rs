//! The ring computes while blocks travel: a rank whose neighbour has not even begun has done the arithmetic on its
//! own block when it comes to wait, in forward and backward. Without overlap it waits first.

use std::time::{Duration, Instant};

use plica_comm::{LaunchOptions, Mesh, Purpose, RankContext, run_ranks};
use plica_folding::layout::{Layout, LayoutSpec};
use plica_kernels::Category;

use super::*;
use crate::{
    Grads, Overlap, ParamSpecs, Params, Phase, Phases, RecomputePolicy, ShardOptions, TokenBatch, TokenInfo,
};

const TOKENS: usize = 32;

/// Returns when the other rank waits for a block; whether it has computed attention before.
fn computed_before_waiting(phases: &Phases) -> bool {
    let started = Instant::now();
    while phases.current() != Some(Phase::CpComm) {
        assert!(started.elapsed() < Duration::from_secs(60), "the other rank never came to wait");
        std::thread::sleep(Duration::from_millis(1));
    }
    phases.total_ns()[Phase::Attention as usize] > 0
}

/// What rank 1 saw of rank 0 before its own forward and before its own backward.
fn one_rank_is_late(overlap: Overlap) -> Vec<bool> {
    let phases = [Phases::new(), Phases::new()];
    let rank = |context: RankContext| -> Result<Vec<bool>, Error> {
        let layout = LayoutSpec { world: 2, cp: 2, ..LayoutSpec::default() };
        let layout = Layout::new(&layout).expect("a valid layout");
        let (device, place) = (&context.device, Place::new(&layout, context.rank));
        let mesh = Mesh::new(&context.world, layout)?;
        let shard = ShardOptions { overlap, ..ShardOptions::default() };
        let params = Params::<f32>::sharded(&ParamSpecs::new(), &mesh, device, 1, &shard)?;
        let mut grads = Grads::zeros(&params);
        let ids = vec![0; TOKENS];
        let tokens = TokenInfo::new(device, &TokenBatch::whole(TOKENS, ids.clone(), ids), &place)?;
        let cx = Cx {
            mesh: &mesh,
            device,
            params: &params,
            grads: &mut grads,
            tokens: &tokens,
            phases: &phases[context.rank],
            seed: 1,
            step: 0,
            recompute: RecomputePolicy::NONE,
        };
        let rows = |heads: usize| {
            let shape = [tokens.len(), heads, 4];
            let values: Vec<f32> = (0..shape.iter().product::<usize>()).map(|i| (i as f32).sin()).collect();
            Tensor::from_slice(device, shape, &values, Category::Activation)
        };
        let heads = Heads { q_thd: rows(2), k_thd: rows(1), v_thd: rows(1) };
        let mask = Mask { scale: 0.5, window: None };
        let mut seen = Vec::new();
        if context.rank == 1 {
            seen.push(computed_before_waiting(&phases[0]));
        }
        let (_, saved) = Ring.forward(heads, &mask, &cx)?;
        phases[context.rank].take_ns();
        context.world.barrier(Purpose::Control)?;
        if context.rank == 1 {
            seen.push(computed_before_waiting(&phases[0]));
        }
        Ring.backward(saved, rows(2), &mask, &cx)?;
        Ok(seen)
    };
    let ranks = run_ranks(2, LaunchOptions::default(), rank).unwrap_or_else(|error| panic!("{error}"));
    ranks.into_iter().nth(1).expect("two ranks")
}

#[test]
fn blocks_travel_under_the_arithmetic_of_the_block_before() {
    assert_eq!(one_rank_is_late(Overlap::Auto), [true, true]);
    assert_eq!(one_rank_is_late(Overlap::Never), [false, false]);
}
