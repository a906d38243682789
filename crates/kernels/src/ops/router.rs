//! The router of a mixture-of-experts layer, from logits [t, e] in the accumulator type: which rows cannot be ranked,
//! which experts a token takes, their weights [t, k], the sums that balancing losses need, and the gradient of the
//! logits from all of these. The arithmetic of one row is in [`score`], [`choice`], [`weighting`] and [`balance`]; the
//! functions here run it on the device of the logits, so that of a forward on a GPU only expert ids and sums come to
//! the host. Ids and padding marks are as in [`choice`]. Leaves out choices that look at more than one row (Sinkhorn,
//! expert choice): they are made on the host from [`weighting`]'s scores.

use crate::dtype::{Element, Real};
use crate::ledger::Category;
use crate::tensor::Tensor;

pub mod balance;
pub mod choice;
mod cuda;
pub mod jitter;
pub mod score;
pub mod weighting;

use balance::{BalanceSums, RowSets, balance_backward, balance_sums};
use choice::TopK;
use score::{ScoreFunction, unrankable};
use weighting::Weighting;

/// The experts of every row.
#[derive(Clone, Debug)]
pub struct Chosen {
    /// Expert of each slot on the device of the logits, [t, k]; -1 in every slot of a padding row.
    pub expert_ids_tk: Tensor<i32>,
    /// The same on the host, where dispatch makes its plan.
    pub host_ids_tk: Vec<i32>,
}

fn assert_rows<A: Element>(logits_te: &Tensor<A>, rows: usize) -> usize {
    assert_eq!(logits_te.dims().len(), 2, "logits are [t, e]");
    assert_eq!(logits_te.rows(), rows, "one padding mark a row");
    logits_te.row_len()
}

/// The k best experts of every row by `rule`; padding rows (TRUE) take none. On a GPU the host waits for the ids.
///
/// # Errors
/// The first row that is no padding and cannot be ranked: it holds a NaN, or its largest value is not finite.
///
/// # Panics
/// When sizes disagree, or fewer than k experts are candidates.
pub fn choose<A: Real>(logits_te: &Tensor<A>, rule: &TopK<'_>, padding_t: &[bool]) -> Result<Chosen, usize> {
    let experts = assert_rows(logits_te, padding_t.len());
    let candidates = rule.groups.map_or(experts, |limit| experts / limit.groups * limit.keep);
    assert!(rule.k <= candidates, "{} experts of {candidates} candidates", rule.k);
    if let Some(gpu) = logits_te.device().gpu() {
        return cuda::choose(gpu, logits_te, rule, padding_t);
    }
    let logits = logits_te.data();
    let rows = logits.chunks_exact(experts).zip(padding_t);
    match rows.into_iter().position(|(row, padding)| !padding && unrankable(row).is_some()) {
        Some(row) => Err(row),
        None => {
            let ids = rule.select(logits, experts, padding_t);
            let shape = [padding_t.len(), rule.k];
            let expert_ids_tk = Tensor::from_slice(logits_te.device(), shape, &ids, Category::Activation);
            Ok(Chosen { expert_ids_tk, host_ids_tk: ids })
        }
    }
}

/// Makes the logits of rows that cannot be ranked zeros, padding rows left as they are; whether there were any (on a
/// GPU the host waits for the answer).
///
/// # Panics
/// When there is not one padding mark a row, or the logits are shared.
pub fn level_unrankable<A: Real>(logits_te: &mut Tensor<A>, padding_t: &[bool]) -> bool {
    let experts = assert_rows(logits_te, padding_t.len());
    if let Some(gpu) = logits_te.device().clone().gpu() {
        return cuda::level_unrankable(gpu, logits_te, padding_t);
    }
    let mut any = false;
    for (row, padding) in logits_te.data_mut().chunks_exact_mut(experts).zip(padding_t) {
        if !padding && unrankable(row).is_some() {
            row.fill(A::zero());
            any = true;
        }
    }
    any
}

/// Weights [t, k] of the chosen experts; 0 in an empty slot (id -1).
///
/// # Panics
/// When sizes disagree.
pub fn weights_forward<A: Real>(
    logits_te: &Tensor<A>,
    rule: &Weighting,
    expert_ids_tk: &Tensor<i32>,
) -> Tensor<A> {
    let experts = assert_rows(logits_te, expert_ids_tk.rows());
    if let Some(gpu) = logits_te.device().gpu() {
        return cuda::weights_forward(gpu, logits_te, rule, expert_ids_tk);
    }
    let weights = rule.weigh(logits_te.data(), experts, expert_ids_tk.data(), expert_ids_tk.dim(1));
    Tensor::from_slice(logits_te.device(), expert_ids_tk.shape(), &weights, Category::Activation)
}

/// The weights with 0 in every slot that is empty in `expert_ids_tk`, in place where nobody else holds them.
///
/// # Panics
/// When the shapes differ.
pub fn empty_slots_weigh_nothing<A: Real>(
    mut weights_tk: Tensor<A>,
    expert_ids_tk: &Tensor<i32>,
) -> Tensor<A> {
    assert_eq!(weights_tk.shape(), expert_ids_tk.shape(), "one weight a slot");
    if !weights_tk.is_unique() {
        weights_tk = weights_tk.duplicate(Category::Activation);
    }
    if let Some(gpu) = weights_tk.device().clone().gpu() {
        cuda::empty_slots_weigh_nothing(gpu, &mut weights_tk, expert_ids_tk);
        return weights_tk;
    }
    for (weight, &id) in weights_tk.data_mut().iter_mut().zip(expert_ids_tk.data()) {
        if id < 0 {
            *weight = A::zero();
        }
    }
    weights_tk
}

/// Sums for the balancing losses over the rows of `logits_te`, where `top_k` is the number of plain picks of a row. On a
/// GPU the host waits for them.
///
/// # Panics
/// When sizes disagree, or a sequence is not below `rows.sequences`.
pub fn sums<A: Real>(
    function: ScoreFunction,
    logits_te: &Tensor<A>,
    top_k: usize,
    rows: &RowSets<'_>,
) -> BalanceSums {
    let experts = assert_rows(logits_te, rows.padding_t.len());
    assert_eq!(rows.sequence_t.len(), rows.padding_t.len(), "one sequence a row");
    assert!(rows.sequence_t.iter().all(|&s| s < rows.sequences), "sequences below {}", rows.sequences);
    match logits_te.device().gpu() {
        Some(gpu) => cuda::sums(gpu, function, logits_te, top_k, rows),
        None => balance_sums(function, logits_te.data(), experts, top_k, rows),
    }
}

/// What the gradient of the logits is made of.
#[derive(Clone, Copy, Debug)]
pub struct Slopes<'a, A: Real> {
    /// How the weights were made.
    pub rule: Weighting,
    /// Chosen experts, [t, k].
    pub expert_ids_tk: &'a Tensor<i32>,
    /// Gradient of the weights, [t, k].
    pub dweights_tk: &'a Tensor<A>,
    /// Where the rows belong.
    pub rows: RowSets<'a>,
    /// Derivative of the losses by the normalised scores of [`Weighting::score`], [s, e].
    pub slopes_se: &'a [f64],
    /// Derivative of the losses by the square of a row's log-sum-exp.
    pub z_slope: f64,
}

/// Gradient [t, e] of the logits: from the weights, from the normalised scores and from the log-sum-exp.
///
/// # Panics
/// When sizes disagree.
pub fn backward<A: Real>(logits_te: &Tensor<A>, slopes: &Slopes<'_, A>) -> Tensor<A> {
    let Slopes { rule, expert_ids_tk, dweights_tk, rows, slopes_se, z_slope } = slopes;
    let experts = assert_rows(logits_te, rows.padding_t.len());
    assert_eq!(expert_ids_tk.rows(), logits_te.rows(), "rows of ids");
    assert_eq!(expert_ids_tk.shape(), dweights_tk.shape(), "one gradient a slot");
    assert_eq!(slopes_se.len(), rows.sequences * experts, "one slope a sequence and expert");
    if let Some(gpu) = logits_te.device().gpu() {
        return cuda::backward(gpu, logits_te, slopes);
    }
    let mut dlogits_te = Tensor::zeros(logits_te.device(), logits_te.shape(), Category::Activation);
    let (logits, dlogits, k) = (logits_te.data(), dlogits_te.data_mut(), expert_ids_tk.dim(1));
    rule.weigh_backward(logits, experts, expert_ids_tk.data(), k, dweights_tk.data(), dlogits);
    balance_backward(rule.score, logits, rows, slopes_se, *z_slope, dlogits);
    dlogits_te
}

/// The logistic function of each element: the gate of shared experts.
pub fn gate_forward<A: Real>(logits: &Tensor<A>) -> Tensor<A> {
    if let Some(gpu) = logits.device().gpu() {
        return cuda::gate(gpu, None, logits);
    }
    let values: Vec<A> = logits.data().iter().map(|&x| score::sigmoid(x)).collect();
    Tensor::from_slice(logits.device(), logits.shape(), &values, Category::Activation)
}

/// Gradient of the logits of [`gate_forward`] from that of its output: d g (1 - g).
///
/// # Panics
/// When the numbers of elements differ.
pub fn gate_backward<A: Real>(dgate: &Tensor<A>, gate: &Tensor<A>) -> Tensor<A> {
    assert_eq!(dgate.len(), gate.len(), "one gradient an element");
    if let Some(gpu) = gate.device().gpu() {
        return cuda::gate(gpu, Some(dgate), gate);
    }
    let pairs = dgate.data().iter().zip(gate.data());
    let values: Vec<A> = pairs.map(|(&d, &g)| d * g * (A::one() - g)).collect();
    Tensor::from_slice(gate.device(), gate.shape(), &values, Category::Activation)
}
