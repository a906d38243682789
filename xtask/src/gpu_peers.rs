//! Every operation on a GPU beside PyTorch on the same work: runs `plica bench ops`, gives its lines to
//! `gpu_peers.py`, and joins the two by operation and setting. Where PyTorch sees no GPU, its column says so.

use std::collections::HashMap;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// Runs both and prints a table; `options` go to the script.
pub fn run(python: &str, device: &str, options: &[String]) -> Result<()> {
    let feature = if device == "emulator" { "emulator" } else { "cuda" };
    let status =
        Command::new("cargo").args(["build", "--release", "--locked", "--features", feature]).status()?;
    if !status.success() {
        bail!("plica does not build");
    }
    let file = std::env::temp_dir().join(format!("plica-gpu-peers-{}.jsonl", std::process::id()));
    let run = Command::new("target/release/plica")
        .args(["bench", "ops", "--device", device, "--json"])
        .arg(&file)
        .output()?;
    if !run.status.success() {
        bail!("plica bench ops --device {device}: {}", String::from_utf8_lossy(&run.stderr));
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("gpu_peers.py");
    let peer =
        Command::new(python).arg(script).arg(&file).args(options).output().context(python.to_string())?;
    let own = lines(&std::fs::read_to_string(&file)?)?;
    std::fs::remove_file(&file)?;
    if !peer.status.success() {
        bail!("gpu_peers.py: {}", String::from_utf8_lossy(&peer.stderr));
    }
    let peers = lines(&String::from_utf8_lossy(&peer.stdout))?;
    print!("{}", joined(&own, &peers));
    Ok(())
}

fn lines(text: &str) -> Result<Vec<Value>> {
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    lines.map(|line| serde_json::from_str(line).with_context(|| line.to_string())).collect()
}

fn text<'a>(row: &'a Value, field: &str) -> &'a str {
    row[field].as_str().unwrap_or("")
}

/// One table of both programs' rows, and the reasons for what is missing.
fn joined(own: &[Value], peers: &[Value]) -> String {
    let key = |row: &Value| (text(row, "op").to_string(), text(row, "setting").to_string());
    let by_key: HashMap<_, &Value> = peers.iter().map(|row| (key(row), row)).collect();
    let mut out = String::new();
    let devices = own.first().into_iter().chain(peers.iter().find(|row| row["us"].is_number()));
    for row in devices {
        let version = row["torch"].as_str().map_or("plica".into(), |version| format!("PyTorch {version}"));
        out += &format!("{version} on {}\n", text(row, "device"));
    }
    out += "\n| operation | setting | plica us | floor us | share of floor | PyTorch us | plica's time over it |\n";
    out += "|---|---|---|---|---|---|---|\n";
    let mut missing = Vec::new();
    // A line without an operation is about all of them.
    missing
        .extend(peers.iter().filter(|row| row["op"].is_null()).map(|row| text(row, "skipped").to_string()));
    for row in own {
        let peer = by_key.get(&key(row)).copied();
        if let Some(reason) = peer.and_then(|peer| peer["skipped"].as_str()) {
            missing.push(format!("{}: {reason}", text(row, "op")));
        }
        let (us, floor) = (row["us"].as_f64(), row["floor_us"].as_f64());
        let peer_us = peer.and_then(|peer| peer["us"].as_f64());
        let number = |value: Option<f64>| value.map_or("-".into(), |value| format!("{value:.1}"));
        let share = us.zip(floor).map_or("-".into(), |(us, floor)| format!("{:.0} %", 100.0 * floor / us));
        let ratio = us.zip(peer_us).map_or("-".into(), |(us, peer)| format!("{:.2}", us / peer));
        out += &format!(
            "| {} | {} | {} | {} | {share} | {} | {ratio} |\n",
            text(row, "op"),
            text(row, "setting"),
            number(us),
            number(floor),
            number(peer_us)
        );
    }
    for reason in missing {
        out += &format!("\nskipped: {reason}");
    }
    if own.iter().all(|row| row["us"].is_null()) {
        out += "\nskipped: plica's times: the device is emulated, its times say nothing";
    }
    out + "\n"
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn rows_meet_by_operation_and_setting() {
        let own = [
            json!({"op": "add", "setting": "rows 4", "us": 2.0, "floor_us": 1.0, "device": "card"}),
            json!({"op": "add", "setting": "rows 8", "us": 3.0, "floor_us": 1.5, "device": "card"}),
            json!({"op": "mul", "setting": "rows 8", "us": 5.0, "floor_us": 1.0, "device": "card"}),
        ];
        let peers = [
            json!({"op": "add", "setting": "rows 8", "us": 4.0, "torch": "2.0", "device": "card"}),
            json!({"op": "mul", "setting": "rows 8", "skipped": "no such call"}),
        ];
        let table = joined(&own, &peers);
        assert!(table.contains("plica on card\nPyTorch 2.0 on card\n"), "{table}");
        assert!(table.contains("| add | rows 4 | 2.0 | 1.0 | 50 % | - | - |"), "{table}");
        assert!(table.contains("| add | rows 8 | 3.0 | 1.5 | 50 % | 4.0 | 0.75 |"), "{table}");
        assert!(table.contains("skipped: mul: no such call"), "{table}");
    }

    #[test]
    fn without_a_gpu_both_sides_say_so() {
        let own = [json!({"op": "add", "setting": "rows 4", "us": null, "device": "emulator"})];
        let table = joined(&own, &[json!({"skipped": "PyTorch 2.0 sees no GPU"})]);
        assert!(table.contains("| add | rows 4 | - | - | - | - | - |"), "{table}");
        assert!(table.contains("skipped: PyTorch 2.0 sees no GPU"), "{table}");
        assert!(table.contains("its times say nothing"), "{table}");
    }
}
