//! The guard of a loop over blocks: the unit of the present block is complete; a block of another unit releases it
//! and gathers its own. In a backward, leaving a unit hands its gradients to the reduction.

use crate::cx::{Cx, Trainable};
use crate::error::Error;
use crate::param::ParamId;
use crate::shard::gather::{GatheredUnit, Pass};

/// Walks from unit to unit.
#[derive(Debug)]
pub struct UnitWalk<'a, T: Trainable> {
    pass: Pass,
    held: Option<GatheredUnit<'a, T>>,
}

impl<'a, T: Trainable> UnitWalk<'a, T> {
    /// Stands nowhere yet.
    pub fn new(pass: Pass) -> UnitWalk<'a, T> {
        UnitWalk { pass, held: None }
    }

    /// Makes the unit of a parameter complete; the one before is left first.
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub fn enter(&mut self, id: ParamId, cx: &mut Cx<'a, T>) -> Result<(), Error> {
        let unit = cx.params.sharding().unit_of(id);
        if self.held.as_ref().is_some_and(|held| held.unit() == unit) {
            return Ok(());
        }
        self.leave(cx)?;
        self.held = Some(cx.gather(unit, self.pass)?);
        Ok(())
    }

    /// Releases the present unit; after a backward its gradients are summed over ranks.
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub fn leave(&mut self, cx: &mut Cx<'a, T>) -> Result<(), Error> {
        let Some(held) = self.held.take() else { return Ok(()) };
        let unit = held.unit();
        drop(held);
        if self.pass == Pass::Backward { cx.reduce_unit(unit) } else { Ok(()) }
    }
}
