//! A layout as JSON: sizes, every rank, every group, and what the model's parts are owned by.
//!
//! Ranges of layers and experts are half-open: `{"start": 0, "end": 8}`. Nothing is abbreviated.

use std::ops::Range;

use plica_folding::{Axis, Family, Layout, ModelDims, padded_vocab};
use serde_json::{Map, Value, json};

/// Everything that [`super::render`] says, for programs. `model` is null without `dims`.
pub fn render_json(layout: &Layout, dims: Option<&ModelDims>) -> Value {
    let axes = |of: &dyn Fn(Axis) -> usize| -> Map<String, Value> {
        Axis::ALL.into_iter().map(|a| (a.token().to_string(), json!(of(a)))).collect()
    };
    let rank_row = |rank: usize| {
        let mut row = Map::new();
        row.insert("rank".into(), json!(rank));
        row.insert("node".into(), json!(layout.node_of(rank)));
        row.extend(axes(&|axis| layout.coordinate(axis, rank)));
        if let Some(dims) = dims {
            row.insert("layers".into(), range(layout.layers_of(rank, dims.layers)));
            let experts = super::experts_of(layout, Some(dims), rank);
            row.insert("experts".into(), experts.map_or(Value::Null, range));
        }
        Value::Object(row)
    };
    let family_entry = |family: Family| {
        let place = layout.placement(family);
        let entry = json!({
            "mesh": family.mesh().to_string(),
            "size": place.group_size,
            "count": place.group_count,
            "leaving_node_count": place.leaving_count,
            "max_node_count": place.max_node_count,
            "groups": layout.groups(family),
        });
        (family.name().to_string(), entry)
    };
    json!({
        "world": layout.world(),
        "order": layout.order().to_string(),
        "ranks_per_node": layout.ranks_per_node(),
        "sizes": axes(&|axis| layout.size(axis)),
        "ranks": (0..layout.world()).map(rank_row).collect::<Vec<_>>(),
        "families": Family::ALL.into_iter().map(family_entry).collect::<Map<_, _>>(),
        "model": dims.map(|dims| model(layout, dims)),
    })
}

fn range(range: Range<usize>) -> Value {
    json!({ "start": range.start, "end": range.end })
}

fn model(layout: &Layout, dims: &ModelDims) -> Value {
    let refused = layout.check_model(dims).err().unwrap_or_default();
    let stages = (0..layout.pp()).map(|stage| range(layout.stage_layers(stage, dims.layers)));
    json!({
        "fits": refused.is_empty(),
        "refused": refused.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "stage_layers": stages.collect::<Vec<_>>(),
        "padded_vocab": padded_vocab(dims.vocab, layout.tp()),
        "micro_batch_count": layout.micro_batch_count(dims.global_batch, dims.micro_batch).ok(),
    })
}
