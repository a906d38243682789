//! Every schedule of a small world can run, takes the time that is published and holds no more than is published;
//! then larger ones at random.

use plica_kernels::rng::{Purpose, Stream};

use crate::pipeline::{Schedule, ScheduleKind, Times, generate, published, simulate, validate};

/// All schedules up to 4 ranks, 8 micro-batches and 3 chunks.
pub(super) fn small_world() -> Vec<(ScheduleKind, usize, usize, usize)> {
    let mut cases = Vec::new();
    for kind in ScheduleKind::ALL {
        for ranks in 1..=4 {
            for chunks in (1..=3).filter(|chunks| kind.takes_chunks(*chunks)) {
                cases.extend((1..=8).map(|micro_batches| (kind, ranks, chunks, micro_batches)));
            }
        }
    }
    cases
}

fn made(kind: ScheduleKind, ranks: usize, chunks: usize, micro_batches: usize) -> Schedule {
    generate(kind, ranks, chunks, micro_batches)
        .unwrap_or_else(|e| panic!("{kind} {ranks} {chunks} {micro_batches}: {e}"))
}

/// Holds one schedule against what is published, for several times of F, I and W; how many formulas were exact.
fn check(kind: ScheduleKind, ranks: usize, chunks: usize, micro_batches: usize) -> usize {
    let case = format!("{kind} p={ranks} v={chunks} m={micro_batches}");
    let schedule = made(kind, ranks, chunks, micro_batches);
    assert_eq!((schedule.stages(), schedule.micro_batches()), (ranks * chunks, micro_batches), "{case}");
    for stage in 0..schedule.stages() {
        let around = if kind.is_v_shaped() && stage >= ranks { 2 * ranks - 1 - stage } else { stage % ranks };
        assert_eq!(schedule.rank_of_stage(stage), around, "{case}: rank of stage {stage}");
    }
    let validated = validate(&schedule).unwrap_or_else(|error| panic!("{case}: {error}"));
    let times = [(1, 1, 1), (2, 2, 1), (3, 3, 2), (3, 2, 1), (2, 3, 2), (1, 2, 2), (1, 1, 2)];
    let mut exact = 0;
    for (f, i, w) in times {
        let times = Times::uniform(schedule.stages(), f.into(), i.into(), w.into());
        let simulation = simulate(&schedule, &times);
        assert_eq!(simulation.work(), (micro_batches * chunks) as f64 * f64::from(f + i + w), "{case}: work");
        let peaks: Vec<usize> = simulation.ranks.iter().map(|rank| rank.in_flight_peak).collect();
        assert_eq!(peaks, validated.in_flight_peak, "{case}");
        let Some(published) = published(kind, ranks, chunks, micro_batches, &times) else { continue };
        let peak = peaks.into_iter().max().unwrap();
        assert!(peak <= published.in_flight_bound, "{case}: {peak} in flight, {published:?}");
        if micro_batches >= 2 * ranks {
            assert_eq!(peak, published.in_flight_bound, "{case}: in flight");
        }
        if published.is_exact {
            assert_eq!(simulation.bubble(), published.bubble, "{case} F={f} I={i} W={w}");
            exact += 1;
        }
    }
    exact
}

#[test]
fn every_schedule_of_a_small_world_takes_the_published_time_and_memory() {
    let mut exact = std::collections::BTreeMap::new();
    for (kind, ranks, chunks, micro_batches) in small_world() {
        *exact.entry(kind.word()).or_insert(0) += check(kind, ranks, chunks, micro_batches);
    }
    assert!(exact.len() == 6 && exact.values().all(|count| *count >= 10), "{exact:?}");
}

#[test]
fn random_larger_schedules_take_the_published_time_and_memory() {
    let seed = 20_240_131;
    println!("seed {seed}");
    let random = Stream::new(seed, Purpose::Named("schedules"));
    for case in 0..60 {
        let draw = |n: u64, bound: u64| random.below(4 * case + n, bound) as usize;
        let kind = ScheduleKind::ALL[draw(0, 6)];
        let chunks = match kind {
            ScheduleKind::GPipe | ScheduleKind::Interleaved => 1 + draw(1, 5),
            _ => kind.default_chunks(),
        };
        check(kind, 1 + draw(2, 16), chunks, 1 + draw(3, 48));
    }
}

#[test]
fn published_examples() {
    for kind in [ScheduleKind::GPipe, ScheduleKind::OneFOneB] {
        let simulation = simulate(&made(kind, 4, 1, 8), &Times::uniform(4, 1.0, 1.0, 1.0));
        assert_eq!(simulation.bubble_share(), 0.375);
        assert!((simulation.idle_share() - 3.0 / 11.0).abs() < 1e-15);
        assert_eq!(format!("{:.1}", simulation.utilisation() * 100.0), "72.7");
        for rank in 0..4 {
            assert!((simulation.idle_share_of(rank) - 3.0 / 11.0).abs() < 1e-15);
        }
    }
    // F = 1, B = 2.
    for (ranks, micro_batches, bubble) in [(4, 8, 9.0), (8, 20, 21.0), (8, 32, 21.0)] {
        let schedule = made(ScheduleKind::OneFOneB, ranks, 1, micro_batches);
        assert_eq!(simulate(&schedule, &Times::uniform(ranks, 1.0, 1.0, 1.0)).bubble(), bubble);
    }
    // (p-1)/(v m) of the work.
    for chunks in [2, 3, 4] {
        let schedule = made(ScheduleKind::Interleaved, 4, chunks, 8);
        let simulation = simulate(&schedule, &Times::uniform(4 * chunks, 1.0, 1.0, 1.0));
        assert_eq!(simulation.bubble_share(), 3.0 / (chunks as f64 * 8.0));
    }
}

#[test]
fn memory_of_zb_v_is_that_of_1f1b_and_of_gpipe_all_micro_batches() {
    let peak = |kind: ScheduleKind, activation: f64| {
        let schedule = made(kind, 8, kind.default_chunks(), 24);
        let mut times = Times::uniform(schedule.stages(), 1.0, 1.0, 1.0);
        times.activation = vec![activation; schedule.stages()];
        times.weight_input = times.activation.clone();
        simulate(&schedule, &times).ranks.iter().map(|rank| rank.memory_peak).fold(0.0, f64::max)
    };
    assert_eq!(peak(ScheduleKind::OneFOneB, 1.0), 8.0);
    assert_eq!(peak(ScheduleKind::ZeroBubbleH1, 1.0), 8.0);
    // Half a rank's layers are half its activations.
    assert_eq!(peak(ScheduleKind::ZeroBubbleV, 0.5), 8.0);
    assert_eq!(peak(ScheduleKind::DualPipeV, 0.5), 8.5);
    assert_eq!(peak(ScheduleKind::GPipe, 1.0), 24.0);
}

#[test]
fn every_kind_of_work_of_a_stage_takes_micro_batches_in_ascending_order() {
    for (kind, ranks, chunks, micro_batches) in small_world() {
        let schedule = made(kind, ranks, chunks, micro_batches);
        for rank in 0..ranks {
            let mut next = std::collections::HashMap::new();
            for part in schedule.actions(rank).flat_map(crate::pipeline::Action::simple) {
                // A whole backward counts as both halves.
                let is_backward = matches!(part.kind.word(), "B" | "I");
                let key = (part.stage, if is_backward { "B" } else { part.kind.word() });
                let expected = next.entry(key).or_insert(0);
                let in_order = part.micro_batch == Some(*expected);
                assert!(in_order || part.kind.word() == "W", "{kind} {ranks} {micro_batches}: {part}");
                *expected += 1;
            }
            // Weight gradients: of B and W together, ascending.
            for stage in schedule.stages_of_rank(rank) {
                let parts = schedule.actions(rank).flat_map(crate::pipeline::Action::simple);
                let weights = parts.filter(|p| p.stage == stage && matches!(p.kind.word(), "B" | "W"));
                let order: Vec<Option<usize>> = weights.map(|part| part.micro_batch).collect();
                assert!(order.is_sorted(), "{kind} {ranks} {micro_batches}: stage {stage} {order:?}");
            }
        }
    }
}

/// FNV-1a over bytes.
fn digest(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, b| (hash ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

#[test]
fn dual_pipe_v_is_the_published_schedule() {
    // Digest of test/distributed/pipelining/artifacts/dualpipev_4rank_10mb.csv of the PyTorch repository.
    assert_eq!(digest(&made(ScheduleKind::DualPipeV, 4, 2, 10).to_csv()), 0xd8e3_ec68_72fc_0c24);
}

#[test]
fn what_a_schedule_cannot_have_is_refused_with_the_numbers() {
    for (kind, ranks, chunks, micro_batches, part) in [
        (ScheduleKind::OneFOneB, 4, 2, 8, "1f1b has one stage a rank, and 2 chunks a rank were asked for"),
        (ScheduleKind::ZeroBubbleH1, 4, 3, 8, "zb-h1 has one stage a rank, and 3 chunks"),
        (ScheduleKind::ZeroBubbleV, 4, 1, 8, "zb-v has two stages a rank, and 1 chunk a rank were asked"),
        (ScheduleKind::DualPipeV, 4, 3, 8, "dualpipe-v has two stages a rank, and 3 chunks"),
        (ScheduleKind::GPipe, 0, 1, 8, "gpipe: 0 ranks"),
        (ScheduleKind::GPipe, 4, 0, 8, "gpipe: 0 chunks"),
        (ScheduleKind::GPipe, 4, 1, 0, "gpipe: 0 micro-batches"),
        (ScheduleKind::GPipe, 1 << 12, 1, 1 << 12, "4096 ranks x 1 chunks x 4096 micro-batches"),
    ] {
        let error = generate(kind, ranks, chunks, micro_batches).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn words_of_schedules_are_read_back_and_others_refused() {
    for kind in ScheduleKind::ALL {
        assert_eq!(kind.word().to_uppercase().parse(), Ok(kind));
    }
    for (name, kind) in [
        ("Interleaved1F1B", ScheduleKind::Interleaved),
        ("ZBVZeroBubble", ScheduleKind::ZeroBubbleV),
        ("DualPipeV", ScheduleKind::DualPipeV),
        ("LoopedBFS", ScheduleKind::GPipe),
    ] {
        assert_eq!(name.parse(), Ok(kind));
    }
    let error = "2f2b".parse::<ScheduleKind>().unwrap_err().to_string();
    assert!(error.contains("`2f2b` is no schedule") && error.contains("zb-h1"), "{error}");
}
