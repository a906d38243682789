//! Tests of reading configurations and of the names: against the parameters that the model really declares, and
//! one refusal for each kind of mistake. The numbers of published models are in tests/golden.rs.

use std::collections::BTreeSet;

use plica_comm::Mesh;
use plica_dense::ParamSpecs;
use plica_kernels::Device;
use serde_json::{Value, json};

use super::*;
use crate::checkpoint::read::expected;
use crate::config::QkNorm;
use crate::model::build::{ModelPlan, build};

fn config(class: &str) -> Value {
    let mut config = json!({
        "architectures": [class], "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "num_hidden_layers": 3, "vocab_size": 11, "intermediate_size": 10,
        "hidden_act": "silu", "rms_norm_eps": 1e-5,
    });
    if class != "LlamaForCausalLM" {
        config["num_experts"] = json!(4);
        config["num_experts_per_tok"] = json!(2);
    }
    if class == "Qwen3MoeForCausalLM" {
        config["moe_intermediate_size"] = json!(6);
        config["mlp_only_layers"] = json!([1]);
    }
    config
}

fn parse(config: &Value) -> Result<HubModel, HubError> {
    HubModel::parse(&config.to_string())
}

#[test]
fn names_cover_the_declared_parameters_both_ways() {
    for architecture in Architecture::ALL {
        for tie in [false, true] {
            let mut config = config(architecture.class());
            config["tie_word_embeddings"] = json!(tie);
            let hub = parse(&config).expect("a supported configuration");
            let device = Device::cpu(1);
            let mut specs = ParamSpecs::new();
            let context = crate::config::ContextMethod::Ring;
            let plan =
                ModelPlan { model: &hub.model, moe: hub.moe.as_ref(), seq_len: 4, context, pipeline: None };
            build::<f32>(&plan, &Mesh::single(&device), &device, &mut specs).expect("a model");
            let names = Names::new(&hub);
            let declared: BTreeSet<String> =
                expected(specs.list(), "").expect("pieces").into_keys().collect();
            let named: BTreeSet<String> = names.pairs().map(|(own, _)| own.to_string()).collect();
            assert_eq!(declared, named, "{architecture}, tied: {tie}");
            for (own, theirs) in names.pairs() {
                assert_eq!((names.hub(own), names.own(theirs)), (Some(theirs), Some(own)));
            }
        }
    }
}

#[test]
fn names_of_a_mixtral_and_of_a_mixed_qwen3() {
    let names = Names::new(&parse(&config("MixtralForCausalLM")).expect("supported"));
    let pairs = [
        ("layers.2.moe.router", "model.layers.2.block_sparse_moe.gate.weight"),
        ("layers.0.moe.experts.3.gate", "model.layers.0.block_sparse_moe.experts.3.w1.weight"),
        ("layers.0.moe.experts.3.up", "model.layers.0.block_sparse_moe.experts.3.w3.weight"),
        ("layers.0.moe.experts.3.down", "model.layers.0.block_sparse_moe.experts.3.w2.weight"),
    ];
    for (own, theirs) in pairs {
        assert_eq!(names.hub(own), Some(theirs));
    }
    let names = Names::new(&parse(&config("Qwen3MoeForCausalLM")).expect("supported"));
    assert_eq!(names.own("model.layers.1.mlp.up_proj.weight"), Some("layers.1.mlp.up"));
    assert_eq!(names.own("model.layers.0.mlp.up_proj.weight"), None);
    assert_eq!(names.own("model.layers.0.self_attn.k_norm.weight"), Some("layers.0.attention.k_norm"));
    let error =
        names.own_all(["model.norm.weight", "model.layers.9.mlp.gate.weight", "x"]).expect_err("unknown");
    assert!(error.to_string().contains("model.layers.9.mlp.gate.weight, x"), "{error}");
}

#[test]
fn every_architecture_reads_its_own_rules() {
    let llama = parse(&config("LlamaForCausalLM")).expect("supported");
    assert_eq!((llama.moe, llama.model.rope_theta, llama.model.qk_norm), (None, 1e4, QkNorm::None));
    let mixtral = parse(&config("MixtralForCausalLM")).expect("supported");
    let moe = mixtral.moe.expect("experts");
    assert_eq!((moe.renormalise, moe.ffn, moe.experts, mixtral.model.rope_theta), (true, 10, 4, 1e6));
    let mut config_of_qwen = config("Qwen3MoeForCausalLM");
    let qwen = parse(&config_of_qwen).expect("supported");
    assert_eq!(qwen.model.dense, [false, true, false]);
    assert_eq!((qwen.moe.expect("experts").renormalise, qwen.model.qk_norm), (false, QkNorm::Head));
    config_of_qwen["decoder_sparse_step"] = json!(2);
    config_of_qwen["mlp_only_layers"] = json!([]);
    config_of_qwen["norm_topk_prob"] = json!(true);
    let qwen = parse(&config_of_qwen).expect("supported");
    assert_eq!((qwen.model.dense, qwen.moe.expect("experts").renormalise), (vec![true, false, true], true));
    let mut of_olmoe = config("OlmoeForCausalLM");
    of_olmoe["rope_parameters"] = json!({"rope_theta": 5e5, "rope_type": "default"});
    of_olmoe.as_object_mut().expect("an object").remove("head_dim");
    let olmoe = parse(&of_olmoe).expect("supported");
    assert_eq!((olmoe.model.rope_theta, olmoe.model.head_dim, olmoe.model.qk_norm), (5e5, 6, QkNorm::Full));
}

/// What changes the mathematics is refused by name and value, all of it in one message.
#[test]
fn what_is_not_supported_is_refused_by_name() {
    let cases = [
        ("sliding_window", json!(4096)),
        ("attention_bias", json!(true)),
        ("mlp_bias", json!(true)),
        ("hidden_act", json!("gelu")),
        ("clip_qkv", json!(8.0)),
        ("final_logit_softcapping", json!(30.0)),
        ("attention_dropout", json!(0.1)),
        ("router_jitter_noise", json!(0.01)),
        ("rope_scaling", json!({"rope_type": "llama3", "factor": 8.0})),
        ("rope_parameters", json!({"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0})),
        ("layer_types", json!(["full_attention", "sliding_attention"])),
        ("quantization_config", json!({"bits": 4})),
        ("a_field_of_tomorrow", json!(1)),
        ("num_experts_per_tok", json!(9)),
        ("num_key_value_heads", json!(3)),
        ("rms_norm_eps", json!(0.0)),
        ("vocab_size", json!(-1)),
        ("hidden_size", json!(null)),
        ("tie_word_embeddings", json!("yes")),
    ];
    for (name, value) in &cases {
        let mut config = config("MixtralForCausalLM");
        config[name] = value.clone();
        let error = parse(&config).expect_err(name).to_string();
        assert!(error.contains(name), "{name}: {error}");
    }
    let mut all = config("MixtralForCausalLM");
    cases[..8].iter().for_each(|(name, value)| all[*name] = value.clone());
    let Err(HubError::Fields { problems, .. }) = parse(&all) else { panic!("refused by its fields") };
    assert_eq!(problems.len(), 8, "{problems:?}");
    let mut qwen = config("Qwen3MoeForCausalLM");
    qwen["sliding_window"] = json!(4096);
    qwen["use_sliding_window"] = json!(false);
    parse(&qwen).expect("a window that is turned off");
    qwen["mlp_only_layers"] = json!([3]);
    assert!(parse(&qwen).expect_err("layer 3 of 3").to_string().contains("3 is no layer of 3"));
}

#[test]
fn other_architectures_are_refused_with_the_supported_ones() {
    for (config, said) in [
        (json!({"architectures": ["GptOssForCausalLM"]}), "GptOssForCausalLM"),
        (json!({"architectures": []}), "[]"),
        (json!({}), "none named"),
    ] {
        let error = parse(&config).expect_err("not supported").to_string();
        assert!(error.contains(said) && error.contains("supported are LlamaForCausalLM, Mixtral"), "{error}");
    }
    for text in ["", "[1]", "null", "{\"architectures\":"] {
        assert!(matches!(HubModel::parse(text), Err(HubError::Syntax(_))), "{text}");
    }
}

/// Every field replaced by every kind of nonsense: a configuration or an error that names the field, no panic.
#[test]
fn nonsense_in_any_field_is_refused_by_name() {
    let nonsense = [
        json!(null),
        json!(-1),
        json!(0),
        json!(1.5),
        json!(1e300),
        json!(u64::MAX),
        json!(""),
        json!("silu"),
        json!([]),
        json!([[1]]),
        json!([u64::MAX]),
        json!({"rope_type": 3}),
        json!(true),
    ];
    for architecture in Architecture::ALL {
        let plain = config(architecture.class());
        let optional = ["rope_theta", "rope_parameters", "tie_word_embeddings", "decoder_sparse_step"];
        let fields: Vec<&str> =
            plain.as_object().expect("an object").keys().map(String::as_str).chain(optional).collect();
        for field in fields {
            for value in &nonsense {
                let mut config = plain.clone();
                config[field] = value.clone();
                if let Err(error) = parse(&config) {
                    let text = error.to_string();
                    let names = text.contains(field) || field == "architectures";
                    assert!(names, "{architecture}, {field} = {value}: {text}");
                }
            }
        }
    }
}
