//! Layouts and batches that users of other systems reported, with the verdict that each must get: scenarios S20,
//! S21 and S22, and the layouts among the reported configurations.

use plica_folding::{Layout, LayoutError, LayoutSpec, ModelDims, even_range, padded_vocab, zigzag_chunks};

use crate::{layout, refusal, says, spec};

const DIMS: ModelDims = ModelDims {
    layers: 8,
    heads: 8,
    kv_heads: 8,
    ffn: 64,
    moe_ffn: 64,
    shared_ffn: 0,
    experts: 8,
    vocab: 256,
    global_batch: 16,
    micro_batch: 1,
};

fn verdicts(layout: &Layout, dims: ModelDims) -> String {
    match layout.check_model(&dims) {
        Ok(()) => String::new(),
        Err(errors) => errors.iter().map(LayoutError::to_string).collect::<Vec<_>>().join("\n"),
    }
}

#[test]
fn s20_layers_over_stages() {
    let sizes: Vec<usize> =
        (0..4).map(|stage| layout(4, [1, 1, 4, 1, 1]).stage_layers(stage, 30).len()).collect();
    assert_eq!(sizes, [8, 8, 7, 7]);
    let all: Vec<usize> = (0..4).flat_map(|stage| even_range(30, 4, stage)).collect();
    assert_eq!(all, (0..30).collect::<Vec<_>>());
    assert_eq!(verdicts(&layout(4, [1, 1, 4, 1, 1]), ModelDims { layers: 30, ..DIMS }), "");
    let text = verdicts(&layout(4, [1, 1, 4, 1, 1]), ModelDims { layers: 3, ..DIMS });
    says(&text, &["layers = 3 over PP = 4", "PP 2", "layers 4"]);
}

#[test]
fn s20_mesh_table() {
    // world, [TP, CP, PP, EP, ETP] -> DP, EDP
    let valid = [
        (4, [1, 1, 2, 2, 1], 2, 1),
        (4, [4, 1, 1, 4, 1], 1, 1),
        (32, [1, 4, 1, 8, 1], 8, 4),
        (8, [1, 1, 1, 1, 4], 8, 2),
    ];
    for (world, sizes, dp, edp) in valid {
        let layout = layout(world, sizes);
        assert_eq!((layout.dp(), layout.edp()), (dp, edp), "world {world} {sizes:?}");
    }
    says(&refusal(&spec(8, [1, 1, 1, 3, 1])), &["8 % 3 = 2", "EP 2 or 4", "G 6 or 9"]);
    let text = verdicts(&layout(8, [1, 1, 1, 8, 1]), ModelDims { experts: 12, ..DIMS });
    says(&text, &["experts = 12", "EP = 8", "12 % 8 = 4", "EP 4", "experts 8 or 16"]);
    says(&refusal(&spec(8, [3, 1, 1, 1, 1])), &["8 % 3 = 2", "TP 2 or 4", "G 6 or 9"]);
}

#[test]
fn s20_megatron_1628_batch() {
    for sizes in [[1, 1, 1, 4, 1], [1, 1, 1, 1, 4]] {
        let layout = layout(8, sizes);
        let dims = ModelDims { layers: 2, global_batch: 4, ..DIMS };
        let text = verdicts(&layout, dims);
        says(&text, &["global batch = 4", "micro batch·DP = 1·8 = 8", "4 % 8 = 4", "global batch 8"]);
        assert_eq!(verdicts(&layout, ModelDims { global_batch: 8, ..dims }), "");
    }
}

#[test]
fn s21_padded_vocabulary() {
    assert_eq!(padded_vocab(10, 4), 12);
    assert_eq!(padded_vocab(12, 4), 12);
    assert_eq!(padded_vocab(1, 8), 8);
    let odd = ModelDims { vocab: 10, ..DIMS };
    assert_eq!(verdicts(&layout(4, [4, 1, 1, 1, 1]), odd), "");
}

#[test]
fn s22_sequence_chunks() {
    assert_eq!(zigzag_chunks(8, 2, 0), [0..2, 6..8]);
    assert_eq!(zigzag_chunks(8, 2, 1), [2..4, 4..6]);
    assert_eq!(zigzag_chunks(7, 1, 0), [0..7, 7..7]);
    let cp2 = layout(2, [1, 2, 1, 1, 1]);
    let error = |length, sp| cp2.check_sequence(length, sp).unwrap_err().to_string();
    says(&error(7, false), &["7 % 4 = 3", "2·CP = 2·2", "length 4 or 8"]);
    says(&error(0, false), &["sequence length = 0"]);
    assert_eq!(cp2.check_sequence(8, true), Ok(()));
    let tp3 = layout(6, [3, 2, 1, 1, 1]);
    says(&tp3.check_sequence(8, true).unwrap_err().to_string(), &["8 % 12 = 8", "length 12"]);
    assert_eq!(tp3.check_sequence(8, false), Ok(()));
    assert_eq!(layout(4, [4, 1, 1, 1, 1]).check_sequence(7, false), Ok(()));
    assert!(layout(4, [4, 1, 1, 1, 1]).check_sequence(7, true).is_err());
}

#[test]
fn report_ms_swift_5737() {
    // TP 8, PP 4, EP 16, ETP 1: PP·EP = 64 ranks at least, although TP·PP = 32.
    let sizes = [8, 1, 4, 16, 1];
    says(&refusal(&spec(32, sizes)), &["ETP·EP·PP = 1·16·4 = 64", "EP 8", "G 64"]);
    let dims = ModelDims { layers: 48, experts: 128, micro_batch: 2, ..DIMS };
    for (world, dp) in [(64, 2), (128, 4), (256, 8)] {
        let layout = layout(world, sizes);
        assert_eq!(layout.dp(), world / 32);
        assert_eq!((layout.dp(), verdicts(&layout, dims).as_str()), (dp, ""));
    }
    says(&verdicts(&layout(512, sizes), dims), &["global batch = 16", "2·16 = 32"]);
    // 46 layers: uneven stages are built, an interleaved schedule is refused with the layer count.
    assert_eq!(verdicts(&layout(64, sizes), ModelDims { layers: 46, ..dims }), "");
    let text = layout(64, sizes).check_chunks(46, 1).unwrap_err().to_string();
    says(&text, &["layers = 46", "PP·V = 4·1 = 4", "46 % 4 = 2", "layers 44 or 48"]);
}

#[test]
fn report_nemo_rl_2319() {
    for (etp, edp) in [(1, 2), (2, 1)] {
        let layout = layout(8, [2, 1, 1, 4, etp]);
        assert_eq!((layout.dp(), layout.edp(), layout.local_expert_count(256)), (4, edp, 64));
        assert_eq!(verdicts(&layout, ModelDims { layers: 40, experts: 256, ..DIMS }), "");
    }
}

#[test]
fn report_speech_14838() {
    let layout = layout(4, [1, 1, 2, 2, 1]);
    assert_eq!(layout.dp(), 2);
    assert_eq!(layout.micro_batch_count(512, 1), Ok(256));
    // 256 sequences a data-parallel rank: 85 micro-batches of 3 and one of 1.
    assert_eq!(layout.micro_batch_count(512, 3), Ok(86));
    assert_eq!(layout.check_chunks(48, 24), Ok(()));
    let text = layout.check_chunks(40, 24).unwrap_err().to_string();
    says(&text, &["layers = 40", "PP·V = 2·24 = 48", "layers 48"]);
    assert!(layout.check_chunks(48, 0).is_err());
    assert!(layout.check_chunks(0, 1).is_err());
}

#[test]
fn report_megatron_bridge_546() {
    assert_eq!(layout(4, [4, 1, 1, 4, 1]).edp(), 1);
    assert_eq!(layout(8, [4, 1, 1, 4, 1]).edp(), 2);
    // Left to follow TP, ETP 4 does not fit.
    let follows = LayoutSpec { world: 4, tp: 4, ep: 4, ..LayoutSpec::default() };
    says(&refusal(&follows), &["ETP·EP·PP = 4·4·1 = 16", "ETP 1", "EP 1", "G 16"]);
}

#[test]
fn report_marin_8953() {
    let layout = layout(32, [1, 1, 4, 8, 1]);
    assert_eq!((layout.dp(), layout.edp()), (8, 1));
}

#[test]
fn report_transformer_engine_1930() {
    let error = layout(2, [1, 2, 1, 1, 1]).check_sequence(10, false).unwrap_err().to_string();
    says(&error, &["10 % 4 = 2", "length 8 or 12"]);
}

#[test]
fn report_deepspeed_5794() {
    assert_eq!(verdicts(&layout(4, [1, 1, 1, 4, 1]), ModelDims { experts: 4, ..DIMS }), "");
}

#[test]
fn report_megatron_4342() {
    // TP 2, EP 2, ETP 2 on 8 ranks: DP 4 holds two instances, EDP 2 as well; on 4 ranks EDP is 1.
    assert_eq!(layout(8, [2, 1, 1, 2, 2]).check_instances(2), Ok(()));
    let errors = layout(4, [2, 1, 1, 2, 2]).check_instances(2).unwrap_err();
    assert_eq!(errors.len(), 1);
    says(&errors[0].to_string(), &["EDP = 1", "instances = 2", "DP·CP = 2", "instances 1"]);
    assert!(layout(4, [2, 1, 1, 2, 2]).check_instances(0).is_err());
}

#[test]
fn every_broken_rule_is_reported_with_its_neighbours() {
    let layout = layout(16, [4, 1, 1, 4, 4]);
    let dims = ModelDims {
        heads: 6,
        kv_heads: 2,
        ffn: 62,
        moe_ffn: 63,
        shared_ffn: 10,
        experts: 6,
        global_batch: 6,
        ..DIMS
    };
    let errors = layout.check_model(&dims).unwrap_err();
    assert_eq!(errors.len(), 7, "{errors:#?}");
    let text = verdicts(&layout, dims);
    says(&text, &["heads = 6 is not divisible by TP = 4 (6 % 4 = 2); nearest valid: TP 2; heads 4 or 8"]);
    says(&text, &["kv heads = 2 is not divisible by TP = 4", "kv heads 4"]);
    says(&text, &["ffn = 62", "ffn 60 or 64", "expert ffn = 63", "ETP = 4", "ETP 1", "expert ffn 60 or 64"]);
    says(&text, &["shared expert ffn = 10", "experts = 6", "EP = 4", "EP 2", "experts 4 or 8"]);
    says(&text, &["global batch = 6", "1·4 = 4", "global batch 4 or 8"]);
}

#[test]
fn a_dense_model_has_no_expert_axis() {
    let dense = ModelDims { experts: 0, moe_ffn: 0, ..DIMS };
    assert_eq!(verdicts(&layout(4, [2, 1, 1, 1, 2]), dense), "");
    says(&verdicts(&layout(4, [1, 1, 1, 4, 1]), dense), &["EP = 4", "experts = 0"]);
}

#[test]
fn zero_model_sizes_are_named() {
    let text = verdicts(&layout(2, [2, 1, 1, 1, 1]), ModelDims::default());
    says(&text, &["layers = 0", "heads = 0", "kv_heads = 0", "vocab = 0", "ffn = 0"]);
    says(&text, &["global_batch = 0", "micro_batch = 0"]);
    let text = verdicts(&layout(2, [2, 1, 1, 1, 1]), ModelDims { moe_ffn: 0, ..DIMS });
    says(&text, &["moe_ffn = 0"]);
    let huge = ModelDims { micro_batch: usize::MAX, ..DIMS };
    says(&verdicts(&layout(2, [1, 1, 1, 1, 1]), huge), &["overflows"]);
}
