//! One case: train the small model under the case's settings and compare every layout-free piece that a rank
//! holds with the complete tensors of the one-rank run.

use std::collections::BTreeMap;
use std::time::Duration;

use plica_comm::launch::{Backend, LaunchOptions, run_on, run_ranks};
use plica_comm::{DeviceMaker, Purpose, RankContext, Reduce};
use plica_dense::param::{Held, Piece};
use plica_dense::{ParamId, Params, Trainable};
use plica_folding::layout::Layout;
use plica_kernels::Tensor;
use serde::Serialize;

use super::base::BASE;
use super::batch::{VerifyBatch, batch};
use super::case::Case;
use crate::batch::{BatchPlan, globalise};
use crate::config::Config;
use crate::step::Engine;
use crate::trainer::engine;

/// How long a rank waits for another.
const DEADLINE: Duration = Duration::from_secs(60);

/// Complete tensors by layout-free name.
type Tensors = BTreeMap<String, Vec<f64>>;

/// What the one-rank run computed.
#[derive(Clone, Debug, Default)]
pub struct Reference {
    /// Loss of each step.
    pub losses: Vec<f64>,
    /// Gradient norm of each step.
    pub norms: Vec<f64>,
    /// Reduced gradients of each step.
    pub grads: Vec<Tensors>,
    /// Weights after each step.
    pub weights: Vec<Tensors>,
}

/// Worst differences of a case, each relative to the largest magnitude of its tensor.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Worst {
    /// Of the losses.
    pub loss: f64,
    /// Of the gradient norms.
    pub norm: f64,
    /// Of the gradients.
    pub grad: f64,
    /// Of the updated weights.
    pub weight: f64,
    /// Step and tensor of the worst gradient or weight.
    pub place: String,
}

impl Worst {
    /// The worst of all.
    pub fn max(&self) -> f64 {
        [self.loss, self.norm, self.grad, self.weight].into_iter().fold(0.0, f64::max)
    }

    /// For another process; JSON has no infinity.
    fn to_bytes(&self) -> Vec<u8> {
        let numbers = [self.loss, self.norm, self.grad, self.weight];
        numbers.iter().flat_map(|x| x.to_le_bytes()).chain(self.place.bytes()).collect()
    }

    fn from_bytes(bytes: &[u8]) -> Option<Worst> {
        let (numbers, place) = bytes.split_at_checked(32)?;
        let number = |i: usize| Some(f64::from_le_bytes(numbers[8 * i..][..8].try_into().ok()?));
        let place = String::from_utf8(place.to_vec()).ok()?;
        Some(Worst { loss: number(0)?, norm: number(1)?, grad: number(2)?, weight: number(3)?, place })
    }

    fn merge(&mut self, other: &Worst) {
        if other.grad.max(other.weight) > self.grad.max(self.weight) {
            self.place = other.place.clone();
        }
        for (own, other) in [
            (&mut self.loss, other.loss),
            (&mut self.norm, other.norm),
            (&mut self.grad, other.grad),
            (&mut self.weight, other.weight),
        ] {
            *own = own.max(other);
        }
    }
}

/// Runs the case's mathematics on one rank of the CPU.
///
/// # Errors
/// The run failed.
pub fn reference(case: &Case) -> anyhow::Result<Reference> {
    let config = config(&case.mathematics())?;
    anyhow::ensure!(config.layout.world() == 1, "the reference runs on one rank");
    let results = run_ranks(1, options(&DeviceMaker::cpu()), |context| {
        let mut made = Reference::default();
        steps::<f64>(context, &config, |engine, _, loss, norm| {
            made.losses.push(loss);
            made.norms.push(norm);
            made.grads.push(complete(&engine.params, |id| engine.grads.held(&engine.params, id)));
            made.weights.push(complete(&engine.params, |id| engine.params.held(id)));
            Ok(())
        })?;
        anyhow::Ok(made)
    })?;
    Ok(results.into_iter().next().expect("one rank"))
}

/// Runs a case and compares it with its reference.
///
/// # Errors
/// The run failed; the first cause with its rank.
pub fn run_case(
    backend: &Backend,
    device: &DeviceMaker,
    case: &Case,
    reference: &Reference,
) -> anyhow::Result<Worst> {
    let config = config(&case.settings())?;
    let results = run_on(backend, case.world(), options(device), |context| {
        let mut worst = Worst::default();
        steps::<f64>(context, &config, |engine, step, loss, norm| {
            worst.loss = worst.loss.max(relative(&[loss], &[reference.losses[step]], 0.0));
            worst.norm = worst.norm.max(relative(&[norm], &[reference.norms[step]], 0.0));
            let params = &engine.params;
            compare(
                params,
                |id| engine.grads.held(params, id),
                &reference.grads[step],
                |name, difference| {
                    if difference > worst.grad {
                        worst.grad = difference;
                        worst.place = format!("gradient of {name}, step {}", step + 1);
                    }
                },
            )?;
            compare(
                params,
                |id| params.held(id),
                &reference.weights[step],
                |name, difference| {
                    if difference > worst.weight {
                        worst.weight = difference;
                        worst.place = format!("weight {name}, step {}", step + 1);
                    }
                },
            )
        })?;
        anyhow::Ok(worst)
    })?;
    gathered(backend, &results)
}

/// The worst of all ranks, the same on every process.
fn gathered(backend: &Backend, own: &[Worst]) -> anyhow::Result<Worst> {
    let mut worst = Worst::default();
    own.iter().for_each(|other| worst.merge(other));
    let Backend::Processes(processes) = backend else { return Ok(worst) };
    let all = processes.exchange("worst differences", &worst.to_bytes(), DEADLINE)?;
    let mut worst = Worst::default();
    for bytes in &all {
        worst.merge(&Worst::from_bytes(bytes).ok_or_else(|| anyhow::anyhow!("differences that are none"))?);
    }
    Ok(worst)
}

/// Runs a case two times in f32: no difference, or an infinite one with the first tensor whose bits differ.
///
/// # Errors
/// A run failed; the first cause with its rank.
pub fn run_twice(backend: &Backend, device: &DeviceMaker, case: &Case) -> anyhow::Result<Worst> {
    let mut settings = case.settings();
    settings.push("train.precision=f32".into());
    let config = config(&settings)?;
    let bits = || {
        let ranks = run_on(backend, case.world(), options(device), |context| {
            let mut bits: Vec<(String, Vec<u64>)> = Vec::new();
            steps::<f32>(context, &config, |engine, step, loss, norm| {
                bits.push((
                    format!("loss and norm, step {}", step + 1),
                    vec![loss.to_bits(), norm.to_bits()],
                ));
                let params = &engine.params;
                for id in params.ids() {
                    let Held { tensor, pieces } = params.held(id);
                    for piece in pieces {
                        let values = piece.copy_out(&tensor);
                        let values = values.iter().map(|x| u64::from(x.to_bits())).collect();
                        bits.push((format!("weight {}, step {}", piece.name, step + 1), values));
                    }
                }
                Ok(())
            })?;
            anyhow::Ok(bits)
        })?;
        anyhow::Ok(ranks.concat())
    };
    let (first, second) = (bits()?, bits()?);
    let differs = first.iter().zip(&second).find(|(a, b)| a != b).map(|((name, _), _)| name.clone());
    let own = match differs {
        None if first.len() == second.len() => Worst::default(),
        place => {
            let place = format!("other bits in {}", place.unwrap_or_default());
            Worst { weight: f64::INFINITY, place, ..Worst::default() }
        }
    };
    gathered(backend, &[own])
}

fn config(settings: &[String]) -> anyhow::Result<Config> {
    Ok(Config::from_sources(None, Some(BASE), settings)?)
}

fn options(device: &DeviceMaker) -> LaunchOptions {
    LaunchOptions { deadline: DEADLINE, device: device.clone(), ..LaunchOptions::default() }
}

/// Trains the steps of a configuration on a rank; `each` sees the engine after every update, with the number of
/// the step from 0, its loss and its gradient norm.
fn steps<T: Trainable>(
    context: RankContext,
    config: &Config,
    mut each: impl FnMut(&Engine<T>, usize, f64, f64) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut engine = engine::<T>(&context, config)?;
    let plan = BatchPlan {
        global_sequences: config.train.global_batch,
        micro_sequences: config.train.micro_batch,
        seq_len: config.train.seq_len,
    };
    let sizes =
        VerifyBatch { sequences: plan.global_sequences, seq_len: plan.seq_len, vocab: config.model.vocab };
    for step in 0..config.run.steps {
        let own = plan.sequences_of(engine.mesh.coordinates().dp, engine.mesh.layout().dp());
        let part = batch(sizes, step).slice(own.clone());
        let mut micros = plan.cut(&part, own, true);
        globalise(&mut micros, &plan, &engine.mesh, &engine.device)?;
        let outcome = engine.step(step, &micros)?;
        each(&engine, step as usize, outcome.loss.mean(), outcome.grad_norm)?;
    }
    // Nobody leaves while another still reads: also a last check that all are here.
    let sum = context.world.all_reduce_f64(Purpose::Control, &context.device, &[1.0], Reduce::Sum)?;
    anyhow::ensure!(sum[0] as usize == context.world.size(), "{} ranks at the end", sum[0]);
    Ok(())
}

/// The complete tensors of a one-rank run.
fn complete(params: &Params<f64>, held: impl Fn(ParamId) -> Held<f64>) -> Tensors {
    assert_eq!(params.place(), &plica_dense::Place::new(&Layout::one(), 0), "one rank holds everything");
    let mut all = Tensors::new();
    for id in params.ids() {
        let Held { tensor, pieces } = held(id);
        for piece in pieces {
            all.insert(piece.name.clone(), piece.copy_out(&tensor));
        }
    }
    all
}

/// Calls `found` with the name and the relative difference of every piece.
fn compare(
    params: &Params<f64>,
    held: impl Fn(ParamId) -> Held<f64>,
    reference: &Tensors,
    mut found: impl FnMut(&str, f64),
) -> anyhow::Result<()> {
    for id in params.ids() {
        let Held { tensor, pieces } = held(id);
        for piece in pieces {
            let name = &piece.name;
            let complete =
                reference.get(name).ok_or_else(|| anyhow::anyhow!("one rank has no tensor {name}"))?;
            found(name, difference(&piece, &tensor, complete));
        }
    }
    Ok(())
}

fn difference(piece: &Piece, local: &Tensor<f64>, complete: &[f64]) -> f64 {
    let scale = complete.iter().fold(0.0f64, |m, x| m.max(x.abs()));
    relative(&piece.copy_out(local), &piece.select(complete), scale)
}

/// Largest difference over `scale` (at least the largest magnitude of `b`); infinite where a value is NaN or a
/// tensor that is zero on one rank is not zero here.
fn relative(a: &[f64], b: &[f64], scale: f64) -> f64 {
    let scale = b.iter().fold(scale, |m, x| m.max(x.abs()));
    let worst = a.iter().zip(b).fold(0.0f64, |w, (x, y)| {
        let d = (x - y).abs();
        if d.is_nan() { f64::INFINITY } else { w.max(d) }
    });
    if worst == 0.0 { 0.0 } else { worst / scale }
}
