//! What each axis of a layout costs a training step on a cluster, on paper: bytes that a rank sends, from the same
//! formulas that the counters of a run are held against ([`crate::verify`], `crates/*/tests`), and the time of links
//! with a published α and β (T = steps·α + bytes/β). Nothing overlaps here, so the times are what has to be hidden; the
//! arithmetic beside them is at the card's full rate, so it is the least that can hide it.
//!
//! Tokens choose experts equally often. A group that leaves a node pays the network for every byte of a ring, and for
//! the share of its members that is elsewhere in an all-to-all. Leaves out congestion, stragglers, what activations
//! take of the memory, and FP8.

mod published;
mod table;
#[cfg(test)]
mod tests;

pub use published::{Cluster, Shape, cases, cluster, deepseek_v3, mixtral_8x22b};
pub use table::{markdown, text};

use plica_folding::{Family, Layout, LayoutError, LayoutSpec};

/// Bytes of a bf16 element.
const ELEMENT_BYTES: f64 = 2.0;
/// Bytes of a parameter that are sharded over its replicas (f32 master weight and two moments), and those that are not
/// (bf16 weight and f32 gradient): ZeRO-1.
const SHARDED_BYTES: f64 = 12.0;
const KEPT_BYTES: f64 = 6.0;

/// One layout of one model, and how much a step does.
#[derive(Clone, Debug)]
pub struct Case {
    /// The model.
    pub shape: Shape,
    /// How it is cut.
    pub spec: LayoutSpec,
    /// Micro-batches of one sequence that each data-parallel replica works through in a step.
    pub micro_batches: usize,
    /// Tokens of a sequence.
    pub sequence: usize,
}

/// What one axis costs a rank in one step.
#[derive(Clone, Debug, PartialEq)]
pub struct AxisCost {
    /// Name of the axis and what it moves.
    pub axis: &'static str,
    /// Ranks of its group.
    pub ranks: usize,
    /// Whether the group has members on another node.
    pub leaves_node: bool,
    /// Collectives of a step.
    pub collectives: f64,
    /// Bytes that a rank sends in a step.
    pub sent_bytes: f64,
    /// Their time by α and β, in seconds.
    pub seconds: f64,
}

/// The costs of a case.
#[derive(Clone, Debug)]
pub struct Costs {
    /// By axis; an axis of one rank costs nothing and is not listed.
    pub axes: Vec<AxisCost>,
    /// Arithmetic of a rank at the card's full rate, in seconds.
    pub compute_seconds: f64,
    /// Share of the step in which a pipeline of this many micro-batches idles (1F1B).
    pub bubble: f64,
    /// Weights, gradients and optimizer state of a rank, in bytes.
    pub state_bytes: f64,
    /// Tokens of a step, over all ranks.
    pub tokens: f64,
}

/// How the bytes of a collective travel.
#[derive(Clone, Copy)]
enum Route {
    /// Round a ring of all members.
    Ring,
    /// From each to each.
    Pairs,
    /// To one neighbour.
    Neighbour,
}

impl Case {
    /// The layout.
    ///
    /// # Errors
    /// Sizes that do not fit the number of ranks.
    pub fn layout(&self) -> Result<Layout, LayoutError> {
        Layout::new(&self.spec)
    }

    /// What the case costs on a cluster.
    ///
    /// # Errors
    /// As [`Case::layout`].
    pub fn costs(&self, cluster: &Cluster) -> Result<Costs, LayoutError> {
        let layout = self.layout()?;
        let size = |family| layout.group_size(family) as f64;
        let (pp, micro_batches) = (size(Family::Pp), self.micro_batches as f64);
        let mut axes = self.axes_of_micro_batches(&layout, cluster);
        axes.extend(self.axes_of_replicas(&layout, cluster));
        let (dense, expert) = self.shape.parameters_of_rank(&layout);
        let state = |family, parameters: f64| parameters * (KEPT_BYTES + SHARDED_BYTES / size(family));
        let tokens = self.sequence as f64 * micro_batches * size(Family::Dp);
        let flops = self.shape.step_flops(self.sequence, tokens);
        Ok(Costs {
            axes,
            compute_seconds: flops / layout.world() as f64 / cluster.flops,
            bubble: (pp - 1.0) / (micro_batches + pp - 1.0),
            state_bytes: state(Family::DpCp, dense) + state(Family::Edp, expert),
            tokens,
        })
    }

    /// What every micro-batch costs, times their number.
    fn axes_of_micro_batches(&self, layout: &Layout, cluster: &Cluster) -> Vec<AxisCost> {
        let shape = &self.shape;
        let size = |family| layout.group_size(family) as f64;
        let (tp, cp, pp) = (size(Family::Tp), size(Family::Cp), size(Family::Pp));
        let (ep, etp) = (size(Family::Ep), size(Family::Etp));
        let micro_batches = self.micro_batches as f64;
        // Layers of the fullest stage, and those of them that may have experts, or a dense MLP.
        let layers = (shape.layers as f64 / pp).ceil();
        let moe_layers = layers.min((shape.layers - shape.dense_layers) as f64);
        let dense_layers = layers.min(shape.dense_layers as f64);
        let tokens_cp = self.sequence as f64 / cp;
        let row_bytes = ELEMENT_BYTES * shape.d_model as f64;
        let stage = tokens_cp * row_bytes;
        // Gather and reduce-scatter of the rows, forward and backward, for attention and for a dense MLP; experts take
        // their rows as they are cut.
        let tp_calls = 4.0 * (layers + dense_layers) * micro_batches;
        let tp_bytes = stage * (tp - 1.0) / tp;
        // Keys and values once round the ring, and with their gradients once more.
        let kv_bytes = tokens_cp * ELEMENT_BYTES * shape.kv_width as f64 / tp;
        let hops = 3.0 * (cp - 1.0) * layers * micro_batches;
        // Rows there and back, and their gradients.
        let routed_bytes = tokens_cp / tp * shape.top_k as f64 * row_bytes;
        let ep_calls = 4.0 * moe_layers * micro_batches;
        // A middle stage sends its output on and its input's gradient back.
        let borders = 2.0 * micro_batches;
        let rows = [
            ("TP rows", Family::Tp, Route::Ring, tp_calls, tp_bytes),
            ("CP ring", Family::Cp, Route::Neighbour, hops, kv_bytes),
            ("EP dispatch and combine", Family::Ep, Route::Pairs, ep_calls, routed_bytes * (ep - 1.0) / ep),
            ("ETP rows of experts", Family::Etp, Route::Ring, ep_calls, routed_bytes * (etp - 1.0)),
            ("PP borders", Family::Pp, Route::Neighbour, borders, stage / tp),
        ];
        rows.into_iter()
            .filter(|(_, family, ..)| layout.group_size(*family) > 1)
            .map(|(axis, family, route, calls, bytes)| {
                axis_cost(layout, cluster, (axis, family, route), calls, calls * bytes)
            })
            .collect()
    }

    /// What the sums of gradients and the gathers of weights cost, once a step.
    fn axes_of_replicas(&self, layout: &Layout, cluster: &Cluster) -> Vec<AxisCost> {
        let (dense, expert) = self.shape.parameters_of_rank(layout);
        let rows = [
            ("DP sums and weights, dense", Family::DpCp, dense),
            ("EDP sums and weights, experts", Family::Edp, expert),
        ];
        rows.into_iter()
            .filter(|(_, family, _)| layout.group_size(*family) > 1)
            .map(|(axis, family, parameters)| {
                // Gradients in f32 to shards, weights in bf16 from them.
                let d = layout.group_size(family) as f64;
                let bytes = parameters * (4.0 + ELEMENT_BYTES) * (d - 1.0) / d;
                axis_cost(layout, cluster, (axis, family, Route::Ring), 2.0, bytes)
            })
            .collect()
    }
}

/// Bytes and time of one axis.
fn axis_cost(
    layout: &Layout,
    cluster: &Cluster,
    (axis, family, route): (&'static str, Family, Route),
    collectives: f64,
    sent_bytes: f64,
) -> AxisCost {
    let members = layout.group_of(family, 0);
    let ranks = members.len();
    let nodes = plica_folding::node_count(&members, layout.ranks_per_node());
    let leaves_node = nodes > 1;
    let (near, far) = (cluster.near, cluster.far);
    let others = ranks as f64 - 1.0;
    let elsewhere = match route {
        Route::Ring => f64::from(u8::from(leaves_node)),
        Route::Neighbour => f64::from(u8::from(layout.node_of(members[0]) != layout.node_of(members[1]))),
        Route::Pairs => {
            let here = members.iter().filter(|&&rank| layout.node_of(rank) == layout.node_of(members[0]));
            (ranks - here.count()) as f64 / others
        }
    };
    let latency = match route {
        // Every round passes every member once: as many steps over the network as there are nodes.
        Route::Ring => {
            let far_steps = if leaves_node { nodes as f64 - 1.0 } else { 0.0 };
            far_steps * far.alpha + (others - far_steps) * near.alpha
        }
        Route::Pairs | Route::Neighbour => {
            if elsewhere > 0.0 {
                far.alpha
            } else {
                near.alpha
            }
        }
    };
    let bytes_time = sent_bytes * (elsewhere / far.beta + (1.0 - elsewhere) / near.beta);
    let seconds = collectives * (cluster.start + latency) + bytes_time;
    AxisCost { axis, ranks, leaves_node, collectives, sent_bytes, seconds }
}
