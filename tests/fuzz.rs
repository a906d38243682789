//! Arbitrary and damaged input to every reader: configurations, manifests, tensor files, data. Never a panic: an
//! error, or a value that is as good as a typed one.

use std::path::Path;

use plica::checkpoint::read::TensorFile;
use plica::checkpoint::{Manifest, open};
use plica::config::{Config, PRESETS, describe};
use plica::data::{Data, DataSpec, Format, IdWidth, Source, Split};
use plica::metrics::{keep_through, read_records};
use proptest::prelude::*;
use serde_json::json;

use crate::runs::{Runs, files};
use crate::support::TempDir;

fn settings(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

/// A small complete checkpoint: its files by name.
fn checkpoint(name: &str) -> (Runs, std::collections::BTreeMap<String, Vec<u8>>) {
    let runs = Runs::new(name);
    runs.train("run", &[&["run.steps=1"]]).unwrap();
    let all = files(&runs.checkpoint("run", 1));
    (runs, all)
}

/// A damage: bytes from `at` (a share of the length) on are replaced, inserted or cut.
#[derive(Clone, Debug)]
struct Damage {
    at: f64,
    bytes: Vec<u8>,
    kind: u8,
}

fn damage() -> impl Strategy<Value = Damage> {
    let bytes = prop_oneof![
        proptest::collection::vec(any::<u8>(), 0..16),
        "[\\[\\]{}:,\"0-9a-z-]{0,16}".prop_map(String::into_bytes),
    ];
    (0.0..1.0f64, bytes, 0..3u8).prop_map(|(at, bytes, kind)| Damage { at, bytes, kind })
}

impl Damage {
    fn apply(&self, whole: &[u8]) -> Vec<u8> {
        let at = (self.at * whole.len() as f64) as usize;
        let skip = match self.kind {
            0 => self.bytes.len().min(whole.len() - at),
            1 => 0,
            _ => whole.len() - at,
        };
        [&whole[..at], &self.bytes, &whole[at + skip..]].concat()
    }
}

/// Reads everything of a tensor file that a load reads.
fn read_all(path: &Path) -> Result<usize, String> {
    let file = TensorFile::open(path).map_err(|e| e.to_string())?;
    let names = file.names();
    let _ = file.differences(&[("a".to_string(), vec![1])].into());
    for name in &names {
        assert!(file.shape(name).is_some());
        let _ = (file.complete::<f32>(name), file.complete::<f64>(name));
    }
    Ok(names.len())
}

#[test]
fn damaged_manifests_and_tensor_files_are_errors_or_harmless() {
    let (runs, all) = checkpoint("fuzz-files");
    let folder = runs.checkpoint("run", 1);
    let mut runner = proptest::test_runner::TestRunner::new(settings(400));
    let names: Vec<&String> = all.keys().collect();
    let strategy = (0..names.len(), damage());
    runner
        .run(&strategy, |(which, damage)| {
            let name = names[which];
            let damaged = damage.apply(&all[name]);
            std::fs::write(folder.join(name), &damaged).unwrap();
            let opened = open(&folder);
            let same = damaged == all[name];
            if name != "manifest.json" {
                prop_assert_eq!(opened.is_ok(), same, "{}: a damage that is not seen", name);
                let read = read_all(&folder.join(name));
                prop_assert!(!same || read.is_ok());
            }
            let manifest = serde_json::from_slice::<Manifest>(&damaged);
            prop_assert!(opened.is_err() || name != "manifest.json" || manifest.is_ok());
            std::fs::write(folder.join(name), &all[name]).unwrap();
            Ok(())
        })
        .unwrap();
    assert!(open(&folder).is_ok());
}

#[test]
fn manifests_that_lead_elsewhere_or_are_of_another_kind_are_refused() {
    let (runs, all) = checkpoint("fuzz-manifest");
    let folder = runs.checkpoint("run", 1);
    let whole: serde_json::Value = serde_json::from_slice(&all["manifest.json"]).unwrap();
    let changes: [(&str, serde_json::Value, &str); 8] = [
        ("/files/0/name", json!("../../../text"), "no file name"),
        ("/files/0/name", json!("/dev/zero"), "no file name"),
        ("/files/0/name", json!(".."), "no file name"),
        ("/files/0/name", json!(""), "no file name"),
        ("/files/0/size_bytes", json!(u64::MAX), "bytes, its manifest says"),
        ("/files/0/crc32", json!(-1), "cannot be parsed"),
        ("/format", json!(2), "its format is 2, this program reads 1"),
        ("/step", json!("one"), "cannot be parsed"),
    ];
    for (pointer, value, wanted) in changes {
        let mut changed = whole.clone();
        *changed.pointer_mut(pointer).unwrap() = value;
        std::fs::write(folder.join("manifest.json"), serde_json::to_vec(&changed).unwrap()).unwrap();
        let text = open(&folder).unwrap_err().to_string();
        assert!(text.contains(wanted), "{pointer}: {text}");
    }
    // A step that is not the folder's name is no checkpoint of this run.
    let mut changed = whole.clone();
    changed["step"] = json!(7);
    std::fs::write(folder.join("manifest.json"), serde_json::to_vec(&changed).unwrap()).unwrap();
    let text = open(&runs.run("run")).unwrap_err().to_string();
    assert!(text.contains("its manifest says step 7, which is not its name"), "{text}");
    // A manifest without its files: the load names what is missing.
    let mut changed = whole;
    changed["files"] = json!([]);
    std::fs::write(folder.join("manifest.json"), serde_json::to_vec(&changed).unwrap()).unwrap();
    std::fs::remove_file(folder.join("model.safetensors")).unwrap();
    let resume = runs.resume(&folder);
    let text = format!("{:#}", runs.train("run", &[&[&resume]]).unwrap_err());
    assert!(text.contains("model.safetensors") && text.contains("cannot open"), "{text}");
}

/// A safetensors file of this header and so many bytes behind it.
fn tensor_file(header_bytes: u64, header: &str, body: usize) -> Vec<u8> {
    let mut file = header_bytes.to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(std::iter::repeat_n(0, body));
    file
}

#[test]
fn headers_that_lie_are_errors() {
    let folder = TempDir::new("fuzz-headers");
    let path = folder.path().join("x.safetensors");
    let one = |dtype: &str, shape: &str, offsets: &str| {
        format!("{{\"a\":{{\"dtype\":\"{dtype}\",\"shape\":{shape},\"data_offsets\":{offsets}}}}}")
    };
    let two = |a: &str, b: &str| {
        let tensor =
            |offsets: &str| format!("{{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":{offsets}}}");
        format!("{{\"a\":{},\"b\":{}}}", tensor(a), tensor(b))
    };
    let good = one("F32", "[2]", "[0,8]");
    let bad: Vec<Vec<u8>> = vec![
        Vec::new(),
        vec![0; 7],
        tensor_file(0, "", 0),
        tensor_file(u64::MAX, &good, 8),
        tensor_file(u64::MAX - 7, &good, 8),
        tensor_file(1 << 62, &good, 8),
        tensor_file(good.len() as u64 + 1, &good, 0),
        tensor_file(good.len() as u64, &good, 7),
        tensor_file(good.len() as u64, &good, 9),
        tensor_file(good.len() as u64 - 1, &good, 8),
    ];
    let headers = [
        one("F32", "[3]", "[0,8]"),
        one("F32", "[2]", "[8,0]"),
        one("F32", "[2]", "[0,16]"),
        one("F32", "[2]", "[1,9]"),
        one("F32", "[18446744073709551615,2]", "[0,8]"),
        one("F32", "[4294967296,4294967296]", "[0,8]"),
        one("F32", "[-1]", "[0,8]"),
        one("F99", "[2]", "[0,8]"),
        one("F32", "[2]", "[0,18446744073709551615]"),
        two("[0,4]", "[0,4]"),
        two("[0,4]", "[2,6]"),
        two("[0,4]", "[5,9]"),
        two("[4,8]", "[8,12]"),
        "[]".into(),
        "null".into(),
        "{\"a\":3}".into(),
        "{".repeat(5000),
    ];
    let bad = bad.into_iter().chain(headers.iter().map(|h| tensor_file(h.len() as u64, h, 8)));
    for (number, contents) in bad.enumerate() {
        std::fs::write(&path, &contents).unwrap();
        let text =
            read_all(&path).expect_err(&format!("file {number}: {:?}", String::from_utf8_lossy(&contents)));
        assert!(text.contains("x.safetensors"), "{text}");
    }
    std::fs::write(&path, tensor_file(good.len() as u64, &good, 8)).unwrap();
    assert_eq!(read_all(&path), Ok(1));
}

#[test]
fn integers_in_a_model_file_are_no_weights() {
    let folder = TempDir::new("fuzz-integers");
    let path = folder.path().join("x.safetensors");
    let header = "{\"a\":{\"dtype\":\"I64\",\"shape\":[1],\"data_offsets\":[0,8]}}";
    std::fs::write(&path, tensor_file(header.len() as u64, header, 8)).unwrap();
    let text =
        TensorFile::open(&path).unwrap().check(&[("a".to_string(), vec![1])].into()).unwrap_err().to_string();
    assert!(text.contains("no float (1): a is I64"), "{text}");
}

proptest! {
    #![proptest_config(settings(300))]

    #[test]
    fn a_damaged_configuration_is_an_error_or_a_configuration(which in 0..PRESETS.len(), damage in damage()) {
        let whole = Config::from_sources(Some(PRESETS[which].name), None, &[]).unwrap().to_toml();
        let text = String::from_utf8_lossy(&damage.apply(whole.as_bytes())).into_owned();
        match Config::from_sources(None, Some(&text), &[]) {
            Ok(config) => prop_assert_eq!(Config::from_sources(None, Some(&config.to_toml()), &[]).unwrap(), config),
            Err(errors) => prop_assert!(!errors.0.is_empty() && !errors.to_string().is_empty()),
        }
    }

    #[test]
    fn many_settings_at_once_never_panic(
        sets in proptest::collection::vec((0..describe().len(), prop_oneof![
            Just("0".to_string()), Just("1".to_string()), Just("2".to_string()), Just("3".to_string()),
            Just("8".to_string()), Just("16777217".to_string()), Just("9223372036854775807".to_string()),
            Just("none".to_string()), Just("auto".to_string()), Just("[0]".to_string()), Just("true".to_string()),
            Just("1e308".to_string()), Just("0.5".to_string()),
        ]), 1..8),
    ) {
        let fields = describe();
        let sets: Vec<String> = sets.iter().map(|(f, v)| format!("{}={v}", fields[*f].name)).collect();
        if let Err(errors) = Config::from_sources(Some("tiny"), None, &sets) {
            prop_assert!(!errors.0.is_empty());
        }
    }

    #[test]
    fn metrics_of_any_text_never_panic(text in "[\\PC\n]{0,200}", damage in damage(), step in any::<u64>()) {
        let _ = keep_through(&text, step);
        let line = plica::metrics::StepRecord { step: 3, ..Default::default() }.to_json_line();
        let text = String::from_utf8_lossy(&damage.apply(line.repeat(3).as_bytes())).into_owned();
        if let Ok(records) = read_records(&text) {
            prop_assert!(records.len() <= text.lines().count());
        }
    }
}

#[test]
fn data_of_any_bytes_is_tokens_below_the_vocabulary_or_an_error() {
    let folder = TempDir::new("fuzz-data");
    let mut runner = proptest::test_runner::TestRunner::new(settings(300));
    let bytes = prop_oneof![
        proptest::collection::vec(any::<u8>(), 0..200),
        "(\\{\"text\":\"[a-z\u{e9}\n]{0,9}\"\\}\r?\n?){0,8}".prop_map(String::into_bytes),
        "\u{feff}?[ab\r\n]{0,80}".prop_map(String::into_bytes),
    ];
    let formats = [
        (Format::Auto, "x.txt"),
        (Format::Text, "x"),
        (Format::Jsonl, "x.jsonl"),
        (Format::Auto, "x.u16"),
        (Format::Ids(IdWidth::U32), "x.bin"),
    ];
    let strategy = (bytes, 0..formats.len(), 1..9usize, prop_oneof![Just(0.0), Just(0.3)], 258..70000usize);
    runner
        .run(&strategy, |(bytes, which, seq_len, validation_share, vocab)| {
            let (format, name) = formats[which];
            let path = folder.path().join(name);
            std::fs::write(&path, &bytes).unwrap();
            let spec = DataSpec {
                source: Source::Path(path.to_string_lossy().into_owned()),
                format,
                field: "text".into(),
                max_bytes: 150,
                validation_share,
                seed: 1,
                vocab,
                document_start: None,
                seq_len,
                global_batch: 3,
            };
            match Data::load(&spec, folder.path()) {
                Err(error) => prop_assert!(!error.to_string().is_empty()),
                Ok(data) => {
                    for (split, step) in [(Split::Train, 0), (Split::Train, 1 << 40), (Split::Validation, 1)]
                    {
                        if split == Split::Validation && !data.has_validation() {
                            continue;
                        }
                        let batch = data.batch(split, step);
                        prop_assert_eq!(batch.len(), 3 * seq_len);
                        prop_assert!(batch.tokens.iter().all(|id| (*id as usize) < vocab));
                        prop_assert!(
                            batch.targets.iter().all(|id| *id == -100 || (0..vocab as i32).contains(id))
                        );
                    }
                }
            }
            Ok(())
        })
        .unwrap();
}
