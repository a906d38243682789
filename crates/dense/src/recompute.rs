//! What a forward pass does not keep and the backward pass makes again. Recomputation never changes a bit: it
//! runs the same operations on the same inputs, and reuses what a feed-forward layer asked to keep (routing).
//! Source: selective recomputation, arXiv 2205.05198, section 5.

/// Flags of what is recomputed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecomputePolicy {
    /// The whole block: only its input is kept.
    pub block: bool,
    /// The attention layer: only its input is kept, not q, k, v, nor the output of the core.
    pub attention: bool,
    /// The output of the activation function, of dense feed-forward layers and of experts.
    pub activation: bool,
    /// The whole MoE layer except its routing.
    pub moe: bool,
    /// The gathered input of tensor-parallel layers: a rank keeps its own rows and gathers again.
    pub tp_input: bool,
}

impl RecomputePolicy {
    /// Nothing is recomputed.
    pub const NONE: RecomputePolicy =
        RecomputePolicy { block: false, attention: false, activation: false, moe: false, tp_input: false };
    /// Whole blocks are recomputed.
    pub const BLOCK: RecomputePolicy = RecomputePolicy { block: true, ..RecomputePolicy::NONE };

    /// Every combination that differs in what it keeps, with its name in settings.
    pub const NAMED: [(&'static str, RecomputePolicy); 7] = [
        ("none", RecomputePolicy::NONE),
        ("block", RecomputePolicy::BLOCK),
        ("attention", RecomputePolicy { attention: true, ..RecomputePolicy::NONE }),
        ("activation", RecomputePolicy { activation: true, ..RecomputePolicy::NONE }),
        ("moe", RecomputePolicy { moe: true, ..RecomputePolicy::NONE }),
        ("tp-input", RecomputePolicy { tp_input: true, ..RecomputePolicy::NONE }),
        ("selective", RecomputePolicy { attention: true, activation: true, ..RecomputePolicy::NONE }),
    ];

    /// The policy of a name in settings.
    pub fn from_name(name: &str) -> Option<RecomputePolicy> {
        RecomputePolicy::NAMED.iter().find(|(n, _)| *n == name).map(|(_, policy)| *policy)
    }
}
