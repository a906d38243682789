//! A chunk: the layers of one model part on one rank, with its forward and its backward for one micro-batch. The
//! first part makes its rows from token ids, the others get them from the part before; the last part ends in the
//! loss, the others give their rows on. Shapes: rows of this TP rank [t, d]. The backward of head and final norm
//! runs in the forward of the last part, so that the logits of all rows never exist. Leaves out how rows travel
//! between ranks, and in which order parts and micro-batches run.

use std::collections::BTreeSet;
use std::ops::Range;

use plica_dense::shard::{GatheredUnit, Pass, Sharding, UnitId, UnitWalk};
use plica_dense::{Block, BlockSaved, Cx, Embedding, Error, Head, LossSum, Norm, ParamId, Tape, Trainable};
use plica_kernels::Tensor;
use plica_moe::{MoeLayer, MoeReport};

use super::feed_forward::FeedForwardLayer;

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
    tape: Tape<BlockSaved<T, FeedForwardLayer<T>>>,
    /// In the last part: gradient of the last block's output.
    dy_td: Option<Tensor<T>>,
    /// Loss of the micro-batch; zero but in the last part.
    pub loss: LossSum,
    /// Reports of the chunk's MoE layers: (layer, report).
    pub reports: Vec<(usize, MoeReport)>,
}

/// What the blocks of a chunk give.
struct Passed<T: Trainable> {
    y_td: Tensor<T>,
    tape: Tape<BlockSaved<T, FeedForwardLayer<T>>>,
    reports: Vec<(usize, MoeReport)>,
}

impl<T: Trainable> Chunk<T> {
    /// The units of weights that the chunk computes with, in the order of a forward.
    pub fn units(&self, sharding: &Sharding) -> Vec<UnitId> {
        let own = self.parameters.clone().map(ParamId::nth);
        let all = own.chain(self.output.as_ref().map(|output| output.head.table()));
        let units: BTreeSet<UnitId> = all.map(|id| sharding.unit_of(id)).collect();
        units.into_iter().collect()
    }

    /// Runs the blocks on the micro-batch of `cx`. `x_td` are the rows of the part before; the first part makes
    /// them itself. `each` gets the residual stream after the embedding (layer `None`) and after each block.
    fn blocks_forward(
        &self,
        x_td: Option<Tensor<T>>,
        pass: Pass,
        cx: &mut Cx<T>,
        mut each: impl FnMut(Option<usize>, &Tensor<T>),
    ) -> Result<Passed<T>, Error> {
        let mut x_td = match (&self.embedding, x_td) {
            (Some(embedding), None) => {
                let table = cx.gather_of(embedding.table(), Pass::Once)?;
                let x_td = embedding.forward(cx)?;
                drop(table);
                each(None, &x_td);
                x_td
            }
            (None, Some(x_td)) => x_td,
            (Some(_), Some(_)) => panic!("the first part makes its rows from token ids"),
            (None, None) => {
                panic!("part {} needs the rows of part {}", self.stage, self.stage.wrapping_sub(1))
            }
        };
        let mut tape = Tape::new();
        let mut reports = Vec::new();
        let mut units = UnitWalk::new(pass);
        for (layer, block) in self.layers.clone().zip(&self.blocks) {
            units.enter(block.attention_norm.weight(), cx)?;
            let (y_td, saved, report) = block.forward(&x_td, cx)?;
            x_td = y_td;
            each(Some(layer), &x_td);
            tape.push(saved);
            reports.extend(report.map(|report| (layer, report)));
        }
        units.leave(cx)?;
        Ok(Passed { y_td: x_td, tape, reports })
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
        let Passed { y_td, tape, reports } = self.blocks_forward(x_td, Pass::Forward, cx, |_, _| ())?;
        let Some(output) = &self.output else {
            return Ok((Some(y_td), InFlight { tape, dy_td: None, loss: LossSum::default(), reports }));
        };
        let Output { final_norm, head } = output;
        let gathered = output.gather(Pass::Backward, cx)?;
        let (h_td, saved) = final_norm.forward(&y_td, cx);
        drop(y_td);
        let (loss, dh_td) = head.forward_backward(&h_td, cx)?;
        drop(h_td);
        let dy_td = final_norm.backward(saved, &dh_td, cx);
        drop(gathered);
        cx.reduce_unit_of(final_norm.weight())?;
        Ok((None, InFlight { tape, dy_td: Some(dy_td), loss, reports }))
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
        let InFlight { mut tape, dy_td: of_loss, .. } = in_flight;
        assert!(of_loss.is_none() || dy_td.is_none(), "the last part's gradient is that of the loss");
        let mut dx_td = of_loss.or(dy_td).expect("the gradient of the rows that the chunk gave on");
        let mut units = UnitWalk::new(Pass::Backward);
        for block in self.blocks.iter().rev() {
            units.enter(block.attention_norm.weight(), cx)?;
            let saved = tape.pop().expect("one entry a block");
            dx_td = block.backward(saved, &dx_td, cx)?;
        }
        units.leave(cx)?;
        let Some(embedding) = &self.embedding else { return Ok(Some(dx_td)) };
        embedding.backward(&dx_td, cx)?;
        cx.reduce_unit_of(embedding.table())?;
        Ok(None)
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
        let Passed { y_td, .. } = self.blocks_forward(x_td, Pass::Once, cx, |_, _| ())?;
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
        let Passed { y_td, reports, .. } = self.blocks_forward(None, Pass::Once, cx, each)?;
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
