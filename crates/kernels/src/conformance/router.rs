//! The router: choices equal the CPU's, weights, sums and gradients agree, for every score function and order, with
//! bias, shift, groups, padding, masked experts, empty slots, sequences in any order, and rows that cannot be ranked.

use super::twin::{Pair, Twin, close, same};
use super::{Cases, case};
use crate::bf16;
use crate::dtype::{Float, Real};
use crate::ledger::Category;
use crate::ops::router::balance::{BalanceSums, RowSets};
use crate::ops::router::choice::{GroupLimit, TopK};
use crate::ops::router::jitter::jitter;
use crate::ops::router::score::ScoreFunction;
use crate::ops::router::weighting::{SoftmaxOrder, Weighting};
use crate::ops::router::{
    Slopes, backward, choose, empty_slots_weigh_nothing, gate_backward, gate_forward, level_unrankable, sums,
    weights_forward,
};
use crate::rng::{Purpose, Stream};
use crate::tensor::Tensor;

/// Rows, experts, k: no rows, one expert, fewer and more experts than lanes, several blocks.
const SIZES: [(usize, usize, usize); 5] = [(0, 8, 2), (3, 1, 1), (45, 8, 3), (70, 36, 8), (4, 260, 33)];
const FUNCTIONS: [ScoreFunction; 3] =
    [ScoreFunction::Softmax, ScoreFunction::Sigmoid, ScoreFunction::SqrtSoftplus];

fn rules() -> impl Iterator<Item = Weighting> {
    FUNCTIONS.into_iter().flat_map(|score| {
        let rule = move |softmax_order, renormalize, scaling_factor| Weighting {
            score,
            softmax_order,
            renormalize,
            scaling_factor,
        };
        [
            rule(SoftmaxOrder::BeforeTopK, false, 1.0),
            rule(SoftmaxOrder::BeforeTopK, true, 2.5),
            rule(SoftmaxOrder::AfterTopK, false, 1.5),
        ]
    })
}

/// Logits of which some are those of masked experts; rows where padding stands hold anything.
fn logits<A: Real>(twin: &Twin, rows: usize, experts: usize, padding_t: &[bool]) -> Pair<A> {
    let stream = Stream::new(17, Purpose::Named("router"));
    let value = |i: u64| {
        let (t, e) = (i / experts as u64, i % experts as u64);
        match () {
            () if padding_t[t as usize] => f64::NAN,
            () if e % 11 == 7 && t % 3 == 0 => f64::NEG_INFINITY,
            () => 2.0 * stream.normal(i),
        }
    };
    let values: Vec<A> = (0..(rows * experts) as u64).map(|i| A::from_f64(value(i))).collect();
    twin.values([rows, experts], &values)
}

fn padding(rows: usize) -> Vec<bool> {
    (0..rows).map(|t| rows > 5 && t % 7 == 2).collect()
}

fn choices<A: Real>(twin: &Twin) -> Result<(), String> {
    for (rows, experts, k) in SIZES {
        let padding_t = padding(rows);
        let x = logits::<A>(twin, rows, experts, &padding_t);
        let bias: Vec<f64> = (0..experts).map(|e| (e % 5) as f64 * 0.07 - 0.1).collect();
        let shift: Vec<f64> = (0..experts).map(|e| (e % 3) as f64 - 1.0).collect();
        let groups = GroupLimit { groups: 4, keep: 3, score_k: 2 };
        for weighting in rules().filter(|rule| !rule.renormalize) {
            for (bias_e, shift_e, groups) in [
                (None, None, None),
                (Some(&bias[..]), Some(&shift[..]), (experts % 4 == 0).then_some(groups)),
            ] {
                let rule = TopK { weighting, k, groups, shift_e, bias_e };
                let chosen = |x| choose(x, &rule, &padding_t).map_err(|row| format!("row {row} refused"));
                let (cpu, gpu) = (chosen(&x.cpu)?, chosen(&x.gpu)?);
                same(&format!("{rows} x {experts} {rule:?}"), &cpu.expert_ids_tk, &gpu.expert_ids_tk)?;
                if gpu.host_ids_tk != gpu.expert_ids_tk.to_vec() {
                    return Err("ids on the host are others".into());
                }
            }
        }
    }
    Ok(())
}

fn refusals<A: Real>(twin: &Twin) -> Result<(), String> {
    let (rows, experts) = (41, 9);
    let mut padding_t = vec![false; rows];
    padding_t[3] = true;
    let weighting = rules().next().expect("a rule");
    let rule = TopK { weighting, k: 2, groups: None, shift_e: None, bias_e: None };
    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let mut values = vec![A::one(); rows * experts];
        for row in [3, 20, 33] {
            let end = if bad == f64::NEG_INFINITY { experts } else { 1 };
            values[row * experts..][..end].fill(A::from_f64(bad));
        }
        let mut x = twin.values([rows, experts], &values);
        let told = [&x.cpu, &x.gpu].map(|x| choose(x, &rule, &padding_t).err());
        if told != [Some(20); 2] {
            return Err(format!("{bad}: rows {told:?} are refused, not row 20"));
        }
        let any = [level_unrankable(&mut x.cpu, &padding_t), level_unrankable(&mut x.gpu, &padding_t)];
        same("levelled", &x.cpu, &x.gpu)?;
        let again = [level_unrankable(&mut x.cpu, &padding_t), level_unrankable(&mut x.gpu, &padding_t)];
        if (any, again) != ([true; 2], [false; 2]) {
            return Err(format!("{bad}: levelled {any:?}, and then {again:?}"));
        }
    }
    Ok(())
}

/// Experts of a token: some slots empty, some rows without any.
fn ids(rows: usize, experts: usize, k: usize) -> Vec<i32> {
    let id = |i: usize| match (i / k, i % k) {
        (t, _) if t % 6 == 4 => -1,
        (t, j) if (t + j) % 5 == 3 => -1,
        (t, j) => ((3 * t + j) % experts) as i32,
    };
    (0..rows * k).map(id).collect()
}

fn weights<A: Real>(twin: &Twin) -> Result<(), String> {
    for (rows, experts, k) in SIZES {
        let x = logits::<A>(twin, rows, experts, &vec![false; rows]);
        let ids_tk = twin.values([rows, k], &ids(rows, experts, k));
        let kept: Vec<i32> =
            ids_tk.cpu.to_vec().iter().map(|&id| if id % 3 == 1 { -1 } else { id }).collect();
        let kept_tk = twin.values([rows, k], &kept);
        for rule in rules().filter(|rule| !rule.after_top_k() || experts < 8) {
            let what = format!("{rows} x {experts} {rule:?}");
            let cpu = weights_forward(&x.cpu, &rule, &ids_tk.cpu);
            let gpu = weights_forward(&x.gpu, &rule, &ids_tk.gpu);
            close(&what, &cpu, &gpu, 8.0)?;
            let cpu = empty_slots_weigh_nothing(cpu, &kept_tk.cpu);
            close(&what, &cpu, &empty_slots_weigh_nothing(gpu, &kept_tk.gpu), 8.0)?;
        }
    }
    after_top_k::<A>(twin)
}

/// The softmax over the chosen alone, where a masked expert is never among them.
fn after_top_k<A: Real>(twin: &Twin) -> Result<(), String> {
    let (rows, experts, k) = (30, 7, 3);
    let x = twin.normal::<A>([rows, experts], 23);
    let ids_tk = twin.values([rows, k], &ids(rows, experts, k));
    for rule in rules().filter(Weighting::after_top_k) {
        let cpu = weights_forward(&x.cpu, &rule, &ids_tk.cpu);
        close("softmax of the chosen", &cpu, &weights_forward(&x.gpu, &rule, &ids_tk.gpu), 8.0)?;
    }
    Ok(())
}

fn gradients<A: Real>(twin: &Twin) -> Result<(), String> {
    for (rows, experts, k) in SIZES {
        let padding_t = padding(rows);
        let x = twin.normal::<A>([rows, experts], 29);
        let mut ids = ids(rows, experts, k);
        for t in (0..rows).filter(|&t| padding_t[t]) {
            ids[t * k..][..k].fill(-1);
        }
        let ids_tk = twin.values([rows, k], &ids);
        let dweights_tk = twin.normal::<A>([rows, k], 31);
        let no_gradient = twin.values([rows, k], &vec![A::zero(); rows * k]);
        let sequence_t: Vec<usize> = (0..rows).map(|t| t * 7 / 20 % 3).collect();
        let sets = RowSets { sequences: 3, sequence_t: &sequence_t, padding_t: &padding_t };
        let slopes: Vec<f64> = (0..3 * experts).map(|i| (i % 13) as f64 * 0.1 - 0.5).collect();
        let nothing = vec![0.0; 3 * experts];
        for rule in rules() {
            for (slopes_se, z_slope, weighs) in
                [(&nothing, 0.0, true), (&slopes, 0.0, true), (&slopes, 0.3, false), (&nothing, 0.3, true)]
            {
                let dweights = if weighs { &dweights_tk } else { &no_gradient };
                let of = |x, expert_ids_tk, dweights_tk| {
                    let rows = sets;
                    backward(x, &Slopes { rule, expert_ids_tk, dweights_tk, rows, slopes_se, z_slope })
                };
                let cpu = of(&x.cpu, &ids_tk.cpu, &dweights.cpu);
                let gpu = of(&x.gpu, &ids_tk.gpu, &dweights.gpu);
                close(&format!("{rows} x {experts} {rule:?} z {z_slope}"), &cpu, &gpu, 16.0)?;
            }
        }
    }
    Ok(())
}

fn loss_sums<A: Real>(twin: &Twin) -> Result<(), String> {
    for (rows, experts, k) in SIZES {
        let padding_t = padding(rows);
        let x = logits::<A>(twin, rows, experts, &padding_t);
        // Runs that are longer than a chunk, and a sequence that comes twice.
        let sequence_t: Vec<usize> = (0..rows).map(|t| if t > 60 { 0 } else { t / 40 }).collect();
        let sets = RowSets { sequences: 3, sequence_t: &sequence_t, padding_t: &padding_t };
        for function in FUNCTIONS {
            let [cpu, gpu] = [&x.cpu, &x.gpu].map(|x| sums(function, x, k, &sets));
            agree(&format!("{rows} x {experts} {function:?}"), &cpu, &gpu, A::DTYPE.size_bytes() == 8)?;
        }
    }
    Ok(())
}

fn agree(what: &str, cpu: &BalanceSums, gpu: &BalanceSums, is_f64: bool) -> Result<(), String> {
    if (&cpu.counts_se, cpu.tokens) != (&gpu.counts_se, gpu.tokens) {
        return Err(format!("{what}: counts {gpu:?}, on the CPU {cpu:?}"));
    }
    let bound = if is_f64 { 1e-12 } else { 8e-6 };
    let far = |a: f64, b: f64| (a - b).abs() > bound * a.abs().max(1.0);
    let scores = cpu.score_sums_se.iter().zip(&gpu.score_sums_se);
    if cpu.score_sums_se.len() != gpu.score_sums_se.len()
        || scores.into_iter().any(|(&a, &b)| far(a, b))
        || far(cpu.z_sum, gpu.z_sum)
        || far(cpu.entropy_sum, gpu.entropy_sum)
    {
        return Err(format!("{what}: {gpu:?}, on the CPU {cpu:?}"));
    }
    Ok(())
}

fn gates<A: Real>(twin: &Twin) -> Result<(), String> {
    for n in [0, 1, 37, 600] {
        let (x, d) = (twin.normal::<A>([n], 37), twin.normal::<A>([n], 41));
        close("gate", &gate_forward(&x.cpu), &gate_forward(&x.gpu), 4.0)?;
        close("gate backward", &gate_backward(&d.cpu, &x.cpu), &gate_backward(&d.gpu, &x.gpu), 4.0)?;
        // Far out, where one of the two forms would overflow.
        let far = [-800.0, -90.0, 90.0, 800.0].map(A::from_f64);
        let on = |device| gate_forward(&Tensor::from_slice(device, [4], &far, Category::Activation));
        close("gate far out", &on(&twin.cpu), &on(&twin.gpu), 1.0)?;
    }
    Ok(())
}

fn noise<T: Float>(cases: &mut Cases) {
    case(cases, format!("router: jitter {}", T::DTYPE), |twin| {
        let stream = Stream::new(5, Purpose::Jitter(3));
        for (rows, width) in [(0, 4), (1, 1), (13, 37), (3, 600)] {
            let x = twin.normal::<T>([rows, width], 47);
            let indices: Vec<u64> = (0..rows as u64).map(|t| t * 977 + (t << 33)).collect();
            let [cpu, gpu] = [&x.cpu, &x.gpu].map(|x| jitter(x, &indices, &stream, 0.1));
            close(&format!("{rows} x {width}"), &cpu, &gpu, 1.0)?;
        }
        Ok(())
    });
}

fn of_type<A: Real>(cases: &mut Cases) {
    let mut add = |what: &str, run: fn(&Twin) -> Result<(), String>| {
        case(cases, format!("router: {what} {}", A::DTYPE), run);
    };
    add("choices", choices::<A>);
    add("rows that cannot be ranked", refusals::<A>);
    add("weights", weights::<A>);
    add("gradients", gradients::<A>);
    add("sums of the losses", loss_sums::<A>);
    add("gates of shared experts", gates::<A>);
}

/// The cases of this family.
pub(super) fn cases(cases: &mut Cases) {
    of_type::<f32>(cases);
    of_type::<f64>(cases);
    noise::<f32>(cases);
    noise::<f64>(cases);
    noise::<bf16>(cases);
}
