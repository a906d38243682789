//! Every field of a configuration: its name, what may be written, what it means. The table serves the check of what
//! was typed, `--help` and the documentation; defaults are taken from the one place that holds them.

use super::choice::*;
use super::low::LowConfig;

/// What may be written in a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Text,
    Count,
    Number,
    Flag,
    /// One of these words.
    Word(&'static [&'static str]),
    AutoCount,
    AutoText,
    NoneCount,
    NoneText,
    Counts,
    Numbers,
    /// One of these words or a list of them.
    Words(&'static [&'static str]),
    NumberOrNumbers,
    /// "none", a number, or a decimal as text.
    Factor,
}

impl Kind {
    /// In words, for a person.
    pub(super) fn text(self) -> String {
        match self {
            Kind::Text => "text".into(),
            Kind::Count => "whole number".into(),
            Kind::Number => "number".into(),
            Kind::Flag => "true or false".into(),
            Kind::Word(words) => words.join(" | "),
            Kind::AutoCount => "whole number or \"auto\"".into(),
            Kind::AutoText => "text or \"auto\"".into(),
            Kind::NoneCount => "whole number or \"none\"".into(),
            Kind::NoneText => "text or \"none\"".into(),
            Kind::Counts => "list of whole numbers".into(),
            Kind::Numbers => "list of numbers".into(),
            Kind::Words(words) => format!("{}, or a list", words.join(" | ")),
            Kind::NumberOrNumbers => "number or list of numbers".into(),
            Kind::Factor => "decimal number or \"none\"".into(),
        }
    }
}

/// A field as shown to a person.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Field {
    /// Dotted name such as `moe.top_k`.
    pub name: &'static str,
    /// What may be written.
    pub kind: String,
    /// The value where nothing is written, as TOML.
    pub default: String,
    /// What it means.
    pub meaning: &'static str,
}

/// (name, kind, meaning) of every field, section by section.
#[rustfmt::skip]
pub(super) const FIELDS: &[(&str, Kind, &str)] = &[
    ("run.name", Kind::Text, "name of the run, used in its folder"),
    ("run.dir", Kind::AutoText, "folder of the run; auto: runs/NAME-TIME"),
    ("run.seed", Kind::Count, "seed of initial weights, data order and noise"),
    ("run.steps", Kind::Count, "optimizer steps"),
    ("run.log_every", Kind::Count, "steps between log lines"),
    ("run.eval_every", Kind::Count, "steps between validations; 0: never"),
    ("run.eval_batches", Kind::Count, "global batches of a validation"),
    ("run.checkpoint_every", Kind::Count, "steps between checkpoints; 0: only at the end"),
    ("run.resume", Kind::NoneText, "run folder or checkpoint to continue from; \"latest\": newest in run.dir"),
    ("run.keep", Kind::Count, "how many checkpoints stay; 0: all"),
    ("run.device", Kind::Text, "what the ranks compute on: cpu; cuda (the visible GPUs are dealt out to the ranks of a machine) or cuda:N, over NCCL where all ranks can use it (cuda+nccl: or no run; cuda+host: never); emulator (GPU kernels on the CPU, to test them)"),
    ("model.vocab", Kind::AutoCount, "vocabulary; auto: 258 for text (256 bytes, document start, padding)"),
    ("model.d_model", Kind::Count, "width of the residual stream"),
    ("model.layers", Kind::Count, "transformer blocks"),
    ("model.heads", Kind::Count, "query heads"),
    ("model.kv_heads", Kind::Count, "key/value heads; divides model.heads"),
    ("model.head_dim", Kind::AutoCount, "width of a head, even; auto: d_model / heads"),
    ("model.ffn", Kind::Count, "width of the SwiGLU of dense layers"),
    ("model.dense_layers", Kind::Counts, "indices of the layers that stay dense in an MoE model"),
    ("model.rope_theta", Kind::Number, "base of the rotary position frequencies"),
    ("model.norm_eps", Kind::Number, "added to the mean square in RMSNorm"),
    ("model.qk_norm", Kind::Word(QkNorm::NAMES), "RMSNorm of queries and keys: per head or over all heads"),
    ("model.tie_embeddings", Kind::Flag, "whether the output head is the embedding"),
    ("model.init_std", Kind::Number, "standard deviation of initial weights"),
    ("moe.experts", Kind::NoneCount, "routed experts of an MoE layer; none: a dense model"),
    ("moe.top_k", Kind::Count, "experts a token"),
    ("moe.ffn", Kind::Count, "width of an expert's SwiGLU"),
    ("moe.shared_ffn", Kind::Count, "width of the shared expert; 0: none"),
    ("moe.score", Kind::Word(Score::NAMES), "from router logits to scores (the router always works in f32)"),
    ("moe.order", Kind::Word(ScoreOrder::NAMES), "scores over all experts then top-k, or softmax over the chosen ones"),
    ("moe.renormalise", Kind::Flag, "whether a token's weights are divided by their sum"),
    ("moe.scaling", Kind::Number, "factor on a token's weights after renormalisation"),
    ("moe.groups", Kind::Count, "expert groups of group-limited selection; 1: off"),
    ("moe.group_top_k", Kind::Count, "groups that a token may use"),
    ("moe.bias_update_rate", Kind::Number, "step of the selection bias that balances without a loss; 0: no bias"),
    ("moe.balance", Kind::Words(Balance::NAMES), "over which tokens the balance loss counts"),
    ("moe.balance_coefficient", Kind::NumberOrNumbers, "coefficient of each balance loss"),
    ("moe.z_loss", Kind::Number, "coefficient of the squared log-sum-exp of the router logits"),
    ("moe.selection", Kind::Word(Selection::NAMES), "how tokens and experts find each other"),
    ("moe.jitter", Kind::Number, "router input is multiplied by uniform 1 ± jitter in training"),
    ("moe.force", Kind::Text, "none, balanced, or biased=STD: routing that ignores the router, for benchmarks"),
    ("moe.dispatcher", Kind::Word(Dispatch::NAMES), "how tokens travel to their experts"),
    ("moe.capacity.factor", Kind::Factor, "capacity over the balanced load, an exact decimal; none: nothing is dropped"),
    ("moe.capacity.min", Kind::Count, "least capacity of an expert"),
    ("moe.capacity.policy", Kind::Word(DropPolicy::NAMES), "whom an expert keeps"),
    ("moe.capacity.pad", Kind::Flag, "whether every expert's rows are filled up to the capacity"),
    ("moe.capacity.scope", Kind::Word(CapacityScope::NAMES), "which tokens share one capacity"),
    ("layout.ranks", Kind::Count, "ranks (threads of this process)"),
    ("layout.tp", Kind::Count, "tensor parallelism of dense parts"),
    ("layout.cp", Kind::Count, "context parallelism: ranks that share every sequence"),
    ("layout.pp", Kind::Count, "pipeline stages"),
    ("layout.dp", Kind::AutoCount, "data parallelism; auto: ranks / (tp cp pp)"),
    ("layout.ep", Kind::Count, "expert parallelism"),
    ("layout.etp", Kind::AutoCount, "tensor parallelism of experts; auto: tp"),
    ("layout.order", Kind::Text, "axes from the innermost to the outermost"),
    ("layout.ranks_per_node", Kind::AutoCount, "ranks that share a node; auto: all"),
    ("layout.threads_per_rank", Kind::AutoCount, "compute threads a rank; auto: cores / ranks, at least 1"),
    ("context.method", Kind::Word(ContextMethod::NAMES), "how the ranks of layout.cp share attention (docs/context.md)"),
    ("pipeline.schedule", Kind::Word(PipelineSchedule::NAMES), "order of stages and micro-batches (layout.pp > 1)"),
    ("pipeline.csv", Kind::NoneText, "file of a custom schedule: one row a rank, cells such as 2F0, 1B3, 0W1"),
    ("pipeline.chunks", Kind::AutoCount, "stages a rank; auto: 1, or 2 for interleaved, zb-v and dualpipe-v"),
    ("pipeline.layers", Kind::Counts, "layers of each stage; []: evenly, the longer stages first (30 over 4: 8, 8, 7, 7)"),
    ("pipeline.gather", Kind::Word(StageGather::NAMES), "who gathers sharded weights (shard.zero = 3): each block while it computes, or the schedule whole stages (UNSHARD, RESHARD, REDUCE_GRAD): more memory, fewer gathers"),
    ("pipeline.count_embedding", Kind::Flag, "whether the embedding counts as a layer of the first stage in an even cut"),
    ("pipeline.count_head", Kind::Flag, "whether the head counts as a layer of the last stage in an even cut"),
    ("shard.zero", Kind::Count, "what replicas shard: 0 nothing (DDP), 1 optimizer state, 2 gradients too, 3 weights too (FSDP)"),
    ("shard.reshard_after_forward", Kind::Flag, "zero = 3: whether complete weights are released after the forward and gathered again"),
    ("shard.prefetch", Kind::Count, "zero = 3: how many units ahead are being gathered"),
    ("shard.unit_layers", Kind::Count, "layers that are gathered together"),
    ("shard.experts_apart", Kind::Flag, "whether the experts of a layer are gathered apart from the rest of it"),
    ("shard.layout", Kind::Word(ShardCut::NAMES), "how a unit is cut: end to end with padding, or each parameter by rows"),
    ("shard.bucket_bytes", Kind::Count, "parameters of a unit travel together up to this many bytes of weights"),
    ("shard.reduce_dtype", Kind::Word(NumberKind::NAMES), "number type in which gradients are summed over ranks"),
    ("shard.gradient_dtype", Kind::Word(NumberKind::NAMES), "number type in which gradients are kept until the update"),
    ("shard.sync", Kind::Word(SyncEach::NAMES), "when gradients are summed over ranks; auto: step up to zero = 1, else micro-batch"),
    ("shard.group", Kind::AutoCount, "ranks that share one copy of the state (hybrid sharding); auto: all replicas"),
    ("train.global_batch", Kind::Count, "sequences a step over all ranks"),
    ("train.micro_batch", Kind::Count, "sequences of one forward pass of a rank"),
    ("train.seq_len", Kind::Count, "tokens a sequence"),
    ("train.lr", Kind::Number, "learning rate after warm-up"),
    ("train.min_lr", Kind::Number, "learning rate at the end of the decay"),
    ("train.schedule", Kind::Word(Schedule::NAMES), "learning rate after warm-up"),
    ("train.warmup", Kind::Count, "steps of linear warm-up"),
    ("train.decay_steps", Kind::AutoCount, "cosine: step at which min_lr is reached (auto: run.steps); wsd: steps of the final decay (auto: a fifth)"),
    ("train.betas", Kind::Numbers, "decay of AdamW's two moments"),
    ("train.eps", Kind::Number, "added to the root of the second moment"),
    ("train.weight_decay", Kind::Number, "AdamW's decay of matrices"),
    ("train.clip", Kind::Number, "greatest norm of all gradients; 0: no clipping"),
    ("train.precision", Kind::Word(Precision::NAMES), "element type of weights and activations"),
    ("train.recompute", Kind::Words(Recompute::NAMES), "what is computed again in the backward pass"),
    ("train.non_finite", Kind::Word(NonFinite::NAMES), "a step whose loss or gradients are not finite: end the run, or leave the update out on all ranks (docs/faults.md)"),
    ("train.skip_limit", Kind::Count, "skip: so many such steps one after the other end the run"),
    ("train.overlap", Kind::Flag, "communication travels while arithmetic runs; false waits for each at once"),
    ("data.source", Kind::Text, "registry (Rust sources of cargo), synthetic (random ids), or a file, folder or glob"),
    ("data.format", Kind::Word(DataFormat::NAMES), "how files become tokens; auto: by their endings"),
    ("data.field", Kind::Text, "text field of JSONL records"),
    ("data.max_bytes", Kind::Count, "at most so many bytes of text are read"),
    ("data.validation", Kind::Number, "share of the tokens that is held out; 0: none"),
    ("data.seed", Kind::AutoCount, "seed of the order of sequences; auto: run.seed"),
    ("data.document_start", Kind::NoneCount, "id that opens a document in token-id files"),
];

/// The kind of a field, or None where no such field exists.
pub(super) fn kind(name: &str) -> Option<Kind> {
    FIELDS.iter().find(|(field, _, _)| *field == name).map(|(_, kind, _)| *kind)
}

/// Whether fields stand below this name: `moe`, `moe.capacity`.
pub(super) fn is_section(name: &str) -> bool {
    FIELDS.iter().any(|(field, _, _)| field.strip_prefix(name).is_some_and(|rest| rest.starts_with('.')))
}

/// The leaf at a dotted name of a table.
pub(super) fn leaf<'a>(table: &'a toml::Table, name: &str) -> Option<&'a toml::Value> {
    let (first, rest) = name.split_once('.').map_or((name, None), |(first, rest)| (first, Some(rest)));
    let value = table.get(first)?;
    match rest {
        None => Some(value),
        Some(rest) => leaf(value.as_table()?, rest),
    }
}

/// The default configuration as a table.
pub(super) fn defaults() -> toml::Table {
    toml::Table::try_from(LowConfig::default()).expect("the default configuration is a table")
}

/// Every field with its default, for `--help` and the documentation.
pub fn describe() -> Vec<Field> {
    let defaults = defaults();
    FIELDS
        .iter()
        .map(|&(name, kind, meaning)| Field {
            name,
            kind: kind.text(),
            default: leaf(&defaults, name).expect("every field has a default").to_string(),
            meaning,
        })
        .collect()
}

/// The reference of all fields as Markdown, one table a section.
pub fn reference_markdown() -> String {
    let mut text = String::from(
        "# Settings\n\nEvery setting, as `plica settings --markdown` prints it. A configuration is TOML with these \
         sections; `--set moe.top_k=4`\nchanges one setting; `--dry-run` prints the resolved whole. Later wins: \
         defaults, preset, file, `--set`.\n",
    );
    let mut section = "";
    for field in describe() {
        let (head, _) = field.name.rsplit_once('.').expect("a field stands in a section");
        if head != section {
            section = head;
            text.push_str(&format!(
                "\n## [{section}]\n\n| field | value | default | meaning |\n|---|---|---|---|\n"
            ));
        }
        let kind = field.kind.replace('|', "\\|");
        text.push_str(&format!("| `{}` | {kind} | `{}` | {} |\n", field.name, field.default, field.meaning));
    }
    text
}
