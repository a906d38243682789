//! What a user types in `[context]`.

use serde::{Deserialize, Serialize};

use super::choice::ContextMethod;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LowContext {
    pub(super) method: ContextMethod,
}

impl Default for LowContext {
    fn default() -> Self {
        Self { method: ContextMethod::Ring }
    }
}
