//! Launches of `router.cu`. What comes to the host: expert ids with the number of the first row that cannot be ranked
//! (one copy), the sums of the losses (one copy), and whether rows were levelled.

use super::balance::{BalanceSums, RowSets};
use super::choice::TopK;
use super::score::ScoreFunction;
use super::weighting::Weighting;
use super::{Chosen, Slopes};
use crate::arguments;
use crate::cuda::{Gpu, source::ROUTER};
use crate::device::Device;
use crate::dtype::Real;
use crate::ledger::Category;
use crate::tensor::Tensor;

/// Threads of a block: eight warps, a row each.
const THREADS: u32 = 256;
/// Shared memory that every card gives a block.
const SHARED_BYTES: usize = 48 << 10;
/// Rows of a chunk whose sums are made by one block; a warp's lanes take one each.
const CHUNK_ROWS: usize = 32;

/// Numbers of `enum Function`.
fn code(function: ScoreFunction) -> usize {
    match function {
        ScoreFunction::Softmax => 0,
        ScoreFunction::Sigmoid => 1,
        ScoreFunction::SqrtSoftplus => 2,
    }
}
/// Logits are ranked as they are.
const LOGIT: usize = 3;

fn upload<A: Real>(device: &Device, values: &[f64]) -> Tensor<A> {
    let values: Vec<A> = values.iter().map(|&v| A::from_f64(v)).collect();
    Tensor::from_slice(device, [values.len()], &values, Category::Workspace)
}

/// Marks of the padding rows; none where there are no such rows.
fn upload_padding(device: &Device, padding_t: &[bool]) -> Option<Tensor<u8>> {
    let marks: &[u8] = bytemuck::cast_slice(padding_t);
    let any = padding_t.contains(&true);
    any.then(|| Tensor::from_slice(device, [marks.len()], marks, Category::Workspace))
}

fn upload_sequences(device: &Device, sequence_t: &[usize]) -> Tensor<i32> {
    let sequence_t: Vec<i32> = sequence_t.iter().map(|&s| s as i32).collect();
    Tensor::from_slice(device, [sequence_t.len()], &sequence_t, Category::Workspace)
}

/// Threads and bytes of blocks whose warps have `warp_bytes` of shared memory each.
fn warps_with(warp_bytes: usize) -> (u32, usize) {
    assert!(warp_bytes <= SHARED_BYTES, "a row's scores take {warp_bytes} bytes of {SHARED_BYTES}");
    let warps = (SHARED_BYTES / warp_bytes.max(1)).clamp(1, THREADS as usize / 32);
    (32 * warps as u32, warps * warp_bytes)
}

fn blocks(rows: usize, threads: u32) -> [u32; 3] {
    Gpu::blocks(rows, threads as usize / 32)
}

/// See [`super::choose`].
pub(super) fn choose<A: Real>(
    gpu: &Gpu,
    logits_te: &Tensor<A>,
    rule: &TopK<'_>,
    padding_t: &[bool],
) -> Result<Chosen, usize> {
    let device = logits_te.device();
    let (tokens, experts, k) = (logits_te.rows(), logits_te.row_len(), rule.k);
    assert!(tokens.max(experts) < i32::MAX as usize, "rows and experts are counted in 31 bits");
    let (groups, keep, score_k) = rule.groups.map_or((0, 0, 0), |g| (g.groups, g.keep, g.score_k));
    assert!(groups == 0 || score_k <= experts / groups, "{score_k} scores of a group");
    let function = if rule.weighting.after_top_k() { LOGIT } else { code(rule.weighting.score) };
    let [shift, bias] = [rule.shift_e, rule.bias_e].map(|v| v.map(|v| upload::<A>(device, v)));
    let padding = upload_padding(device, padding_t);
    // The number of the first bad row stands behind the ids, so that both are one copy.
    let mut ids = Tensor::<i32>::full(device, [tokens + 1, k], i32::MAX, Category::Activation);
    let first_bad = ids.address_mut() + (tokens * k * size_of::<i32>()) as u64;
    let warp_bytes = (experts * size_of::<A>() + groups * (size_of::<A>() + 4)).next_multiple_of(16);
    let (threads, shared_bytes) = warps_with(warp_bytes);
    let arguments = arguments![
        logits_te,
        shift.as_ref(),
        bias.as_ref(),
        padding.as_ref(),
        &mut ids,
        first_bad,
        tokens,
        experts,
        k,
        function,
        groups,
        keep,
        score_k,
        warp_bytes,
    ];
    let kernel = format!("router_choose_{}", A::DTYPE);
    gpu.launch_shared(&ROUTER, &kernel, blocks(tokens, threads), threads, shared_bytes, &arguments);
    let mut host_ids_tk = ids.to_vec();
    let first_bad = host_ids_tk[tokens * k];
    host_ids_tk.truncate(tokens * k);
    match first_bad {
        i32::MAX => Ok(Chosen { expert_ids_tk: ids.slice_rows(0..tokens), host_ids_tk }),
        row => Err(row as usize),
    }
}

/// See [`super::level_unrankable`].
pub(super) fn level_unrankable<A: Real>(gpu: &Gpu, logits_te: &mut Tensor<A>, padding_t: &[bool]) -> bool {
    let (tokens, experts) = (logits_te.rows(), logits_te.row_len());
    let padding = upload_padding(logits_te.device(), padding_t);
    let mut count = Tensor::<i32>::zeros(logits_te.device(), [1], Category::Workspace);
    let kernel = format!("router_level_{}", A::DTYPE);
    let arguments = arguments![logits_te, padding.as_ref(), &mut count, tokens, experts];
    gpu.launch(&ROUTER, &kernel, blocks(tokens, THREADS), THREADS, &arguments);
    count.item() > 0
}

/// See [`super::weights_forward`].
pub(super) fn weights_forward<A: Real>(
    gpu: &Gpu,
    logits_te: &Tensor<A>,
    rule: &Weighting,
    ids: &Tensor<i32>,
) -> Tensor<A> {
    let (tokens, experts, k) = (logits_te.rows(), logits_te.row_len(), ids.dim(1));
    let mut weights_tk = Tensor::empty(logits_te.device(), ids.shape(), Category::Activation);
    let arguments = arguments![
        logits_te,
        ids,
        &mut weights_tk,
        tokens,
        experts,
        k,
        code(rule.score),
        usize::from(rule.after_top_k()),
        usize::from(rule.renormalize),
        A::from_f64(rule.scaling_factor),
    ];
    let kernel = format!("router_weights_{}", A::DTYPE);
    gpu.launch(&ROUTER, &kernel, blocks(tokens, THREADS), THREADS, &arguments);
    weights_tk
}

/// See [`super::empty_slots_weigh_nothing`].
pub(super) fn empty_slots_weigh_nothing<A: Real>(gpu: &Gpu, weights: &mut Tensor<A>, ids: &Tensor<i32>) {
    let n = weights.len();
    let kernel = format!("router_mask_{}", A::DTYPE);
    gpu.launch(&ROUTER, &kernel, Gpu::blocks(n, THREADS as usize), THREADS, &arguments![weights, ids, n]);
}

/// See [`super::backward`].
pub(super) fn backward<A: Real>(gpu: &Gpu, logits_te: &Tensor<A>, slopes: &Slopes<'_, A>) -> Tensor<A> {
    let Slopes { rule, expert_ids_tk, dweights_tk, rows, slopes_se, z_slope } = slopes;
    let (device, k) = (logits_te.device(), expert_ids_tk.dim(1));
    let (tokens, experts) = (logits_te.rows(), logits_te.row_len());
    let padding = upload_padding(device, rows.padding_t);
    let sequences = upload_sequences(device, rows.sequence_t);
    let any_slope = slopes_se.iter().any(|&slope| slope != 0.0);
    let slopes_se = any_slope.then(|| upload::<A>(device, slopes_se));
    let mut dlogits_te = Tensor::empty(device, logits_te.shape(), Category::Activation);
    let arguments = arguments![
        logits_te,
        *expert_ids_tk,
        *dweights_tk,
        &sequences,
        padding.as_ref(),
        slopes_se.as_ref(),
        &mut dlogits_te,
        tokens,
        experts,
        k,
        code(rule.score),
        usize::from(rule.after_top_k()),
        usize::from(rule.renormalize),
        A::from_f64(rule.scaling_factor),
        A::from_f64(2.0 * z_slope),
    ];
    let kernel = format!("router_backward_{}", A::DTYPE);
    gpu.launch(&ROUTER, &kernel, blocks(tokens, THREADS), THREADS, &arguments);
    dlogits_te
}

/// Runs of rows of one sequence, cut into chunks, in the order of the sequences: first row and number of rows of each
/// chunk, and where the chunks of each sequence begin.
fn chunks_of(rows: &RowSets<'_>) -> (Vec<i64>, Vec<i64>) {
    let mut of_sequence: Vec<Vec<[i64; 2]>> = vec![Vec::new(); rows.sequences];
    let mut first = 0;
    for run in rows.sequence_t.chunk_by(|a, b| a == b) {
        for chunk in run.chunks(CHUNK_ROWS) {
            of_sequence[run[0]].push([first as i64, chunk.len() as i64]);
            first += chunk.len();
        }
    }
    let mut offsets = vec![0];
    for chunks in &of_sequence {
        offsets.push(offsets[offsets.len() - 1] + chunks.len() as i64);
    }
    (of_sequence.into_iter().flatten().flatten().collect(), offsets)
}

/// See [`super::sums`].
pub(super) fn sums<A: Real>(
    gpu: &Gpu,
    function: ScoreFunction,
    logits_te: &Tensor<A>,
    k: usize,
    rows: &RowSets<'_>,
) -> BalanceSums {
    let device = logits_te.device();
    let (tokens, experts, sequences) = (logits_te.rows(), logits_te.row_len(), rows.sequences);
    assert!(k <= experts, "{k} experts of {experts}");
    let (chunks, offsets) = chunks_of(rows);
    let chunk_count = chunks.len() / 2;
    let list = |values: &[i64]| Tensor::from_slice(device, [values.len()], values, Category::Workspace);
    let (chunks, offsets) = (list(&chunks), list(&offsets));
    let padding = upload_padding(device, rows.padding_t);
    let sequence_t = upload_sequences(device, rows.sequence_t);
    let mut counts_se = Tensor::<i32>::zeros(device, [sequences, experts], Category::Workspace);
    let mut of_rows = Tensor::<f64>::empty(device, [tokens, 4], Category::Workspace);
    let mut partial = Tensor::<f64>::empty(device, [chunk_count, experts + 3], Category::Workspace);
    let mut totals = Tensor::<f64>::empty(device, [sequences, 2 * experts + 3], Category::Workspace);

    let warp_bytes = (experts * size_of::<A>()).next_multiple_of(16);
    let (threads, shared_bytes) = warps_with(warp_bytes);
    let padding = padding.as_ref();
    let function = code(function);
    let arguments = arguments![
        logits_te,
        &sequence_t,
        padding,
        &mut counts_se,
        &mut of_rows,
        tokens,
        experts,
        k,
        function,
        warp_bytes
    ];
    let kernel = format!("router_rows_{}", A::DTYPE);
    gpu.launch_shared(&ROUTER, &kernel, blocks(tokens, threads), threads, shared_bytes, &arguments);
    let arguments =
        arguments![logits_te, padding, &of_rows, &chunks, &mut partial, chunk_count, experts, function];
    let kernel = format!("router_sums_{}", A::DTYPE);
    gpu.launch(&ROUTER, &kernel, Gpu::blocks(chunk_count, 1), THREADS, &arguments);
    let total_blocks = Gpu::blocks(totals.len(), THREADS as usize);
    let arguments = arguments![&partial, &offsets, &counts_se, &mut totals, sequences, experts];
    gpu.launch(&ROUTER, "router_totals", total_blocks, THREADS, &arguments);
    unpack(&totals.to_vec(), sequences, experts)
}

/// The sums from the table that `router_totals` makes: by sequence the score sums, log-sum-exp squared, entropy,
/// number of rows, counts.
fn unpack(totals: &[f64], sequences: usize, experts: usize) -> BalanceSums {
    let mut sums = BalanceSums::default();
    for row in totals.chunks_exact(2 * experts + 3).take(sequences) {
        let (score_sums_e, rest) = row.split_at(experts);
        sums.score_sums_se.extend_from_slice(score_sums_e);
        sums.z_sum += rest[0];
        sums.entropy_sum += rest[1];
        sums.tokens += rest[2] as u64;
        sums.counts_se.extend(rest[3..].iter().map(|&count| count as i64));
    }
    sums
}

/// See [`super::gate_forward`] (no gradient given) and [`super::gate_backward`].
pub(super) fn gate<A: Real>(gpu: &Gpu, dgate: Option<&Tensor<A>>, x: &Tensor<A>) -> Tensor<A> {
    let mut out = Tensor::empty(x.device(), x.shape(), Category::Activation);
    let n = x.len();
    let kernel = format!("router_gate_{}", A::DTYPE);
    let arguments = arguments![dgate, x, &mut out, n];
    gpu.launch(&ROUTER, &kernel, Gpu::blocks(n, THREADS as usize), THREADS, &arguments);
    out
}
