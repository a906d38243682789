//! Faults of other systems, by the number of their scenario: the stated values, on the layer itself. The
//! router weight is the identity where a scenario gives logits: the input rows are the logits.

use plica_dense::{BatchScale, FeedForward, RecomputePolicy, TokenBatch, TokenInfo};
use plica_dispatch::{Capacity, DispatcherKind, Policy};
use plica_kernels::{Category, Device, Tensor};
use plica_moe::select::{Select, SelectInput, Selected};
use plica_moe::{MoeConfig, MoeError, MoeReport};

use crate::world::{Cut, Problem, Rank, alone, assert_same, run};

/// A layer whose router logits are the input rows; one sequence.
struct Direct {
    problem: Problem,
    rank: Rank<f64>,
}

struct Step {
    y: Vec<f64>,
    dx: Vec<f64>,
    kept: Vec<i32>,
    report: MoeReport,
}

impl Direct {
    fn new(config: MoeConfig, tokens: usize) -> Direct {
        let mut problem = Problem::new(config);
        problem.width = problem.config.experts;
        problem.sequence = tokens;
        problem.cut_at(&[0, 1]);
        problem.padding_share = 0.0;
        let mut rank = alone(&problem);
        let (router, experts) = (rank.layer.router().parameter(), problem.config.experts);
        let identity: Vec<f64> =
            (0..experts * experts).map(|i| f64::from(u8::from(i % (experts + 1) == 0))).collect();
        rank.params.value_mut(router).host_mut().expect("host memory").copy_from_slice(&identity);
        Direct { problem, rank }
    }

    fn try_step(&mut self, logits: &[f64], padding: &[bool], dy: f64) -> Result<Step, plica_dense::Error> {
        let mut batch = self.problem.batch(0..1);
        batch.padding = padding.to_vec();
        batch.scale.tokens = padding.iter().filter(|p| !**p).count() as u64;
        let tokens = TokenInfo::new(&self.rank.device, &batch, &self.rank.place)?;
        let x_td = self.rank.tensor(self.problem.width, logits);
        let dy_td = self.rank.tensor(self.problem.width, &vec![dy; logits.len()]);
        let (layer, mut cx) = self.rank.cx(&tokens, &Cut::one(), 0, 1);
        let (y_td, saved, report) = layer.forward(&x_td, &mut cx)?;
        let kept = saved.choice().kept_ids_tk().to_vec();
        let dx_td = layer.backward(saved, &dy_td, &mut cx)?;
        Ok(Step { y: y_td.to_vec(), dx: dx_td.to_vec(), kept, report })
    }

    fn step(&mut self, logits: &[f64], padding: &[bool], dy: f64) -> Step {
        self.try_step(logits, padding, dy).unwrap_or_else(|error| panic!("{error}"))
    }
}

fn with_capacity(experts: usize, factor: &str, min: usize, policy: Policy) -> MoeConfig {
    let factor = factor.parse().expect("a factor");
    MoeConfig {
        capacity: Some(Capacity { factor, min, policy, pad: false }),
        ..MoeConfig::new(experts, 1, 4)
    }
}

#[test]
fn s06_drop_order_and_a_dropped_token() {
    let logits: Vec<f64> = [0.6f64, 0.9, 0.7, 0.8].iter().flat_map(|p| [(p / (1.0 - p)).ln(), 0.0]).collect();
    for (policy, kept) in [(Policy::Position, [0, 0, -1, -1]), (Policy::Probability, [-1, 0, -1, 0])] {
        let mut direct = Direct::new(with_capacity(2, "1", 0, policy), 4);
        let step = direct.step(&logits, &[false; 4], 1.0);
        assert_eq!(step.kept, kept, "{policy:?}");
        assert_eq!((step.report.dropped(), &step.report.counts_e[..]), (2, &[4, 0][..]));
        for t in 0..4 {
            let (y, dx) = (&step.y[t * 2..][..2], &step.dx[t * 2..][..2]);
            if kept[t] < 0 {
                assert_eq!((y, dx), (&[0.0; 2][..], &[0.0; 2][..]), "dropped: the residual alone");
            } else {
                assert!(y.iter().all(|v| *v != 0.0) && dx.iter().any(|v| *v != 0.0));
            }
        }
    }
    // DeepSpeed issue 1658: 5 tokens, at least 4 places.
    let mut direct = Direct::new(with_capacity(4, "1", 4, Policy::Position), 5);
    let step = direct.step(&[1.0, 0.0, 0.0, 0.0].repeat(5), &[false; 5], 1.0);
    assert_eq!((step.kept, step.report.kept_e), (vec![0, 0, 0, 0, -1], vec![4, 0, 0, 0]));
}

#[test]
fn s06_padding_takes_no_place() {
    let padding = [true, true, true, true, false, false, false, false];
    for policy in [Policy::Position, Policy::Probability, Policy::Choice] {
        // Capacity ceil(4 * 1 / 2 * 2) = 4 of the 4 tokens that are not padding.
        let mut direct = Direct::new(with_capacity(2, "2", 0, policy), 8);
        let step = direct.step(&[3.0, 0.0].repeat(8), &padding, 1.0);
        assert_eq!(step.kept, [-1, -1, -1, -1, 0, 0, 0, 0], "{policy:?}");
        assert_eq!(
            (step.report.dropped(), step.report.tokens, &step.report.counts_e[..]),
            (0, 4, &[4, 0][..])
        );
        assert_eq!((&step.y[..8], &step.dx[..8]), (&[0.0; 8][..], &[0.0; 8][..]), "padding: nothing");
    }
}

#[test]
fn s01_padding_changes_no_bit_of_the_layer() {
    let mut config = MoeConfig::new(4, 2, 4);
    config.balance.micro = 0.3;
    config.balance.sequence = 0.3;
    config.balance.z = 0.1;
    let valid: Vec<f64> = (0..16).map(|i| ((i * 7 % 13) as f64 - 6.0) / 4.0).collect();
    let results: Vec<(Step, Vec<Vec<f64>>)> = [0, 2, 5]
        .into_iter()
        .map(|extra| {
            let mut direct = Direct::new(config.clone(), 4 + extra);
            let mut logits = valid.clone();
            logits.extend((0..extra * 4).map(|i| 40.0 - 9.0 * i as f64));
            let padding: Vec<bool> = (0..4 + extra).map(|t| t >= 4).collect();
            let step = direct.step(&logits, &padding, 0.5);
            let grads = direct.rank.params.ids().map(|id| direct.rank.grads.get(id).to_vec()).collect();
            (step, grads)
        })
        .collect();
    let (alone, grads) = &results[0];
    for (step, other_grads) in &results[1..] {
        assert_eq!((&step.y[..16], &step.dx[..16]), (&alone.y[..], &alone.dx[..]));
        assert_eq!(grads, other_grads);
        assert_eq!((step.report.micro, step.report.z_sum), (alone.report.micro, alone.report.z_sum));
        assert!(step.dx[16..].iter().chain(&step.y[16..]).all(|v| *v == 0.0));
    }
}

#[test]
fn s08_nan_ends_the_step_with_layer_and_token() {
    let mut direct = Direct::new(MoeConfig::new(4, 2, 4), 3);
    let mut logits = vec![0.25; 12];
    logits[4..8].fill(f64::NAN);
    let error = direct.try_step(&logits, &[false; 3], 1.0).err().expect("refused").to_string();
    assert!(error.contains("layer 1") && error.contains("token 1"), "{error}");
    let step = direct.step(&logits, &[false, true, false], 1.0);
    assert_eq!(step.report.counts_e.iter().sum::<i64>(), 4, "counts are T*K");
}

#[test]
fn logits_that_cannot_be_ranked_are_carried_on_and_told_where_that_is_asked_for() {
    let config = MoeConfig { carry_non_finite: true, ..MoeConfig::new(4, 2, 4) };
    let logits: Vec<f64> = (0..12).map(|i| f64::from(i) * 0.25).collect();
    let clean = Direct::new(config.clone(), 3).step(&logits, &[false; 3], 1.0);
    assert!(clean.report.z_sum.is_finite());
    for bad in [f64::NAN, f64::INFINITY] {
        let mut direct = Direct::new(config.clone(), 3);
        let mut logits = logits.clone();
        logits[5] = bad;
        let step = direct.step(&logits, &[false; 3], 1.0);
        assert!(step.report.z_sum.is_nan(), "{bad} is told");
        assert_eq!(step.kept[2..4], [0, 1], "equal logits: the lowest experts");
        assert_eq!(step.report.counts_e.iter().sum::<i64>(), 6, "counts are T*K");
        for t in [0, 2] {
            assert_eq!(step.y[t * 4..][..4], clean.y[t * 4..][..4], "other tokens are as without it");
        }
        // Padding is not looked at.
        assert!(direct.step(&logits, &[false, true, false], 1.0).report.z_sum.is_finite());
    }
}

/// Token t of the batch goes to the experts of [`Select`] rules below.
struct ByToken(fn(u64) -> Vec<i32>, usize);

impl Select<f64> for ByToken {
    fn name(&self) -> &str {
        "by token"
    }

    fn select(&self, input: &SelectInput<'_, f64>) -> Result<Selected, MoeError> {
        let ids = (0..input.padding_t.len()).flat_map(|t| match input.padding_t[t] {
            true => vec![-1; self.1],
            false => (self.0)(input.indices_t[t]),
        });
        Ok(Selected { k: self.1, expert_ids_tk: ids.collect() })
    }
}

/// Group sizes of the report.
const SIZES: [usize; 6] = [162, 0, 2577, 446, 0, 83];

fn by_group(token: u64) -> Vec<i32> {
    let mut left = token as usize;
    let expert = SIZES.iter().position(|&size| {
        let inside = left < size;
        left = left.saturating_sub(size);
        inside
    });
    vec![expert.expect("3268 tokens") as i32]
}

/// y and the gradients of an expert's gate, up and down, token by token.
fn expert_oracle(
    problem: &Problem,
    rank: &Rank<f64>,
    ids: &[i32],
    weights: &[f64],
) -> (Vec<f64>, Vec<Vec<f64>>) {
    let (d, f) = (problem.width, problem.config.ffn);
    let [gate_up, down] = rank.layer.experts().parameters().map(|id| rank.params.value(id).to_vec());
    let x = problem.rows("x", 0..problem.tokens());
    let dy = problem.rows("dy", 0..problem.tokens());
    let mut y = vec![0.0; x.len()];
    let mut grads = vec![vec![0.0; gate_up.len()], vec![0.0; down.len()]];
    for (t, (&id, &weight)) in ids.iter().zip(weights).enumerate() {
        let (x, dy) = (&x[t * d..][..d], &dy[t * d..][..d]);
        let gate_up = &gate_up[id as usize * 2 * f * d..][..2 * f * d];
        let dot = |row: usize| -> f64 { gate_up[row * d..][..d].iter().zip(x).map(|(w, x)| w * x).sum() };
        for j in 0..f {
            let (gate, up) = (dot(j), dot(f + j));
            let s = 1.0 / (1.0 + (-gate).exp());
            let h = weight * gate * s * up;
            let column = |i: usize| (id as usize * d + i) * f + j;
            let dh: f64 = (0..d).map(|i| dy[i] * down[column(i)]).sum();
            let dgate = dh * weight * up * (s + gate * s * (1.0 - s));
            let dup = dh * weight * gate * s;
            for i in 0..d {
                y[t * d + i] += h * down[column(i)];
                grads[1][column(i)] += dy[i] * h;
                grads[0][(id as usize * 2 * f + j) * d + i] += dgate * x[i];
                grads[0][(id as usize * 2 * f + f + j) * d + i] += dup * x[i];
            }
        }
    }
    (y, grads)
}

#[test]
fn s13_idle_experts_have_zero_gradients_and_the_others_are_right() {
    let mut problem = Problem::new(MoeConfig::new(6, 1, 4));
    problem.sequence = SIZES.iter().sum();
    problem.cut_at(&[0, 1]);
    problem.padding_share = 0.0;
    let mut rank = alone::<f64>(&problem);
    // Freed blocks full of NaN are what the next tensors are made of.
    let blocks: Vec<Tensor<f64>> = [3268 * 8, 3268 * 6, 3268 * 4, 6 * 8 * 6, 6 * 6 * 4]
        .map(|len| Tensor::full(&rank.device, [len], f64::NAN, Category::Workspace))
        .into();
    drop(blocks);
    rank.layer.router_mut().set_select(Box::new(ByToken(by_group, 1)));
    let outcome = rank.step(&problem, &Cut::one(), 0).expect("a step");
    assert_eq!(outcome.report.counts_e, SIZES.map(|s| s as i64));
    let weights = routing_weights(&mut rank, &problem);
    let (y, grads) = expert_oracle(&problem, &rank, &outcome.ids[0].1, &weights);
    plica_kernels::check::assert_close("y", &outcome.y[0].1, &y, 1e-12);
    for (id, expected) in rank.layer.experts().parameters().into_iter().zip(&grads) {
        let grad = rank.grads.get(id).to_vec();
        plica_kernels::check::assert_close(&rank.params.spec(id).name, &grad, expected, 1e-11);
        let size = grad.len() / 6;
        for idle in [1, 4] {
            assert!(grad[idle * size..][..size].iter().all(|g| g.to_bits() == 0), "expert {idle}: exactly 0");
        }
    }
}

/// Softmax probability of the forced expert of each token, from the router's weight.
fn routing_weights(rank: &mut Rank<f64>, problem: &Problem) -> Vec<f64> {
    let (d, experts) = (problem.width, problem.config.experts);
    let w = rank.params.value(rank.layer.router().parameter()).to_vec();
    let x = problem.rows("x", 0..problem.tokens());
    (0..problem.tokens())
        .map(|t| {
            let logit = |e: usize| -> f64 { (0..d).map(|i| w[e * d + i] * x[t * d + i]).sum() };
            let sum: f64 = (0..experts).map(|e| logit(e).exp()).sum();
            logit(by_group(t as u64)[0] as usize).exp() / sum
        })
        .collect()
}

#[test]
fn s14_all_tokens_on_one_rank() {
    let mut problem = Problem::new(MoeConfig::new(4, 2, 4));
    problem.select = Some(|| Box::new(ByToken(|_| vec![0, 1], 2)));
    let one = run::<f64>(&problem, &Cut::one());
    for kind in DispatcherKind::ALL {
        let two = run::<f64>(&problem, &Cut::of(2, 1, 2, 1, kind));
        assert_same(&format!("{kind}"), &two, &one, 1e-10);
        for idle in [2, 3] {
            for part in ["gate", "up", "down"] {
                let grad = &two.grads[&format!("layers.1.moe.experts.{idle}.{part}")];
                assert!(grad.iter().all(|g| *g == 0.0), "expert {idle} {part}");
            }
        }
        assert_eq!(two.ranks[1].report.received_rows, 0);
    }
}

#[test]
fn s14_a_rank_without_tokens_owns_all_the_work() {
    // 4 ranks of 6 experts; rank 0 has no token, the others 4 tokens with 6 experts each, all of rank 0.
    let mut problem = Problem::new(MoeConfig::new(24, 6, 4));
    problem.sequence = 4;
    problem.micro_batches = vec![0..0, 0..1, 1..2, 2..3];
    problem.padding_share = 0.0;
    problem.select = Some(|| Box::new(ByToken(|_| (0..6).collect(), 6)));
    let one = run::<f64>(&problem, &Cut::one());
    for kind in DispatcherKind::ALL {
        let many = run::<f64>(&problem, &Cut::of(4, 1, 4, 1, kind));
        assert_same(&format!("{kind}"), &many, &one, 1e-10);
        let rows: Vec<u64> = many.ranks.iter().map(|r| r.report.received_rows).collect();
        assert_eq!(rows, [72, 0, 0, 0], "{kind}");
    }
}

#[test]
fn no_token_at_all_and_one_token() {
    for sequences in [0, 1] {
        let mut config = MoeConfig::new(4, 2, 4);
        config.balance.micro = 0.1;
        config.balance.sequence = 0.1;
        config.capacity = Some(Capacity {
            factor: "1".parse().expect("a factor"),
            min: 0,
            policy: Policy::Choice,
            pad: true,
        });
        let mut problem = Problem::new(config);
        problem.sequence = 1;
        problem.padding_share = 0.0;
        problem.micro_batches = vec![0..0, 0..sequences];
        let one = run::<f64>(&problem, &Cut::one());
        for (world, tp, ep, etp) in [(2, 1, 2, 1), (4, 2, 4, 1), (4, 2, 2, 2), (2, 2, 1, 2)] {
            for kind in DispatcherKind::ALL {
                let many = run::<f64>(&problem, &Cut::of(world, tp, ep, etp, kind));
                assert_same(&format!("{sequences} world {world} tp {tp} {kind}"), &many, &one, 1e-10);
            }
        }
    }
}

#[test]
fn jitter_is_off_in_evaluation() {
    let mut config = MoeConfig::new(4, 2, 4);
    config.jitter_epsilon = 0.3;
    config.balance.micro = 0.1;
    config.balance.sequence = 0.1;
    config.balance.z = 0.1;
    let mut direct = Direct::new(config.clone(), 3);
    let logits: Vec<f64> = (0..12).map(|i| f64::from(i % 5)).collect();
    let noisy = direct.step(&logits, &[false; 3], 1.0).y;
    let evaluate = |direct: &mut Direct| {
        let mut batch: TokenBatch = direct.problem.batch(0..1);
        batch.training = false;
        batch.scale = BatchScale::default();
        let tokens = TokenInfo::new(&direct.rank.device, &batch, &direct.rank.place).expect("a batch");
        let x_td = direct.rank.tensor(4, &logits);
        let (layer, mut cx) = direct.rank.cx(&tokens, &Cut::one(), 0, 1);
        layer.forward(&x_td, &mut cx).expect("a forward").0.to_vec()
    };
    let quiet = evaluate(&mut direct);
    assert_ne!(noisy, quiet);
    let mut plain = Direct::new(MoeConfig { jitter_epsilon: 0.0, ..config }, 3);
    assert_eq!(plain.step(&logits, &[false; 3], 1.0).y, quiet);
}

#[test]
fn bf16_is_near_f64_with_the_same_weights() {
    let mut problem = Problem::new(MoeConfig::new(4, 2, 8));
    problem.cut_at(&[0, 4]);
    problem.padding_share = 0.1;
    let mut wide = alone::<f64>(&problem);
    let mut narrow = alone::<plica_kernels::bf16>(&problem);
    let ids: Vec<_> = wide.params.ids().collect();
    for &id in &ids {
        let rounded: Vec<f64> = narrow.params.value(id).to_vec().iter().map(|w| w.to_f64()).collect();
        wide.params.value_mut(id).host_mut().expect("host memory").copy_from_slice(&rounded);
    }
    let (exact, rounded) = (wide.step(&problem, &Cut::one(), 0), narrow.step(&problem, &Cut::one(), 0));
    let (exact, rounded) = (exact.expect("a step"), rounded.expect("a step"));
    assert_eq!(exact.ids, rounded.ids, "the router ranks in the accumulator type");
    let near = |what: &str, a: &[f64], b: &[f64]| {
        let largest = b.iter().fold(0.0f64, |m, v| m.max(v.abs()));
        let (difference, _) = plica_kernels::check::max_difference(a, b);
        assert!(difference <= 0.03 * largest, "{what}: {difference} of {largest}");
    };
    near("y", &rounded.y[0].1, &exact.y[0].1);
    near("dx", &rounded.dx[0].1, &exact.dx[0].1);
    for id in ids {
        near(&wide.params.spec(id).name, &widened(narrow.grads.get(id)), &wide.grads.get(id).to_vec());
    }
}

fn widened(x: &Tensor<f32>) -> Vec<f64> {
    x.to_vec().iter().map(|v| f64::from(*v)).collect()
}

#[test]
fn s32_nothing_of_a_step_outlives_its_backward() {
    let mut config = MoeConfig::new(8, 2, 4);
    config.balance.micro = 0.1;
    config.selection = plica_moe::config::Selection::ForcedBiased { std: 3.0, fresh: true };
    config.capacity = Some(Capacity {
        factor: "1.5".parse().expect("a factor"),
        min: 0,
        policy: Policy::Probability,
        pad: false,
    });
    for recompute in [RecomputePolicy::NONE, RecomputePolicy { moe: true, ..RecomputePolicy::NONE }] {
        let problem = Problem::new(config.clone());
        let cut = Cut { recompute, ..Cut::one() };
        let mut rank = alone::<f64>(&problem);
        let device: Device = rank.device.clone();
        let before = device.ledger().now();
        let mut loads = std::collections::BTreeSet::new();
        for step in 0..300 {
            let outcome = rank.step(&problem, &cut, step).expect("a step");
            loads.insert(outcome.report.counts_e);
            assert_eq!(device.ledger().now(), before, "step {step}: live bytes");
        }
        assert!(loads.len() > 100, "the imbalance changes: {} loads", loads.len());
    }
}
