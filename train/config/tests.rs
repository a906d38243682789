//! Reading, merging and writing configurations; arbitrary text never panics.

use proptest::prelude::*;

use super::*;

fn read(preset: Option<&str>, text: &str, sets: &[&str]) -> Result<Config, ConfigErrors> {
    let sets: Vec<String> = sets.iter().map(|set| set.to_string()).collect();
    Config::from_sources(preset, Some(text), &sets)
}

fn error(text: &str, sets: &[&str]) -> String {
    read(None, text, sets).unwrap_err().to_string()
}

#[test]
fn every_preset_is_valid_and_round_trips() {
    for preset in PRESETS {
        let config =
            read(Some(preset.name), "", &[]).unwrap_or_else(|errors| panic!("{}: {errors}", preset.name));
        assert_eq!(config.run.name, preset.name);
        let text = config.to_toml();
        let again =
            read(None, &text, &[]).unwrap_or_else(|errors| panic!("{}: {errors}\n{text}", preset.name));
        assert_eq!(config, again, "{text}");
        assert_eq!(text, again.to_toml());
    }
    assert_eq!(PRESETS[0].name, DEFAULT_PRESET);
}

#[test]
fn the_benchmark_size_is_that_of_the_peers() {
    let config = read(Some("moe-small"), "", &[]).unwrap();
    let (model, moe) = (&config.model, config.moe.as_ref().unwrap());
    let attention = 2 * model.d_model * model.head_dim * (model.heads + model.kv_heads);
    let layer = attention
        + moe.experts * 3 * model.d_model * moe.ffn
        + moe.experts * model.d_model
        + 2 * model.d_model;
    let all = model.layers * layer + 2 * model.vocab * model.d_model + model.d_model;
    assert_eq!((all as f64 / 1e5).round() / 10.0, 111.2);
    assert_eq!(config.train.global_batch * config.train.seq_len, 2048);
    assert_eq!((config.train.lr, config.data.source.to_string().as_str()), (3e-4, "synthetic"));
}

#[test]
fn later_sources_win() {
    let config =
        read(Some("small"), "[train]\nlr = 0.5\nclip = 2\n", &["train.lr=0.25", "run.name = x y "]).unwrap();
    assert_eq!((config.train.lr, config.train.clip, config.run.name.as_str()), (0.25, Some(2.0), "x y"));
    assert_eq!(config.layout.to_string(), "tp2 cp1 dp2 | etp1 ep2 edp2 | pp1");
    assert_eq!(config.train.micro_batches, 2);
}

#[test]
fn overrides_are_typed() {
    let sets = [
        "moe.experts=8",
        "moe.capacity={factor=1.1, min=4}",
        "moe.balance=[\"micro\", \"global\"]",
        "moe.balance_coefficient=[0.01, 1]",
        "model.dense_layers=[1]",
        "train.recompute=moe",
        "train.betas=[0.9, 0.99]",
        "run.name=123",
        "moe.force=biased=0.5",
        "data.source=\"a b.txt\"",
    ];
    let config = read(None, "", &sets).unwrap();
    let moe = config.moe.as_ref().unwrap();
    assert_eq!(moe.capacity.unwrap().factor, Decimal { numerator: 11, denominator: 10 });
    assert_eq!(moe.balance, [(Balance::Micro, 0.01), (Balance::Global, 1.0)]);
    assert_eq!(moe.force, Force::Biased(0.5));
    assert_eq!(config.model.dense, [false, true]);
    assert!(config.train.recomputes(Recompute::Moe) && !config.train.recomputes(Recompute::Attention));
    assert_eq!((config.run.name.as_str(), config.train.betas), ("123", (0.9, 0.99)));
    assert_eq!(config.data.source, crate::data::Source::Path("a b.txt".into()));
}

#[test]
fn unknown_keys_name_the_nearest_and_the_valid_ones() {
    let text = error("[moe]\ntopk = 2\n", &["layot.tp=2", "train.learning=1", "speed=9", "nonsense"]);
    assert!(
        text.contains("moe.topk: no such field; did you mean moe.top_k? fields of [moe] are experts, top_k,")
    );
    assert!(text.contains("layot.tp: no such field; did you mean layout.tp? sections are run, model"));
    assert!(text.contains("train.learning: no such field; fields of [train] are global_batch"), "{text}");
    assert!(text.contains("speed: no such field; sections are run"), "{text}");
    assert!(text.contains("--set nonsense: write KEY=VALUE"));
    assert!(text.starts_with("the configuration has 5 mistakes:"));
    let text = error("moe = 3\n", &["moe.capacity=3"]);
    assert!(text.contains("moe: no such field") && text.contains("moe.capacity: no such field; "), "{text}");
    let unknown = read(Some("smal"), "", &[]).unwrap_err().to_string();
    assert!(unknown.contains("preset \"smal\": no such preset; did you mean small? presets are small, tiny"));
}

#[test]
fn wrong_types_and_words_are_named_all_at_once() {
    let text = error(
        "[model]\nlayers = \"two\"\nd_model = 1.5\nheads = -1\n[moe]\nscore = \"softmaxx\"\nrenormalise = 1\n\
         [train]\nlr = nan\nmin_lr = inf\nbetas = 0.9\n[run]\nname = \"\"\n[data]\nsource = [1]\n",
        &["moe.balance=[\"micro\", 3]", "moe.capacity.factor=nan", "layout.dp=many"],
    );
    for part in [
        "model.layers = \"two\": it must be whole number, not a string; write whole number",
        "model.d_model = 1.5: it must be whole number, not a float",
        "model.heads = -1: it is negative; write 0 or more",
        "moe.score = \"softmaxx\": it must be softmax | sigmoid; did you mean \"softmax\"? write one of them",
        "moe.renormalise = 1: it must be true or false, not an integer",
        "train.lr = nan: it must be a finite number",
        "train.min_lr = inf: it must be a finite number",
        "train.betas = 0.9: it must be list of numbers",
        "run.name = \"\": it is empty",
        "data.source = [1]: it must be text, not an array",
        "moe.balance = [\"micro\", 3]: it must be none | micro | sequence | global, not an integer",
        "moe.capacity.factor = nan: it must be a finite number",
        "layout.dp = \"many\": it must be whole number or \"auto\", not a string",
    ] {
        assert!(text.contains(part), "{part}\n--\n{text}");
    }
    assert!(text.starts_with("the configuration has 13 mistakes:"), "{text}");
    assert!(error("[model\n", &[]).contains("not valid TOML"));
}

#[test]
fn every_field_is_described_and_every_described_field_exists() {
    let described = describe();
    let mut names: Vec<&str> = described.iter().map(|field| field.name).collect();
    let mut leaves = Vec::new();
    fn walk(table: &toml::Table, prefix: &str, leaves: &mut Vec<String>) {
        for (key, value) in table {
            match value {
                toml::Value::Table(inner) => walk(inner, &format!("{prefix}{key}."), leaves),
                _ => leaves.push(format!("{prefix}{key}")),
            }
        }
    }
    walk(&fields::defaults(), "", &mut leaves);
    names.sort_unstable();
    leaves.sort_unstable();
    assert_eq!(names, leaves);
    assert!(described.iter().all(|field| !field.meaning.is_empty() && !field.kind.is_empty()));
    let lr = described.iter().find(|field| field.name == "train.lr").unwrap();
    assert_eq!((lr.default.as_str(), lr.kind.as_str()), ("0.001", "number"));
    let reference = reference_markdown();
    assert!(reference.starts_with("# Settings\n") && reference.contains("\n## [run]\n\n| field |"));
    assert!(reference.contains("| `moe.score` | softmax \\| sigmoid | `\"softmax\"` |"), "{reference}");
    assert_eq!(reference.lines().filter(|line| line.starts_with("| `")).count(), described.len());
}

/// A default written back through `--set` changes nothing: the kinds accept what the defaults hold.
#[test]
fn defaults_are_accepted_as_overrides() {
    let sets: Vec<String> =
        describe().iter().map(|field| format!("{}={}", field.name, field.default)).collect();
    let config = Config::from_sources(None, None, &sets).unwrap();
    assert_eq!(config, Config::from_sources(None, None, &[]).unwrap());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_text_never_panics(text in "\\PC{0,200}", set in "\\PC{0,40}") {
        let _ = Config::from_sources(None, Some(&text), &[set]);
    }

    #[test]
    fn a_damaged_preset_never_panics(
        which in 0..PRESETS.len(),
        at in 0usize..2000,
        cut in 0usize..20,
        insert in "[\\[\\]=\"',.a-z0-9\n-]{0,12}",
    ) {
        let complete = read(Some(PRESETS[which].name), "", &[]).unwrap().to_toml();
        let letters: Vec<char> = complete.chars().collect();
        let at = at % letters.len();
        let rest = letters[(at + cut).min(letters.len())..].iter();
        let text: String = letters[..at].iter().copied().chain(insert.chars()).chain(rest.copied()).collect();
        if let Ok(config) = Config::from_sources(None, Some(&text), &[]) {
            let again = Config::from_sources(None, Some(&config.to_toml()), &[]);
            prop_assert_eq!(again.unwrap(), config);
        }
    }

    #[test]
    fn any_value_in_any_field_never_panics(
        field in 0..fields::FIELDS.len(),
        value in prop_oneof![
            any::<i64>().prop_map(|value| value.to_string()),
            any::<f64>().prop_map(|value| format!("{value:?}")),
            "[a-z0-9=.\\[\\]\",-]{0,12}",
            Just("0".to_string()), Just("1".to_string()), Just("[]".to_string()), Just("none".to_string()),
            Just("auto".to_string()), Just("9223372036854775807".to_string()),
        ],
        which in 0..PRESETS.len(),
    ) {
        let set = format!("{}={value}", fields::FIELDS[field].0);
        match Config::from_sources(Some(PRESETS[which].name), None, std::slice::from_ref(&set)) {
            Ok(config) => {
                let again = Config::from_sources(None, Some(&config.to_toml()), &[]);
                prop_assert_eq!(again.unwrap(), config);
            }
            Err(errors) => prop_assert!(!errors.0.is_empty()),
        }
    }
}
