//! Rules of `[data]`.

use super::super::choice::DataFormat;
use super::super::low::LowConfig;
use super::super::resolved::ModelConfig;
use super::Check;
use crate::data::{DataSpec, Format, IdWidth, Source, VOCAB_SIZE};

pub(super) fn check(low: &LowConfig, model: &ModelConfig, check: &mut Check) -> DataSpec {
    let data = &low.data;
    let source = match data.source.as_str() {
        "registry" => Source::Registry,
        "synthetic" => Source::Synthetic,
        path => Source::Path(path.into()),
    };
    let format = match data.format {
        DataFormat::Auto => Format::Auto,
        DataFormat::Text => Format::Text,
        DataFormat::Jsonl => Format::Jsonl,
        DataFormat::U16 => Format::Ids(IdWidth::U16),
        DataFormat::U32 => Format::Ids(IdWidth::U32),
    };
    check.within("data.validation", data.validation, 0.0, 1.0);
    if data.max_bytes == 0 {
        check.error("data.max_bytes", 0, "it must be at least 1", "write a number of bytes such as 67108864");
    }
    let ids = matches!(format, Format::Ids(_));
    let text = source == Source::Registry || matches!(format, Format::Text | Format::Jsonl);
    if source == Source::Registry && matches!(format, Format::Ids(_) | Format::Jsonl) {
        let rule = "data.source = registry is text";
        check.error("data.format", data.format, rule, "write data.format = \"auto\", or another source");
    } else if text && source != Source::Synthetic && model.vocab < VOCAB_SIZE {
        let rule = format!("byte text has {VOCAB_SIZE} ids (256 bytes, document start, padding)");
        check.error("model.vocab", model.vocab, rule, format!("write {VOCAB_SIZE} or more, or \"auto\""));
    }
    if (ids || source == Source::Synthetic) && low.model.vocab.value().is_none() {
        let rule = format!("data.source = {source} does not tell its vocabulary");
        check.error("model.vocab", "auto", rule, "write the number of ids");
    }
    if let Some(&id) = data.document_start.value()
        && id >= model.vocab as u64
    {
        let rule = format!("it is outside model.vocab = {}", model.vocab);
        check.error("data.document_start", id, rule, "write an id below the vocabulary");
    }
    DataSpec {
        source,
        format,
        field: data.field.clone(),
        max_bytes: data.max_bytes,
        validation_share: data.validation,
        seed: data.seed.value().copied().unwrap_or(low.run.seed),
        vocab: model.vocab,
        document_start: data.document_start.value().map(|&id| id as u32),
        seq_len: low.train.seq_len,
        global_batch: low.train.global_batch,
    }
}
