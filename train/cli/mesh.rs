//! `plica mesh`: both factorisations of a world, every group, who owns what; for an impossible layout the
//! equation that fails and the nearest layouts that work.

use std::process::ExitCode;

use clap::Args;
use plica_folding::check::ModelDims;
use plica_folding::layout::{Layout, LayoutSpec};

use crate::config::Config;
use crate::mesh_text::{explain_refusal, render, render_json};

const AFTER: &str = "\
The world has TP*CP*DP*PP = ETP*EP*EDP*PP = G ranks: attention and everything dense use the first factorisation, \
experts the second, over the same ranks. EP is not a further factor, and may span TP, CP and DP.

Examples:
  plica mesh --ranks 8 --tp 2 --ep 4
  plica mesh --ranks 16 --tp 2 --pp 2 --ep 8 --etp 1 --preset moe-small
  plica mesh --ranks 8 --ep 3                       says why not, and what is near";

/// Arguments of `plica mesh`.
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub(super) struct MeshCommand {
    /// Number of ranks, G.
    #[arg(long, value_name = "G")]
    ranks: usize,
    /// Tensor parallel size of attention and dense layers.
    #[arg(long, default_value_t = 1)]
    tp: usize,
    /// Context parallel size.
    #[arg(long, default_value_t = 1)]
    cp: usize,
    /// Pipeline stages.
    #[arg(long, default_value_t = 1)]
    pp: usize,
    /// Data parallel size; without it what is left.
    #[arg(long)]
    dp: Option<usize>,
    /// Expert parallel size.
    #[arg(long, default_value_t = 1)]
    ep: usize,
    /// Tensor parallel size of experts; without it that of attention.
    #[arg(long)]
    etp: Option<usize>,
    /// Axes from the innermost (neighbouring ranks) to the outermost; one order for both meshes.
    #[arg(long, default_value = "tp-cp-ep-dp-pp")]
    order: String,
    /// Ranks that share a node; groups that leave one are marked.
    #[arg(long, value_name = "N")]
    ranks_per_node: Option<usize>,
    /// Show what each rank owns of this preset's model, and check that it divides.
    #[arg(long, value_name = "NAME")]
    preset: Option<String>,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

impl MeshCommand {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let spec = LayoutSpec {
            world: self.ranks,
            tp: self.tp,
            cp: self.cp,
            pp: self.pp,
            ep: self.ep,
            etp: self.etp,
            dp: self.dp,
            order: self.order.clone(),
            ranks_per_node: self.ranks_per_node.unwrap_or(self.ranks),
        };
        let dims = self.preset.as_deref().map(dims_of).transpose()?;
        let layout = match Layout::new(&spec) {
            Ok(layout) => layout,
            Err(error) => {
                eprint!("{}", explain_refusal(&spec, &error));
                return Ok(ExitCode::FAILURE);
            }
        };
        if self.json {
            println!("{}", serde_json::to_string_pretty(&render_json(&layout, dims.as_ref()))?);
        } else {
            print!("{}", render(&layout, dims.as_ref()));
        }
        let refused = dims.and_then(|dims| layout.check_model(&dims).err()).unwrap_or_default();
        refused.iter().for_each(|error| eprintln!("error: {error}"));
        Ok(if refused.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

/// What of a preset's model is cut over axes.
fn dims_of(preset: &str) -> anyhow::Result<ModelDims> {
    let one = ["layout.ranks=1", "layout.tp=1", "layout.dp=auto", "layout.ep=1", "layout.etp=1"];
    let sets: Vec<String> = one.iter().map(|s| s.to_string()).collect();
    let config = Config::from_sources(Some(preset), None, &sets)?;
    let (model, moe) = (&config.model, config.moe.as_ref());
    let has_dense = model.dense.iter().any(|dense| *dense);
    Ok(ModelDims {
        layers: model.layers,
        heads: model.heads,
        kv_heads: model.kv_heads,
        ffn: if has_dense { model.ffn } else { 0 },
        moe_ffn: moe.map_or(0, |m| m.ffn),
        shared_ffn: moe.map_or(0, |m| m.shared_ffn),
        experts: moe.map_or(0, |m| m.experts),
        vocab: model.vocab,
        global_batch: config.train.global_batch,
        micro_batch: config.train.micro_batch,
    })
}
