//! A stack of GPT-style blocks under a layout: forward and backward of one micro-batch with given inputs and output
//! gradients, gathered into layout-free tensors.

use std::collections::BTreeMap;

use plica_comm::{LaunchOptions, Mesh, Purpose, RankContext, run_ranks};
use plica_folding::layout::{Layout, LayoutSpec};
use plica_kernels::rng::{self, Stream};
use plica_kernels::{Category, Float, Tensor};

use crate::gpt::rows::Rows;
use crate::gpt::{Core, GptBlock, GptConfig};
use crate::*;

/// One run.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub tp: usize,
    pub layers: usize,
    pub config: GptConfig,
    pub recompute: RecomputePolicy,
    /// Tokens of a sequence.
    pub s: usize,
    /// Sequences.
    pub b: usize,
}

impl Case {
    pub fn new(width: usize, heads: usize) -> Case {
        let config = GptConfig {
            width,
            heads,
            dropout: 0.2,
            attention_dropout: 0.3,
            core: Core::Materialised,
            rows: Rows::Cut,
            init: Init::Normal { std: 0.4 },
        };
        Case { tp: 1, layers: 1, config, recompute: RecomputePolicy::NONE, s: 8, b: 2 }
    }

    pub fn tp(self, tp: usize, rows: Rows) -> Case {
        Case { tp, config: GptConfig { rows, ..self.config }, ..self }
    }

    pub fn core(self, core: Core) -> Case {
        Case { config: GptConfig { core, ..self.config }, ..self }
    }

    /// The micro-batch: the second half of a global batch, documents of two lengths.
    pub fn batch(&self, whole_documents: bool) -> TokenBatch {
        let total = self.s * self.b;
        let documents = match whole_documents {
            true => (0..=self.b).map(|i| i * self.s).collect(),
            false => {
                let ends = (0..self.b).flat_map(|i| [i * self.s + self.s / 3 + 1, (i + 1) * self.s]);
                std::iter::once(0).chain(ends).collect()
            }
        };
        TokenBatch {
            documents,
            first_token: total as u64,
            ..TokenBatch::whole(self.s, vec![0; total], vec![0; total])
        }
    }
}

/// What a run comes to; complete tensors.
#[derive(Debug)]
pub struct Outcome {
    pub y: Vec<f64>,
    pub dx: Vec<f64>,
    pub grads: BTreeMap<String, Vec<f64>>,
    /// Bytes that each block's forward left behind, by rank.
    pub saved_bytes: Vec<Vec<u64>>,
    /// Of a rank.
    pub tensor_parallel_bytes: u64,
}

/// Replaces initial values, to move one of them.
pub type Moved<'a> = Option<(&'a str, usize, f64)>;

struct RankOutcome {
    y: Vec<f64>,
    dx: Vec<f64>,
    grads: Vec<(param::Piece, Vec<f64>)>,
    saved_bytes: Vec<u64>,
    tensor_parallel_bytes: u64,
}

fn drawn<T: Float>(context: &RankContext, name: &str, shape: [usize; 2], first: usize) -> Tensor<T> {
    let stream = Stream::new(3, rng::Purpose::Named(name));
    let count = shape[0] * shape[1];
    let values: Vec<T> =
        (0..count).map(|i| T::from_f64(stream.normal((first * shape[1] + i) as u64))).collect();
    Tensor::from_slice(&context.device, shape, &values, Category::Activation)
}

fn wide<T: Float>(x: &Tensor<T>) -> Vec<f64> {
    x.to_vec().into_iter().map(T::to_f64).collect()
}

/// Runs a case; `moved` adds to one element of a named parameter, or of the input ("x").
pub fn run<T: Trainable>(case: &Case, batch: &TokenBatch, moved: Moved<'_>) -> Outcome {
    let ranks =
        run_ranks(case.tp, LaunchOptions::default(), |context| rank_run::<T>(case, batch, moved, context))
            .unwrap_or_else(|error| panic!("{case:?}: {error}"));
    let whole = |part: fn(&RankOutcome) -> &Vec<f64>| match case.config.rows {
        Rows::Cut => ranks.iter().flat_map(|r| part(r).clone()).collect(),
        Rows::Whole => {
            assert!(ranks.iter().all(|r| part(r) == part(&ranks[0])), "the same rows on all ranks");
            part(&ranks[0]).clone()
        }
    };
    let mut grads: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for (piece, values) in ranks.iter().flat_map(|r| &r.grads) {
        let data = grads.entry(piece.name.clone()).or_insert_with(|| vec![0.0; piece.shape.iter().product()]);
        piece.place(data, values);
    }
    Outcome {
        y: whole(|r| &r.y),
        dx: whole(|r| &r.dx),
        grads,
        saved_bytes: ranks.iter().map(|r| r.saved_bytes.clone()).collect(),
        tensor_parallel_bytes: ranks[0].tensor_parallel_bytes,
    }
}

/// Adds to one element of a parameter.
fn move_one<T: Trainable>(params: &mut Params<T>, moved: Moved<'_>) -> Result<(), Error> {
    let Some((name, index, by)) = moved else { return Ok(()) };
    let start: BTreeMap<String, Vec<T>> =
        params.export().map(|(_, piece, values)| (piece.name.clone(), values)).collect();
    params.import(|_, piece| {
        let mut values = start[&piece.name].clone();
        if piece.name == name {
            values[index] = T::from_f64(values[index].to_f64() + by);
        }
        Ok(values)
    })
}

fn rank_run<T: Trainable>(
    case: &Case,
    batch: &TokenBatch,
    moved: Moved<'_>,
    context: RankContext,
) -> Result<RankOutcome, Error> {
    let spec = LayoutSpec { world: case.tp, tp: case.tp, ..LayoutSpec::default() };
    let layout = Layout::new(&spec).unwrap_or_else(|error| panic!("{error}"));
    let place = Place::new(&layout, context.rank);
    let mesh = Mesh::new(&context.world, layout)?;
    let mut specs = ParamSpecs::new();
    let blocks: Vec<GptBlock> = (0..case.layers)
        .map(|layer| GptBlock::new(&mut specs, (&format!("layers.{layer}"), layer), case.config, &place))
        .collect::<Result<_, Error>>()?;
    let mut params = Params::<T>::new(&specs, &place, &context.device, 11)?;
    move_one(&mut params, moved)?;
    let mut grads = Grads::zeros(&params);
    let (tokens, phases) = (TokenInfo::new(&context.device, batch, &place)?, Phases::new());
    let mut cx = Cx {
        mesh: &mesh,
        device: &context.device,
        params: &params,
        grads: &mut grads,
        tokens: &tokens,
        phases: &phases,
        seed: 11,
        step: 2,
        recompute: case.recompute,
    };
    let mut outcome = passes(case, &blocks, moved, &context, &mut cx)?;
    reduce_gradients(&params, &mut grads, &mesh, &phases)?;
    for id in params.ids() {
        for piece in params.pieces(id) {
            let values = piece.copy_out(grads.get(id)).iter().map(|x| x.to_f64()).collect();
            outcome.grads.push((piece.clone(), values));
        }
    }
    Ok(outcome)
}

/// Forward and backward of the stack; gradients of parameters stay in `cx`.
fn passes<T: Trainable>(
    case: &Case,
    blocks: &[GptBlock],
    moved: Moved<'_>,
    context: &RankContext,
    cx: &mut Cx<T>,
) -> Result<RankOutcome, Error> {
    let rows = match case.config.rows {
        Rows::Whole => 0..cx.tokens.len(),
        Rows::Cut => cx.tokens.local_range(),
    };
    let shape = [rows.len(), case.config.width];
    let mut x = drawn::<T>(context, "x", shape, rows.start);
    if let Some(("x", index, by)) = moved {
        let values = x.host_mut().expect("host memory");
        values[index] = T::from_f64(values[index].to_f64() + by);
    }
    // Peers read a rank's tensors in place: live bytes are its own once all are past a point.
    let live = || -> Result<u64, Error> {
        context.world.barrier(Purpose::Control)?;
        let live = context.device.ledger().now().total_bytes();
        context.world.barrier(Purpose::Control)?;
        Ok(live)
    };
    context.recorder.reset_traffic();
    let (mut tape, mut saved_bytes) = (Tape::new(), Vec::new());
    for block in blocks {
        // The input counts to the block that keeps it, the output to the next one.
        let before = live()? - x.size_bytes();
        let (y, saved) = block.forward(&x, cx)?;
        x = y;
        saved_bytes.push(live()? - x.size_bytes() - before);
        tape.push(saved);
    }
    let y = wide(&x);
    drop(x);
    let mut dx = drawn::<T>(context, "dy", shape, rows.start);
    for block in blocks.iter().rev() {
        dx = block.backward(tape.pop().expect("a block's"), &dx, cx)?;
    }
    let tensor_parallel_bytes = context.recorder.by_purpose(Purpose::TensorParallel).sent_bytes;
    Ok(RankOutcome { y, dx: wide(&dx), grads: Vec::new(), saved_bytes, tensor_parallel_bytes })
}
