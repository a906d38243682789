//! Forward and backward of a micro-batch through the blocks of a chunk, as states that stop wherever rows travel
//! between ranks and can be resumed there. So two passes can take turns on one rank (`pipeline/pair`); a pass that is
//! alone is resumed until it is through. Shapes: rows of this TP rank [t, d].

use plica_dense::shard::{Pass, UnitWalk};
use plica_dense::{
    Block, BlockBackward, BlockForward, BlockSaved, Cx, Error, Params, Segment, Tape, Trainable,
};
use plica_kernels::Tensor;
use plica_kernels::ledger::naming;
use plica_moe::MoeReport;

use super::feed_forward::FeedForwardLayer;

/// A block of our models.
type ModelBlock<T> = Block<T, FeedForwardLayer<T>>;

/// What the blocks of a chunk keep for their backwards.
pub(super) type BlockTape<T> = Tape<BlockSaved<T, FeedForwardLayer<T>>>;

/// The layer of a block as its parameters are named.
fn layer_name<T: Trainable>(block: &ModelBlock<T>, params: &Params<T>) -> String {
    let norm = &params.spec(block.attention_norm.weight()).name;
    let mut parts = norm.split('.');
    let (layers, number) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    format!("{layers}.{number}")
}

/// A forward through the blocks of a chunk.
pub struct BlocksForward<'a, T: Trainable> {
    /// Rows [t, d] of the next block; at the end those of the chunk.
    pub(super) x_td: Tensor<T>,
    pub(super) tape: BlockTape<T>,
    /// Reports of the MoE layers so far: (block of the chunk, report).
    pub(super) reports: Vec<(usize, MoeReport)>,
    /// The present block, where its rows travel.
    going: Option<BlockForward<'a, T, FeedForwardLayer<T>>>,
    units: UnitWalk<'a, T>,
}

impl<'a, T: Trainable> BlocksForward<'a, T> {
    pub(super) fn new(x_td: Tensor<T>, pass: Pass) -> BlocksForward<'a, T> {
        let (tape, reports) = (Tape::new(), Vec::new());
        BlocksForward { x_td, tape, reports, going: None, units: UnitWalk::new(pass) }
    }

    /// Goes on to the next place where rows travel; whether the last block is through. `each` gets the rows after
    /// each block of the chunk.
    pub(super) fn advance(
        &mut self,
        blocks: &[ModelBlock<T>],
        cx: &mut Cx<'a, T>,
        mut each: impl FnMut(usize, &Tensor<T>),
    ) -> Result<bool, Error> {
        while let Some(block) = blocks.get(self.tape.len()) {
            let params = cx.params;
            let name = || format!("forward of {}", layer_name(block, params));
            let segment = match self.going.take() {
                Some(going) => naming(name, || block.forward_resume(going, cx))?,
                None => {
                    self.units.enter(block.attention_norm.weight(), cx)?;
                    naming(name, || block.forward_begin(&self.x_td, cx))?
                }
            };
            let (y_td, saved, report) = match segment {
                Segment::Travelling(going) => {
                    self.going = Some(going);
                    return Ok(false);
                }
                Segment::Done(done) => done,
            };
            let index = self.tape.len();
            self.x_td = y_td;
            each(index, &self.x_td);
            self.tape.push(saved);
            self.reports.extend(report.map(|report| (index, report)));
        }
        self.units.leave(cx)?;
        Ok(true)
    }
}

/// A backward through the blocks of a chunk.
pub struct BlocksBackward<'a, T: Trainable> {
    /// Gradient [t, d] of the rows of the present block; at the end that of the chunk's input.
    pub(super) dx_td: Tensor<T>,
    tape: BlockTape<T>,
    /// The last block that is not through yet, where its rows travel.
    going: Option<BlockBackward<'a, T, FeedForwardLayer<T>>>,
    units: UnitWalk<'a, T>,
}

impl<'a, T: Trainable> BlocksBackward<'a, T> {
    pub(super) fn new(dy_td: Tensor<T>, tape: BlockTape<T>) -> BlocksBackward<'a, T> {
        BlocksBackward { dx_td: dy_td, tape, going: None, units: UnitWalk::new(Pass::Backward) }
    }

    /// Goes on to the next place where rows travel; whether the first block is through.
    pub(super) fn advance(&mut self, blocks: &[ModelBlock<T>], cx: &mut Cx<'a, T>) -> Result<bool, Error> {
        let params = cx.params;
        let name = |block| format!("backward of {}", layer_name(block, params));
        loop {
            let segment = match self.going.take() {
                // Its entry is off the tape already.
                Some(going) => {
                    let block = &blocks[self.tape.len()];
                    naming(|| name(block), || block.backward_resume(going, cx))?
                }
                None => {
                    let Some(saved) = self.tape.pop() else { break };
                    let block = &blocks[self.tape.len()];
                    self.units.enter(block.attention_norm.weight(), cx)?;
                    naming(|| name(block), || block.backward_begin(saved, &self.dx_td, cx))?
                }
            };
            match segment {
                Segment::Travelling(going) => {
                    self.going = Some(going);
                    return Ok(false);
                }
                Segment::Done(dx_td) => self.dx_td = dx_td,
            }
        }
        self.units.leave(cx)?;
        Ok(true)
    }
}
