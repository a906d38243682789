//! What fills a block's feed-forward slot in our models: a dense MLP or a mixture-of-experts layer.

use plica_dense::mlp::MlpSaved;
use plica_dense::shard::{GatheredUnit, Pass};
use plica_dense::{Cx, Error, FeedForward, Mlp, SlotSaved, Trainable};
use plica_kernels::Tensor;
use plica_moe::{MoeKept, MoeLayer, MoeReport, MoeSaved};

/// A feed-forward layer.
pub enum FeedForwardLayer<T: Trainable> {
    /// SwiGLU, tensor-parallel.
    Dense(Mlp),
    /// Router and experts.
    Moe(Box<MoeLayer<T>>),
}

/// What a forward kept.
#[derive(Debug)]
pub enum FeedForwardSaved<T: Trainable> {
    /// Of the dense layer.
    Dense(MlpSaved<T>),
    /// Of the MoE layer.
    Moe(Box<MoeSaved<T>>),
}

/// What block recomputation keeps.
#[derive(Debug)]
pub enum FeedForwardKept {
    /// A dense layer needs nothing.
    Dense,
    /// The routing.
    Moe(Box<MoeKept>),
}

impl<T: Trainable> FeedForwardLayer<T> {
    /// The MoE layer, if this is one.
    pub fn moe(&self) -> Option<&MoeLayer<T>> {
        match self {
            FeedForwardLayer::Dense(_) => None,
            FeedForwardLayer::Moe(layer) => Some(layer),
        }
    }

    /// The MoE layer, if this is one.
    pub fn moe_mut(&mut self) -> Option<&mut MoeLayer<T>> {
        match self {
            FeedForwardLayer::Dense(_) => None,
            FeedForwardLayer::Moe(layer) => Some(layer),
        }
    }
}

impl<T: Trainable> FeedForwardLayer<T> {
    /// Gives a forward the balance counts of the whole global batch; nothing for a dense layer.
    pub fn set_global_counts(&self, slot: SlotSaved<'_, T, Self>, counts_e: &[i64]) {
        match (self, slot) {
            (FeedForwardLayer::Moe(layer), SlotSaved::Saved(FeedForwardSaved::Moe(saved))) => {
                layer.set_global_counts(saved, counts_e);
            }
            (FeedForwardLayer::Moe(layer), SlotSaved::Kept(FeedForwardKept::Moe(kept))) => {
                layer.set_global_counts_kept(kept, counts_e);
            }
            _ => {}
        }
    }
}

/// Complete weights of a layer's experts, where these are a unit of their own.
fn gather_experts<'a, T: Trainable>(
    layer: &MoeLayer<T>,
    pass: Pass,
    cx: &Cx<'a, T>,
) -> Result<Option<GatheredUnit<'a, T>>, Error> {
    let plan = cx.params.sharding();
    let experts = plan.unit_of(layer.experts().parameters()[0]);
    let apart = experts != plan.unit_of(layer.router().parameter());
    apart.then(|| cx.gather(experts, pass)).transpose()
}

impl<T: Trainable> FeedForward<T> for FeedForwardLayer<T> {
    type Saved = FeedForwardSaved<T>;
    type Kept = FeedForwardKept;
    type Report = Option<MoeReport>;

    fn forward(
        &self,
        x_td: &Tensor<T>,
        cx: &mut Cx<T>,
    ) -> Result<(Tensor<T>, Self::Saved, Self::Report), Error> {
        match self {
            FeedForwardLayer::Dense(layer) => {
                let (y_td, saved, ()) = layer.forward(x_td, cx)?;
                Ok((y_td, FeedForwardSaved::Dense(saved), None))
            }
            FeedForwardLayer::Moe(layer) => {
                let pass = if cx.tokens.training { Pass::Forward } else { Pass::Once };
                let _experts = gather_experts(layer, pass, cx)?;
                let (y_td, saved, report) = layer.forward(x_td, cx)?;
                Ok((y_td, FeedForwardSaved::Moe(Box::new(saved)), Some(report)))
            }
        }
    }

    fn keep(&self, saved: &Self::Saved) -> Self::Kept {
        match (self, saved) {
            (FeedForwardLayer::Moe(layer), FeedForwardSaved::Moe(saved)) => {
                FeedForwardKept::Moe(Box::new(layer.keep(saved)))
            }
            _ => FeedForwardKept::Dense,
        }
    }

    fn forward_again(
        &self,
        x_td: &Tensor<T>,
        kept: &Self::Kept,
        cx: &mut Cx<T>,
    ) -> Result<Self::Saved, Error> {
        match (self, kept) {
            (FeedForwardLayer::Dense(layer), FeedForwardKept::Dense) => {
                Ok(FeedForwardSaved::Dense(layer.forward_again(x_td, &(), cx)?))
            }
            (FeedForwardLayer::Moe(layer), FeedForwardKept::Moe(kept)) => {
                let _experts = gather_experts(layer, Pass::Again, cx)?;
                Ok(FeedForwardSaved::Moe(Box::new(layer.forward_again(x_td, kept, cx)?)))
            }
            _ => panic!("kept by a layer of another kind"),
        }
    }

    fn backward(&self, saved: Self::Saved, dy_td: &Tensor<T>, cx: &mut Cx<T>) -> Result<Tensor<T>, Error> {
        match (self, saved) {
            (FeedForwardLayer::Dense(layer), FeedForwardSaved::Dense(saved)) => {
                layer.backward(saved, dy_td, cx)
            }
            (FeedForwardLayer::Moe(layer), FeedForwardSaved::Moe(saved)) => {
                let experts = gather_experts(layer, Pass::Backward, cx)?;
                let dx_td = layer.backward(*saved, dy_td, cx)?;
                let unit = experts.as_ref().map(GatheredUnit::unit);
                drop(experts);
                unit.map_or(Ok(()), |unit| cx.reduce_unit(unit))?;
                Ok(dx_td)
            }
            _ => panic!("saved by a layer of another kind"),
        }
    }
}
