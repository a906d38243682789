//! A step that is not finite: its loss, its gradient norm or the logits of a router. Whether it is so follows from
//! numbers that all ranks share, so all leave the update out alike, in every layout; a skipped step moves the data
//! and the learning rate on, but neither weights nor moments nor their count, nor the selection bias. Leaves out
//! what a run does about it (the trainer: stop, or skip up to a limit).

use plica_dense::{Error, TokenBatch, Trainable, gradient_norm};

use super::{Diagnosis, Engine, StepOutcome, StepSums};

/// Steps that were left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Skips {
    /// In the whole run, resumed parts included.
    pub total: u64,
    /// One after the other up to now.
    pub consecutive: u64,
}

/// What became of a step.
#[derive(Clone, Debug)]
pub enum Attempt {
    /// The model was updated.
    Updated(StepOutcome),
    /// Nothing was changed.
    NotFinite(Box<NotFinite>),
}

/// Why a step changed nothing; the same on all ranks.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "step {}: loss {loss}, gradient norm {grad_norm}: nothing was updated; {diagnosis}; the run diverged: lower the \
     learning rate ({lr:e} here), or look for a NaN in the data or the weights", step + 1
)]
pub struct NotFinite {
    /// Steps before it.
    pub step: u64,
    /// Mean loss over the valid targets of the global batch.
    pub loss: f64,
    /// Norm of the gradients.
    pub grad_norm: f64,
    /// Learning rate that the update would have had.
    pub lr: f64,
    /// Where it began.
    pub diagnosis: Diagnosis,
}

impl<T: Trainable> Engine<T> {
    /// A whole step: forward, backward, update, selection bias.
    ///
    /// # Errors
    /// A collective or a layer failed, or the step is not finite (nothing is updated then): see [`NotFinite`].
    pub fn step(&mut self, step: u64, micros: &[TokenBatch]) -> Result<StepOutcome, Error> {
        match self.attempt(step, micros)? {
            Attempt::Updated(outcome) => Ok(outcome),
            Attempt::NotFinite(why) => Err(Error::slot(*why)),
        }
    }

    /// A whole step, or where it is not finite the reason, with nothing changed.
    ///
    /// # Errors
    /// A collective or a layer failed.
    pub fn attempt(&mut self, step: u64, micros: &[TokenBatch]) -> Result<Attempt, Error> {
        let sums = self.forward_backward(step, micros)?;
        let lr = self.settings.lr.at(step);
        let grad_norm = match sums.is_finite() {
            false => gradient_norm(&self.params, &self.grads, &self.mesh)?,
            true => match self.optimizer.step(&mut self.params, &self.grads, &self.mesh, &self.phases, lr) {
                Err(Error::Diverged { grad_norm, .. }) => grad_norm,
                report => {
                    let grad_norm = report?.grad_norm;
                    self.update_bias(&sums);
                    let StepSums { loss, layers } = sums;
                    return Ok(Attempt::Updated(StepOutcome { loss, grad_norm, lr, layers }));
                }
            },
        };
        let diagnosis = self.diagnose(step, micros)?;
        let loss = sums.loss.mean();
        Ok(Attempt::NotFinite(Box::new(NotFinite { step, loss, grad_norm, lr, diagnosis })))
    }
}
