//! When communication travels while arithmetic runs. The choice is made here, in one place; layers ask [`Cx::overlap`],
//! loops over units ask [`Overlap::ahead`]. No threads and no callbacks: something is started early and waited for
//! late, or a pass stops where rows travel ([`Segment`]) and its caller computes something else meanwhile. Either
//! way the same operations run on the same inputs, and gradients are added to in the same order: the same bits.

use plica_comm::Group;
use plica_kernels::Float;

use crate::cx::Cx;

/// When communication travels under arithmetic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Overlap {
    /// Where it can gain something. What is started ahead of its use (weights of the next unit, sums of gradients)
    /// needs memory meanwhile; where ranks share memory and no slower link is modelled it would gain nothing, since
    /// such a transfer is a copy by the very thread that waits for it.
    #[default]
    Auto,
    /// Everywhere, also where it gains nothing.
    Always,
    /// Nowhere: what is started is waited for at once, and passes run one after the other.
    Never,
}

impl Overlap {
    /// Whether rows travel under the arithmetic of the layer that sends them, and passes share one stretch of time.
    pub fn is_on(self) -> bool {
        self != Overlap::Never
    }

    /// Whether operations of a group are started ahead of their use, and waited for after what comes next.
    pub fn ahead(self, group: &Group) -> bool {
        match self {
            Overlap::Auto => !group.shares_memory() || group.recorder().has_link(group.name()),
            Overlap::Always => true,
            Overlap::Never => false,
        }
    }
}

impl<T: Float> Cx<'_, T> {
    /// When communication travels under arithmetic.
    pub fn overlap(&self) -> Overlap {
        self.params.sharding().options().overlap
    }
}

/// How far a pass has come that stops wherever rows travel.
#[derive(Debug)]
#[must_use = "a pass that is not resumed never ends"]
pub enum Segment<S, R> {
    /// Rows travel: the caller may compute something else, and then resumes the pass from here.
    Travelling(S),
    /// The pass is through.
    Done(R),
}

impl<S, R> Segment<S, R> {
    /// Resumes the pass until it is through.
    ///
    /// # Errors
    /// The first of `resume`.
    pub fn run<E>(mut self, mut resume: impl FnMut(S) -> Result<Segment<S, R>, E>) -> Result<R, E> {
        loop {
            match self {
                Segment::Travelling(state) => self = resume(state)?,
                Segment::Done(result) => return Ok(result),
            }
        }
    }

    /// The same place of a larger pass.
    pub fn map<S2, R2>(self, state: impl FnOnce(S) -> S2, done: impl FnOnce(R) -> R2) -> Segment<S2, R2> {
        match self {
            Segment::Travelling(s) => Segment::Travelling(state(s)),
            Segment::Done(r) => Segment::Done(done(r)),
        }
    }
}
