//! What fills a block's feed-forward slot in our models: a dense MLP or a mixture-of-experts layer.

use plica_dense::mlp::MlpSaved;
use plica_dense::shard::{GatheredUnit, Pass};
use plica_dense::{
    BackwardSegment, Cx, Error, FeedForward, ForwardSegment, Mlp, Segment, SlotSaved, Trainable,
};
use plica_kernels::Tensor;
use plica_moe::layer::{MoeBackward, MoeForward};
use plica_moe::{MoeKept, MoeLayer, MoeReport, MoeSaved};

/// A segment of an MoE layer's forward.
type MoeForwardSegment<'a, T> = ForwardSegment<'a, T, MoeLayer<T>>;
/// A segment of its backward.
type MoeBackwardSegment<'a, T> = BackwardSegment<'a, T, MoeLayer<T>>;

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

/// A pass of an MoE layer whose rows travel, and the complete weights of its experts meanwhile.
pub struct MoeGoing<'a, T: Trainable, S> {
    pass: S,
    experts: Option<GatheredUnit<'a, T>>,
}

impl<T: Trainable> FeedForwardLayer<T> {
    /// The MoE layer of a pass that only such a layer has.
    fn expect_moe(&self) -> &MoeLayer<T> {
        self.moe().expect("rows travel in MoE layers alone")
    }
}

/// What follows on a segment of an MoE layer's forward.
fn forward_on<'a, T: Trainable>(
    segment: MoeForwardSegment<'a, T>,
    experts: Option<GatheredUnit<'a, T>>,
) -> ForwardSegment<'a, T, FeedForwardLayer<T>> {
    let done = |(y_td, saved, report)| (y_td, FeedForwardSaved::Moe(Box::new(saved)), Some(report));
    segment.map(|pass| MoeGoing { pass, experts }, done)
}

/// What follows on a segment of an MoE layer's backward: at its end the experts, where they are a unit of their own,
/// are released and their gradients summed.
fn backward_on<'a, T: Trainable>(
    segment: MoeBackwardSegment<'a, T>,
    experts: Option<GatheredUnit<'a, T>>,
    cx: &mut Cx<'a, T>,
) -> Result<BackwardSegment<'a, T, FeedForwardLayer<T>>, Error> {
    let dx_td = match segment {
        Segment::Travelling(pass) => return Ok(Segment::Travelling(MoeGoing { pass, experts })),
        Segment::Done(dx_td) => dx_td,
    };
    let unit = experts.as_ref().map(GatheredUnit::unit);
    drop(experts);
    unit.map_or(Ok(()), |unit| cx.reduce_unit(unit))?;
    Ok(Segment::Done(dx_td))
}

impl<T: Trainable> FeedForward<T> for FeedForwardLayer<T> {
    type Saved = FeedForwardSaved<T>;
    type Kept = FeedForwardKept;
    type Report = Option<MoeReport>;
    type Forward<'a> = MoeGoing<'a, T, MoeForward<T>>;
    type Backward<'a> = MoeGoing<'a, T, MoeBackward<T>>;

    fn forward_begin<'a>(
        &self,
        x_td: &Tensor<T>,
        cx: &mut Cx<'a, T>,
    ) -> Result<ForwardSegment<'a, T, Self>, Error> {
        match self {
            FeedForwardLayer::Dense(layer) => {
                let (y_td, saved, ()) = layer.forward(x_td, cx)?;
                Ok(Segment::Done((y_td, FeedForwardSaved::Dense(saved), None)))
            }
            FeedForwardLayer::Moe(layer) => {
                let pass = if cx.tokens.training { Pass::Forward } else { Pass::Once };
                let experts = gather_experts(layer, pass, cx)?;
                Ok(forward_on(layer.forward_begin(x_td, cx)?, experts))
            }
        }
    }

    fn forward_resume<'a>(
        &self,
        MoeGoing { pass, experts }: Self::Forward<'a>,
        cx: &mut Cx<'a, T>,
    ) -> Result<ForwardSegment<'a, T, Self>, Error> {
        Ok(forward_on(self.expect_moe().forward_resume(pass, cx)?, experts))
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
                Ok(FeedForwardSaved::Moe(Box::new(layer.forward_again(x_td, kept, cx)?)))
            }
            _ => panic!("kept by a layer of another kind"),
        }
    }

    fn backward_begin<'a>(
        &self,
        saved: Self::Saved,
        dy_td: &Tensor<T>,
        cx: &mut Cx<'a, T>,
    ) -> Result<BackwardSegment<'a, T, Self>, Error> {
        match (self, saved) {
            (FeedForwardLayer::Dense(layer), FeedForwardSaved::Dense(saved)) => {
                Ok(Segment::Done(layer.backward(saved, dy_td, cx)?))
            }
            (FeedForwardLayer::Moe(layer), FeedForwardSaved::Moe(saved)) => {
                let experts = gather_experts(layer, Pass::Backward, cx)?;
                let segment = layer.backward_begin(*saved, dy_td, cx)?;
                backward_on(segment, experts, cx)
            }
            _ => panic!("saved by a layer of another kind"),
        }
    }

    fn backward_resume<'a>(
        &self,
        MoeGoing { pass, experts }: Self::Backward<'a>,
        cx: &mut Cx<'a, T>,
    ) -> Result<BackwardSegment<'a, T, Self>, Error> {
        let segment = self.expect_moe().backward_resume(pass, cx)?;
        backward_on(segment, experts, cx)
    }
}
