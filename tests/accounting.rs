//! Bytes of real steps against the formulas of the specification: what stays after a step, what travels for each
//! purpose, and the peak. Expected numbers come from the sizes of the configuration, not from the code under test.

use plica::config::Config;
use plica::data::{Data, Split};
use plica::step::Engine;
use plica_comm::launch::LaunchOptions;
use plica_comm::{Purpose, RankContext};
use plica_dense::Trainable;
use plica_dispatch::ExpertGrid;
use plica_dispatch::plan::Counts;
use plica_dispatch::traffic::{self, SentBytes, Widths};
use plica_kernels::{Category, bf16};

use crate::runs::{FOLDED, ONE, ROUTER, Runs, on_engines, plan, quick, step};

/// Elements of a rank's parameters by the group that sums their gradients.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Elements {
    /// Dense and cut over TP: summed over DP.
    pub(crate) cut: u64,
    /// Dense and the same on all TP ranks: summed over TP and DP.
    pub(crate) same: u64,
    /// Experts: summed over EDP.
    pub(crate) experts: u64,
}

impl Elements {
    pub(crate) fn of(config: &Config) -> Elements {
        let (model, layout) = (&config.model, &config.layout);
        let (d, tp) = (model.d_model as u64, layout.tp() as u64);
        let heads = ((2 * model.heads + 2 * model.kv_heads) * model.head_dim) as u64;
        // The vocabulary is padded to a multiple of TP.
        let mut all = Elements { cut: 2 * (model.vocab as u64).div_ceil(tp) * d, same: d, experts: 0 };
        for dense in &model.dense {
            all.cut += d * heads / tp;
            all.same += 2 * d;
            match config.moe.as_ref().filter(|_| !dense) {
                None => all.cut += 3 * d * model.ffn as u64 / tp,
                Some(moe) => {
                    all.same += d * moe.experts as u64;
                    all.cut += 3 * d * moe.shared_ffn as u64 / tp;
                    let expert = 3 * d * moe.ffn as u64 / layout.etp() as u64;
                    all.experts += moe.experts as u64 / layout.ep() as u64 * expert;
                }
            }
        }
        all
    }

    fn sum(&self) -> u64 {
        self.cut + self.same + self.experts
    }
}

const LAYOUTS: &[&[&str]] = &[
    ONE,
    FOLDED,
    &["layout.ranks=4", "layout.ep=4"],
    &["layout.ranks=4", "layout.ep=2"],
    &["layout.ranks=2", "layout.tp=2", "layout.etp=2"],
    &["layout.ranks=4", "layout.tp=2", "layout.etp=1", "layout.ep=4"],
    &["layout.ranks=4", "layout.tp=1", "layout.etp=2", "layout.ep=2"],
];

fn state_bytes<T: Trainable>(runs: &Runs, precision: &str, (weight, gradient, optimizer): (u64, u64, u64)) {
    for layout in LAYOUTS {
        let config = runs.config(&[layout, ROUTER, &[precision, "moe.shared_ffn=8"]]);
        let n = Elements::of(&config).sum();
        let ranks = on_engines::<T, _>(&config, quick(), |context, engine, data| {
            let mut moments = Vec::new();
            for number in 0..3 {
                step(engine, &config, data, number)?;
                // Peers may still read this rank's last buffers.
                context.world.barrier(Purpose::Control)?;
                moments.push(engine.device.ledger().now());
            }
            Ok(moments)
        });
        for moments in ranks.unwrap_or_else(|e| panic!("{layout:?}: {e}")) {
            let first = moments[0];
            assert!(moments.iter().all(|m| *m == first), "{layout:?} {precision}: {moments:?}");
            for (category, bytes) in [
                (Category::Parameter, weight),
                (Category::Gradient, gradient),
                (Category::OptimizerState, optimizer),
                (Category::Activation, 0),
                (Category::GatheredParameter, 0),
                (Category::CommBuffer, 0),
                (Category::Data, 0),
            ] {
                assert_eq!(first.get(category), bytes * n, "{layout:?} {precision}: {}", category.name());
            }
            // Only the table of rotations stays: s positions, cosine and sine of d/2 pairs, in the accumulator type.
            let table = config.train.seq_len * config.model.head_dim * size_of::<T::Acc>();
            assert_eq!(first.get(Category::Workspace), table as u64, "{layout:?} {precision}");
        }
    }
}

#[test]
fn after_a_step_a_rank_holds_exactly_its_share_of_the_state() {
    let runs = Runs::new("state-bytes");
    state_bytes::<f32>(&runs, "train.precision=f32", (4, 4, 4 + 4));
    state_bytes::<f64>(&runs, "train.precision=f64", (8, 8, 8 + 8));
    // Rounded weights, gradients and both moments in f32, and a master copy in f32.
    state_bytes::<bf16>(&runs, "train.precision=bf16", (2, 4, 4 + 4 + 4));
}

#[test]
fn gradient_reduction_is_2qn_of_d_minus_1_over_d_in_each_family_of_its_own() {
    let runs = Runs::new("reduce-bytes");
    for layout in LAYOUTS {
        let config = runs.config(&[layout, &["moe.shared_ffn=8"]]);
        let n = Elements::of(&config);
        let sizes = (config.layout.tp() as u64, config.layout.dp() as u64, config.layout.edp() as u64);
        let sent = on_engines::<f32, _>(&config, quick(), |context, engine, data| {
            step(engine, &config, data, 0)?;
            let all = context.recorder.traffic();
            Ok(all
                .into_iter()
                .filter(|(purpose, _, _)| *purpose == Purpose::ReduceGradients)
                .collect::<Vec<_>>())
        })
        .unwrap();
        let (tp, dp, edp) = sizes;
        let families = [(dp, n.cut), (tp * dp, n.same), (edp, n.experts)];
        let expected: Vec<(u64, u64)> = families.into_iter().filter(|(size, _)| *size > 1).collect();
        let world = sent.len() as u64;
        let total: u64 = sent.iter().flatten().map(|(_, _, traffic)| traffic.sent_bytes).sum();
        // All members of a group of D ranks together send 2qN(D-1) bytes.
        let wanted: u64 = expected.iter().map(|(size, n)| world / size * 2 * 4 * n * (size - 1)).sum();
        assert_eq!(total, wanted, "{layout:?}");
        for rank in &sent {
            let own: u64 = rank.iter().map(|(_, _, traffic)| traffic.sent_bytes).sum();
            let share: u64 = expected.iter().map(|(size, n)| 2 * 4 * n * (size - 1) / size).sum();
            let operations: u64 = rank.iter().map(|(_, _, traffic)| traffic.operations).sum();
            // Each collective may give a rank one element more than another, in both halves.
            assert!(own.abs_diff(share) <= 16 * operations.max(1), "{layout:?}: {own} and {share}");
        }
    }
}

#[test]
fn tensor_parallel_traffic_is_8q_bsh_of_t_minus_1_over_t_a_dense_layer_and_micro_batch() {
    let runs = Runs::new("tp-bytes");
    for (tp, layout) in
        [(2, FOLDED), (4, &["layout.ranks=4", "layout.tp=4", "layout.etp=1", "layout.ep=4"][..])]
    {
        for (precision, q, acc) in [("train.precision=f32", 4, 4), ("train.precision=bf16", 2, 4)] {
            for (shared, of_shared) in [("moe.shared_ffn=0", 0), ("moe.shared_ffn=8", 4)] {
                let config = runs.config(&[layout, &[precision, shared]]);
                let (b, s) = (config.train.micro_batch as u64, config.train.seq_len as u64);
                let h = config.model.d_model as u64;
                let unit = q * b * s * h * (tp - 1) / tp;
                // Attention 4 and a dense feed-forward 4 (gather and scatter, forward and backward), routed experts
                // none; embedding 2, head 2; of the loss a maximum, a sum and a target's logit of every row.
                let of_loss = 3 * 2 * acc * b * s * (tp - 1) / tp;
                let micro = (8 + 4 + of_shared + 2 + 2) * unit + of_loss;
                let expected = config.train.micro_batches as u64 * micro;
                let sent = match precision {
                    "train.precision=f32" => sent_in_a_step::<f32>(&config, Purpose::TensorParallel),
                    _ => sent_in_a_step::<bf16>(&config, Purpose::TensorParallel),
                };
                assert!(
                    sent.iter().all(|bytes| *bytes == expected),
                    "tp {tp} {precision} {shared}: {sent:?} {expected}"
                );
            }
        }
    }
}

fn sent_in_a_step<T: Trainable>(config: &Config, purpose: Purpose) -> Vec<u64> {
    on_engines::<T, _>(config, quick(), |context, engine, data| {
        step(engine, config, data, 0)?;
        Ok(context.recorder.by_purpose(purpose).sent_bytes)
    })
    .unwrap()
}

/// What a rank's MoE layer did in each micro-batch, and what it sent.
struct Dispatched {
    group: Vec<usize>,
    tokens: Vec<usize>,
    kept_me: Vec<Vec<usize>>,
    dispatch_bytes: u64,
    combine_bytes: u64,
}

fn dispatched<T: Trainable>(
    config: &Config,
    context: &RankContext,
    engine: &mut Engine<T>,
    data: &Data,
) -> anyhow::Result<Dispatched> {
    let micros = plica::batch::load(data, Split::Train, 0, &plan(config), &engine.mesh, &engine.device)?;
    let (mut tokens, mut kept_me) = (Vec::new(), Vec::new());
    for micro in &micros {
        let info = engine.tokens(micro)?;
        let in_flight = engine.with_cx(&info, 0, |model, cx| model.forward(cx))?;
        let (_, report) = &in_flight.reports[0];
        kept_me.push(report.kept_e.iter().map(|c| *c as usize).collect());
        tokens.push(info.len().div_ceil(config.layout.tp()));
        engine.with_cx(&info, 0, |model, cx| model.backward(in_flight, cx))?;
    }
    let sent = |purpose| context.recorder.by_purpose(purpose).sent_bytes;
    let (dispatch_bytes, combine_bytes) = (sent(Purpose::Dispatch), sent(Purpose::Combine));
    let group = engine.mesh.etp_ep().global_ranks().to_vec();
    Ok(Dispatched { group, tokens, kept_me, dispatch_bytes, combine_bytes })
}

fn dispatch_traffic<T: Trainable>(runs: &Runs, precision: &str, q: u64) {
    for layout in &LAYOUTS[1..] {
        for dispatcher in ["all-to-all", "all-gather", "direct"] {
            for capacity in ["none", "0.75"] {
                let sets = [
                    precision,
                    &format!("moe.dispatcher={dispatcher}"),
                    &format!("moe.capacity.factor={capacity}"),
                ];
                let config = runs.config(&[layout, &sets]);
                let moe = config.moe.as_ref().unwrap();
                let (ep, etp) = (config.layout.ep(), config.layout.etp());
                let (d, acc) = (config.model.d_model as u64, size_of::<T::Acc>() as u64);
                let widths = Widths { row_bytes: d * q, sum_row_bytes: d * acc, weight_bytes: acc };
                let ranks = on_engines::<T, _>(&config, quick(), |context, engine, data| {
                    dispatched(&config, context, engine, data)
                })
                .unwrap();
                for (rank, own) in ranks.iter().enumerate() {
                    let grid = ExpertGrid::new(ep, etp, moe.experts).unwrap();
                    let at = own.group.iter().position(|r| *r == rank).unwrap();
                    let mut sum = SentBytes::default();
                    for micro in 0..own.tokens.len() {
                        let of_group = |f: &dyn Fn(&Dispatched) -> Vec<usize>| -> Vec<usize> {
                            own.group.iter().flat_map(|r| f(&ranks[*r])).collect()
                        };
                        let counts = Counts::new(grid, of_group(&|r| r.kept_me[micro].clone()));
                        let tokens = of_group(&|r| vec![r.tokens[micro]]);
                        let sent = match dispatcher {
                            "all-to-all" => traffic::all_to_all(at, &counts, &widths),
                            "all-gather" => traffic::all_gather(at, &counts, &tokens, moe.top_k, &widths),
                            _ => traffic::direct(at, &counts, &counts, &widths),
                        };
                        sum.dispatch += sent.dispatch + sent.dispatch_backward;
                        sum.combine += sent.combine + sent.combine_backward;
                    }
                    let found = (own.dispatch_bytes, own.combine_bytes);
                    let text = format!("{layout:?} {dispatcher} {precision} {capacity} rank {rank}");
                    assert_eq!(found, (sum.dispatch, sum.combine), "{text}");
                    assert_eq!(found.1 > 0, ep * etp > 1, "{text}");
                }
            }
        }
    }
}

#[test]
fn dispatch_and_combine_send_what_the_plan_predicts() {
    let runs = Runs::new("dispatch-bytes");
    dispatch_traffic::<f32>(&runs, "train.precision=f32", 4);
    dispatch_traffic::<bf16>(&runs, "train.precision=bf16", 2);
}

#[test]
fn the_peak_is_of_the_sum_a_budget_of_exactly_it_is_enough_and_one_byte_less_is_not() {
    let runs = Runs::new("peak");
    let config = runs.config(&[&["train.micro_batch=2"]]);
    let run = |budget_bytes| {
        on_engines::<f32, _>(&config, LaunchOptions { budget_bytes, ..quick() }, |_, engine, data| {
            for number in 0..2 {
                step(engine, &config, data, number)?;
            }
            let peak = engine.device.ledger().peak();
            let parts: u64 = Category::ALL.iter().map(|c| peak.get(*c)).sum();
            Ok((peak.total_bytes(), parts))
        })
    };
    let (peak, parts) = run(None).unwrap()[0];
    assert_eq!(peak, parts, "what coexisted adds up to the peak");
    assert_eq!(run(Some(peak)).unwrap()[0].0, peak);
    let text = run(Some(peak - 1)).unwrap_err().to_string();
    assert!(text.contains(&format!("of a budget of {}", peak - 1)), "{text}");
}

#[test]
fn s32a_live_bytes_are_constant_over_300_steps_of_changing_imbalance() {
    let runs = Runs::new("s32a");
    let small =
        ["train.global_batch=2", "train.seq_len=8", "moe.jitter=0.9", "train.lr=0.02", "train.min_lr=0.02"];
    for layout in [ONE, &["layout.ranks=2", "layout.ep=2"]] {
        for recompute in ["train.recompute=none", "train.recompute=full"] {
            let config =
                runs.config(&[layout, &small, &[recompute, "moe.capacity.factor=1.5", "run.steps=300"]]);
            let ranks = on_engines::<f32, _>(&config, quick(), |context, engine, data| {
                let (mut live, mut reserved, mut loads) =
                    (Vec::new(), Vec::new(), std::collections::BTreeSet::new());
                for number in 0..300 {
                    let outcome = step(engine, &config, data, number)?;
                    loads.insert(outcome.layers[0].1.counts_e.clone());
                    context.world.barrier(Purpose::Control)?;
                    live.push(engine.device.ledger().now());
                    reserved.push(engine.device.reserved_bytes());
                }
                Ok((live, reserved, loads.len()))
            })
            .unwrap();
            for (live, reserved, loads) in ranks {
                assert!(loads > 100, "the imbalance changes: {loads} loads");
                assert!(
                    live[20..].iter().all(|l| *l == live[20]),
                    "{layout:?} {recompute}: live bytes after a step"
                );
                let most = |range: &[u64]| range.iter().copied().max().unwrap();
                let (early, late) = (most(&reserved[..150]), most(&reserved[150..]));
                assert!(
                    late <= early + early / 4,
                    "{layout:?} {recompute}: kept for reuse {early}, then {late}"
                );
                assert!(most(&reserved) < 1 << 20, "{layout:?}: {} bytes kept for reuse", most(&reserved));
            }
        }
    }
}
