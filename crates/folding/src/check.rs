//! The rules that need the model: what each axis must divide.
//!
//! | size | must be divisible by |
//! |---|---|
//! | heads, kv heads, dense ffn, shared-expert ffn | TP |
//! | expert ffn | ETP |
//! | experts | EP |
//! | global batch | DP; at least micro batch · DP |
//! | sequence length, where it must not be filled up ([`Layout::check_sequence`]) | 2·CP (CP > 1), and TP with sequence parallelism |
//!
//! Layers need not divide by PP (8, 8, 7, 7 is legal), but no stage may be empty. A vocabulary that does not
//! divide by TP is padded, see [`padded_vocab`].

use crate::axis::Axis;
use crate::error::LayoutError;
use crate::layout::Layout;
use crate::search::{divisors, either_side, multiples};

/// The sizes of a model and a batch that a layout divides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelDims {
    /// Transformer blocks.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Width of the dense feed-forward layers; 0 where the model has none.
    pub ffn: usize,
    /// Width of one expert; 0 where the model has no experts.
    pub moe_ffn: usize,
    /// Width of the shared expert; 0 where there is none.
    pub shared_ffn: usize,
    /// Routed experts a layer; 0 for a dense model.
    pub experts: usize,
    /// Vocabulary before padding.
    pub vocab: usize,
    /// Sequences of one optimizer step over all ranks.
    pub global_batch: usize,
    /// Sequences of one micro-batch on one rank.
    pub micro_batch: usize,
}

/// The vocabulary padded up to a multiple of TP: 10 over 4 is 12. The padding takes no part in the loss.
pub fn padded_vocab(vocab: usize, tp: usize) -> usize {
    vocab.next_multiple_of(tp)
}

impl Layout {
    /// Holds the model against the layout.
    ///
    /// # Errors
    /// Every broken rule, not only the first, each with the axis, both numbers and the nearest valid values.
    pub fn check_model(&self, dims: &ModelDims) -> Result<(), Vec<LayoutError>> {
        let mut errors = zero_sizes(dims);
        let mut divides = |what, value, axis| {
            if value > 0 && !usize::is_multiple_of(value, self.size(axis)) {
                errors.push(self.indivisible(what, value, axis));
            }
        };
        divides("heads", dims.heads, Axis::Tp);
        divides("kv heads", dims.kv_heads, Axis::Tp);
        divides("ffn", dims.ffn, Axis::Tp);
        divides("shared expert ffn", dims.shared_ffn, Axis::Tp);
        divides("experts", dims.experts, Axis::Ep);
        if dims.experts > 0 {
            divides("expert ffn", dims.moe_ffn, Axis::Etp);
        }
        if dims.experts == 0 && self.ep() > 1 {
            errors.push(LayoutError::NoExperts { axis: Axis::Ep, size: self.ep() });
        }
        if dims.layers > 0 && dims.layers < self.pp() {
            errors.push(self.too_few_layers(dims.layers));
        }
        if dims.global_batch > 0 && dims.micro_batch > 0 {
            errors.extend(self.micro_batch_count(dims.global_batch, dims.micro_batch).err());
        }
        if errors.is_empty() { Ok(()) } else { Err(errors) }
    }

    /// Micro-batches that each data-parallel rank runs in one step: global batch / DP in parts of `micro_batch`, of
    /// which the last one may be smaller. So every data-parallel rank runs as many, of the same sizes.
    ///
    /// # Errors
    /// Zero sizes, overflow, a batch that does not divide over DP or fills no micro-batch.
    pub fn micro_batch_count(&self, global_batch: usize, micro_batch: usize) -> Result<usize, LayoutError> {
        for (name, value) in [("global_batch", global_batch), ("micro_batch", micro_batch)] {
            if value == 0 {
                return Err(LayoutError::ZeroSize { name });
            }
        }
        let dp = self.dp();
        let Some(least) = micro_batch.checked_mul(dp) else {
            return Err(LayoutError::Overflow { product: format!("micro batch·DP = {micro_batch}·{dp}") });
        };
        if global_batch >= least && global_batch.is_multiple_of(dp) {
            return Ok((global_batch / dp).div_ceil(micro_batch));
        }
        let remedy = match global_batch < least {
            true => format!("global batch {least}"),
            false => multiples("global batch", dp, global_batch).unwrap_or_else(|| "a smaller DP".into()),
        };
        Err(LayoutError::Batch { global_batch, micro_batch, dp, remedy })
    }

    /// Whether the layers divide evenly over `chunks` chunks a rank, as an interleaved pipeline needs.
    ///
    /// # Errors
    /// Zero chunks, overflow, or layers that do not divide by PP·V.
    pub fn check_chunks(&self, layers: usize, chunks: usize) -> Result<(), LayoutError> {
        if chunks == 0 {
            return Err(LayoutError::ZeroSize { name: "virtual chunks" });
        }
        let pp = self.pp();
        let Some(parts) = pp.checked_mul(chunks) else {
            return Err(LayoutError::Overflow { product: format!("PP·V = {pp}·{chunks}") });
        };
        if layers > 0 && layers.is_multiple_of(parts) {
            return Ok(());
        }
        let remedy = multiples("layers", parts, layers).unwrap_or_else(|| "fewer chunks".into());
        Err(LayoutError::VirtualStages { layers, pp, chunks, remedy })
    }

    /// Whether a sequence can be shared without filling it up: by 2·CP chunks where CP > 1, and each rank's part by
    /// TP where sequence parallelism is on. Training runs fill up what does not divide and need not ask.
    ///
    /// # Errors
    /// A zero length or one that does not divide, with the nearest valid lengths.
    pub fn check_sequence(&self, sequence: usize, sequence_parallel: bool) -> Result<(), LayoutError> {
        if sequence == 0 {
            return Err(LayoutError::ZeroSize { name: "sequence length" });
        }
        let tp = if sequence_parallel { self.tp() } else { 1 };
        // The part of a context rank is two chunks, so its length s/CP must also divide by TP.
        let (divisor, rule) = match (self.cp(), tp) {
            (1, tp) => (tp, format!("TP = {tp}")),
            (cp, 1) => (2 * cp, format!("2·CP = 2·{cp}")),
            (cp, tp) => {
                let chunks = if tp.is_multiple_of(2) { tp } else { 2 * tp };
                (cp * chunks, format!("CP·lcm(2, TP) = {cp}·{chunks}"))
            }
        };
        if sequence.is_multiple_of(divisor) {
            return Ok(());
        }
        let remedy = multiples("sequence length", divisor, sequence).unwrap_or_else(|| "a smaller CP".into());
        Err(LayoutError::Sequence { sequence, rule, divisor, remedy })
    }

    /// Whether `instances` optimizer instances cut both the dense (DP·CP) and the expert (EDP) replicas evenly.
    ///
    /// # Errors
    /// Zero instances, or each group size that does not divide.
    pub fn check_instances(&self, instances: usize) -> Result<(), Vec<LayoutError>> {
        if instances == 0 {
            return Err(vec![LayoutError::ZeroSize { name: "optimizer instances" }]);
        }
        let (dp_cp, edp) = (self.dp() * self.cp(), self.edp());
        let valid: Vec<usize> = divisors(dp_cp).into_iter().filter(|&d| edp.is_multiple_of(d)).collect();
        let refused =
            [("DP·CP", dp_cp), ("EDP", edp)].into_iter().filter(|(_, s)| !s.is_multiple_of(instances));
        let errors: Vec<LayoutError> = refused
            .map(|(what, size)| {
                let remedy = either_side("optimizer instances", &valid, instances).unwrap_or_default();
                LayoutError::Instances { what, size, instances, dp_cp, edp, remedy }
            })
            .collect();
        if errors.is_empty() { Ok(()) } else { Err(errors) }
    }

    /// Sizes of `axis` that keep both equations true with every other given axis as it is.
    fn valid_sizes(&self, axis: Axis) -> Vec<usize> {
        let stage = self.world() / self.pp();
        match axis {
            Axis::Tp => divisors(stage / self.cp()),
            Axis::Cp => divisors(stage / self.tp()),
            Axis::Etp => divisors(stage / self.ep()),
            Axis::Ep => divisors(stage / self.etp()),
            Axis::Pp => {
                let (attention, expert) = (self.tp() * self.cp(), self.etp() * self.ep());
                let fits =
                    |pp: &usize| [attention, expert].iter().all(|p| (self.world() / pp).is_multiple_of(*p));
                divisors(self.world()).into_iter().filter(fits).collect()
            }
            Axis::Dp | Axis::Edp => vec![self.size(axis)],
        }
    }

    fn indivisible(&self, what: &'static str, value: usize, axis: Axis) -> LayoutError {
        let size = self.size(axis);
        let candidates: Vec<usize> =
            self.valid_sizes(axis).into_iter().filter(|c| value.is_multiple_of(*c)).collect();
        let parts = [either_side(axis.name(), &candidates, size), multiples(what, size, value)];
        let remedy = parts.into_iter().flatten().collect::<Vec<_>>().join("; ");
        LayoutError::Indivisible { what, value, axis, size, remedy }
    }

    fn too_few_layers(&self, layers: usize) -> LayoutError {
        let pp = self.pp();
        let candidates: Vec<usize> =
            self.valid_sizes(Axis::Pp).into_iter().filter(|&c| c <= layers).collect();
        let parts = [either_side("PP", &candidates, pp), Some(format!("layers {pp}"))];
        let remedy = parts.into_iter().flatten().collect::<Vec<_>>().join("; ");
        LayoutError::TooFewLayers { layers, pp, remedy }
    }
}

/// Sizes that no model has zero of, and widths without which the stated parts cannot be.
fn zero_sizes(dims: &ModelDims) -> Vec<LayoutError> {
    let required = [
        ("layers", dims.layers),
        ("heads", dims.heads),
        ("kv_heads", dims.kv_heads),
        ("vocab", dims.vocab),
        ("global_batch", dims.global_batch),
        ("micro_batch", dims.micro_batch),
        ("moe_ffn", if dims.experts > 0 { dims.moe_ffn } else { 1 }),
        ("ffn", if dims.experts > 0 { 1 } else { dims.ffn }),
    ];
    required.into_iter().filter(|(_, v)| *v == 0).map(|(name, _)| LayoutError::ZeroSize { name }).collect()
}
