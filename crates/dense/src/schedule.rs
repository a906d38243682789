//! The learning rate as a function of the step: constant, warm-up and cosine, warm-up-stable-decay. Sources:
//! Loshchilov and Hutter, arXiv 1608.03983 (cosine); Hu et al., arXiv 2404.06395, section 4 (WSD).

/// Learning rate by step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LrSchedule {
    /// The same at every step.
    Constant {
        /// Learning rate.
        lr: f64,
    },
    /// Linear warm-up, then half a cosine down to `min_lr`, and `min_lr` from `total_steps` on.
    Cosine {
        /// Learning rate at the end of the warm-up.
        lr: f64,
        /// Learning rate at the end.
        min_lr: f64,
        /// Steps of warm-up.
        warmup_steps: u64,
        /// Steps of the run.
        total_steps: u64,
    },
    /// Linear warm-up, a plateau, and a linear decay over the last `decay_steps` to `min_lr`.
    Wsd {
        /// Learning rate of the plateau.
        lr: f64,
        /// Learning rate at the end.
        min_lr: f64,
        /// Steps of warm-up.
        warmup_steps: u64,
        /// Steps of the decay.
        decay_steps: u64,
        /// Steps of the run.
        total_steps: u64,
    },
}

impl LrSchedule {
    /// The learning rate of a step, counted from 0. The first step of a warm-up of n has lr/n.
    pub fn at(&self, step: u64) -> f64 {
        match *self {
            LrSchedule::Constant { lr } => lr,
            LrSchedule::Cosine { lr, min_lr, warmup_steps, total_steps } => {
                if step < warmup_steps {
                    return warm(lr, step, warmup_steps);
                }
                let done = share(step - warmup_steps, total_steps.saturating_sub(warmup_steps));
                min_lr + 0.5 * (lr - min_lr) * (1.0 + (std::f64::consts::PI * done).cos())
            }
            LrSchedule::Wsd { lr, min_lr, warmup_steps, decay_steps, total_steps } => {
                if step < warmup_steps {
                    return warm(lr, step, warmup_steps);
                }
                let start = total_steps.saturating_sub(decay_steps).max(warmup_steps);
                lr + (min_lr - lr) * share(step.saturating_sub(start), total_steps.saturating_sub(start))
            }
        }
    }
}

fn warm(lr: f64, step: u64, warmup_steps: u64) -> f64 {
    lr * (step + 1) as f64 / warmup_steps as f64
}

/// `part / whole` in 0..=1; 0 of nothing is 0, more than nothing is all.
fn share(part: u64, whole: u64) -> f64 {
    if part >= whole && part > 0 { 1.0 } else { part as f64 / whole.max(1) as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_at_their_corners() {
        assert_eq!(LrSchedule::Constant { lr: 0.3 }.at(1 << 40), 0.3);
        let cosine = LrSchedule::Cosine { lr: 1.0, min_lr: 0.1, warmup_steps: 4, total_steps: 24 };
        assert_eq!([0, 1, 3, 4].map(|s| cosine.at(s)), [0.25, 0.5, 1.0, 1.0]);
        assert!((cosine.at(14) - 0.55).abs() < 1e-12, "half way");
        assert!((cosine.at(24) - 0.1).abs() < 1e-12 && (cosine.at(99) - 0.1).abs() < 1e-12);
        let wsd = LrSchedule::Wsd { lr: 1.0, min_lr: 0.2, warmup_steps: 2, decay_steps: 4, total_steps: 10 };
        assert_eq!([0, 1, 2, 6].map(|s| wsd.at(s)), [0.5, 1.0, 1.0, 1.0]);
        assert!((wsd.at(8) - 0.6).abs() < 1e-12 && (wsd.at(10) - 0.2).abs() < 1e-12);
    }

    #[test]
    fn degenerate_lengths_stay_finite() {
        for total_steps in [0, 1, 2] {
            for step in 0..4 {
                let cosine = LrSchedule::Cosine { lr: 1.0, min_lr: 0.1, warmup_steps: 1, total_steps };
                let wsd =
                    LrSchedule::Wsd { lr: 1.0, min_lr: 0.1, warmup_steps: 0, decay_steps: 9, total_steps };
                for lr in [cosine.at(step), wsd.at(step)] {
                    assert!((0.1 - 1e-12..=1.0).contains(&lr), "{lr}");
                }
            }
        }
    }
}
