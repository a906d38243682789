//! The data pipeline against a plain one that builds the whole stream, and the mistakes that it must name.

use std::fs;
use std::path::{Path, PathBuf};

use super::*;

/// A folder that is removed at the end of a test.
pub(super) struct Folder(pub PathBuf);

impl Folder {
    pub(super) fn new(name: &str) -> Self {
        let unique = format!("data-{}-{name}", std::process::id());
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/tmp").join(unique);
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(super) fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, bytes).unwrap();
        path
    }

    pub(super) fn text(&self) -> String {
        self.0.to_string_lossy().into_owned()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

pub(super) fn spec(source: &str) -> DataSpec {
    DataSpec {
        source: Source::Path(source.into()),
        format: Format::Auto,
        field: "text".into(),
        max_bytes: 1 << 20,
        validation_share: 0.0,
        seed: 1,
        vocab: VOCAB_SIZE,
        document_start: None,
        seq_len: 4,
        global_batch: 3,
    }
}

fn load(spec: &DataSpec) -> Result<Data, DataError> {
    Data::load(spec, Path::new("/nowhere"))
}

fn error(spec: &DataSpec) -> String {
    load(spec).unwrap_err().to_string()
}

/// All sequences of the train split, sorted by content, from the batches of one epoch.
fn epoch_rows(data: &Data, sequences: u64, epoch: u64) -> Vec<Vec<u32>> {
    let g = data.batch(Split::Train, 0).sequences as u64;
    let rows = epoch * sequences..(epoch + 1) * sequences;
    rows.map(|row| {
        let index = (row % g) as usize;
        data.sequences(Split::Train, row / g, index..index + 1).tokens
    })
    .collect()
}

#[test]
fn one_sequence_by_hand() {
    let folder = Folder::new("hand");
    folder.write("a.txt", "ab");
    folder.write("b.txt", "c");
    folder.write("c.txt", "defg");
    // Stream: 256 a b 256 c 256 d e f g: 10 tokens, ceil(9 / 4) = 3 sequences.
    let data = load(&DataSpec { global_batch: 1, ..spec(&folder.text()) }).unwrap();
    assert_eq!(data.summary().train_tokens, 10);
    assert_eq!(data.summary().train_sequences, 3);
    let mut batches: Vec<GlobalBatch> = (0..3).map(|step| data.batch(Split::Train, step)).collect();
    batches.sort_by_key(|batch| (batch.padding.clone(), batch.tokens[0] == 99));
    let byte = |text: u8| u32::from(text);
    let want = [vec![256, 97, 98, 256], vec![99, 256, 100, 101], vec![102, 103, PADDING, PADDING]];
    for (batch, want) in batches.iter().zip(&want) {
        assert_eq!(&batch.tokens, want);
    }
    assert_eq!(batches[0].targets, [97, 98, 256, 99]);
    assert_eq!(batches[0].document_ids, [0, 0, 0, 1]);
    assert_eq!(batches[0].positions, [0, 1, 2, 0]);
    assert_eq!(batches[1].targets, [256, 100, 101, 102]);
    assert_eq!(batches[1].document_ids, [0, 1, 1, 1]);
    assert_eq!(batches[2].tokens[0], byte(b'f'));
    assert_eq!(batches[2].targets, [103, IGNORE, IGNORE, IGNORE]);
    assert_eq!(batches[2].document_ids, [0, 0, 1, 1]);
    assert_eq!(batches[2].padding, [false, false, true, true]);
    assert_eq!(batches[2].valid_targets, 1);
}

/// The slow version: the whole stream in a vector, cut into sequences.
fn oracle(texts: &[&[u8]], seq_len: usize) -> Vec<(Vec<u32>, Vec<i32>)> {
    let mut stream: Vec<u32> = Vec::new();
    for text in texts {
        stream.push(DOCUMENT_START);
        stream.extend(text.iter().map(|&byte| u32::from(byte)));
    }
    let count = (stream.len() - 1).div_ceil(seq_len);
    (0..count)
        .map(|sequence| {
            let at = |place: usize| stream.get(sequence * seq_len + place).copied();
            let tokens = (0..seq_len).map(|place| at(place).unwrap_or(PADDING)).collect();
            let targets = (0..seq_len).map(|place| at(place + 1).map_or(IGNORE, |id| id as i32)).collect();
            (tokens, targets)
        })
        .collect()
}

#[test]
fn an_epoch_is_the_whole_stream_once() {
    let folder = Folder::new("epoch");
    let texts: Vec<Vec<u8>> = (0..23u64)
        .map(|file| (0..permute::mix(&[file]) % 40).map(|at| permute::mix(&[file, at]) as u8).collect())
        .collect();
    for (index, text) in texts.iter().enumerate() {
        // A leading letter keeps the random bytes from being a byte-order mark or a line end.
        folder.write(&format!("{index:02}.x"), [b"x", text.as_slice()].concat());
    }
    let cleaned: Vec<Vec<u8>> =
        texts.iter().map(|text| text::clean([b"x", text.as_slice()].concat())).collect();
    let cleaned: Vec<&[u8]> = cleaned.iter().map(Vec::as_slice).collect();
    let pattern = format!("{}/*.x", folder.text());
    for seq_len in [1, 2, 3, 7, 16, 64] {
        for global_batch in [1, 3, 8] {
            let spec = DataSpec { seq_len, global_batch, ..spec(&pattern) };
            let data = load(&spec).unwrap();
            let want = oracle(&cleaned, seq_len);
            let count = want.len() as u64;
            assert_eq!(data.summary().train_sequences, count);
            let mut sorted: Vec<_> = want.iter().map(|(tokens, _)| tokens.clone()).collect();
            sorted.sort();
            let mut orders = Vec::new();
            for epoch in 0..2 {
                let rows = epoch_rows(&data, count, epoch);
                orders.push(rows.clone());
                let mut rows = rows;
                rows.sort();
                assert_eq!(rows, sorted, "seq_len {seq_len}, global batch {global_batch}, epoch {epoch}");
            }
            assert!(count < 20 || orders[0] != orders[1], "two epochs in the same order");
            let batch = data.batch(Split::Train, 5);
            for row in 0..global_batch {
                let part = batch.slice(row..row + 1);
                assert!(want.contains(&(part.tokens, part.targets)));
            }
        }
    }
}

#[test]
fn a_part_equals_the_slice_of_the_whole_and_the_seed_decides() {
    let folder = Folder::new("part");
    folder.write("a", (0..=255u8).cycle().take(5000).collect::<Vec<u8>>());
    let path = folder.0.join("a").to_string_lossy().into_owned();
    let base = DataSpec { global_batch: 8, seq_len: 16, validation_share: 0.2, ..spec(&path) };
    let (data, again) = (load(&base).unwrap(), load(&base).unwrap());
    let other = load(&DataSpec { seed: 2, ..base.clone() }).unwrap();
    for split in [Split::Train, Split::Validation] {
        for step in [0, 1, 50, 1_000_000, u64::MAX / 8] {
            let whole = data.batch(split, step);
            assert_eq!(whole, again.batch(split, step));
            assert_ne!(whole, other.batch(split, step));
            for (from, to) in [(0, 0), (0, 8), (2, 4), (7, 8)] {
                let part = data.sequences(split, step, from..to);
                assert_eq!(part, whole.slice(from..to));
                assert_eq!(part.len(), (to - from) * 16);
            }
        }
    }
    assert_eq!(data.summary().validation_tokens + data.summary().train_tokens, 5000 + spans(&data));
}

/// Document starts inserted: one a span.
fn spans(data: &Data) -> u64 {
    let starts = |split, count: u64| {
        let mut rows: Vec<Vec<u32>> = Vec::new();
        for step in 0..count.div_ceil(8) {
            for row in 0..8.min(count - step * 8) as usize {
                rows.push(data.sequences(split, step, row..row + 1).tokens);
            }
        }
        rows.iter().flatten().filter(|&&id| id == DOCUMENT_START).count() as u64
    };
    let validation = (data.summary().validation_tokens - 1).div_ceil(16);
    starts(Split::Train, data.summary().train_sequences) + starts(Split::Validation, validation)
}

#[test]
fn held_out_blocks_are_disjoint_and_stay_when_the_seed_changes() {
    let folder = Folder::new("held");
    // Every 8 bytes are a different number, so that each place of the file can be recognised.
    let text: Vec<u8> = (0..4000u64).flat_map(|at| format!("{at:07} ").into_bytes()).collect();
    let path = folder.write("numbers", text).to_string_lossy().into_owned();
    let base = DataSpec { validation_share: 0.1, seq_len: 8, global_batch: 1, ..spec(&path) };
    let words = |data: &Data, split, tokens: u64| -> std::collections::BTreeSet<Vec<u32>> {
        let rows = (0..(tokens - 1).div_ceil(8)).map(|step| data.batch(split, step).tokens);
        rows.flat_map(|row| row.windows(7).map(<[u32]>::to_vec).collect::<Vec<_>>())
            .filter(|word| word.iter().all(|&id| (48..58).contains(&id)))
            .collect()
    };
    let data = load(&base).unwrap();
    let summary = data.summary().clone();
    assert!(summary.validation_tokens > 1000 && summary.validation_tokens < 6000, "{summary:?}");
    let train = words(&data, Split::Train, summary.train_tokens);
    let validation = words(&data, Split::Validation, summary.validation_tokens);
    assert!(validation.len() > 20 && train.len() > 500, "{} and {} numbers", validation.len(), train.len());
    assert!(train.is_disjoint(&validation));
    let other = load(&DataSpec { seed: 9, ..base }).unwrap();
    assert_eq!(other.summary(), &summary);
    assert_eq!(words(&other, Split::Validation, summary.validation_tokens), validation);
}

#[test]
fn s29_text_bytes_have_one_documented_meaning() {
    let folder = Folder::new("s29");
    let path = folder.write("a.txt", b"\xef\xbb\xbfa\r\nb").to_string_lossy().into_owned();
    let data = load(&DataSpec { seq_len: 2, global_batch: 1, ..spec(&path) }).unwrap();
    assert_eq!(data.summary().train_tokens, 4);
    let mut rows = epoch_rows(&data, 2, 0);
    rows.sort();
    assert_eq!(rows, [vec![10, 98], vec![256, 97]]);
    let invalid = folder.write("b.txt", b"\xff\xfe\x80\xc3").to_string_lossy().into_owned();
    let data = load(&DataSpec { seq_len: 3, global_batch: 1, ..spec(&invalid) }).unwrap();
    let mut rows = epoch_rows(&data, 2, 0);
    rows.sort();
    assert_eq!(rows, [vec![128, 195, PADDING], vec![256, 255, 254]]);
    let one = folder.write("one", b"x").to_string_lossy().into_owned();
    let data = load(&DataSpec { seq_len: 1, ..spec(&format!("{}/[ab]*", folder.text())) }).unwrap();
    assert_eq!(data.summary().train_tokens, 4 + 5);
    assert!(error(&DataSpec { seq_len: 1, ..spec(&one) }).contains("2 tokens"));
}

#[test]
fn s29_jsonl_counts_the_same_records_for_both_line_ends() {
    let folder = Folder::new("jsonl");
    for (name, end) in [("unix.jsonl", "\n"), ("dos.jsonl", "\r\n")] {
        let text = format!("\u{feff}{{\"text\":\"first\"}}{end}{{\"text\":\"second\"}}{end}{end}");
        let path = folder.write(name, text).to_string_lossy().into_owned();
        let data = load(&spec(&path)).unwrap();
        assert_eq!(data.summary().documents, 2);
        assert_eq!(data.summary().train_tokens, 6 + 7);
    }
    let bad = folder.write("bad.jsonl", "{\"body\":\"x\"}\n").to_string_lossy().into_owned();
    assert!(error(&spec(&bad)).contains("bad.jsonl\" line 1: no field \"text\"; set data.field"));
    let data = load(&DataSpec { field: "body".into(), seq_len: 1, ..spec(&bad) });
    assert!(data.unwrap_err().to_string().contains("2 tokens"));
}

#[test]
fn s29_an_id_equal_to_the_vocabulary_is_refused_at_load() {
    let folder = Folder::new("ids");
    let ids: Vec<u8> = (0..40_000u32).map(|at| at.min(31_999) as u16).flat_map(u16::to_le_bytes).collect();
    let mut wrong = ids.clone();
    wrong[2 * 35_000..2 * 35_000 + 2].copy_from_slice(&32_000u16.to_le_bytes());
    let good = folder.write("good.u16", &ids).to_string_lossy().into_owned();
    let bad = folder.write("bad.u16", &wrong).to_string_lossy().into_owned();
    let spec = |path: &str| DataSpec { vocab: 32_000, ..spec(path) };
    assert_eq!(load(&spec(&good)).unwrap().summary().train_tokens, 40_000);
    let text = error(&spec(&bad));
    assert!(text.contains("bad.u16\": token id 32000 at token offset 35000"), "{text}");
    assert!(text.contains("vocabulary of 32000 (ids 0..=31999)"), "{text}");
    let torn = folder.write("torn.u32", [0u8; 10]).to_string_lossy().into_owned();
    assert!(error(&spec(&torn)).contains("10 bytes are no whole number of 4-byte ids"));
    let plain = folder.write("plain.bin", &ids).to_string_lossy().into_owned();
    assert!(error(&spec(&plain)).contains("data.format = \"u16\" or \"u32\""));
    let told = DataSpec { format: Format::Ids(IdWidth::U16), ..spec(&plain) };
    assert_eq!(load(&told).unwrap().summary().train_tokens, 40_000);
}

#[test]
fn id_files_know_documents_by_their_start_id() {
    let folder = Folder::new("starts");
    let ids = [9u32, 1, 2, 9, 3, 9, 4, 5, 6, 7];
    let path = folder.write("a.u32", bytemuck::cast_slice::<u32, u8>(&ids)).to_string_lossy().into_owned();
    let base = DataSpec { vocab: 10, global_batch: 1, seq_len: 9, ..spec(&path) };
    assert_eq!(load(&base).unwrap_err().to_string().split(';').next(), Some("the train split has 10 tokens"));
    let data = load(&DataSpec { seq_len: 8, document_start: Some(9), ..base.clone() }).unwrap();
    assert_eq!(data.summary().documents, 3);
    let batch = (0..2).map(|step| data.batch(Split::Train, step)).find(|batch| batch.tokens[1] == 1).unwrap();
    assert_eq!(batch.tokens, ids[..8]);
    assert_eq!(batch.targets, [1, 2, 9, 3, 9, 4, 5, 6]);
    assert_eq!(batch.document_ids, [0, 0, 0, 1, 1, 2, 2, 2]);
    assert_eq!(batch.positions, [0, 1, 2, 0, 1, 0, 1, 2]);
    // Two files without start ids: the border is no target.
    folder.write("b.u32", bytemuck::cast_slice::<u32, u8>(&[8, 8, 8]));
    let both = DataSpec { seq_len: 11, ..base };
    let data = load(&DataSpec { source: Source::Path(folder.text()), ..both }).unwrap();
    let first = (0..2).map(|step| data.batch(Split::Train, step)).find(|batch| batch.tokens[0] == 9).unwrap();
    assert_eq!(first.targets[9], IGNORE);
    assert_eq!(first.document_ids[9..], [0, 1]);
}

#[test]
fn mistakes_are_named() {
    let folder = Folder::new("mistakes");
    assert!(error(&spec("/no/such/place")).contains("\"/no/such/place\": no such file or folder"));
    assert!(error(&spec(&folder.text())).contains("no usable file found"));
    assert!(error(&spec("/tmp/[z")).contains("not a valid glob pattern"));
    assert!(error(&spec(&format!("{}/*.none", folder.text()))).contains("no usable file"));
    let empty = folder.write("empty", "").to_string_lossy().into_owned();
    assert!(error(&spec(&empty)).contains("all 1 files are empty"));
    let registry = DataSpec { source: Source::Registry, ..spec("") };
    assert!(error(&registry).contains("/nowhere/registry/src"));
    let text = folder.write("text", "some text").to_string_lossy().into_owned();
    assert!(error(&DataSpec { vocab: 257, ..spec(&text) }).contains("model.vocab = 257: byte text needs"));
    folder.write("ids.u16", [0, 0]);
    assert!(error(&spec(&folder.text())).contains("mixes text and token-id files"));
}

#[test]
fn s28_too_few_tokens_are_refused_with_both_numbers() {
    let folder = Folder::new("few");
    let path = folder.write("a", "abc").to_string_lossy().into_owned();
    for seq_len in [3, 4, 5, 1000] {
        let text = error(&DataSpec { seq_len, ..spec(&path) });
        let want =
            format!("the train split has 4 tokens; train.seq_len = {seq_len} needs at least {}", seq_len + 2);
        assert!(text.starts_with(&want), "{text}");
    }
    assert!(load(&DataSpec { seq_len: 2, ..spec(&path) }).is_ok());
    let text = error(&DataSpec { seq_len: 2, validation_share: 0.0002, ..spec(&path) });
    assert!(text.starts_with("the validation split has 0 tokens"), "{text}");
    assert!(text.contains("data.validation_share = 0 for none"), "{text}");
}

#[test]
fn s28_five_samples_micro_batch_two_two_ranks() {
    let folder = Folder::new("five");
    let path = folder.write("a", "x".repeat(20)).to_string_lossy().into_owned();
    let data = load(&DataSpec { global_batch: 4, ..spec(&path) }).unwrap();
    assert_eq!(data.summary().train_sequences, 5);
    // Five sequences, four a step: five steps are exactly four epochs, every step is full on both ranks.
    for step in 0..5 {
        let batch = data.batch(Split::Train, step);
        let (left, right) =
            (data.sequences(Split::Train, step, 0..2), data.sequences(Split::Train, step, 2..4));
        assert_eq!((left.sequences, right.sequences), (2, 2));
        assert_eq!([left.tokens, right.tokens].concat(), batch.tokens);
    }
    assert_eq!(data.epochs(5), 4.0);
    // A global batch above the number of sequences goes round more than once within a step.
    let wide = load(&DataSpec { global_batch: 12, ..spec(&path) }).unwrap();
    assert_eq!(wide.batch(Split::Train, 0).sequences, 12);
}

#[test]
fn the_cap_is_met_exactly_and_does_not_depend_on_the_order_of_reading() {
    let folder = Folder::new("cap");
    for index in 0..10 {
        folder.write(&format!("sub{}/{index}.txt", index % 3), vec![b'a' + index; 100]);
    }
    folder.write(".hidden/x.txt", "hidden");
    folder.write("binary", [1, 0, 2]);
    let data = load(&spec(&folder.text())).unwrap();
    assert_eq!((data.summary().files, data.summary().binary_files), (10, 1));
    let data = load(&DataSpec { max_bytes: 250, ..spec(&folder.text()) }).unwrap();
    let summary = data.summary();
    assert_eq!((summary.files, summary.used_bytes, summary.found_bytes), (3, 250, 1000));
    assert_eq!(summary.train_tokens, 253);
}

#[test]
fn synthetic_ids_cover_the_vocabulary_and_are_shifted_targets() {
    let base = DataSpec { source: Source::Synthetic, vocab: 11, seq_len: 64, global_batch: 4, ..spec("") };
    let data = load(&base).unwrap();
    let batch = data.batch(Split::Train, 3);
    assert_eq!(batch.valid_targets, 4 * 64);
    for row in 0..4 {
        let part = batch.slice(row..row + 1);
        let shifted: Vec<i32> = part.tokens[1..].iter().map(|&id| id as i32).collect();
        assert_eq!(part.targets[..63], shifted);
    }
    let mut counts = [0; 11];
    batch.tokens.iter().for_each(|&id| counts[id as usize] += 1);
    assert!(counts.iter().all(|&count| count > 5 && count < 50), "{counts:?}");
    assert_eq!(data.sequences(Split::Train, 3, 1..3), batch.slice(1..3));
    assert_ne!(data.batch(Split::Train, 4), batch);
    assert_ne!(data.batch(Split::Validation, 3), batch);
}
