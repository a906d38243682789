//! The engine over a network in memory: the whole suite with and without delays, large tensors in many pieces,
//! processes that are lost or stopped, and what is left after each.

use std::time::{Duration, Instant};

use plica_kernels::{Category, Tensor};

use super::memory::{MemoryOptions, Network};
use super::{ProcessOptions, Processes};
use crate::launch::Cause;
use crate::suite;
use crate::{CommError, DeviceMaker, LaunchError, LaunchOptions, Purpose, RankContext, Reduce};

/// Runs `f` as every process of a job of `world`; results by rank.
fn job<R: Send>(
    world: usize,
    options: MemoryOptions,
    pieces: usize,
    f: impl Fn(&Processes, &Network) -> R + Sync,
) -> Vec<R> {
    let (network, transports) = Network::new(world, options);
    std::thread::scope(|scope| {
        let start = |transport| {
            let (f, network) = (&f, network.clone());
            scope.spawn(move || {
                let options = ProcessOptions { piece_bytes: pieces, ..ProcessOptions::new(world) };
                f(&Processes::new(transport, options), &network)
            })
        };
        let threads: Vec<_> = transports.into_iter().map(start).collect();
        threads.into_iter().map(|t| t.join().expect("no process panics")).collect()
    })
}

const AT_ONCE: MemoryOptions = MemoryOptions { seed: 0, max_delay: Duration::ZERO };
const DELAYED: MemoryOptions = MemoryOptions { seed: 7, max_delay: Duration::from_micros(400) };

fn passes_the_suite(options: MemoryOptions, pieces: usize, device: &DeviceMaker) {
    let run = |processes: &Processes, _: &Network| suite::run_over_on(processes, device);
    let results = job(suite::MAX_WORLD, options, pieces, run);
    for (name, result) in &results[0] {
        assert_eq!(result, &Ok(()), "{name}");
    }
    assert!(results.iter().all(|other| *other == results[0]), "every process has the same results");
    assert_eq!(results[0].len(), suite::cases().len());
}

#[test]
fn processes_pass_the_suite() {
    passes_the_suite(AT_ONCE, 64 * 1024, &DeviceMaker::cpu());
}

#[test]
fn processes_pass_the_suite_with_delays_and_many_pieces() {
    passes_the_suite(DELAYED, 16 * 1024, &DeviceMaker::cpu());
}

#[cfg(feature = "emulator")]
#[test]
fn processes_with_gpus_pass_the_suite() {
    use plica_kernels::cuda::emulator::{Order, Timing};
    let device = suite::tests_emulator::emulated(Order::Forward, Timing::Late);
    passes_the_suite(AT_ONCE, 64 * 1024, &device);
}

#[test]
fn sums_have_the_bits_of_threads() {
    let value = |rank: usize, i: usize| 1.0 / (1.0 + (i * 7 + rank * 13) as f32 % 97.0);
    let program = |ctx: &RankContext, n: usize| -> Result<Vec<u32>, CommError> {
        let own: Vec<f32> = (0..n).map(|i| value(ctx.rank, i)).collect();
        let x = Tensor::from_slice(&ctx.device, [n], &own, Category::Activation);
        let sum = ctx.world.all_reduce(Purpose::Metrics, &x, Reduce::Sum)?.to_vec();
        Ok(sum.iter().map(|v| v.to_bits()).collect())
    };
    for n in [1, 3, 4_096, 4_097, 20_000, 300_000] {
        let threads = crate::run_ranks(3, LaunchOptions::default(), |ctx| program(&ctx, n));
        let expected = threads.expect("no rank fails").remove(0);
        let run = |processes: &Processes, _: &Network| {
            processes.run(3, LaunchOptions::default(), |ctx| program(&ctx, n)).expect("no rank fails")
        };
        for (rank, got) in job(3, DELAYED, 32 * 1024, run).into_iter().enumerate() {
            assert_eq!(got, vec![expected.clone()], "{n} elements on rank {rank}");
        }
    }
}

fn sum(ctx: &RankContext, n: usize) -> Result<f32, CommError> {
    let x = Tensor::<f32>::full(&ctx.device, [n], 1.0, Category::Activation);
    Ok(ctx.world.all_reduce(Purpose::Metrics, &x, Reduce::Sum)?.to_vec().iter().sum())
}

#[test]
fn processes_beyond_a_run_wait_for_its_end() {
    let outcomes = job(4, DELAYED, 16 * 1024, |processes, _| {
        let two = processes.run(2, LaunchOptions::default(), |ctx| sum(&ctx, 5)).expect("no rank fails");
        let all = processes.run(4, LaunchOptions::default(), |ctx| sum(&ctx, 5)).expect("no rank fails");
        let failed = processes.run(2, LaunchOptions::default(), |ctx| match ctx.rank {
            1 => Err("disk is full".into()),
            _ => Ok::<f32, crate::launch::BoxError>(sum(&ctx, 5)?),
        });
        let text = failed.expect_err("rank 1 fails").to_string();
        let more = processes.run(5, LaunchOptions::default(), |ctx| sum(&ctx, 5));
        (two, all, text, more.expect_err("5 of 4").to_string())
    });
    for (rank, (two, all, text, more)) in outcomes.into_iter().enumerate() {
        assert_eq!(two, if rank < 2 { vec![10.0] } else { vec![] });
        assert_eq!(all, vec![20.0]);
        assert_eq!(text, "rank 1: disk is full");
        assert!(more.contains("needs as many processes, 4 are running"), "{more}");
    }
}

#[test]
fn a_lost_process_ends_the_run_on_all_others() {
    let results: Vec<Option<(LaunchError, Duration)>> = job(3, AT_ONCE, 16 * 1024, |processes, network| {
        let started = Instant::now();
        let result = processes.run(3, LaunchOptions::default(), |ctx| -> Result<(), CommError> {
            sum(&ctx, 50_000)?;
            if ctx.rank == 1 {
                network.lose(1);
                return Ok(());
            }
            sum(&ctx, 50_000).map(drop)
        });
        (processes.rank() != 1).then(|| (result.expect_err("rank 1 is lost"), started.elapsed()))
    });
    for (error, elapsed) in results.into_iter().flatten() {
        assert!(error.rank == 1 && matches!(error.cause, Cause::Lost(_)), "{error:?}");
        assert!(error.to_string().contains("rank 1: its process is gone"), "{error}");
        let texts: Vec<&String> = error.consequences.iter().map(|(_, text)| text).collect();
        assert!(texts.len() == 2 && texts[0].starts_with("aborted, because rank 1"), "{error:?}");
        assert!(elapsed < Duration::from_secs(60), "told after {elapsed:?}");
    }
}

#[test]
fn a_deadline_names_the_ranks_that_do_not_answer() {
    let results = job(3, AT_ONCE, 16 * 1024, |processes, network| {
        let options = LaunchOptions { deadline: Duration::from_secs(1), ..LaunchOptions::default() };
        let result = processes.run(3, options, |ctx| -> Result<(), CommError> {
            sum(&ctx, 5)?;
            if ctx.rank == 2 {
                network.stop(2, true);
                std::thread::sleep(Duration::from_secs(8));
                network.stop(2, false);
                return Ok(());
            }
            sum(&ctx, 5).map(drop)
        });
        result.expect_err("rank 2 is stopped").to_string()
    });
    assert!(results.iter().all(|text| *text == results[0]), "{results:?}");
    for part in ["not arrived: [2]", "ranks that do not answer: [2]", "sequence number 1", "all_reduce"] {
        assert!(results[0].contains(part), "`{part}` is not in: {}", results[0]);
    }
}

#[test]
fn a_stopped_process_does_not_hold_up_the_end_of_a_failed_run() {
    let told = std::sync::atomic::AtomicUsize::new(0);
    let results = job(3, AT_ONCE, 16 * 1024, |processes, network| {
        let started = Instant::now();
        let result =
            processes.run(3, LaunchOptions::default(), |ctx| -> Result<(), crate::launch::BoxError> {
                sum(&ctx, 5)?;
                if ctx.rank == 1 {
                    network.stop(1, true);
                    while told.load(std::sync::atomic::Ordering::SeqCst) < 2
                        && started.elapsed() < Duration::from_secs(100)
                    {
                        std::thread::sleep(Duration::from_millis(10));
                    }
                    network.stop(1, false);
                    return Ok(());
                }
                if ctx.rank == 0 { Err("disk is full".into()) } else { Ok(sum(&ctx, 5).map(drop)?) }
            });
        told.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        (result.expect_err("rank 0 fails"), started.elapsed())
    });
    for (rank, (error, elapsed)) in results.into_iter().enumerate() {
        assert_eq!(error.to_string(), "rank 0: disk is full");
        let stopped = |(rank, text): &(usize, String)| *rank == 1 && text.contains("does not answer");
        assert!(rank == 1 || error.consequences.iter().any(stopped), "{error:?}");
        assert!(elapsed < Duration::from_secs(60), "told after {elapsed:?}");
    }
}

#[test]
fn given_up_operations_serve_the_others_while_their_rank_computes() {
    // Rank 0 starts, gives up, and computes: the others' large sum must not wait for its next operation.
    let finished = std::sync::atomic::AtomicUsize::new(0);
    job(3, DELAYED, 16 * 1024, |processes, _| {
        let run = processes.run(3, LaunchOptions::default(), |ctx| -> Result<(), CommError> {
            let x = Tensor::<f32>::full(&ctx.device, [100_000], 1.0, Category::Activation);
            let pending = ctx.world.all_reduce_start(Purpose::Metrics, &x, Reduce::Sum)?;
            if ctx.rank == 0 {
                drop(pending);
                let until = Instant::now() + Duration::from_secs(30);
                while finished.load(std::sync::atomic::Ordering::SeqCst) < 2 && Instant::now() < until {
                    std::thread::sleep(Duration::from_millis(1));
                }
            } else {
                assert!(pending.finish()?.to_vec().iter().all(|&v| v == 3.0));
                finished.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            }
            assert_eq!(finished.load(std::sync::atomic::Ordering::SeqCst).min(1), 1);
            Ok(())
        });
        run.expect("no rank fails");
    });
    assert_eq!(finished.into_inner(), 2);
}

#[test]
fn nothing_is_left_in_the_network() {
    let (network, transports) = Network::new(3, DELAYED);
    std::thread::scope(|scope| {
        for transport in transports {
            scope.spawn(move || {
                let processes = Processes::new(transport, ProcessOptions::new(3));
                let run = processes.run(3, LaunchOptions::default(), |ctx| -> Result<(), CommError> {
                    for round in 0..6 {
                        let x = Tensor::<f32>::full(&ctx.device, [60_000], 1.0, Category::Activation);
                        let pending = ctx.world.all_gather_start(Purpose::Metrics, &x)?;
                        if round % 3 != ctx.rank {
                            drop(pending.finish()?);
                        }
                    }
                    Ok(())
                });
                run.expect("no rank fails");
                processes.close().expect("an orderly end");
            });
        }
    });
    assert_eq!(network.open_transfers(), 0);
}

#[test]
fn exchanges_gather_long_and_short_texts_and_name_who_does_not_come() {
    let limit = Duration::from_secs(60);
    let results = job(3, DELAYED, 16 * 1024, |processes, _| {
        let own = vec![processes.rank() as u8; 100_000 * processes.rank()];
        let all = processes.exchange("sizes", &own, limit).expect("all come");
        let lengths: Vec<usize> = all.iter().map(Vec::len).collect();
        let what = if processes.rank() == 2 { "version" } else { "config" };
        let differs = processes.exchange(what, &[], limit).expect_err("two names").to_string();
        let late = match processes.rank() {
            1 => None,
            _ => Some(processes.exchange("end", &[], Duration::from_secs(1)).expect_err("1 is late")),
        };
        (lengths, differs, late)
    });
    for (lengths, differs, late) in results {
        assert_eq!(lengths, [0, 100_000, 200_000]);
        assert!(differs.contains("an exchange of config") && differs.contains("an exchange of version"));
        let names =
            |e: &CommError| matches!(e, CommError::Deadline { waiting, .. } if waiting.missing.contains(&1));
        assert!(late.as_ref().is_none_or(names), "{late:?}");
    }
}

#[test]
fn consulting_costs_one_message_and_an_answer_and_names_who_does_not_come() {
    let limit = Duration::from_secs(60);
    let results = job(5, DELAYED, 16 * 1024, |processes, _| {
        let own = vec![processes.rank() as u8; 50_000 * processes.rank()];
        let sizes =
            |all: Vec<Vec<u8>>| all.iter().flat_map(|bytes| (bytes.len() as u32).to_le_bytes()).collect();
        let answer = processes.consult("sizes", &own, limit, sizes).expect("all come");
        let what = if processes.rank() == 2 { "version" } else { "config" };
        let differs = processes.consult(what, &[], limit, |_| Vec::new()).expect_err("two names").to_string();
        let late = match processes.rank() {
            1 => None,
            _ => Some(processes.consult("end", &[], Duration::from_secs(1), |_| Vec::new())),
        };
        let late = late.map(|result| result.expect_err("1 is late").to_string());
        (answer, differs, late)
    });
    for (answer, differs, late) in results {
        let expected: Vec<u8> = (0..5u32).flat_map(|rank| (50_000 * rank).to_le_bytes()).collect();
        assert_eq!(answer, expected);
        assert!(differs.contains("an exchange of config") && differs.contains("an exchange of version"));
        assert!(late.as_ref().is_none_or(|text| text.contains("not arrived: [1]")), "{late:?}");
    }
}
