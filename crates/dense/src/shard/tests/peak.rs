//! S32c: what is complete at once.

use plica_comm::{LaunchOptions, Mesh, RankContext, run_ranks};
use plica_folding::layout::{Layout, LayoutSpec};
use plica_kernels::Category;

use crate::param::{Init, ParamSpec, ParamSpecs, Params};
use crate::phases::Phases;
use crate::shard::{Pass, ShardOptions, UnitId, Zero};
use crate::*;

const RANKS: usize = 4;
const UNITS: usize = 8;

/// The numbers of the report at 1/100 of their size: 8 units of 1 MB (10^6 bytes, 250,000 f32).
const UNIT_BYTES: u64 = 1_000_000;

/// Peak bytes of weights (shards and complete units) of each rank over a forward and a backward.
fn peak_bytes(shard: ShardOptions) -> Vec<u64> {
    let mut specs = ParamSpecs::new();
    for layer in 0..UNITS {
        let shape = [250, UNIT_BYTES as usize / 4 / 250];
        specs.add(ParamSpec::replicated(format!("layers.{layer}.w"), &shape, true, Init::Zeros));
    }
    let layout = LayoutSpec { world: RANKS, ..LayoutSpec::default() };
    let rank_run = |context: RankContext| -> Result<u64, Error> {
        let mesh = Mesh::new(&context.world, Layout::new(&layout).expect("legal"))?;
        let params = Params::<f32>::sharded(&specs, &mesh, &context.device, 1, &shard)?;
        let (phases, ledger) = (Phases::new(), context.device.ledger());
        let weights = || {
            let now = ledger.now();
            now.get(Category::Parameter)
                + now.get(Category::GatheredParameter)
                + now.get(Category::CommBuffer)
        };
        let mut most = weights();
        let mut visit = |unit: UnitId, pass: Pass| -> Result<(), Error> {
            let _unit = params.gather(unit, pass, &phases)?;
            assert_eq!(params.weight(params.sharding().unit(unit).ids[0]).dims()[0], 250);
            most = most.max(weights());
            Ok(())
        };
        let all: Vec<UnitId> = params.sharding().unit_ids().collect();
        all.iter().try_for_each(|unit| visit(*unit, Pass::Forward))?;
        all.iter().rev().try_for_each(|unit| visit(*unit, Pass::Backward))?;
        assert_eq!(weights(), UNITS as u64 * UNIT_BYTES / RANKS as u64, "only the shards are left");
        // Nothing came and went between two looks.
        assert_eq!(ledger.peak().total_bytes(), most);
        Ok(most)
    };
    run_ranks(RANKS, LaunchOptions::default(), rank_run).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn s32c_prefetched_units_are_all_that_is_complete() {
    let shards = UNITS as u64 * UNIT_BYTES / RANKS as u64;
    for (prefetch, complete) in [(0, 1), (1, 2), (2, 3), (20, UNITS as u64)] {
        let shard = ShardOptions { prefetch, ..ShardOptions::of(Zero::Weights) };
        for peak in peak_bytes(shard) {
            assert_eq!(peak, shards + complete * UNIT_BYTES, "prefetch {prefetch}");
        }
    }
    // 400 MB of the report, at 1/100.
    let of_report = ShardOptions { prefetch: 1, ..ShardOptions::of(Zero::Weights) };
    assert!(peak_bytes(of_report).iter().all(|peak| *peak == 4_000_000));
    let retained = ShardOptions { reshard_after_forward: false, ..of_report };
    assert!(peak_bytes(retained).iter().all(|peak| *peak == shards + UNITS as u64 * UNIT_BYTES));
}
