//! The decoder language model: embedding, residual blocks of attention and a dense or mixture-of-experts
//! feed-forward, final norm, output head. Layers are built here from the configuration, one visible order;
//! what they compute is in `plica-dense` and `plica-moe`. Shapes: rows of this TP rank [t, d].

pub mod build;
pub mod feed_forward;
pub mod flops;

use plica_dense::{Block, BlockSaved, Cx, Embedding, Error, Head, LossSum, Norm, Tape, Trainable};
use plica_kernels::Tensor;

use feed_forward::FeedForwardLayer;
use plica_moe::MoeReport;

/// A decoder for one rank.
pub struct Model<T: Trainable> {
    /// Token embedding.
    pub embedding: Embedding,
    /// Residual blocks.
    pub blocks: Vec<Block<T, FeedForwardLayer<T>>>,
    /// Norm before the head.
    pub final_norm: Norm,
    /// Output head with the loss.
    pub head: Head,
}

/// A micro-batch between its forward and its backward.
pub struct InFlight<T: Trainable> {
    tape: Tape<BlockSaved<T, FeedForwardLayer<T>>>,
    /// Gradient of the last block's output.
    dx_td: Tensor<T>,
    /// Loss of the micro-batch.
    pub loss: LossSum,
    /// Reports of the MoE layers: (layer, report).
    pub reports: Vec<(usize, MoeReport)>,
}

impl<T: Trainable> Model<T> {
    /// Runs the blocks on the micro-batch of `cx`; `each` gets the residual stream after the embedding (layer
    /// `None`) and after each block.
    fn blocks_forward(
        &self,
        cx: &mut Cx<T>,
        mut each: impl FnMut(Option<usize>, &Tensor<T>),
    ) -> Result<(Tensor<T>, Tape<BlockSaved<T, FeedForwardLayer<T>>>, Vec<(usize, MoeReport)>), Error> {
        let mut x_td = self.embedding.forward(cx)?;
        each(None, &x_td);
        let mut tape = Tape::new();
        let mut reports = Vec::new();
        for (layer, block) in self.blocks.iter().enumerate() {
            let (y_td, saved, report) = block.forward(&x_td, cx)?;
            x_td = y_td;
            each(Some(layer), &x_td);
            tape.push(saved);
            reports.extend(report.map(|report| (layer, report)));
        }
        Ok((x_td, tape, reports))
    }

    /// Forward of one micro-batch up to the loss, and the backward of head and final norm.
    ///
    /// # Errors
    /// A collective or a layer failed.
    pub fn forward(&self, cx: &mut Cx<T>) -> Result<InFlight<T>, Error> {
        let (x_td, tape, reports) = self.blocks_forward(cx, |_, _| ())?;
        let (y_td, saved) = self.final_norm.forward(&x_td, cx);
        drop(x_td);
        let (loss, dy_td) = self.head.forward_backward(&y_td, cx)?;
        drop(y_td);
        let dx_td = self.final_norm.backward(saved, &dy_td, cx);
        Ok(InFlight { tape, dx_td, loss, reports })
    }

    /// Backward of one micro-batch; gradients are added to those of `cx`.
    ///
    /// # Errors
    /// A collective or a layer failed.
    pub fn backward(&self, in_flight: InFlight<T>, cx: &mut Cx<T>) -> Result<(), Error> {
        let InFlight { mut tape, mut dx_td, .. } = in_flight;
        for block in self.blocks.iter().rev() {
            let saved = tape.pop().expect("one entry a block");
            dx_td = block.backward(saved, &dx_td, cx)?;
        }
        self.embedding.backward(&dx_td, cx)
    }

    /// Tells the MoE layers of a micro-batch the balance counts of the whole global batch, from the reports of all
    /// micro-batches and ranks: the global balance loss needs them before the backward.
    pub fn set_global_counts(&self, in_flight: &mut InFlight<T>, global: &[(usize, MoeReport)]) {
        for (layer, (block, saved)) in self.blocks.iter().zip(in_flight.tape.iter_mut()).enumerate() {
            if let Some((_, report)) = global.iter().find(|(l, _)| *l == layer) {
                block.feed_forward.set_global_counts(saved.slot_mut(), &report.balance_counts_e);
            }
        }
    }

    /// Loss of one micro-batch without any gradient.
    ///
    /// # Errors
    /// A collective or a layer failed.
    pub fn evaluate(&self, cx: &mut Cx<T>) -> Result<LossSum, Error> {
        let (x_td, _, _) = self.blocks_forward(cx, |_, _| ())?;
        let (y_td, _) = self.final_norm.forward(&x_td, cx);
        self.head.forward(&y_td, cx)
    }

    /// Logits [T, V] of the micro-batch on every TP rank; `each` sees the residual stream as in a forward.
    ///
    /// # Errors
    /// A collective or a layer failed.
    pub fn logits(
        &self,
        cx: &mut Cx<T>,
        each: impl FnMut(Option<usize>, &Tensor<T>),
    ) -> Result<(Tensor<T::Acc>, Vec<(usize, MoeReport)>), Error> {
        let (x_td, _, reports) = self.blocks_forward(cx, each)?;
        let (y_td, _) = self.final_norm.forward(&x_td, cx);
        Ok((self.head.logits(&y_td, cx)?, reports))
    }

    /// The MoE layers: (layer, its feed-forward).
    pub fn moe_layers(&self) -> impl Iterator<Item = (usize, &plica_moe::MoeLayer<T>)> {
        self.blocks.iter().enumerate().filter_map(|(i, block)| Some((i, block.feed_forward.moe()?)))
    }

    /// The MoE layers, to change their selection bias.
    pub fn moe_layers_mut(&mut self) -> impl Iterator<Item = (usize, &mut plica_moe::MoeLayer<T>)> {
        self.blocks.iter_mut().enumerate().filter_map(|(i, block)| Some((i, block.feed_forward.moe_mut()?)))
    }
}
