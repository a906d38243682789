//! The one error type of this crate: which rule a layout breaks, with every number and a remedy.
//!
//! The texts are written for the person who typed the layout, so each says what was asked, which equation or
//! rule fails, and the nearest values that work.

use crate::axis::{Axis, MeshKind};

/// Why a layout, or a layout with a model, is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// A size of zero.
    #[error("{name} = 0 is refused: every size is at least 1; set {name} to 1 or more")]
    ZeroSize {
        /// The setting's name.
        name: &'static str,
    },
    /// A product of sizes that no machine word holds.
    #[error("{product} overflows: no world has that many ranks; lower one of its factors")]
    Overflow {
        /// The product with its numbers.
        product: String,
    },
    /// More ranks than the crate lists groups for.
    #[error("G = {world} ranks is above the limit of {limit}; lower the world size")]
    WorldTooLarge {
        /// Ranks asked for.
        world: usize,
        /// Most ranks accepted.
        limit: usize,
    },
    /// The given axes of one mesh do not divide the world, so its data-parallel size is not whole.
    #[error(
        "{mesh} mesh: {product} = {value} does not divide G = {world} ({world} % {value} = {}), so no whole \
         {free} solves TP·CP·DP·PP = ETP·EP·EDP·PP = G; nearest valid: {remedy}", .world % .value
    )]
    DoesNotDivide {
        /// The mesh whose equation fails.
        mesh: MeshKind,
        /// Its product written out, e.g. `TP·CP·PP = 8·1·1`.
        product: String,
        /// The product's value.
        value: usize,
        /// Ranks, G.
        world: usize,
        /// The axis that is left over (DP or EDP).
        free: Axis,
        /// Nearest valid values.
        remedy: String,
    },
    /// A stated DP that contradicts the other sizes.
    #[error(
        "attention mesh: TP·CP·DP·PP = {tp}·{cp}·{dp}·{pp} is not G = {world} \
         (TP·CP·DP·PP = ETP·EP·EDP·PP = G); nearest valid: {remedy}"
    )]
    WrongDp {
        /// TP.
        tp: usize,
        /// CP.
        cp: usize,
        /// DP as stated.
        dp: usize,
        /// PP.
        pp: usize,
        /// Ranks, G.
        world: usize,
        /// Nearest valid values.
        remedy: String,
    },
    /// A word in the order string that is no axis.
    #[error(
        "order \"{order}\" has the unknown axis \"{token}\"; write tp, cp, ep, dp, pp, each at most once, \
         joined by '-', e.g. tp-cp-ep-dp-pp"
    )]
    UnknownToken {
        /// The word.
        token: String,
        /// The whole string.
        order: String,
    },
    /// An axis written twice in the order string.
    #[error("order \"{order}\" names {token} twice; name each axis once, e.g. tp-cp-ep-dp-pp")]
    DuplicateToken {
        /// The axis.
        token: &'static str,
        /// The whole string.
        order: String,
    },
    /// An axis larger than 1 that the order string leaves out.
    #[error(
        "order \"{order}\" leaves out {token}, but {axis} = {size}; only an axis of size 1 may be left out: add \
         {token} (e.g. tp-cp-ep-dp-pp) or set {axis} to 1"
    )]
    MissingToken {
        /// The order token.
        token: &'static str,
        /// The axis it stands for that is larger than 1.
        axis: Axis,
        /// Its size.
        size: usize,
        /// The whole string.
        order: String,
    },
    /// `pp` is not last although attention and experts have different data-parallel sizes.
    #[error(
        "order \"{order}\" does not end in pp: with PP = {pp} that needs DP = EDP, but DP = {dp} and EDP = {edp} \
         (G = {world}: DP = G/(TP·CP·PP), EDP = G/(ETP·EP·PP)); write \"{pp_last}\", or make ETP·EP equal TP·CP"
    )]
    PpNotLast {
        /// The order string.
        order: String,
        /// PP.
        pp: usize,
        /// DP.
        dp: usize,
        /// EDP.
        edp: usize,
        /// Ranks, G.
        world: usize,
        /// The same order with pp last.
        pp_last: String,
    },
    /// The two meshes would put a rank in different pipeline stages.
    #[error(
        "order \"{order}\" gives the meshes different stages: PP = {pp} has stride {attention_stride} in the \
         attention mesh and {expert_stride} in the expert mesh; write \"{pp_last}\""
    )]
    StagesDiffer {
        /// The order string.
        order: String,
        /// PP.
        pp: usize,
        /// Ranks between neighbouring stages, attention mesh.
        attention_stride: usize,
        /// Ranks between neighbouring stages, expert mesh.
        expert_stride: usize,
        /// The same order with pp last.
        pp_last: String,
    },
    /// A model size that an axis does not divide.
    #[error(
        "{what} = {value} is not divisible by {axis} = {size} ({value} % {size} = {}); nearest valid: {remedy}",
        .value % .size
    )]
    Indivisible {
        /// The model size's name.
        what: &'static str,
        /// Its value.
        value: usize,
        /// The axis.
        axis: Axis,
        /// The axis size.
        size: usize,
        /// Nearest valid values.
        remedy: String,
    },
    /// Fewer layers than stages.
    #[error(
        "layers = {layers} over PP = {pp} leaves {} of the stages without a layer; nearest valid: {remedy}",
        .pp - .layers
    )]
    TooFewLayers {
        /// Layers of the model.
        layers: usize,
        /// PP.
        pp: usize,
        /// Nearest valid values.
        remedy: String,
    },
    /// Layers that do not divide over the chunks of an interleaved pipeline.
    #[error(
        "layers = {layers} is not divisible by PP·V = {pp}·{chunks} = {} ({layers} % {0} = {}), V chunks a rank; \
         nearest valid: {remedy}", .pp * .chunks, .layers % (.pp * .chunks)
    )]
    VirtualStages {
        /// Layers of the model.
        layers: usize,
        /// PP.
        pp: usize,
        /// Chunks a rank, V.
        chunks: usize,
        /// Nearest valid values.
        remedy: String,
    },
    /// Expert axes on a model without experts.
    #[error(
        "{axis} = {size}, but the model has no experts (experts = 0); set {axis} to 1 or give it experts"
    )]
    NoExperts {
        /// EP.
        axis: Axis,
        /// Its size.
        size: usize,
    },
    /// A global batch that does not divide over the data-parallel ranks, or is too small for a micro-batch on each.
    #[error(
        "global batch = {global_batch} must be divisible by DP = {dp} ({global_batch} % {dp} = {}) and at least micro \
         batch·DP = {micro_batch}·{dp} = {}; nearest valid: {remedy}", .global_batch % .dp, .micro_batch * .dp
    )]
    Batch {
        /// Sequences of one optimizer step, all ranks.
        global_batch: usize,
        /// Sequences of one micro-batch, one rank.
        micro_batch: usize,
        /// DP.
        dp: usize,
        /// Nearest valid values.
        remedy: String,
    },
    /// A sequence length that the context or tensor ranks cannot share evenly.
    #[error(
        "sequence length = {sequence} is not divisible by {rule} = {divisor} ({sequence} % {divisor} = {}); nearest \
         valid: {remedy}", .sequence % .divisor
    )]
    Sequence {
        /// Tokens of a sequence.
        sequence: usize,
        /// The divisor's formula with its numbers.
        rule: String,
        /// The divisor.
        divisor: usize,
        /// Nearest valid values.
        remedy: String,
    },
    /// Optimizer instances that do not divide a data-parallel group.
    #[error(
        "{what} = {size} is not divisible by optimizer instances = {instances} ({size} % {instances} = {}), with \
         DP·CP = {dp_cp} and EDP = {edp}; nearest valid: {remedy}", .size % .instances
    )]
    Instances {
        /// `DP·CP` or `EDP`.
        what: &'static str,
        /// Its size.
        size: usize,
        /// Instances asked for.
        instances: usize,
        /// DP·CP.
        dp_cp: usize,
        /// EDP.
        edp: usize,
        /// Nearest valid values.
        remedy: String,
    },
}
