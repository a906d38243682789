//! The text against the worked examples of the reference, and the shape of both renderings.

use std::path::PathBuf;

use plica_folding::{Family, Layout, LayoutSpec, ModelDims};

use super::{compressed, explain_refusal, group_list, render, render_json};

fn spec(world: usize, [tp, cp, pp, ep, etp]: [usize; 5]) -> LayoutSpec {
    LayoutSpec { world, tp, cp, pp, ep, etp: Some(etp), ranks_per_node: 8, ..LayoutSpec::default() }
}

fn layout(world: usize, sizes: [usize; 5]) -> Layout {
    Layout::new(&spec(world, sizes)).unwrap()
}

const DIMS: ModelDims = ModelDims {
    layers: 30,
    heads: 8,
    kv_heads: 4,
    ffn: 0,
    moe_ffn: 64,
    shared_ffn: 0,
    experts: 8,
    vocab: 259,
    global_batch: 16,
    micro_batch: 2,
};

fn says(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
}

#[test]
fn runs_of_ranks_are_compressed() {
    let cases: [(&[usize], &str); 8] = [
        (&[3], "[3]"),
        (&[0, 4], "[0,4]"),
        (&[0, 1, 2], "[0..2]"),
        (&[1, 3, 5, 7], "[1..7/2]"),
        (&[0, 1, 2, 3, 8, 9, 10, 11], "[0..3,8..11]"),
        (&[0, 2, 8, 10], "[0,2,8,10]"),
        (&[0, 2, 1, 3], "[0,2,1,3]"),
        (&[5, 4, 3], "[5,4,3]"),
    ];
    for (group, text) in cases {
        assert_eq!(compressed(group, false), text);
    }
    let many: Vec<usize> = (0..20).map(|i| i * i).collect();
    assert_eq!(compressed(&many, true), "[0,1,4,...,361]");
    assert_eq!(group_list(&[vec![0], vec![1]], false), "singletons");
}

/// `**c01** - W=8, TP=2 CP=1 PP=1 => DP=4; ETP=1 EP=4 => EDP=2; order ...` and the block of groups below it.
#[test]
fn groups_read_like_the_worked_examples() {
    let default = concat!(env!("CARGO_MANIFEST_DIR"), "/../shared/reference");
    let folder = std::env::var_os("PLICA_REFERENCE").map_or(PathBuf::from(default), PathBuf::from);
    let path = folder.join("megatron-moe.md");
    let Ok(text) = std::fs::read_to_string(&path) else {
        println!("skipped: groups_read_like_the_worked_examples: no golden data at {}", path.display());
        return;
    };
    let mut current: Option<Layout> = None;
    let mut checked = 0;
    for row in text.lines() {
        if row.starts_with("**c") {
            let number = |name: &str| -> usize {
                let after = &row[row.find(&format!(" {name}=")).unwrap() + name.len() + 2..];
                after.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap()
            };
            let order = row.split("order `").nth(1).unwrap().split('`').next().unwrap().to_string();
            let sizes = ["TP", "CP", "PP", "EP", "ETP"].map(number);
            current = Some(Layout::new(&LayoutSpec { order, ..spec(number("W"), sizes) }).unwrap());
        } else if row == "---" && current.is_some() {
            break;
        } else if let (Some(layout), Some((name, groups))) = (&current, row.split_once(' '))
            && let Some(family) = Family::ALL.into_iter().find(|f| f.name() == name)
        {
            assert_eq!(group_list(&layout.groups(family), false), groups.trim(), "{layout} {name}");
            checked += 1;
        }
    }
    assert_eq!(checked, 13 * 12, "group lines read from {}", path.display());
}

#[test]
fn a_small_layout_is_shown_in_full() {
    let text = render(&layout(16, [2, 1, 2, 4, 1]), Some(&DIMS));
    says(&text, &["16 ranks on 2 nodes of 8, order tp-cp-ep-dp-pp"]);
    says(&text, &["TP·CP·DP·PP   = 2·1·4·2 = 16", "ETP·EP·EDP·PP = 1·4·2·2 = 16"]);
    says(&text, &["     15     1 |    1    0    3    1 |    0    3    1 | [15..29]    [6..7]"]);
    says(&text, &["    tp         8 of 2       stay        [0,1] [2,3]", "8 leave     [0,8] [1,9]"]);
    says(&text, &["pp 1    15 layers [15..29]     ranks [8..15]"]);
    says(&text, &["ep 2    2 experts [4..5]       ranks [2..14/4]"]);
    says(&text, &["ETP = 1 and held EDP = 2 times", "259 padded to 260: 130", "16 / (2·4) = 2", "fits"]);
    assert_eq!(
        text.lines().filter(|l| l.contains(" | ") && l.trim().starts_with(char::is_numeric)).count(),
        16
    );
    assert!(!text.contains("..."));
    assert!(Family::ALL.iter().all(|f| text.contains(&format!("    {:<10} ", f.name()))));
}

#[test]
fn a_model_that_does_not_fit_is_shown_with_the_reason() {
    let layout = layout(8, [1, 1, 1, 8, 1]);
    let dims = ModelDims { experts: 12, ..DIMS };
    let text = render(&layout, Some(&dims));
    says(&text, &["refused: experts = 12 is not divisible by EP = 8", "| [0..29]     -"]);
    let json = render_json(&layout, Some(&dims));
    assert_eq!(json["model"]["fits"], false);
    assert!(json["ranks"][0]["experts"].is_null());
}

#[test]
fn one_rank_and_no_model() {
    let text = render(&Layout::one(), None);
    says(&text, &["1 rank on one node", "1·1·1·1 = 1", "singletons"]);
    assert!(!text.contains("ownership"));
}

#[test]
fn a_large_layout_is_abbreviated() {
    let layout = layout(16_384, [8, 16, 16, 64, 1]);
    let dims = ModelDims { layers: 126, experts: 128, kv_heads: 8, global_batch: 2048, ..DIMS };
    let text = render(&layout, Some(&dims));
    says(&text, &["8·16·8·16 = 16384", "1·64·16·16 = 16384", "16375 more", "  16383  2047 |"]);
    says(&text, &["    tp         2048 of 8    stay", "[0..7] [8..15] [16..23] [24..31] ... [16376..16383]"]);
    let longest = text.lines().map(str::len).max().unwrap();
    assert!(longest < 300 && text.lines().count() < 64, "{longest} bytes, {} lines", text.lines().count());
}

#[test]
fn json_holds_every_rank_and_group() {
    let layout = layout(16, [2, 2, 2, 4, 1]);
    let json = render_json(&layout, Some(&DIMS));
    for family in Family::ALL {
        let entry = &json["families"][family.name()];
        let groups: Vec<Vec<usize>> = serde_json::from_value(entry["groups"].clone()).unwrap();
        assert_eq!(groups, layout.groups(family));
        assert_eq!(entry["count"], groups.len());
    }
    assert_eq!(json["sizes"]["edp"], 2);
    assert_eq!(json["ranks"].as_array().unwrap().len(), 16);
    assert_eq!(json["ranks"][9]["pp"], layout.coordinates(9).pp);
    assert_eq!(json["ranks"][9]["layers"]["start"], 15);
    assert_eq!(json["model"]["micro_batch_count"], 4);
    assert!(render_json(&layout, None)["model"].is_null());
}

fn explained(spec: &LayoutSpec) -> String {
    explain_refusal(spec, &Layout::new(spec).unwrap_err())
}

#[test]
fn refusals_list_the_nearest_layouts() {
    let text = explained(&spec(12, [8, 1, 1, 1, 8]));
    says(&text, &["refused: attention mesh: TP·CP·PP = 8·1·1 = 8 does not divide G = 12"]);
    says(&text, &["= 8·1·DP·1 = 12: DP = 12/8 is not whole", "EDP = 12/8 is not whole"]);
    says(&text, &["     6    1    2    1 |    6    1    2 | tp-cp-ep-dp-pp  | TP 8 -> 6, ETP 8 -> 6"]);
    let text = explained(&LayoutSpec { order: "tp-cp-ep-pp-dp".into(), ..spec(16, [2, 1, 2, 8, 1]) });
    says(&text, &["DP = 4 and EDP = 1", "order \"tp-cp-ep-pp-dp\" -> tp-cp-ep-dp-pp"]);
    let text = explained(&LayoutSpec { dp: Some(3), ..spec(8, [2, 1, 1, 1, 1]) });
    says(&text, &["2·1·3·1 = 8: DP must be 4", "DP 3 -> 4"]);
    says(&explained(&spec(0, [1, 1, 1, 1, 1])), &["world = 0", "no layout of 0 ranks"]);
    says(&explained(&spec(8, [0, 1, 1, 1, 1])), &["tp = 0", "a size is 0", "TP 0 -> 1"]);
    says(&explained(&spec(8, [usize::MAX, 2, 1, 1, 1])), &["overflows"]);
}

#[test]
fn a_refused_model_on_a_valid_layout_lists_no_layouts() {
    let spec = spec(8, [1, 1, 1, 8, 1]);
    let dims = ModelDims { experts: 12, ..DIMS };
    let errors = Layout::new(&spec).unwrap().check_model(&dims).unwrap_err();
    let text = explain_refusal(&spec, &errors[0]);
    says(&text, &["experts = 12", "DP = 8", "Both equations hold"]);
    assert!(!text.contains("changed"));
}
