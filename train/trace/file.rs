//! From the parts of all ranks to one file: `{"displayTimeUnit": "ms", "otherData": {...}, "traceEvents": [...]}`.
//! Each rank makes the text of its own events; rank 0 takes them over messages, one rank after the other, and writes
//! the file as a whole (under another name, then renamed), so that a half-written one never stands there.

use std::path::Path;

use plica_comm::{CommError, Group, Purpose};
use plica_kernels::{Category, Device, Tensor};
use serde_json::{Value, json};

use super::chrome::Part;
use crate::checkpoint::store::write_whole;

/// The text of a rank: a line of facts, then an event a line, commas between them.
fn text(part: &Part) -> String {
    let events = part.events.iter().map(|event| serde_json::to_string(event).expect("numbers and text keys"));
    let events: Vec<String> = events.collect();
    format!("{}\n{}", part.facts, events.join(",\n"))
}

/// The file from the texts of all ranks.
fn join(texts: &[String]) -> String {
    let parts = texts.iter().map(|text| text.split_once('\n').unwrap_or((text.as_str(), "")));
    let facts = parts.clone().map(|(facts, _)| serde_json::from_str(facts).unwrap_or(Value::Null));
    let about = json!({
        "program": format!("plica {}", env!("CARGO_PKG_VERSION")),
        "ranks": facts.collect::<Vec<Value>>(),
    });
    let events: Vec<&str> = parts.map(|(_, events)| events).filter(|events| !events.is_empty()).collect();
    let events = events.join(",\n");
    format!("{{\"displayTimeUnit\": \"ms\", \"otherData\": {about}, \"traceEvents\": [\n{events}\n]}}\n")
}

/// Collects the parts on rank 0, which writes the file; what rank 0 has to say. Collective over `world`.
///
/// # Errors
/// As a collective.
pub fn write(world: &Group, device: &Device, file: &Path, part: &Part) -> anyhow::Result<Option<String>> {
    let own = text(part);
    let Some(texts) = collect(world, device, own)? else { return Ok(None) };
    let whole = join(&texts);
    // The run has done its work: a file that cannot be written does not end it.
    Ok(Some(match write_whole(file, whole.as_bytes()) {
        Ok(()) => {
            format!("trace      {} ({} bytes): open it in ui.perfetto.dev", file.display(), whole.len())
        }
        Err(error) => format!("trace      not written: {error}"),
    }))
}

/// The texts of all ranks, on rank 0.
fn collect(world: &Group, device: &Device, own: String) -> Result<Option<Vec<String>>, CommError> {
    let lengths = world.exchange_counts(Purpose::Control, device, &[own.len()])?;
    if world.rank() > 0 {
        let bytes = Tensor::from_slice(device, [own.len()], own.as_bytes(), Category::CommBuffer);
        world.send(Purpose::Control, &bytes, 0)?;
        return Ok(None);
    }
    let mut texts = vec![own];
    for (rank, length) in lengths.iter().enumerate().skip(1) {
        let bytes = world.receive::<u8>(Purpose::Control, device, rank, [length[0]])?;
        texts.push(String::from_utf8_lossy(&bytes.to_vec()).into_owned());
    }
    Ok(Some(texts))
}
