//! The published formulas of the activations that one GPT-style layer saves, in bytes, for 2-byte activations and
//! 1-byte masks (Korthikanti et al., arXiv 2205.05198, table 2), with s·b·h the elements of the residual stream
//! and a heads:
//!
//! | form | bytes |
//! |---|---|
//! | no parallelism | sbh (34 + 5as/h) |
//! | tensor parallel, t ranks | sbh (10 + 24/t + 5as/(ht)) |
//! | with sequence parallelism | sbh/t (34 + 5as/h) |
//! | with it and selective recomputation | 34 sbh/t |
//!
//! They leave out what is small: here the mean and 1/std of every row of both LayerNorms, 4 bytes each
//! ([`statistics_bytes`]). The ledger shows the sum of the two and not a byte more.

/// Sizes of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerSizes {
    /// Tokens of a sequence.
    pub s: u64,
    /// Sequences of a micro-batch.
    pub b: u64,
    /// Width.
    pub h: u64,
    /// Heads.
    pub a: u64,
}

/// What is cut and what is made again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Tensor parallelism over t ranks; t = 1 is none.
    TensorParallel(u64),
    /// With sequence parallelism, inputs of regions kept by their own rows alone.
    SequenceParallel(u64),
    /// The same with the core of the attention made again.
    Selective(u64),
}

/// Saved bytes of a rank by the published formula, rounded down.
pub fn published_bytes(sizes: LayerSizes, form: Form) -> u64 {
    let LayerSizes { s, b, h, a } = sizes;
    let (sbh, scores) = (s * b * h, 5 * a * s * s * b);
    match form {
        Form::TensorParallel(t) => 10 * sbh + (24 * sbh + scores) / t,
        Form::SequenceParallel(t) => (34 * sbh + scores) / t,
        Form::Selective(t) => 34 * sbh / t,
    }
}

/// Bytes of the statistics of both LayerNorms of a rank, which the formula leaves out (4-byte accumulators).
pub fn statistics_bytes(sizes: LayerSizes, form: Form) -> u64 {
    let rows = match form {
        Form::TensorParallel(_) => sizes.s * sizes.b,
        Form::SequenceParallel(t) | Form::Selective(t) => sizes.s * sizes.b / t,
    };
    2 * 2 * 4 * rows
}
