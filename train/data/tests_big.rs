//! Files beyond 32-bit counts, and the real default corpus where this machine has it.

use std::path::{Path, PathBuf};

use super::tests::{Folder, load, spec};
use super::*;

/// A sparse file of 2^31 + 10 two-byte ids: every offset is right, the last id is read through the whole pipeline.
#[test]
fn s28_more_tokens_than_31_bits() {
    use std::io::{Seek, SeekFrom, Write};
    let folder = Folder::new("sparse");
    let path = folder.0.join("sparse.u16");
    let tokens = (1u64 << 31) + 10;
    let mut file = std::fs::File::create(&path).unwrap();
    file.seek(SeekFrom::Start(2 * (tokens - 1))).unwrap();
    file.write_all(&77u16.to_le_bytes()).unwrap();
    drop(file);

    let ids = TokenFile::open(&path, IdWidth::U16).unwrap();
    assert_eq!(ids.len(), tokens);
    assert_eq!((ids.get(tokens - 1), ids.get(tokens - 2)), (77, 0));
    drop(ids);

    let path = path.to_string_lossy().into_owned();
    let spec = DataSpec { vocab: 78, seq_len: 1 << 20, global_batch: 1, ..spec(&path) };
    let data = load(&spec).unwrap();
    assert_eq!(data.summary().train_tokens, tokens);
    assert_eq!(data.summary().train_sequences, 2049);
    let order = source::order(spec.seed, Split::Train, 0, 2049);
    let step = (0..2049).find(|&step| order.get(step) == 2048).unwrap();
    let padded = data.batch(Split::Train, step);
    assert_eq!((padded.tokens[8], padded.tokens[9], padded.padding[10]), (0, 77, true));
    assert_eq!(padded.targets[8..10], [77, IGNORE]);
    let refused = load(&DataSpec { vocab: 77, ..spec }).unwrap_err().to_string();
    assert!(refused.contains("token id 77 at token offset 2147483657"), "{refused}");
}

/// The default corpus: found, loaded within the start-up limit, both splits large, batches below the vocabulary.
#[test]
fn the_registry_is_a_corpus() {
    let home = option_env!("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(Path::new(option_env!("HOME")?).join(".cargo")));
    let home = home.filter(|home| home.join("registry/src").is_dir());
    let Some(home) = home else {
        println!("skipped: the_registry_is_a_corpus: no sources below CARGO_HOME/registry/src");
        return;
    };
    let spec = DataSpec {
        source: Source::Registry,
        max_bytes: 16 << 20,
        validation_share: 0.05,
        seq_len: 256,
        global_batch: 8,
        ..spec("")
    };
    let begin = std::time::Instant::now();
    let data = Data::load(&spec, &home).unwrap();
    println!("loaded in {:?}: {:?}", begin.elapsed(), data.summary());
    let summary = data.summary();
    assert!(summary.used_bytes <= 16 << 20 && summary.files > 10);
    let share = summary.validation_tokens as f64 / (summary.train_tokens + summary.validation_tokens) as f64;
    assert!((0.01..0.15).contains(&share), "held-out share {share}");
    let batch = data.batch(Split::Train, 17);
    assert!(batch.tokens.iter().all(|&id| (id as usize) < VOCAB_SIZE));
    assert!(batch.valid_targets > 8 * 256 - 16);
}
