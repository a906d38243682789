//! Section `[pipeline]` as typed; see `low`.

use serde::{Deserialize, Serialize};

use super::choice::*;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LowPipeline {
    pub(super) schedule: PipelineSchedule,
    pub(super) csv: Maybe<String>,
    pub(super) chunks: Auto<usize>,
    pub(super) layers: Vec<usize>,
    pub(super) gather: StageGather,
    pub(super) count_embedding: bool,
    pub(super) count_head: bool,
}

impl Default for LowPipeline {
    fn default() -> Self {
        Self {
            schedule: PipelineSchedule::OneFOneB,
            csv: Maybe::NONE,
            chunks: Auto::AUTO,
            layers: Vec::new(),
            gather: StageGather::Blocks,
            count_embedding: false,
            count_head: false,
        }
    }
}
