//! The sizes that operations are measured at: those of a layer of Mixtral 8x7B on 8192 tokens, and small ones.

/// Sizes of all operations.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    /// Tokens.
    pub rows: usize,
    /// Model width.
    pub width: usize,
    /// Width of an expert.
    pub ffn: usize,
    /// Classes.
    pub vocab: usize,
    /// Parameters of one update.
    pub params: usize,
    /// Experts.
    pub experts: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Tokens of a sequence.
    pub sequence: usize,
    /// Side of the square product that says what the device can do.
    pub square: usize,
    /// Bytes of the copy that does.
    pub copy_bytes: usize,
}

impl Sizes {
    /// Of a real layer: no tensor fits a cache.
    pub(super) const LARGE: Sizes = Sizes {
        rows: 8192,
        width: 4096,
        ffn: 14_336,
        vocab: 32_768,
        params: 1 << 26,
        experts: 8,
        top_k: 2,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        sequence: 8192,
        square: 8192,
        copy_bytes: 1 << 30,
    };

    /// For tests.
    pub(super) const SMALL: Sizes = Sizes {
        rows: 24,
        width: 32,
        ffn: 48,
        vocab: 100,
        params: 3000,
        experts: 4,
        top_k: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        sequence: 24,
        square: 64,
        copy_bytes: 1 << 16,
    };
}
