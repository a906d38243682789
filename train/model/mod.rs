//! The decoder language model: embedding, residual blocks of attention and a dense or mixture-of-experts
//! feed-forward, final norm, output head. Layers are built here from the configuration, one visible order;
//! what they compute is in `plica-dense` and `plica-moe`. A rank holds chunks: one without a pipeline, else those
//! of its stages. Shapes: rows of this TP rank [t, d].

pub mod build;
pub mod chunk;
pub mod feed_forward;
pub mod flops;
pub mod part;
pub mod passes;

use plica_dense::{Cx, Error, LossSum, Trainable};
use plica_kernels::Tensor;
use plica_moe::{MoeLayer, MoeReport};

pub use chunk::{Chunk, InFlight};

/// The part of a decoder that one rank holds.
pub struct Model<T: Trainable> {
    /// Its chunks, by rising stage.
    pub chunks: Vec<Chunk<T>>,
}

impl<T: Trainable> Model<T> {
    /// The only chunk of a rank that holds the whole model.
    ///
    /// # Panics
    /// When the model is cut over a pipeline.
    pub fn whole(&self) -> &Chunk<T> {
        match &self.chunks[..] {
            [chunk] if chunk.embedding.is_some() && chunk.output.is_some() => chunk,
            chunks => panic!("the model is cut over a pipeline; this rank holds {} parts", chunks.len()),
        }
    }

    /// The chunk of a stage that this rank holds.
    ///
    /// # Panics
    /// When another rank holds it.
    pub fn chunk(&self, stage: usize) -> &Chunk<T> {
        self.chunks.iter().find(|chunk| chunk.stage == stage).expect("a stage of this rank")
    }

    /// Forward of one micro-batch through the whole model, up to the loss, and the backward of head and final
    /// norm.
    ///
    /// # Errors
    /// A collective or a layer failed.
    pub fn forward(&self, cx: &mut Cx<T>) -> Result<InFlight<T>, Error> {
        Ok(self.whole().forward(None, cx)?.1)
    }

    /// Backward of one micro-batch through the whole model; gradients are added to those of `cx`.
    ///
    /// # Errors
    /// A collective or a layer failed.
    pub fn backward(&self, in_flight: InFlight<T>, cx: &mut Cx<T>) -> Result<(), Error> {
        self.whole().backward(in_flight, None, cx).map(|_| ())
    }

    /// Loss of one micro-batch through the whole model without any gradient.
    ///
    /// # Errors
    /// A collective or a layer failed.
    pub fn evaluate(&self, cx: &mut Cx<T>) -> Result<LossSum, Error> {
        Ok(self.whole().evaluate(None, cx)?.1)
    }

    /// Logits [T, V] of the micro-batch on every TP rank, of the whole model; see [`Chunk::logits`].
    ///
    /// # Errors
    /// A collective or a layer failed.
    pub fn logits(
        &self,
        cx: &mut Cx<T>,
        each: impl FnMut(Option<usize>, &Tensor<T>),
    ) -> Result<(Tensor<T::Acc>, Vec<(usize, MoeReport)>), Error> {
        self.whole().logits(cx, each)
    }

    /// See [`Chunk::set_global_counts`], of the whole model.
    pub fn set_global_counts(&self, in_flight: &mut InFlight<T>, global: &[(usize, MoeReport)]) {
        self.whole().set_global_counts(in_flight, global);
    }

    /// The MoE layers of this rank: (layer, its feed-forward).
    pub fn moe_layers(&self) -> impl Iterator<Item = (usize, &MoeLayer<T>)> {
        self.chunks.iter().flat_map(Chunk::moe_layers)
    }

    /// The MoE layers of this rank, to change their selection bias.
    pub fn moe_layers_mut(&mut self) -> impl Iterator<Item = (usize, &mut MoeLayer<T>)> {
        self.chunks.iter_mut().flat_map(Chunk::moe_layers_mut)
    }
}
