//! Output head and cross-entropy, vocabulary-parallel: logits = x Wᵀ with W [V, d] cut by rows over TP (V padded
//! to a multiple of TP; the padded columns never count), and the negative log-likelihood of the targets, computed
//! from each rank's maximum, sum of exponentials and target logit. Rows are taken in chunks and the backward of a
//! chunk follows its forward at once, so that neither a full row of logits on one TP rank nor the logits of all
//! rows ever exist. The gradient is divided here, once, by the valid targets of the whole global batch; the loss
//! is returned as a plain sum. Source: Megatron-LM (arXiv 1909.08053, section 3).

use plica_comm::{Mesh, Purpose, Reduce};
use plica_folding::axis::Axis;
use plica_folding::groups::Family;
use plica_kernels::ops::{cross_entropy as ce, elementwise, gemm};
use plica_kernels::{Category, Device, Float, Tensor};

use crate::cx::{Cx, Trainable};
use crate::embedding::{Embedding, declare_table, first_id, table_spec};
use crate::error::Error;
use crate::param::{Init, ParamId, ParamSpecs};
use crate::phases::Phase;

/// Logits of a chunk that are worth one more row: rows = this / local vocabulary.
const CHUNK_ELEMENTS: usize = 1 << 21;
/// Fewest rows of a chunk.
const MIN_CHUNK_ROWS: usize = 64;

/// A sum of negative log-likelihoods (natural logarithm).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LossSum {
    /// Sum over the valid targets of the micro-batch; the same on all TP ranks.
    pub nll_sum: f64,
    /// Number of valid targets of the micro-batch.
    pub valid_targets: u64,
}

impl LossSum {
    /// Adds another micro-batch.
    pub fn add(&mut self, other: LossSum) {
        self.nll_sum += other.nll_sum;
        self.valid_targets += other.valid_targets;
    }

    /// The mean; 0 where no target is valid.
    pub fn mean(&self) -> f64 {
        if self.valid_targets == 0 { 0.0 } else { self.nll_sum / self.valid_targets as f64 }
    }

    /// The sum over all data-parallel ranks.
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub fn reduced<T: Float>(self, cx: &Cx<T>) -> Result<LossSum, Error> {
        let own = [self.nll_sum, self.valid_targets as f64];
        let group = cx.mesh.group(Family::DpCp);
        let all = group.all_reduce_f64(Purpose::Metrics, cx.device, &own, Reduce::Sum)?;
        Ok(LossSum { nll_sum: all[0], valid_targets: all[1] as u64 })
    }
}

/// The output head with its loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    table: ParamId,
    vocabulary: usize,
    chunk_elements: usize,
}

/// What a pass over the chunks leaves behind.
struct Pass<T: Float> {
    loss: LossSum,
    dx_td: Option<Tensor<T>>,
}

impl Head {
    /// Declares a weight [`vocabulary`, `width`] of its own.
    pub fn new(specs: &mut ParamSpecs, name: &str, vocabulary: usize, width: usize, init: Init) -> Head {
        let table = declare_table(specs, name, (vocabulary, width), init);
        Head { table, vocabulary, chunk_elements: CHUNK_ELEMENTS }
    }

    /// A head that shares the table of the embedding; both add to the same gradient.
    pub fn tied(embedding: &Embedding, vocabulary: usize) -> Head {
        Head { table: embedding.table(), vocabulary, chunk_elements: CHUNK_ELEMENTS }
    }

    /// A head whose table is the embedding of an earlier pipeline stage: it declares the second copy of `name`.
    pub fn tied_copy(
        specs: &mut ParamSpecs,
        name: &str,
        vocabulary: usize,
        width: usize,
        init: Init,
    ) -> Head {
        let spec = table_spec(name, (vocabulary, width), init).second_copy();
        Head { table: specs.add(spec), vocabulary, chunk_elements: CHUNK_ELEMENTS }
    }

    /// The same head with another size of the chunks, in logits of one rank.
    pub fn with_chunk_elements(self, chunk_elements: usize) -> Head {
        Head { chunk_elements, ..self }
    }

    /// Handle of the weight.
    pub fn table(&self) -> ParamId {
        self.table
    }

    /// Loss of the micro-batch, and the gradient of this TP rank's rows `x_td` [t, d] (after the final norm) of
    /// the mean over the global batch. Adds to the gradient of the weight.
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub fn forward_backward<T: Trainable>(
        &self,
        x_td: &Tensor<T>,
        cx: &mut Cx<T>,
    ) -> Result<(LossSum, Tensor<T>), Error> {
        let _phase = cx.phase(Phase::Loss);
        let pass = self.pass(x_td, true, cx)?;
        let dx_td = pass.dx_td.expect("a backward pass makes a gradient");
        Ok((pass.loss, cx.scatter_tokens(dx_td)?))
    }

    /// Loss of the micro-batch alone (validation).
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub fn forward<T: Trainable>(&self, x_td: &Tensor<T>, cx: &mut Cx<T>) -> Result<LossSum, Error> {
        let _phase = cx.phase(Phase::Loss);
        Ok(self.pass(x_td, false, cx)?.loss)
    }

    /// All logits [T, V] of this context rank's rows on every TP rank, for tests and for reading off a model's answer:
    /// the one place where they exist as a whole.
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub fn logits<T: Trainable>(&self, x_td: &Tensor<T>, cx: &Cx<T>) -> Result<Tensor<T::Acc>, Error> {
        let _phase = cx.phase(Phase::Loss);
        let x_td = cx.gather_tokens(x_td)?;
        let own = gemm::matmul_nt_acc(&x_td, &*cx.weight(self.table));
        let (rows, columns) = (own.rows(), own.row_len());
        let all = cx.mesh.group(Family::Tp).all_gather(Purpose::TensorParallel, &own)?;
        let parts: Vec<Tensor<T::Acc>> = (0..cx.params.place().size(Axis::Tp))
            .map(|rank| {
                let valid = self.vocabulary.saturating_sub(rank * columns).min(columns);
                elementwise::take_columns(&all.slice_rows(rank * rows..(rank + 1) * rows), 0..valid)
            })
            .collect();
        Ok(elementwise::concat_columns(&parts.iter().collect::<Vec<_>>()))
    }

    /// Columns of this rank that are real.
    fn valid_columns<T: Float>(&self, cx: &Cx<T>) -> usize {
        let columns = cx.params.local_shape(self.table)[0];
        self.vocabulary.saturating_sub(first_id(self.table, cx)).min(columns)
    }

    fn pass<T: Trainable>(&self, x_td: &Tensor<T>, backward: bool, cx: &mut Cx<T>) -> Result<Pass<T>, Error> {
        let x_td = cx.gather_tokens(x_td)?;
        let (rows, width) = (x_td.rows(), x_td.row_len());
        let weight = cx.weight(self.table);
        let chunk_rows = (self.chunk_elements / weight.rows().max(1)).max(MIN_CHUNK_ROWS);
        let mut losses = Vec::new();
        // One chunk: its own gradient is the whole one.
        let many = backward && (rows > chunk_rows || rows == 0);
        let mut dx_td = many.then(|| Tensor::empty(cx.device, [rows, width], Category::Activation));
        for start in (0..rows).step_by(chunk_rows) {
            let chunk = start..(start + chunk_rows).min(rows);
            let x_chunk = x_td.slice_rows(chunk.clone());
            let targets = cx.tokens.targets.slice_rows(chunk.clone());
            let logits = gemm::matmul_nt_acc(&x_chunk, &*weight);
            let (nll_t, dlogits) = self.loss_of_chunk(logits, &targets, backward, cx)?;
            losses.push(nll_t);
            let Some(dlogits) = dlogits else { continue };
            let dx_chunk = gemm::matmul_nn(&dlogits, &*weight);
            // Not put off: that would keep the logits of all rows.
            gemm::accumulate_tn(cx.grad(self.table), &dlogits, &x_chunk);
            match &mut dx_td {
                Some(dx_td) => elementwise::copy_rows(dx_td, start, &dx_chunk, 0..chunk.len()),
                None => dx_td = Some(dx_chunk),
            }
        }
        // Read when everything is queued: a GPU works on meanwhile.
        let total = |nll_t: &Tensor<T::Acc>| nll_t.to_vec().iter().map(|nll| nll.to_f64()).sum::<f64>();
        let nll_sum = losses.iter().map(total).fold(0.0, |sum, chunk| sum + chunk);
        Ok(Pass { loss: LossSum { nll_sum, valid_targets: cx.tokens.valid_targets }, dx_td })
    }

    /// The losses of some rows, and the gradient of their logits.
    fn loss_of_chunk<T: Trainable>(
        &self,
        logits_tv: Tensor<T::Acc>,
        targets: &Tensor<i32>,
        backward: bool,
        cx: &Cx<T>,
    ) -> Result<(Tensor<T::Acc>, Option<Tensor<T::Acc>>), Error> {
        let scale = match cx.tokens.global_valid_targets {
            0 => 0.0,
            valid => 1.0 / valid as f64,
        };
        let valid_columns = self.valid_columns(cx);
        let group = cx.mesh.group(Family::Tp);
        if group.is_single() && backward {
            let (nll_t, dlogits) = ce::cross_entropy_in_place(logits_tv, targets, valid_columns, scale);
            return Ok((nll_t, Some(dlogits)));
        }
        if group.is_single() {
            return Ok((ce::cross_entropy(&logits_tv, targets).0, None));
        }
        let rows = targets.len();
        let first_id = first_id(self.table, cx);
        let max_t = ce::ce_local_max(&logits_tv, valid_columns);
        let comm = cx.phase(Phase::TpComm);
        let max_t = group.all_reduce(Purpose::TensorParallel, &max_t, Reduce::Max)?;
        drop(comm);
        let (sum_exp, target_logit) =
            ce::ce_local_sum_exp_and_target(&logits_tv, &max_t, targets, first_id, valid_columns);
        let comm = cx.phase(Phase::TpComm);
        let both = elementwise::concat_rows(&[&sum_exp, &target_logit]);
        let both = group.all_reduce(Purpose::TensorParallel, &both, Reduce::Sum)?;
        drop(comm);
        let (sum_exp, target_logit) = (both.slice_rows(0..rows), both.slice_rows(rows..2 * rows));
        let nll_t = ce::ce_nll(&max_t, &sum_exp, &target_logit, targets);
        let dlogits = backward.then(|| {
            ce::ce_backward_in_place(logits_tv, &max_t, &sum_exp, targets, first_id, valid_columns, scale)
        });
        Ok((nll_t, dlogits))
    }
}

/// Valid targets of the whole global batch from the number that this rank's DP coordinate holds in all its
/// micro-batches: the one number by which the loss is divided.
///
/// # Errors
/// [`Error::Comm`].
pub fn global_valid_targets(mesh: &Mesh, device: &Device, own: u64) -> Result<u64, Error> {
    let group = mesh.group(Family::DpCp);
    let all = group.all_reduce_f64(Purpose::Metrics, device, &[own as f64], Reduce::Sum)?;
    Ok(all[0] as u64)
}
