//! The closed sets of words in a configuration, and values that may also be a word ("auto", "none", one or a list).

use serde::{Deserialize, Serialize};

/// Defines an enum whose variants are the words that a user types.
macro_rules! choice {
    ($(#[$about:meta])* $name:ident { $($(#[$variant_about:meta])* $variant:ident = $text:literal),+ $(,)? }) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
        pub enum $name { $($(#[$variant_about])* #[serde(rename = $text)] $variant),+ }

        impl $name {
            /// All words.
            pub const NAMES: &'static [&'static str] = &[$($text),+];

            /// The word that stands for this value.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $text),+ }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.name())
            }
        }
    };
}

choice!(
    /// Normalisation of queries and keys.
    QkNorm {
        /// None.
        None = "none",
        /// Over each head, one weight of length head_dim shared by the heads (Qwen3).
        Head = "head",
        /// Over all heads together, a weight of length heads * head_dim (OLMoE).
        Full = "full",
    }
);
choice!(
    /// What turns router logits into scores.
    Score {
        /// exp over the sum.
        Softmax = "softmax",
        /// Each expert by itself (DeepSeek-V3).
        Sigmoid = "sigmoid",
    }
);
choice!(
    /// Whether scores are taken over all experts or over the selected ones.
    ScoreOrder {
        /// Scores over all experts, then top-k.
        ScoreFirst = "softmax-topk",
        /// Top-k of the logits, then softmax over the k.
        SelectFirst = "topk-softmax",
    }
);
choice!(
    /// Over which tokens a balance loss counts.
    Balance {
        /// No balance loss.
        None = "none",
        /// One micro-batch of one data-parallel rank.
        Micro = "micro",
        /// Every sequence by itself.
        Sequence = "sequence",
        /// The whole global batch.
        Global = "global",
    }
);
choice!(
    /// How tokens and experts find each other.
    Selection {
        /// Each token takes its k best experts.
        TopK = "topk",
        /// Top-k of Sinkhorn-balanced scores.
        Sinkhorn = "sinkhorn",
        /// Each expert takes its best tokens.
        ExpertChoice = "expert-choice",
    }
);
choice!(
    /// Whom an expert keeps when more tokens ask than it takes.
    DropPolicy {
        /// Higher weight first.
        Probability = "probability",
        /// Earlier token first.
        Position = "position",
        /// First choices before second ones.
        Choice = "choice",
    }
);
choice!(
    /// Which tokens share one capacity.
    CapacityScope {
        /// Every sequence by itself: does not depend on the layout.
        Sequence = "sequence",
        /// All tokens of a rank's micro-batch.
        Rank = "rank",
    }
);
choice!(
    /// How tokens travel to their experts.
    Dispatch {
        /// Chosen by the layout: local for one expert group, direct where memory is shared, else all-to-all.
        Auto = "auto",
        /// No transport: every expert is on every rank.
        Local = "local",
        /// Everybody gathers everything.
        AllGather = "all-gather",
        /// Rows go only where they are needed.
        AllToAll = "all-to-all",
        /// Receivers read their rows from the peers' memory.
        Direct = "direct",
    }
);
choice!(
    /// How the ranks of layout.cp share attention.
    ContextMethod {
        /// Blocks of keys and values travel round.
        Ring = "ring",
        /// Every rank gathers all keys and values.
        AllGather = "all-gather",
        /// Every rank gets all rows of some heads.
        Ulysses = "ulysses",
    }
);
choice!(
    /// The order in which a pipeline runs its stages and micro-batches.
    PipelineSchedule {
        /// All forwards, then all backwards.
        GPipe = "gpipe",
        /// One forward, one backward.
        OneFOneB = "1f1b",
        /// The same with several chunks a rank.
        Interleaved = "interleaved",
        /// Weight gradients fill the drain.
        ZeroBubbleH1 = "zb-h1",
        /// Two chunks a rank in a V, backward split.
        ZeroBubbleV = "zb-v",
        /// Two chunks a rank in a V, forwards and backwards in pairs.
        DualPipeV = "dualpipe-v",
        /// Read from a file.
        Custom = "custom",
    }
);
choice!(
    /// What gathers sharded weights of a pipeline stage.
    StageGather {
        /// Every block its own, for as long as it computes.
        Blocks = "blocks",
        /// The schedule, a whole stage for as long as the rank needs it next.
        Stages = "stages",
    }
);
choice!(
    /// The learning rate after warm-up.
    Schedule {
        /// Half a cosine down to the minimum.
        Cosine = "cosine",
        /// Warm-up, stable, linear decay.
        Wsd = "wsd",
        /// No change.
        Constant = "constant",
    }
);
choice!(
    /// Element type of weights and activations.
    Precision {
        /// 32 bits.
        F32 = "f32",
        /// 64 bits.
        F64 = "f64",
        /// bfloat16 with f32 master weights and accumulation.
        Bf16 = "bf16",
    }
);
choice!(
    /// What is computed again in the backward pass instead of being kept.
    Recompute {
        /// Nothing.
        None = "none",
        /// Every block.
        Full = "full",
        /// Attention.
        Attention = "attention",
        /// The activation function inside the experts.
        ExpertActivation = "expert-activation",
        /// The whole MoE layer (its routing is kept).
        Moe = "moe",
        /// The gathered input of tensor-parallel layers: own rows are kept and gathered again.
        TpInput = "tp-input",
    }
);
choice!(
    /// What becomes of a step whose loss or gradients are not finite.
    NonFinite {
        /// The run ends.
        Stop = "stop",
        /// The update is left out.
        Skip = "skip",
    }
);
choice!(
    /// How files become tokens.
    DataFormat {
        /// By the files' endings.
        Auto = "auto",
        /// Bytes.
        Text = "text",
        /// JSON records.
        Jsonl = "jsonl",
        /// Token ids of two bytes.
        U16 = "u16",
        /// Token ids of four bytes.
        U32 = "u32",
    }
);
choice!(
    /// How state is cut into shards.
    ShardCut {
        /// All parameters of a unit end to end, in equal pieces.
        Flat = "flat",
        /// Each parameter by its rows.
        PerParameter = "per-parameter",
    }
);
choice!(
    /// In which of the two number types of a parameter something is kept or sent.
    NumberKind {
        /// f32 for bf16 weights.
        Accumulator = "accumulator",
        /// That of the weights.
        Weight = "weight",
    }
);
choice!(
    /// When gradients are summed over ranks.
    SyncEach {
        /// Once a step up to stage 1, after every micro-batch from stage 2 on.
        Auto = "auto",
        /// After every micro-batch.
        MicroBatch = "micro-batch",
        /// Once a step.
        Step = "step",
    }
);

/// The word "auto".
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum AutoWord {
    /// Chosen by the program.
    #[serde(rename = "auto")]
    Auto,
}

/// The word "none".
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum NoneWord {
    /// Absent.
    #[serde(rename = "none")]
    None,
}

/// A value, or "auto".
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Auto<T> {
    /// The word.
    Word(AutoWord),
    /// The value.
    Value(T),
}

impl<T> Auto<T> {
    /// The word "auto".
    pub const AUTO: Self = Auto::Word(AutoWord::Auto);

    /// The value, if one was given.
    pub fn value(&self) -> Option<&T> {
        match self {
            Auto::Word(_) => None,
            Auto::Value(value) => Some(value),
        }
    }
}

/// A value, or "none".
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Maybe<T> {
    /// The word.
    Word(NoneWord),
    /// The value.
    Value(T),
}

impl<T> Maybe<T> {
    /// The word "none".
    pub const NONE: Self = Maybe::Word(NoneWord::None);

    /// The value, if there is one.
    pub fn value(&self) -> Option<&T> {
        match self {
            Maybe::Word(_) => None,
            Maybe::Value(value) => Some(value),
        }
    }
}

/// A value or a list of values.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum OneOrMany<T> {
    /// Written without brackets.
    One(T),
    /// Written as a list.
    Many(Vec<T>),
}

impl<T> OneOrMany<T> {
    /// The values as a list.
    pub fn list(&self) -> &[T] {
        match self {
            OneOrMany::One(value) => std::slice::from_ref(value),
            OneOrMany::Many(values) => values,
        }
    }
}
