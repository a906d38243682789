//! A chunk: the layers of one model part on one rank, with its forward and its backward for one micro-batch. The
//! first part makes its rows from token ids, the others get them from the part before; the last part ends in the
//! loss, the others give their rows on. Shapes: rows of this TP rank [t, d]. The backward of head and final norm
//! runs in the forward of the last part, so that the logits of all rows never exist. Both passes stop where rows travel
//! between ranks, and can be run through. Leaves out how rows travel
//! between ranks, and in which order parts and micro-batches run.

use std::collections::BTreeSet;
use std::ops::Range;

use plica_dense::shard::{GatheredUnit, Pass, Sharding, UnitId};
use plica_dense::{Block, Cx, Embedding, Error, Head, LossSum, Norm, ParamId, Segment, Trainable};
use plica_kernels::Tensor;
use plica_kernels::ledger::naming;
use plica_moe::{MoeLayer, MoeReport};

use super::feed_forward::FeedForwardLayer;
use super::passes::{BlockTape, BlocksBackward, BlocksForward};

/// What stands behind the last block.
pub struct Output {
    /// Norm before the head.
    pub final_norm: Norm,
    /// Output head with the loss.
    pub head: Head,
}

impl Output {
    /// Complete weights of norm and head, whose units differ where the head is the embedding.
    fn gather<'a, T: Trainable>(
        &self,
        pass: Pass,
        cx: &Cx<'a, T>,
    ) -> Result<[GatheredUnit<'a, T>; 2], Error> {
        Ok([cx.gather_of(self.head.table(), pass)?, cx.gather_of(self.final_norm.weight(), pass)?])
    }

    /// The loss of the last block's rows, and their gradient.
    fn loss_and_backward<T: Trainable>(
        &self,
        y_td: Tensor<T>,
        cx: &mut Cx<T>,
    ) -> Result<(LossSum, Tensor<T>), Error> {
        let Output { final_norm, head } = self;
        let gathered = self.gather(Pass::Backward, cx)?;
        let (h_td, saved) = final_norm.forward(&y_td, cx);
        drop(y_td);
        let (loss, dh_td) = naming(|| "output head".into(), || head.forward_backward(&h_td, cx))?;
        drop(h_td);
        let dy_td = final_norm.backward(saved, &dh_td, cx);
        drop(gathered);
        cx.reduce_unit_of(final_norm.weight())?;
        Ok((loss, dy_td))
    }
}

/// The layers of one model part.
pub struct Chunk<T: Trainable> {
    /// Stage of the part.
    pub stage: usize,
    /// Indices of the blocks in the model.
    pub layers: Range<usize>,
    /// Token embedding, in the first part.
    pub embedding: Option<Embedding>,
    /// Residual blocks.
    pub blocks: Vec<Block<T, FeedForwardLayer<T>>>,
    /// Final norm and head, in the last part.
    pub output: Option<Output>,
    /// Its parameters, by index in the order of declaration; the table of a tied head may be another chunk's.
    pub parameters: Range<usize>,
}

/// A micro-batch between its forward and its backward through a chunk.
pub struct InFlight<T: Trainable> {
    tape: BlockTape<T>,
    /// In the last part: gradient of the last block's output.
    dy_td: Option<Tensor<T>>,
    /// Loss of the micro-batch; zero but in the last part.
    pub loss: LossSum,
    /// Reports of the chunk's MoE layers: (layer, report).
    pub reports: Vec<(usize, MoeReport)>,
}

/// A forward of a chunk up to a place where rows travel, or to its end: the rows for the next part (none in the last
/// one), and what the backward needs.
pub type ChunkForward<'a, T> = Segment<BlocksForward<'a, T>, (Option<Tensor<T>>, InFlight<T>)>;

/// The same of a backward, which gives the gradient of the rows that the chunk got (none in the first part).
pub type ChunkBackward<'a, T> = Segment<BlocksBackward<'a, T>, Option<Tensor<T>>>;

impl<T: Trainable> Chunk<T> {
    /// The units of weights that the chunk computes with, in the order of a forward.
    pub fn units(&self, sharding: &Sharding) -> Vec<UnitId> {
        let own = self.parameters.clone().map(ParamId::nth);
        let all = own.chain(self.output.as_ref().map(|output| output.head.table()));
        let units: BTreeSet<UnitId> = all.map(|id| sharding.unit_of(id)).collect();
        units.into_iter().collect()
    }

    /// The rows of the first block: those of the part before, or in the first part those of the token ids.
    fn first_rows(&self, x_td: Option<Tensor<T>>, cx: &mut Cx<T>) -> Result<Tensor<T>, Error> {
        match (&self.embedding, x_td) {
            (Some(embedding), None) => {
                let _table = cx.gather_of(embedding.table(), Pass::Once)?;
                embedding.forward(cx)
            }
            (None, Some(x_td)) => Ok(x_td),
            (Some(_), Some(_)) => panic!("the first part makes its rows from token ids"),
            (None, None) => {
                panic!("part {} needs the rows of part {}", self.stage, self.stage.wrapping_sub(1))
            }
        }
    }

    /// Reports by block of the chunk as reports by layer of the model.
    fn by_layer(&self, reports: Vec<(usize, MoeReport)>) -> Vec<(usize, MoeReport)> {
        reports.into_iter().map(|(index, report)| (self.layers.start + index, report)).collect()
    }

    /// Runs the blocks without a backward to come. `each` gets the residual stream after the embedding (layer
    /// `None`) and after each block.
    fn blocks_alone<'a>(
        &self,
        x_td: Option<Tensor<T>>,
        cx: &mut Cx<'a, T>,
        mut each: impl FnMut(Option<usize>, &Tensor<T>),
    ) -> Result<BlocksForward<'a, T>, Error> {
        let x_td = self.first_rows(x_td, cx)?;
        if self.embedding.is_some() {
            each(None, &x_td);
        }
        let mut blocks = BlocksForward::new(x_td, Pass::Once);
        while !blocks.advance(&self.blocks, cx, |index, y_td| each(Some(self.layers.start + index), y_td))? {}
        Ok(blocks)
    }

    /// Forward of one micro-batch: the rows for the next part, or in the last part none, but the loss and the
    /// backward of head and final norm.
    ///
    /// # Errors
    /// A collective or a layer failed.
    pub fn forward(
        &self,
        x_td: Option<Tensor<T>>,
        cx: &mut Cx<T>,
    ) -> Result<(Option<Tensor<T>>, InFlight<T>), Error> {
        self.forward_begin(x_td, cx)?.run(|blocks| self.forward_resume(blocks, cx))
    }

    /// The forward, up to the first place where rows travel.
    ///
    /// # Errors
    /// A collective or a layer failed.
    pub fn forward_begin<'a>(
        &self,
        x_td: Option<Tensor<T>>,
        cx: &mut Cx<'a, T>,
    ) -> Result<ChunkForward<'a, T>, Error> {
        let x_td = self.first_rows(x_td, cx)?;
        self.forward_resume(BlocksForward::new(x_td, Pass::Forward), cx)
    }

    /// On to the next such place. `cx` has the same micro-batch as before.
    ///
    /// # Errors
    /// A collective or a layer failed.
    pub fn forward_resume<'a>(
        &self,
        mut blocks: BlocksForward<'a, T>,
        cx: &mut Cx<'a, T>,
    ) -> Result<ChunkForward<'a, T>, Error> {
        if !blocks.advance(&self.blocks, cx, |_, _| ())? {
            return Ok(Segment::Travelling(blocks));
        }
        let BlocksForward { x_td: y_td, tape, reports, .. } = blocks;
        let reports = self.by_layer(reports);
        let in_flight = InFlight { tape, dy_td: None, loss: LossSum::default(), reports };
        match &self.output {
            None => Ok(Segment::Done((Some(y_td), in_flight))),
            Some(output) => {
                let (loss, dy_td) = output.loss_and_backward(y_td, cx)?;
                Ok(Segment::Done((None, InFlight { dy_td: Some(dy_td), loss, ..in_flight })))
            }
        }
    }

    /// Backward of one micro-batch: `dy_td` is the gradient of the rows that the chunk gave on (none in the last
    /// part); the result is that of the rows that it got (none in the first part). Weight gradients go to `cx`.
    ///
    /// # Errors
    /// A collective or a layer failed.
    pub fn backward(
        &self,
        in_flight: InFlight<T>,
        dy_td: Option<Tensor<T>>,
        cx: &mut Cx<T>,
    ) -> Result<Option<Tensor<T>>, Error> {
        self.backward_begin(in_flight, dy_td, cx)?.run(|blocks| self.backward_resume(blocks, cx))
    }

    /// The backward, up to the first place where rows travel.
    ///
    /// # Errors
    /// A collective or a layer failed.
    pub fn backward_begin<'a>(
        &self,
        in_flight: InFlight<T>,
        dy_td: Option<Tensor<T>>,
        cx: &mut Cx<'a, T>,
    ) -> Result<ChunkBackward<'a, T>, Error> {
        let InFlight { tape, dy_td: of_loss, .. } = in_flight;
        assert!(of_loss.is_none() || dy_td.is_none(), "the last part's gradient is that of the loss");
        let dy_td = of_loss.or(dy_td).expect("the gradient of the rows that the chunk gave on");
        self.backward_resume(BlocksBackward::new(dy_td, tape), cx)
    }

    /// On to the next such place. `cx` has the same micro-batch as before.
    ///
    /// # Errors
    /// A collective or a layer failed.
    pub fn backward_resume<'a>(
        &self,
        mut blocks: BlocksBackward<'a, T>,
        cx: &mut Cx<'a, T>,
    ) -> Result<ChunkBackward<'a, T>, Error> {
        if !blocks.advance(&self.blocks, cx)? {
            return Ok(Segment::Travelling(blocks));
        }
        let dx_td = blocks.dx_td;
        let Some(embedding) = &self.embedding else { return Ok(Segment::Done(Some(dx_td))) };
        embedding.backward(&dx_td, cx)?;
        cx.reduce_unit_of(embedding.table())?;
        Ok(Segment::Done(None))
    }

    /// Forward alone: the rows for the next part, or in the last part the loss.
    ///
    /// # Errors
    /// A collective or a layer failed.
    pub fn evaluate(
        &self,
        x_td: Option<Tensor<T>>,
        cx: &mut Cx<T>,
    ) -> Result<(Option<Tensor<T>>, LossSum), Error> {
        let y_td = self.blocks_alone(x_td, cx, |_, _| ())?.x_td;
        let Some(output) = &self.output else {
            return Ok((Some(y_td), LossSum::default()));
        };
        let Output { final_norm, head } = output;
        let _gathered = output.gather(Pass::Once, cx)?;
        let (h_td, _) = final_norm.forward(&y_td, cx);
        Ok((None, head.forward(&h_td, cx)?))
    }

    /// Logits [T, V] of the micro-batch on every TP rank, from a chunk that is the whole model; `each` sees the
    /// residual stream as in a forward.
    ///
    /// # Errors
    /// A collective or a layer failed.
    pub fn logits(
        &self,
        cx: &mut Cx<T>,
        each: impl FnMut(Option<usize>, &Tensor<T>),
    ) -> Result<(Tensor<T::Acc>, Vec<(usize, MoeReport)>), Error> {
        let BlocksForward { x_td: y_td, reports, .. } = self.blocks_alone(None, cx, each)?;
        let reports = self.by_layer(reports);
        let output = self.output.as_ref().expect("a whole model has a head");
        let Output { final_norm, head } = output;
        let _gathered = output.gather(Pass::Once, cx)?;
        let (h_td, _) = final_norm.forward(&y_td, cx);
        Ok((head.logits(&h_td, cx)?, reports))
    }

    /// Tells the MoE layers of a micro-batch the balance counts of the whole global batch, from the reports of all
    /// micro-batches and ranks: the global balance loss needs them before the backward.
    pub fn set_global_counts(&self, in_flight: &mut InFlight<T>, global: &[(usize, MoeReport)]) {
        for ((layer, block), saved) in self.layers.clone().zip(&self.blocks).zip(in_flight.tape.iter_mut()) {
            if let Some((_, report)) = global.iter().find(|(l, _)| *l == layer) {
                block.feed_forward.set_global_counts(saved.slot_mut(), &report.balance_counts_e);
            }
        }
    }

    /// The MoE layers: (layer, its feed-forward).
    pub fn moe_layers(&self) -> impl Iterator<Item = (usize, &MoeLayer<T>)> {
        let blocks = self.layers.clone().zip(&self.blocks);
        blocks.filter_map(|(layer, block)| Some((layer, block.feed_forward.moe()?)))
    }

    /// The MoE layers, to change their selection bias.
    pub fn moe_layers_mut(&mut self) -> impl Iterator<Item = (usize, &mut MoeLayer<T>)> {
        let blocks = self.layers.clone().zip(&mut self.blocks);
        blocks.filter_map(|(layer, block)| Some((layer, block.feed_forward.moe_mut()?)))
    }
}
