//! Files beyond 32-bit counts, and the real default corpus where this machine has it.

use std::path::{Path, PathBuf};

use super::tests::{Folder, spec};
use super::*;

/// A sparse file of 2^31 + 10 two-byte ids: every offset is right, the last id is read through the packed stream. (Only
/// the last block is looked at: the holes of the file would fill 4 GiB of page cache.)
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
    assert!(ids.check_from(78, tokens - 100_000).is_ok());
    let refused = ids.check_from(77, tokens - 100_000).unwrap_err().to_string();
    assert!(refused.contains("token id 77 at token offset 2147483657"), "{refused}");

    let store = stream::Store::Ids(vec![ids]);
    let document = stream::Document { file: 0, start: 0, length: tokens, key: 1 };
    let [train, validation] = stream::split(&[document], &store, None, 0.0);
    assert_eq!((train.tokens(), validation.tokens()), (tokens, 0));
    assert_eq!(train.sequences(16), (1 << 27) + 1);
    let mut batch = GlobalBatch::empty(16);
    train.sequence(&store, 1 << 27, &mut batch);
    assert_eq!(batch.tokens[8..11], [0, 77, 0]);
    assert_eq!(batch.targets[7..10], [0, 77, IGNORE]);
    assert_eq!(batch.padding[9..11], [false, true]);
    // A held-out share cuts it into blocks without losing a token.
    let [train, validation] = stream::split(&[document], &store, None, 0.1);
    assert_eq!(train.tokens() + validation.tokens(), tokens);
    assert!((0.09..0.11).contains(&(validation.tokens() as f64 / tokens as f64)));
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
        max_bytes: 64 << 20,
        validation_share: 0.05,
        seq_len: 256,
        global_batch: 8,
        ..spec("")
    };
    let begin = std::time::Instant::now();
    let data = Data::load(&spec, &home).unwrap();
    println!("loaded in {:?}: {}", begin.elapsed(), data.summary());
    let summary = data.summary();
    assert!(summary.used_bytes <= 64 << 20 && summary.files > 10);
    let share = summary.validation_tokens as f64 / (summary.train_tokens + summary.validation_tokens) as f64;
    assert!((0.01..0.15).contains(&share), "held-out share {share}");
    let batch = data.batch(Split::Train, 17);
    assert!(batch.tokens.iter().all(|&id| (id as usize) < VOCAB_SIZE));
    assert!(batch.valid_targets > 8 * 256 - 16);
}

#[test]
fn s28_a_summary_tells_exact_counts() {
    let summary = Summary {
        files: 3,
        empty_files: 1,
        found_bytes: 3 << 30,
        used_bytes: 1 << 20,
        documents: 2,
        train_tokens: 10_251_184_259,
        ..Summary::default()
    };
    assert_eq!(
        summary.to_string(),
        "3 files, 2 documents, 1.00 MiB of 3.00 GiB; 10,251,184,259 tokens to train on, 0 held out; 1 empty files left out"
    );
}
