//! Every group list and coordinate recorded from Megatron-LM's rank generator, and its refusals.

use std::path::PathBuf;

use plica_folding::{Family, Layout, LayoutError, LayoutSpec};
use serde_json::Value;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

fn number(input: &Value, name: &str) -> usize {
    input[name].as_u64().unwrap_or_else(|| panic!("no {name} in {input}")) as usize
}

fn list(groups: &Value) -> Vec<Vec<usize>> {
    let row = |row: &Value| row.as_array().unwrap().iter().map(|r| r.as_u64().unwrap() as usize).collect();
    groups.as_array().unwrap().iter().map(row).collect()
}

fn spec_of(input: &Value, world: &str) -> LayoutSpec {
    LayoutSpec {
        world: number(input, world),
        tp: number(input, "tp"),
        cp: number(input, "cp"),
        pp: number(input, "pp"),
        ep: number(input, "ep"),
        etp: Some(number(input, "etp")),
        order: input["order"].as_str().unwrap_or("tp-cp-ep-dp-pp").to_string(),
        ..LayoutSpec::default()
    }
}

/// The family of a recorded name; `None` for the position embedding, which is the first stage alone.
fn family(name: &str) -> Option<Family> {
    match name {
        "mp(tp_pp)" => Some(Family::TpPp),
        "embd" => Some(Family::Embedding),
        "pos_embd" => None,
        _ => match Family::ALL.into_iter().find(|f| f.name() == name) {
            None => panic!("unknown family {name}"),
            found => found,
        },
    }
}

fn check_case(case: &Value) {
    let name = case["name"].as_str().unwrap();
    let layout = Layout::new(&spec_of(&case["input"], "world")).unwrap_or_else(|e| panic!("{name}: {e}"));
    let offset = number(&case["input"], "rank_offset");
    let shift = |groups: Vec<Vec<usize>>| -> Vec<Vec<usize>> {
        groups.into_iter().map(|g| g.into_iter().map(|r| r + offset).collect()).collect()
    };
    assert_eq!(layout.dp(), number(&case["derived"], "dp"), "{name} DP");
    assert_eq!(layout.edp(), number(&case["derived"], "edp"), "{name} EDP");
    for mesh in ["attention", "expert"] {
        for (label, groups) in case[mesh].as_object().unwrap() {
            let ours = match family(label) {
                Some(family) => layout.groups(family),
                None => layout.groups(Family::Pp).into_iter().map(|g| vec![g[0]]).collect(),
            };
            assert_eq!(shift(ours), list(groups), "{name} {label}");
        }
    }
    let rows = case["rank_coords"].as_array().unwrap();
    assert_eq!(rows.len(), layout.world(), "{name}");
    for row in rows {
        let rank = number(row, "rank") - offset;
        let c = layout.coordinates(rank);
        let ours = [
            ("tp", c.tp),
            ("cp", c.cp),
            ("dp", c.dp),
            ("pp", c.pp),
            ("etp", c.etp),
            ("ep", c.ep),
            ("edp", c.edp),
            ("dp_cp", layout.member_index(Family::DpCp, rank).unwrap()),
        ];
        for (axis, coordinate) in ours {
            assert_eq!(coordinate, number(row, axis), "{name} rank {rank} {axis}");
        }
    }
}

/// The refusal has the recorded kind and the recorded numbers.
fn check_invalid(case: &Value) {
    let name = case["name"].as_str().unwrap();
    let input = &case["input"];
    let error = Layout::new(&spec_of(input, "W")).expect_err(name);
    let recorded = case["error"].as_str().unwrap();
    match &error {
        LayoutError::DoesNotDivide { value, world, .. } => {
            assert!(recorded.contains(&format!("({world})")), "{name}: {error} / {recorded}");
            let divisor = recorded.trim_end_matches(')').rsplit([' ', '(']).next().unwrap();
            assert_eq!(divisor, value.to_string(), "{name}: {error} / {recorded}");
        }
        LayoutError::PpNotLast { dp, edp, .. } => {
            assert!(recorded.contains("pp-last"), "{name}: {error} / {recorded}");
            assert_ne!(dp, edp);
        }
        LayoutError::MissingToken { token, size, .. } => {
            let size = format!("size of ({token}) is ({size})");
            assert!(recorded.contains(&size), "{name}: {error} / {recorded}");
        }
        other => panic!("{name}: {other} / {recorded}"),
    }
}

fn check_file(text: &str, cases: usize, invalid: usize) {
    let file: Value = serde_json::from_str(text).unwrap();
    let rows = |key: &str| file[key].as_array().unwrap().clone();
    assert_eq!((rows("cases").len(), rows("invalid").len()), (cases, invalid));
    rows("cases").iter().for_each(check_case);
    rows("invalid").iter().for_each(check_invalid);
}

#[test]
fn equals_the_recorded_groups_kept_here() {
    check_file(&std::fs::read_to_string(format!("{ROOT}/tests/fixtures/groups.json")).unwrap(), 6, 5);
}

#[test]
fn equals_every_recorded_group() {
    let folder = std::env::var_os("PLICA_REFERENCE").map(PathBuf::from);
    let path = folder.unwrap_or_else(|| format!("{ROOT}/../shared/reference").into()).join("groups.json");
    match std::fs::read_to_string(&path) {
        Ok(text) => check_file(&text, 17, 5),
        Err(_) => println!("skipped: equals_every_recorded_group: no golden data at {}", path.display()),
    }
}
