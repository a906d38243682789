//! The thread beside each rank: moves messages on, asks communicators for errors that happened meanwhile, sees what
//! takes longer than the deadline, and learns that another rank has ended the run. The rank itself may compute, or
//! wait for its GPU, which waits for a peer.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Weak;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use plica_kernels::cuda::CudaError;

use super::world::World;
use crate::error::CommError;

/// How often messages are moved on while some are not.
const LOOK_AT_MESSAGES: Duration = Duration::from_micros(300);
/// How often the rest is looked at.
const LOOK_AT_THE_REST: Duration = Duration::from_millis(10);

/// Watches until the world is closed or gone.
pub(super) fn watch(world: &Weak<World>) {
    let mut looked = Instant::now();
    loop {
        let Some(world) = world.upgrade() else { return };
        if world.is_closing.load(Ordering::SeqCst) {
            return;
        }
        let is_late = looked.elapsed() >= LOOK_AT_THE_REST;
        let look = || {
            let are_moving = world.advance_channels()?;
            if is_late {
                look_around(&world)?;
            }
            Ok::<bool, CommError>(are_moving)
        };
        let are_moving = match catch_unwind(AssertUnwindSafe(look)) {
            Ok(Ok(are_moving)) => are_moving,
            Ok(Err(error)) => {
                world.fail(error);
                false
            }
            Err(payload) => {
                world.fail(panicked(&world, payload));
                false
            }
        };
        if is_late {
            looked = Instant::now();
        }
        drop(world);
        std::thread::sleep(if are_moving { LOOK_AT_MESSAGES } else { LOOK_AT_THE_REST });
    }
}

fn look_around(world: &World) -> Result<(), CommError> {
    if let Err(told) = world.control.ended() {
        world.fail(told);
        return Ok(());
    }
    world.look_at_handles();
    world.look_at_streams().map_err(|error| device_error(world, error.to_string()))
}

fn device_error(world: &World, text: String) -> CommError {
    CommError::Device {
        rank: world.rank(),
        group: "world".into(),
        operation: "an operation on the GPU",
        text,
    }
}

fn panicked(world: &World, payload: Box<dyn Any + Send>) -> CommError {
    let text = match payload.downcast::<CudaError>() {
        Ok(error) => error.to_string(),
        Err(other) => match other.downcast::<plica_kernels::ledger::OutOfMemory>() {
            Ok(error) => error.to_string(),
            Err(other) => match other.downcast::<String>() {
                Ok(text) => format!("panicked: {text}"),
                Err(_) => "panicked".into(),
            },
        },
    };
    device_error(world, text)
}
