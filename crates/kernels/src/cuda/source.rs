//! The kernel texts: one a file of operations, without any header but `platform.cuh`, which stands before each.

/// What every text stands on.
pub const PLATFORM: &str = include_str!("platform.cuh");

/// One kernel text.
#[derive(Debug, PartialEq, Eq)]
pub struct Source {
    /// Name of its file without the ending.
    pub name: &'static str,
    /// The text without the platform.
    pub text: &'static str,
}

impl Source {
    /// What the compiler gets.
    pub fn complete(&self) -> String {
        format!("#line 1 \"platform.cuh\"\n{PLATFORM}\n#line 1 \"{}.cu\"\n{}", self.name, self.text)
    }
}

macro_rules! sources {
    ($($(#[$doc:meta])* $constant:ident = $name:literal, $path:literal;)*) => {
        $($(#[$doc])* pub static $constant: Source = Source { name: $name, text: include_str!($path) };)*

        /// Every kernel text.
        pub static ALL: &[&Source] = &[$(&$constant),*];
    };
}

sources! {
    /// Gated units with the weight of a row.
    ACTIVATION = "activation", "../ops/activation.cu";
    /// AdamW.
    ADAMW = "adamw", "../ops/adamw.cu";
    /// Attention for every type and head size.
    ATTENTION = "attention", "../ops/attention.cu";
    /// Attention of bf16 heads of usual sizes on tensor cores.
    ATTENTION_TC = "attention_tc", "../ops/attention/attention_tc.cu";
    /// Slots that keep their expert under a capacity.
    CAPACITY = "capacity", "../ops/capacity.cu";
    /// Exact copies.
    COPY = "copy", "../ops/elementwise/copy.cu";
    /// Cross-entropy.
    CROSS_ENTROPY = "cross_entropy", "../ops/cross_entropy.cu";
    /// Masks from the counter-based generator.
    DROPOUT = "dropout", "../ops/dropout.cu";
    /// Arithmetic element by element.
    ELEMENTWISE = "elementwise", "../ops/elementwise.cu";
    /// Rows of a table by id.
    EMBEDDING = "embedding", "../ops/embedding.cu";
    /// Matrix products of every element type, without tensor cores.
    GEMM = "gemm", "../ops/gemm.cu";
    /// Noise on a router's input.
    JITTER = "jitter", "../ops/router/jitter.cu";
    /// LayerNorm.
    LAYER = "layer", "../ops/norm/layer.cu";
    /// Attention that keeps its probabilities.
    MATERIALISED = "materialised", "../ops/attention/materialised.cu";
    /// RMSNorm, whole and in halves, and the second pass of weight gradients.
    NORM = "norm", "../ops/norm.cu";
    /// Rows and weights moved by index lists.
    PERMUTE = "permute", "../ops/permute.cu";
    /// Nonlinearities of one operand.
    POINTWISE = "pointwise", "../ops/activation/pointwise.cu";
    /// Reductions.
    REDUCE = "reduce", "../ops/elementwise/reduce.cu";
    /// Rotary position embedding.
    ROPE = "rope", "../ops/rope.cu";
    /// Router of a mixture-of-experts layer.
    ROUTER = "router", "../ops/router.cu";
    /// bf16 matrix products on tensor cores.
    TENSOR_GEMM = "tensor_gemm", "../ops/gemm/tensor_gemm.cu";
    /// The k largest of every row.
    TOPK = "topk", "../ops/topk.cu";
}
