//! Every rule of `check`, and the configurations of users in public reports.

use super::*;

/// The mistakes of the default configuration with these overrides, empty where it is valid.
fn mistakes(sets: &[&str]) -> Vec<String> {
    let sets: Vec<String> = sets.iter().map(|set| set.to_string()).collect();
    match Config::from_sources(None, None, &sets) {
        Ok(_) => Vec::new(),
        Err(errors) => errors.0.iter().map(ConfigError::to_string).collect(),
    }
}

/// Each row: overrides, and what exactly one mistake must start with.
fn one_mistake_each(rows: &[(&str, &str)]) {
    for (sets, want) in rows {
        let sets: Vec<&str> = sets.split_whitespace().collect();
        let found = mistakes(&sets);
        assert!(found.len() == 1 && found[0].starts_with(want), "{sets:?}\nwant {want}\ngot  {found:#?}");
    }
}

#[test]
fn s05_capacity_and_expert_counts() {
    let factor = "it must be a positive decimal number such as 1.25";
    for value in ["0", "0.0", "-1", "-1.5", "word", "1e400"] {
        let found = mistakes(&["moe.experts=4", &format!("moe.capacity.factor={value}")]);
        assert_eq!(found.len(), 1, "{value}: {found:?}");
        assert!(found[0].starts_with("moe.capacity.factor = "), "{value}: {found:?}");
        assert!(found[0].contains(factor) || found[0].contains("finite"), "{value}: {found:?}");
    }
    one_mistake_each(&[
        ("moe.experts=4 moe.capacity.factor=nan", "moe.capacity.factor = nan: it must be a finite number"),
        (
            "moe.experts=4 moe.top_k=5",
            "moe.top_k = 5: a token cannot have more experts than moe.experts = 4; write 4",
        ),
        ("moe.experts=0", "moe.experts = 0: an MoE layer has at least one expert"),
        ("moe.experts=4 moe.top_k=0", "moe.top_k = 0: it must be at least 1"),
        ("moe.experts=4 moe.capacity.pad=true", "moe.capacity.pad = true: moe.capacity.factor = none"),
        ("moe.experts=4 moe.capacity.min=4", "moe.capacity.min = 4: moe.capacity.factor = none"),
    ]);
    assert!(mistakes(&["moe.experts=4", "moe.capacity.factor=1e-1"]).is_empty());
}

#[test]
fn s04_coefficients_without_effect() {
    one_mistake_each(&[
        (
            "moe.experts=4 moe.balance_coefficient=0.01",
            "moe.balance_coefficient = 0.01: moe.balance = none, so",
        ),
        (
            "moe.balance_coefficient=0.01",
            "moe.balance_coefficient = 0.01: the model has no MoE layer (moe.experts = none)",
        ),
        ("moe.z_loss=0.001", "moe.z_loss = 0.001: the model has no MoE layer (moe.experts = none)"),
        (
            "moe.experts=4 model.dense_layers=[0,1] moe.balance=micro moe.balance_coefficient=0.01",
            "moe.balance_coefficient = 0.01: the model has no MoE layer (model.dense_layers names every layer)",
        ),
        ("moe.experts=4 moe.balance=micro", "moe.balance_coefficient = 0: moe.balance = micro has no effect"),
        (
            "moe.experts=4 moe.balance=[\"micro\",\"global\"] moe.balance_coefficient=0.1",
            "moe.balance_coefficient = [0.1]: moe.balance has 2 kinds and this 1 coefficients",
        ),
        (
            "moe.experts=4 moe.balance=[\"micro\",\"micro\"] moe.balance_coefficient=[1,1]",
            "moe.balance = micro, micro: each kind stands once",
        ),
        ("moe.experts=4 moe.balance_coefficient=-1", "moe.balance_coefficient = -1: it must be at least 0"),
    ]);
}

#[test]
fn s09_one_expert_with_renormalisation() {
    one_mistake_each(&[
        (
            "moe.experts=4 moe.top_k=1",
            "moe.top_k = 1: with moe.renormalise = true the one weight is always 1 and the router's gradient is 0",
        ),
        (
            "moe.experts=4 moe.top_k=1 moe.renormalise=false moe.order=topk-softmax",
            "moe.top_k = 1: with moe.order = topk-softmax the one weight",
        ),
        (
            "moe.experts=4 moe.score=sigmoid moe.order=topk-softmax",
            "moe.order = topk-softmax: topk-softmax takes",
        ),
    ]);
    assert!(mistakes(&["moe.experts=4", "moe.top_k=1", "moe.renormalise=false"]).is_empty());
}

#[test]
fn groups_and_selection() {
    one_mistake_each(&[
        ("moe.experts=10 moe.groups=4", "moe.groups = 4: moe.experts = 10 is no multiple of it (10 % 4 = 2)"),
        (
            "moe.experts=8 moe.groups=2 moe.group_top_k=3",
            "moe.group_top_k = 3: a token cannot use more groups than",
        ),
        (
            "moe.experts=8 moe.groups=4 moe.top_k=3",
            "moe.top_k = 3: moe.group_top_k = 1 groups of 2 experts hold only 2",
        ),
        (
            "moe.experts=8 moe.selection=sinkhorn moe.groups=2",
            "moe.groups = 2: moe.selection = sinkhorn does not use",
        ),
        (
            "moe.experts=8 moe.selection=expert-choice moe.bias_update_rate=0.1",
            "moe.bias_update_rate = 0.1: moe.selection = expert-choice does not use",
        ),
        (
            "moe.experts=8 moe.selection=sinkhorn moe.balance=micro moe.balance_coefficient=1",
            "moe.balance = micro: moe.selection = sinkhorn balances by itself",
        ),
        (
            "moe.experts=8 moe.force=biased",
            "moe.force = \"biased\": it must be none, balanced, or biased=STD",
        ),
        ("moe.experts=8 moe.force=biased=-1", "moe.force = \"biased=-1\": it must be"),
        ("moe.experts=8 moe.jitter=1", "moe.jitter = 1: it must be at least 0 and below 1"),
        ("moe.experts=8 moe.scaling=0", "moe.scaling = 0: it must be above 0"),
        (
            "moe.experts=8 moe.dispatcher=local layout.ranks=2 layout.ep=2",
            "moe.dispatcher = local: it moves no row, but the experts are shared over EP = 2 and ETP = 1",
        ),
    ]);
}

#[test]
fn model_train_data_and_run() {
    one_mistake_each(&[
        ("model.kv_heads=3", "model.kv_heads = 3: it must divide model.heads = 4"),
        ("model.heads=3 model.kv_heads=3", "model.head_dim = auto: model.d_model = 128 is no multiple of"),
        (
            "model.head_dim=7",
            "model.head_dim = 7: rotary positions turn pairs of numbers, so it must be even; write 8",
        ),
        ("model.dense_layers=[2]", "model.dense_layers = 2: there are 2 layers, counted from 0"),
        ("model.dense_layers=[1,1]", "model.dense_layers = 1: the index stands twice"),
        ("model.ffn=0", "model.ffn = 0: it must be at least 1"),
        ("model.layers=0", "model.layers = 0: it must be at least 1"),
        ("model.d_model=100000000000", "model.d_model = 100000000000: it must be at most 16777216"),
        ("model.norm_eps=0", "model.norm_eps = 0: it must be above 0"),
        ("model.vocab=257", "model.vocab = 257: byte text has 258 ids"),
        ("data.source=synthetic", "model.vocab = auto: data.source = synthetic does not tell its vocabulary"),
        ("data.source=x.bin data.format=u16", "model.vocab = auto: data.source = x.bin does not tell"),
        ("data.format=u16 model.vocab=300", "data.format = u16: data.source = registry is text"),
        ("data.document_start=258", "data.document_start = 258: it is outside model.vocab = 258"),
        ("data.validation=1", "data.validation = 1: it must be at least 0 and below 1"),
        ("data.validation=0", "data.validation = 0: run.eval_every = 50 needs held-out data"),
        ("data.max_bytes=0", "data.max_bytes = 0: it must be at least 1"),
        ("train.lr=0", "train.lr = 0: it must be above 0"),
        ("train.min_lr=1", "train.min_lr = 1: it must not be above train.lr = 0.001"),
        ("train.betas=[0.9]", "train.betas = [0.9]: AdamW has two moments, the list has 1"),
        ("train.betas=[0.9,1]", "train.betas = 1: it must be at least 0 and below 1"),
        ("train.decay_steps=5", "train.decay_steps = 5: the decay cannot end before train.warmup = 10"),
        (
            "train.schedule=wsd train.decay_steps=101",
            "train.decay_steps = 101: the final decay cannot be longer",
        ),
        ("train.recompute=[\"full\",\"moe\"]", "train.recompute = full, moe: none and full stand alone"),
        ("train.skip_limit=0", "train.skip_limit = 0: it is a number of skipped steps, at least 1"),
        ("train.seq_len=0", "train.seq_len = 0: it must be at least 1"),
        ("run.steps=0", "run.steps = 0: it must be at least 1"),
        ("run.log_every=0", "run.log_every = 0: it must be at least 1"),
        ("run.eval_batches=0", "run.eval_batches = 0: run.eval_every = 50 asks for validations of no batch"),
        ("run.name=a/b", "run.name = \"a/b\": it becomes a folder name"),
        ("run.resume=latest", "run.resume = latest: \"latest\" is looked for in run.dir"),
        ("layout.threads_per_rank=0", "layout.threads_per_rank = 0: a rank computes on at least one thread"),
    ]);
}

#[test]
fn s20_mesh_arithmetic_comes_from_folding() {
    one_mistake_each(&[
        (
            "layout.ranks=8 layout.tp=3 model.heads=3 model.kv_heads=3 model.d_model=12",
            "layout: attention mesh: TP·CP·PP = 3",
        ),
        ("layout.ranks=8 layout.ep=3 layout.etp=1 moe.experts=12", "layout: expert mesh: ETP·EP·PP = 1·3·1"),
        (
            "layout.ranks=8 layout.ep=8 moe.experts=12",
            "layout: experts = 12 is not divisible by EP = 8 (12 % 8 = 4)",
        ),
        ("layout.ranks=2 layout.ep=2", "layout: EP = 2, but the model has no experts"),
        ("layout.ranks=4 layout.tp=4", "layout: kv heads = 2 is not divisible by TP = 4 (2 % 4 = 2)"),
        ("layout.ranks=0", "layout: world = 0 is refused"),
        ("layout.order=tp-xx", "layout: order \"tp-xx\" has the unknown axis \"xx\""),
        ("layout.ranks=4 layout.dp=3", "layout: attention mesh: TP·CP·DP·PP = 1·1·3·1 is not G = 4"),
        // Megatron#1628: global batch 4, micro-batch 1 on 8 data-parallel ranks.
        (
            "layout.ranks=8 moe.experts=8 layout.ep=4 layout.etp=1 train.global_batch=4",
            "layout: global batch = 4 must be divisible by DP = 8 (4 % 8 = 4) and at least micro batch·DP = 1·8",
        ),
        (
            "layout.ranks=4 layout.cp=4 context.method=ulysses",
            "context.method = ulysses: it hands out whole key/value heads, but model.kv_heads = 2 over layout.tp = 1 \
             leave 2 a rank, which do not divide over layout.cp = 4",
        ),
        ("layout.ranks=4 layout.cp=3", "layout: attention mesh: TP·CP·PP = 1·3·1 = 3"),
    ]);
}

/// Configurations of users in public reports: where from, overrides, and every mistake that must be named.
#[rustfmt::skip]
const REPORTED: &[(&str, &str, &[&str])] = &[
    // 30 layers are legal over 4 stages, and 16 % (2 * DP 2) holds on 64 ranks.
    ("ms-swift#5737",
     "model.heads=8 model.kv_heads=8 model.layers=30 layout.ranks=64 layout.tp=8 layout.pp=4 layout.ep=16 layout.etp=1 \
      moe.experts=128 train.micro_batch=2 train.global_batch=16",
     &[]),
    ("ms-swift#5737 on 320 ranks: DP 10",
     "model.heads=8 model.kv_heads=8 model.layers=30 layout.ranks=320 layout.tp=8 layout.pp=4 layout.ep=16 layout.etp=1 \
      moe.experts=128 train.micro_batch=2 train.global_batch=16",
     &["layout: global batch = 16 must be divisible by DP = 10 (16 % 10 = 6)"]),
    ("NeMo-RL#2319 with ETP 1",
     "layout.ranks=8 layout.tp=2 layout.ep=4 layout.etp=1 moe.experts=256 model.layers=40", &[]),
    ("NeMo-RL#2319 with ETP 2",
     "layout.ranks=8 layout.tp=2 layout.ep=4 layout.etp=2 moe.experts=256 model.layers=40", &[]),
    ("Speech#14838: a valid mesh, also with 24 stages a rank of one layer each",
     "layout.ranks=4 layout.pp=2 layout.ep=2 layout.etp=1 moe.experts=8 train.global_batch=512 model.layers=48 \
      pipeline.schedule=interleaved pipeline.chunks=24", &[]),
    ("Speech#14838 with 40 layers: they do not divide over the 48 virtual stages",
     "layout.ranks=4 layout.pp=2 layout.ep=2 layout.etp=1 moe.experts=8 train.global_batch=512 model.layers=40 \
      pipeline.schedule=interleaved pipeline.chunks=24",
     &["layout: layers = 40 is not divisible by PP·V = 2·24 = 48 (40 % 48 = 40)", "pipeline.layers = []: 40 layers over 48 stages"]),
    ("Megatron#1628, EP 4", "layout.ranks=8 layout.ep=4 layout.etp=1 moe.experts=8 train.global_batch=8", &[]),
    ("Megatron#1628, ETP 4", "layout.ranks=8 layout.ep=1 layout.etp=4 moe.experts=8 train.global_batch=8", &[]),
    ("Megatron-Bridge#546 on 4 ranks",
     "model.heads=8 model.kv_heads=8 layout.ranks=4 layout.tp=4 layout.ep=4 layout.etp=1 moe.experts=8", &[]),
    ("Megatron-Bridge#546 on 8 ranks",
     "model.heads=8 model.kv_heads=8 layout.ranks=8 layout.tp=4 layout.ep=4 layout.etp=1 moe.experts=8", &[]),
    ("KempnerForge#202", "layout.ranks=2 layout.ep=2 moe.experts=4 run.checkpoint_every=4", &[]),
    ("marin#8953",
     "layout.ranks=32 layout.pp=4 layout.ep=8 layout.etp=1 moe.experts=64 moe.capacity.factor=2 model.layers=26 moe.top_k=4 \
      train.global_batch=64", &[]),
    ("TransformerEngine#1930: 10 tokens over 2 * CP 2 are filled up to 12", "layout.ranks=2 layout.cp=2 train.seq_len=10",
     &[]),
    ("LlamaFactory#1998", "layout.ranks=8 layout.ep=8 moe.experts=8 moe.order=topk-softmax train.micro_batch=1", &[]),
    ("DeepSpeed#5794", "layout.ranks=4 layout.ep=4 moe.experts=4", &[]),
    ("Megatron#4342, without optimizer instances",
     "layout.ranks=8 layout.tp=2 layout.ep=2 layout.etp=1 moe.experts=8", &[]),
];

#[test]
fn configurations_seen_in_reports() {
    for (name, sets, want) in REPORTED {
        let found = mistakes(&sets.split_whitespace().collect::<Vec<_>>());
        assert_eq!(found.len(), want.len(), "{name}: {found:#?}");
        for (found, want) in found.iter().zip(*want) {
            assert!(found.starts_with(want), "{name}\nwant {want}\ngot  {found}");
        }
    }
}

#[test]
fn resolved_values() {
    let config = Config::from_sources(Some("small"), None, &["run.seed=7".into()]).unwrap();
    assert_eq!((config.model.vocab, config.model.head_dim, config.data.seed), (258, 32, 7));
    assert_eq!((config.train.decay_steps, config.threads_per_rank), (300, None));
    let text = config.to_toml();
    for line in [
        "vocab = 258",
        "head_dim = 32",
        "dp = 2",
        "etp = 1",
        "decay_steps = 300",
        "seed = 7",
        "factor = \"none\"",
    ] {
        assert!(text.contains(line), "{line}\n{text}");
    }
    let wsd = Config::from_sources(Some("small"), None, &["train.schedule=wsd".into()]).unwrap();
    assert_eq!(wsd.train.decay_steps, 60);
}

#[test]
fn sharded_state_and_hybrid_groups() {
    one_mistake_each(&[
        ("shard.zero=4", "shard.zero = 4: the stages are 0"),
        ("shard.unit_layers=0", "shard.unit_layers = 0: it must be at least 1"),
        (
            "shard.zero=2 shard.reshard_after_forward=false",
            "shard.reshard_after_forward = false: weights are complete at all times under shard.zero = 2",
        ),
        ("shard.group=2", "shard.group = 2: nothing is sharded under shard.zero = 0"),
        (
            "layout.ranks=6 train.global_batch=12 shard.zero=3 shard.group=4",
            "shard.group = 4: dense parameters have DP x CP = 6 replicas, which groups of 4 do not divide",
        ),
        // megatron 4342: two copies of the optimizer divide DP 6 but not EDP 3.
        (
            "layout.ranks=12 layout.tp=2 layout.etp=1 layout.ep=4 moe.experts=8 train.global_batch=12 \
             shard.zero=1 shard.group=2",
            "shard.group = 2: experts have EDP = 3 replicas, which groups of 2 do not divide",
        ),
    ]);
    assert!(
        mistakes(&["layout.ranks=8", "shard.zero=1", "shard.group=2", "moe.experts=8", "layout.ep=2"])
            .is_empty()
    );
}
