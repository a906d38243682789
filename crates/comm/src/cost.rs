//! The α-β cost of collectives: T = rounds·α + V/β with V the bytes that a rank sends, rounds and V of the ring
//! algorithms (Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
//! 2005). α and β belong to a group, since its members may or may not share a node; both are fitted to timed
//! all-gathers. Buffers are counted as in [`Collective::sent_bytes`]; times in nanoseconds. Leaves out
//! contention between groups that communicate at once.

use crate::bench::{self, Collective};
use crate::communicator::Operation;
use crate::error::CommError;
use crate::group::Group;

/// Rounds of an operation among `size` ranks in the ring model; 1 for a message and a broadcast.
pub fn rounds(operation: &Operation, size: usize) -> u64 {
    let others = size as u64 - 1;
    match operation {
        Operation::AllReduce { .. } => 2 * others,
        Operation::AllGather { .. } | Operation::ReduceScatter { .. } | Operation::AllToAll { .. } => others,
        Operation::Broadcast { .. }
        | Operation::Send { .. }
        | Operation::Receive { .. }
        | Operation::Barrier
        | Operation::Expose => 1,
    }
}

/// α and β of a group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// Time of one round without bytes, in nanoseconds.
    pub alpha_ns: f64,
    /// Time of one sent byte, in nanoseconds: 1/β.
    pub ns_per_byte: f64,
}

/// One timed collective.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// Rounds of the ring model.
    pub rounds: u64,
    /// Bytes that a rank sends.
    pub sent_bytes: u64,
    /// Time that it took.
    pub ns: f64,
}

/// The fitted cost of a group, and what it was fitted to.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupCost {
    /// Name of the group.
    pub group: String,
    /// Its ranks.
    pub size: usize,
    /// α and β.
    pub cost: Cost,
    /// The timed collectives; none for a group of one rank.
    pub samples: Vec<Sample>,
}

impl Cost {
    /// Nothing is sent, nothing is waited for.
    pub const FREE: Cost = Cost { alpha_ns: 0.0, ns_per_byte: 0.0 };

    /// T = rounds·α + V/β.
    pub fn predict_ns(&self, rounds: u64, sent_bytes: u64) -> f64 {
        rounds as f64 * self.alpha_ns + sent_bytes as f64 * self.ns_per_byte
    }

    /// Time of a collective among `size` ranks over a buffer of that many bytes.
    pub fn collective_ns(&self, collective: Collective, size: usize, buffer_bytes: u64) -> f64 {
        self.predict_ns(collective.rounds(size), collective.sent_bytes(size, buffer_bytes))
    }

    /// The α and 1/β, neither negative, with the least sum of squared relative errors over the samples.
    ///
    /// # Panics
    /// When there is no sample, or one took no time.
    pub fn fit(samples: &[Sample]) -> Cost {
        assert!(!samples.is_empty() && samples.iter().all(|s| s.ns > 0.0), "samples that took time");
        let (mut rr, mut rv, mut vv, mut rt, mut vt) = (0.0, 0.0, 0.0, 0.0, 0.0);
        for sample in samples {
            let (r, v) = (sample.rounds as f64 / sample.ns, sample.sent_bytes as f64 / sample.ns);
            rr += r * r;
            rv += r * v;
            vv += v * v;
            rt += r;
            vt += v;
        }
        let alone =
            |numerator: f64, denominator: f64| if denominator > 0.0 { numerator / denominator } else { 0.0 };
        let determinant = rr * vv - rv * rv;
        let both = Cost {
            alpha_ns: (rt * vv - vt * rv) / determinant,
            ns_per_byte: (vt * rr - rt * rv) / determinant,
        };
        if determinant > 1e-12 * rr * vv && both.alpha_ns >= 0.0 && both.ns_per_byte >= 0.0 {
            return both;
        }
        if both.ns_per_byte < 0.0 || vv == 0.0 {
            Cost { alpha_ns: alone(rt, rr), ns_per_byte: 0.0 }
        } else {
            Cost { alpha_ns: 0.0, ns_per_byte: alone(vt, vv) }
        }
    }
}

/// Times all-gathers of several buffer sizes in a group and fits its cost; all members call it and get the same
/// numbers (the time of the slowest).
///
/// # Errors
/// As [`crate::Started::finish`].
pub fn measure(group: &Group, buffer_bytes: &[usize], repetitions: usize) -> Result<GroupCost, CommError> {
    let named =
        |cost, samples| GroupCost { group: group.name().to_string(), size: group.size(), cost, samples };
    if group.is_single() {
        return Ok(named(Cost::FREE, Vec::new()));
    }
    let mut samples = Vec::new();
    for &bytes in buffer_bytes {
        let measured = bench::time_collective(group, Collective::AllGather, bytes, repetitions)?;
        samples.push(Sample {
            rounds: Collective::AllGather.rounds(group.size()),
            sent_bytes: Collective::AllGather.sent_bytes(group.size(), measured.buffer_bytes),
            ns: measured.median_ns,
        });
    }
    Ok(named(Cost::fit(&samples), samples))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::{LaunchOptions, run_ranks};

    fn sample(rounds: u64, sent_bytes: u64, cost: Cost) -> Sample {
        Sample { rounds, sent_bytes, ns: cost.predict_ns(rounds, sent_bytes) }
    }

    #[test]
    fn a_fit_finds_the_cost_that_made_the_samples() {
        let cost = Cost { alpha_ns: 5_000.0, ns_per_byte: 0.125 };
        let samples: Vec<Sample> =
            [(1, 0), (3, 4096), (3, 1 << 20), (7, 64 << 20)].map(|(r, v)| sample(r, v, cost)).to_vec();
        let fitted = Cost::fit(&samples);
        assert!((fitted.alpha_ns / cost.alpha_ns - 1.0).abs() < 1e-9, "{fitted:?}");
        assert!((fitted.ns_per_byte / cost.ns_per_byte - 1.0).abs() < 1e-9, "{fitted:?}");
        // Samples that a straight line would explain with a negative α, a negative β, or none.
        let falling =
            [Sample { rounds: 1, sent_bytes: 10, ns: 9.0 }, Sample { rounds: 1, sent_bytes: 90, ns: 5.0 }];
        let fitted = Cost::fit(&falling);
        assert!(fitted.ns_per_byte == 0.0 && (5.0..9.0).contains(&fitted.alpha_ns), "{fitted:?}");
        let steep =
            [Sample { rounds: 1, sent_bytes: 10, ns: 1.0 }, Sample { rounds: 1, sent_bytes: 20, ns: 9.0 }];
        let fitted = Cost::fit(&steep);
        assert!(fitted.alpha_ns == 0.0 && fitted.ns_per_byte > 0.0, "{fitted:?}");
        let empty = [Sample { rounds: 2, sent_bytes: 0, ns: 6.0 }];
        assert_eq!(Cost::fit(&empty), Cost { alpha_ns: 3.0, ns_per_byte: 0.0 });
    }

    #[test]
    fn many_small_collectives_cost_more_than_one() {
        let cost = Cost { alpha_ns: 1_000.0, ns_per_byte: 0.1 };
        let one = cost.collective_ns(Collective::AllReduce, 8, 1 << 20);
        let many = 64.0 * cost.collective_ns(Collective::AllReduce, 8, 1 << 14);
        assert!((many - one - 63.0 * 14.0 * cost.alpha_ns).abs() < 1e-3, "{one} {many}");
    }

    #[test]
    fn every_member_measures_the_same_numbers() {
        let costs =
            run_ranks(3, LaunchOptions::default(), |ctx| measure(&ctx.world, &[3 << 10, 300 << 10], 3))
                .expect("no rank fails");
        assert!(costs.iter().all(|c| *c == costs[0]));
        assert_eq!((costs[0].size, costs[0].samples.len()), (3, 2));
        assert_eq!(costs[0].samples[0].sent_bytes, 2 << 10);
        assert!(costs[0].cost.alpha_ns > 0.0 || costs[0].cost.ns_per_byte > 0.0);
        let alone = crate::RankContext::single(plica_kernels::Device::cpu(1));
        assert_eq!(measure(&alone.world, &[64], 1).expect("alone").cost, Cost::FREE);
    }
}
