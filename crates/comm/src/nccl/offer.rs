//! Whether the ranks of a run use NCCL: what each of them could, and what all of them do. Every rank says on the host
//! which version it has loaded, or why it cannot use it; it is used where all have the same. And the smallest check of
//! it: a world of one rank, on which every collective gives back what it got.

use std::sync::Arc;
use std::time::Duration;

use plica_kernels::{Category, Device, Tensor, bf16};

use super::library::{VERSION_SHARED_GPU, version_text};
use super::world::{Nccl, World};
use super::{communicator, heads};
use crate::communicator::{Communicator, Operation, Purpose, Reduce, Request};
use crate::launch::BoxError;
use crate::local;
use crate::payload::Message;
use crate::record::{RecordOptions, Recorder};

/// Bytes in which a rank says what it could.
const NOTE_BYTES: usize = 512;
/// How long the only rank of a check waits for its GPU.
const ALONE_WITHIN: Duration = Duration::from_secs(60);

/// What ranks on GPUs can use between them.
#[derive(Clone, Debug)]
pub struct Offer {
    /// The library, or why there is none.
    pub nccl: Result<Nccl, String>,
    /// Most ranks of a machine that get a GPU each.
    pub gpus: usize,
    /// Whether ranks may share a GPU over NCCL: from version 2.30 on, where `NCCL_MULTI_RANK_GPU_ENABLE=1` is set.
    pub shares_gpus: bool,
    /// Whether a run that cannot use it is refused; else its tensors go over the backend that started it.
    pub is_required: bool,
}

impl Offer {
    /// The library, where `local_ranks` ranks of a machine can use it.
    fn for_ranks(&self, local_ranks: usize) -> Result<&Nccl, String> {
        let nccl = self.nccl.as_ref().map_err(String::clone)?;
        let version = nccl.loaded.version();
        if local_ranks <= self.gpus || (self.shares_gpus && version >= VERSION_SHARED_GPU) {
            return Ok(nccl);
        }
        Err(format!(
            "{local_ranks} ranks of this machine share {} GPUs: that needs NCCL 2.30 (this is {}) and \
             NCCL_MULTI_RANK_GPU_ENABLE=1",
            self.gpus,
            nccl.loaded.version_text()
        ))
    }

    /// What all ranks of a run use, of which `local_ranks` are on this machine; `control` is of all of them.
    ///
    /// # Errors
    /// Where it is required and one cannot, that one and its reason; or a rank does not answer.
    pub(crate) fn agreed(
        &self,
        control: &Arc<dyn Communicator>,
        device: &Device,
        local_ranks: usize,
    ) -> Result<Option<Nccl>, BoxError> {
        if control.size() == 1 {
            return Ok(None);
        }
        let own = self.for_ranks(local_ranks);
        let mut note = match &own {
            Ok(nccl) => nccl.loaded.version().to_le_bytes().to_vec(),
            Err(reason) => [&0i32.to_le_bytes()[..], reason.as_bytes()].concat(),
        };
        note.resize(NOTE_BYTES, 0);
        let all = heads::gather(control, &device.host(), &note)?;
        let version = |note: &[u8]| i32::from_le_bytes(note[..4].try_into().expect("four bytes"));
        let notes: Vec<&[u8]> = all.chunks(NOTE_BYTES).collect();
        let odd = notes.iter().position(|note| version(note) != version(notes[0]) || version(note) == 0);
        let Some(odd) = odd else { return Ok(own.ok().cloned()) };
        let reason = match version(notes[odd]) {
            0 => String::from_utf8_lossy(&notes[odd][4..]).trim_end_matches('\0').to_string(),
            other => {
                format!("it has NCCL {}, rank 0 has {}", version_text(other), version_text(version(notes[0])))
            }
        };
        let text = format!("NCCL is not used: rank {}: {reason}", control.global_ranks()[odd]);
        if self.is_required {
            return Err(text.into());
        }
        if control.rank() == 0 {
            tracing::warn!("{text}");
        }
        Ok(None)
    }
}

/// Runs every collective over NCCL on one rank: each must give back its input.
///
/// # Errors
/// The first one that fails or gives something else.
pub fn check_alone(nccl: Nccl, device: &Device) -> Result<(), BoxError> {
    let recorder = Recorder::new(0, RecordOptions::default());
    let options = local::LocalOptions { deadline: ALONE_WITHIN, spin: Duration::ZERO };
    let control = local::World::new(vec![recorder], options).communicator(0);
    let world = World::new(nccl, control, device.clone(), ALONE_WITHIN);
    let group = communicator(&world);
    let result = gives_back(&*group, device, &[1.5f32, -2.0, 0.25, 3.0, 0.0, 8.0])
        .and_then(|()| gives_back(&*group, device, &[bf16::ONE, bf16::from_f32(-2.5)]))
        .and_then(|()| gives_back(&*group, device, &[1i64, -2, 1 << 40]));
    match result {
        Ok(()) => world.close().map_err(BoxError::from),
        Err(error) => {
            world.close_after(&error.to_string());
            Err(error)
        }
    }
}

fn gives_back<T: Message>(group: &dyn Communicator, device: &Device, values: &[T]) -> Result<(), BoxError> {
    let rows = vec![values.len()];
    let operations = [
        Operation::AllReduce { op: Reduce::Sum },
        Operation::AllReduce { op: Reduce::Max },
        Operation::AllGather { rows: rows.clone() },
        Operation::ReduceScatter { rows: rows.clone() },
        Operation::AllToAll { send_rows: rows.clone(), receive_rows: rows },
        Operation::Broadcast { root: 0 },
    ];
    for operation in operations {
        let name = operation.name();
        let x = Tensor::from_slice(device, [values.len()], values, Category::CommBuffer);
        let payload = Some(T::wrap(x));
        let request = Request { operation, purpose: Purpose::Metrics, payload, device: device.clone() };
        let mut outputs = group.start(request)?.finish()?.payloads;
        let got = T::unwrap(outputs.remove(0)).to_vec();
        let same = bytemuck::cast_slice::<T, u8>(&got) == bytemuck::cast_slice::<T, u8>(values);
        if !same {
            return Err(format!("{name} of one rank: got {got:?}, expected {values:?}").into());
        }
    }
    Ok(())
}
