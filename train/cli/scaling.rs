//! `plica scaling`: what each axis of a layout costs on a cluster, on paper.

use std::process::ExitCode;

use clap::{Args, ValueEnum};
use plica_folding::LayoutSpec;

use crate::scaling::{Case, Shape, cases, cluster, deepseek_v3, markdown, mixtral_8x22b, text};

const AFTER: &str = "\
Bytes are those of the formulas that the counters of real runs are tested against; times are those of published links \
(eight H100 a node, NVLink 450 GB/s each way, 400 Gb/s InfiniBand a card) with nothing hidden. Nothing is measured.

Examples:
  plica scaling                                            8, 64, 1,024 and 16,384 GPUs
  plica scaling --model deepseek-v3 --gpus 2048 --tp 1 --pp 16 --ep 64";

/// A model that is counted with.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Model {
    /// 141 B parameters, 39 B active.
    #[value(name = "mixtral-8x22b")]
    Mixtral,
    /// The shape of DeepSeek-V3: 671 B parameters, 37 B active.
    #[value(name = "deepseek-v3")]
    DeepSeek,
}

impl Model {
    fn shape(self) -> Shape {
        match self {
            Model::Mixtral => mixtral_8x22b(),
            Model::DeepSeek => deepseek_v3(),
        }
    }
}

/// Arguments of `plica scaling`.
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub(super) struct Scaling {
    /// The model; without a number of GPUs, its shown layouts.
    #[arg(long, value_name = "NAME")]
    model: Option<Model>,
    /// GPUs in all.
    #[arg(long, value_name = "N", requires = "model")]
    gpus: Option<usize>,
    /// Tensor parallelism.
    #[arg(long, default_value_t = 1, requires = "gpus")]
    tp: usize,
    /// Context parallelism.
    #[arg(long, default_value_t = 1, requires = "gpus")]
    cp: usize,
    /// Pipeline stages.
    #[arg(long, default_value_t = 1, requires = "gpus")]
    pp: usize,
    /// Expert parallelism.
    #[arg(long, default_value_t = 1, requires = "gpus")]
    ep: usize,
    /// Tensor parallelism of experts.
    #[arg(long, default_value_t = 1, requires = "gpus")]
    etp: usize,
    /// Sequences that each replica works through in a step, one at a time.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    micro_batches: u32,
    /// Tokens of a sequence.
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..))]
    sequence: u32,
    /// Print Markdown, as in docs/scaling.md.
    #[arg(long)]
    markdown: bool,
}

impl Scaling {
    fn cases(&self) -> Vec<Case> {
        let (Some(model), Some(world)) = (self.model, self.gpus) else {
            let name = self.model.map(|model| model.shape().name);
            return cases()
                .into_iter()
                .filter(|case| name.is_none_or(|name| case.shape.name == name))
                .collect();
        };
        let spec = LayoutSpec {
            world,
            tp: self.tp,
            cp: self.cp,
            pp: self.pp,
            ep: self.ep,
            etp: Some(self.etp),
            ranks_per_node: cluster().ranks_per_node,
            ..LayoutSpec::default()
        };
        let (micro_batches, sequence) = (self.micro_batches as usize, self.sequence as usize);
        vec![Case { shape: model.shape(), spec, micro_batches, sequence }]
    }

    /// Prints the tables.
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let show = if self.markdown { markdown } else { text };
        print!("{}", show(&self.cases(), &cluster())?);
        Ok(ExitCode::SUCCESS)
    }
}
