//! From the validated configuration to the values that the dense core takes.

use plica_dense::{LrSchedule, RecomputePolicy};

use super::choice::{Recompute, Schedule};
use super::resolved::TrainConfig;

impl TrainConfig {
    /// Whether a part is computed again in the backward pass.
    pub fn recomputes(&self, part: Recompute) -> bool {
        self.recompute.contains(&part)
    }

    /// What the backward pass computes again.
    pub fn recompute_policy(&self) -> RecomputePolicy {
        RecomputePolicy {
            block: self.recomputes(Recompute::Full),
            attention: self.recomputes(Recompute::Attention),
            activation: self.recomputes(Recompute::ExpertActivation),
            moe: self.recomputes(Recompute::Moe),
            tp_input: self.recomputes(Recompute::TpInput),
        }
    }

    /// The learning rate by step of a run of so many steps. A constant one with a warm-up is a plateau without decay.
    pub fn lr_schedule(&self, steps: u64) -> LrSchedule {
        let (lr, min_lr, warmup_steps) = (self.lr, self.min_lr, self.warmup);
        match self.schedule {
            Schedule::Constant if warmup_steps == 0 => LrSchedule::Constant { lr },
            Schedule::Constant => {
                LrSchedule::Wsd { lr, min_lr: lr, warmup_steps, decay_steps: 0, total_steps: steps }
            }
            Schedule::Cosine => {
                LrSchedule::Cosine { lr, min_lr, warmup_steps, total_steps: self.decay_steps }
            }
            Schedule::Wsd => {
                let decay_steps = self.decay_steps;
                LrSchedule::Wsd { lr, min_lr, warmup_steps, decay_steps, total_steps: steps }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Config;

    fn train(sets: &[&str]) -> super::TrainConfig {
        let sets: Vec<String> = sets.iter().map(|set| set.to_string()).collect();
        Config::from_sources(None, None, &sets).unwrap_or_else(|errors| panic!("{errors}")).train
    }

    #[test]
    fn schedules_at_their_corners() {
        let check = |sets: &[&str], corners: &[(u64, f64)]| {
            let schedule = train(sets).lr_schedule(100);
            for &(step, lr) in corners {
                let got = schedule.at(step);
                assert!((got - lr).abs() < 1e-12, "{sets:?} step {step}: {got}, not {lr}");
            }
        };
        let cosine = ["train.lr=1", "train.min_lr=0.1", "train.warmup=4"];
        check(&cosine, &[(0, 0.25), (3, 1.0), (52, 0.55), (100, 0.1)]);
        let wsd = ["train.lr=1", "train.min_lr=0", "train.warmup=0", "train.schedule=wsd"];
        check(&wsd, &[(0, 1.0), (80, 1.0), (90, 0.5), (100, 0.0)]);
        let constant = ["train.lr=1", "train.warmup=2", "train.schedule=constant"];
        check(&constant, &[(0, 0.5), (1, 1.0), (99, 1.0), (100, 1.0), (1000, 1.0)]);
    }

    #[test]
    fn recomputation_flags() {
        let policy = |value: &str| train(&[&format!("train.recompute={value}")]).recompute_policy();
        assert_eq!(policy("none"), plica_dense::RecomputePolicy::NONE);
        assert_eq!(policy("full"), plica_dense::RecomputePolicy::BLOCK);
        let both = policy("[\"moe\", \"expert-activation\"]");
        assert_eq!((both.block, both.attention, both.activation, both.moe), (false, false, true, true));
        assert!(!both.tp_input && policy("[\"attention\", \"tp-input\"]").tp_input);
    }
}
