//! From the word in a configuration to a dispatcher.

use std::sync::Arc;

use plica_comm::{Mesh, Message};
use plica_kernels::Float;

use crate::all_gather::AllGather;
use crate::all_to_all::AllToAll;
use crate::direct::Direct;
use crate::dispatcher::{Dispatcher, ExpertGroups};
use crate::error::DispatchError;
use crate::local::Local;

/// How rows reach their experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DispatcherKind {
    /// Gather all token rows everywhere.
    AllGather,
    /// Send each row to its expert.
    AllToAll,
    /// Read each row out of the peers' memory.
    Direct,
}

impl DispatcherKind {
    /// All kinds.
    pub const ALL: [DispatcherKind; 3] =
        [DispatcherKind::AllGather, DispatcherKind::AllToAll, DispatcherKind::Direct];

    /// The word for it.
    pub const fn name(self) -> &'static str {
        match self {
            DispatcherKind::AllGather => "all_gather",
            DispatcherKind::AllToAll => "all_to_all",
            DispatcherKind::Direct => "direct",
        }
    }
}

impl std::fmt::Display for DispatcherKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for DispatcherKind {
    type Err = DispatchError;

    fn from_str(text: &str) -> Result<DispatcherKind, DispatchError> {
        DispatcherKind::ALL.into_iter().find(|kind| kind.name() == text).ok_or_else(|| {
            DispatchError::setting(
                "dispatcher",
                format_args!("\"{text}\""),
                "it must be one of all_gather, all_to_all, direct",
                "correct the word",
            )
        })
    }
}

/// The dispatcher of a layer with `experts` experts on this rank's mesh. Where one rank holds every expert,
/// that is the one without traffic, whatever the kind.
///
/// # Errors
/// When the experts do not divide over EP, or direct reads are asked for without shared memory.
pub fn build<T: Float + Message>(
    kind: DispatcherKind,
    mesh: &Mesh,
    experts: usize,
) -> Result<Arc<dyn Dispatcher<T>>, DispatchError>
where
    T::Acc: Message,
{
    if mesh.etp_ep().is_single() {
        return Ok(Arc::new(Local::new(experts)?));
    }
    let groups = ExpertGroups::new(mesh, experts)?;
    Ok(match kind {
        DispatcherKind::AllGather => Arc::new(AllGather::new(groups)),
        DispatcherKind::AllToAll => Arc::new(AllToAll::new(groups)),
        DispatcherKind::Direct => Arc::new(Direct::new(groups)?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_name_kinds() {
        for kind in DispatcherKind::ALL {
            assert_eq!(kind.to_string().parse::<DispatcherKind>().unwrap(), kind);
        }
        let text = "alltoall".parse::<DispatcherKind>().unwrap_err().to_string();
        assert!(text.starts_with("dispatcher = \"alltoall\"") && text.contains("all_to_all"), "{text}");
    }
}
