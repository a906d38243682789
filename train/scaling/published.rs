//! Shapes of published models, a cluster of published links, and the layouts that are shown.

use plica_folding::{Family, Layout, LayoutSpec};

use super::Case;

/// Sizes of a model that costs follow from.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Name.
    pub name: &'static str,
    /// Layers in all.
    pub layers: usize,
    /// Of these, how many have a dense MLP (the first ones).
    pub dense_layers: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Parameters of the attention of a layer.
    pub attention: f64,
    /// Width of heads times their number, for the products with scores: query-key and value sides added.
    pub score_width: usize,
    /// Elements of keys and values that a token hands round the context ring.
    pub kv_width: usize,
    /// Width of a dense MLP.
    pub dense_ffn: usize,
    /// Width of an expert.
    pub expert_ffn: usize,
    /// Width of the experts that every token uses.
    pub shared_ffn: usize,
    /// Experts of a layer.
    pub experts: usize,
    /// Of these, how many a token uses.
    pub top_k: usize,
    /// Rows of the embedding, and of the head.
    pub vocabulary: usize,
}

impl Shape {
    /// Parameters of a layer that are no expert's, averaged over the layers.
    fn dense_of_layer(&self) -> f64 {
        let d = self.d_model as f64;
        let moe_share = (self.layers - self.dense_layers) as f64 / self.layers as f64;
        let router_and_shared = d * self.experts as f64 + 3.0 * d * self.shared_ffn as f64;
        self.attention + (1.0 - moe_share) * 3.0 * d * self.dense_ffn as f64 + moe_share * router_and_shared
    }

    /// Parameters of the routed experts of all layers.
    fn of_experts(&self) -> f64 {
        let one = 3.0 * (self.d_model * self.expert_ffn) as f64;
        (self.layers - self.dense_layers) as f64 * self.experts as f64 * one
    }

    fn of_table(&self) -> f64 {
        (self.vocabulary * self.d_model) as f64
    }

    /// All parameters.
    pub fn parameters(&self) -> f64 {
        self.layers as f64 * self.dense_of_layer() + self.of_experts() + 2.0 * self.of_table()
    }

    /// Parameters that a token is multiplied with, the head among them.
    pub fn active_parameters(&self) -> f64 {
        let share = self.top_k as f64 / self.experts as f64;
        self.layers as f64 * self.dense_of_layer() + share * self.of_experts() + self.of_table()
    }

    /// Parameters of the fullest rank, dense and expert: its stage's share of the layers, the table on one end.
    pub(super) fn parameters_of_rank(&self, layout: &Layout) -> (f64, f64) {
        let size = |family| layout.group_size(family) as f64;
        let (tp, pp) = (size(Family::Tp), size(Family::Pp));
        let stage = (self.layers as f64 / pp).ceil() / self.layers as f64;
        let tables = if pp > 1.0 { self.of_table() } else { 2.0 * self.of_table() };
        let dense = (self.layers as f64 * self.dense_of_layer() * stage + tables) / tp;
        (dense, self.of_experts() * stage / size(Family::EtpEp))
    }

    /// Floating-point operations of a step: 6 a parameter and token, and causal attention over half of the keys.
    pub(super) fn step_flops(&self, sequence: usize, tokens: f64) -> f64 {
        let scores = 6.0 * self.layers as f64 * self.score_width as f64 * sequence as f64 / 2.0;
        tokens * (6.0 * self.active_parameters() + scores)
    }
}

/// Mixtral-8x22B (its published configuration).
pub fn mixtral_8x22b() -> Shape {
    let (d, heads, kv_heads, head) = (6144usize, 48, 8, 128);
    Shape {
        name: "Mixtral-8x22B",
        layers: 56,
        dense_layers: 0,
        d_model: d,
        attention: (d * head * (2 * heads + 2 * kv_heads)) as f64,
        score_width: 2 * heads * head,
        kv_width: 2 * kv_heads * head,
        dense_ffn: 0,
        expert_ffn: 16384,
        shared_ffn: 0,
        experts: 8,
        top_k: 2,
        vocabulary: 32_000,
    }
}

/// The shape of DeepSeek-V3 (arXiv 2412.19437, section 4.2, and its published configuration) with the parameters of its
/// latent attention; plica has no latent attention, so this is a shape to count with, not one to train.
pub fn deepseek_v3() -> Shape {
    let (d, heads, q_rank, kv_rank, nope, rope, value) = (7168usize, 128usize, 1536, 512, 128, 64, 128);
    let query = d * q_rank + q_rank * heads * (nope + rope);
    let key_value = d * (kv_rank + rope) + kv_rank * heads * (nope + value);
    Shape {
        name: "DeepSeek-V3",
        layers: 61,
        dense_layers: 3,
        d_model: d,
        attention: (query + key_value + heads * value * d) as f64,
        score_width: heads * (nope + rope + value),
        kv_width: kv_rank + rope,
        dense_ffn: 18432,
        expert_ffn: 2048,
        shared_ffn: 2048,
        experts: 256,
        top_k: 8,
        vocabulary: 129_280,
    }
}

/// One kind of link: seconds of a step, bytes a second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Seconds that one step of a ring takes without bytes.
    pub alpha: f64,
    /// Bytes a second in each direction.
    pub beta: f64,
}

/// A cluster.
#[derive(Clone, Copy, Debug)]
pub struct Cluster {
    /// Cards of a node.
    pub ranks_per_node: usize,
    /// Memory of a card in bytes.
    pub memory_bytes: f64,
    /// Dense bf16 operations a second of a card.
    pub flops: f64,
    /// Seconds that starting a collective takes.
    pub start: f64,
    /// Between cards of a node.
    pub near: Link,
    /// Between nodes.
    pub far: Link,
}

/// Nodes of eight H100 (80 GB; 989.4 TFLOP/s dense bf16) with NVLink 4 (900 GB/s a card, 450 each way) and a 400 Gb/s
/// InfiniBand port a card; α of NCCL's own tuning model (ring, simple protocol: 8.4 µs a collective, 3.4 µs a step over
/// NVLink, 9.6 µs over the network; `src/graph/tuning.cc` of NVIDIA/nccl at 01afd20).
pub fn cluster() -> Cluster {
    Cluster {
        ranks_per_node: 8,
        memory_bytes: 80e9,
        flops: 989.4e12,
        start: 8.4e-6,
        near: Link { alpha: 3.4e-6, beta: 450e9 },
        far: Link { alpha: 9.6e-6, beta: 50e9 },
    }
}

/// The layouts that are shown: for each model 8, 64, 1,024 and 16,384 ranks.
pub fn cases() -> Vec<Case> {
    // world, tp, pp, ep, micro-batches.
    let rows = |shape: fn() -> Shape, rows: [(usize, usize, usize, usize, usize); 4]| {
        rows.map(|(world, tp, pp, ep, micro_batches)| Case {
            shape: shape(),
            spec: LayoutSpec { world, tp, pp, ep, etp: Some(1), ranks_per_node: 8, ..LayoutSpec::default() },
            micro_batches,
            sequence: 4096,
        })
    };
    let mixtral = [(8, 1, 1, 8, 32), (64, 2, 4, 8, 32), (1024, 2, 8, 8, 32), (16_384, 2, 8, 8, 16)];
    let deepseek = [(8, 1, 1, 8, 64), (64, 1, 8, 8, 64), (1024, 2, 8, 64, 128), (16_384, 2, 8, 64, 16)];
    rows(mixtral_8x22b, mixtral).into_iter().chain(rows(deepseek_v3, deepseek)).collect()
}
