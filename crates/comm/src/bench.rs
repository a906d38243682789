//! Timing of collectives and of copies. Every repetition is barrier, start of the clock, operation, barrier,
//! end of the clock; all ranks get the figures of the slowest rank. A rate is bytes of the buffer over the
//! median time; the buffer of all-to-all is what a rank holds to send (own share included), of all-gather the
//! gathered result, of reduce-scatter the input, of all-reduce and of a message the tensor. Elements are f32.

use std::time::Instant;

use plica_kernels::ops::elementwise::copy_range;
use plica_kernels::{Category, Tensor};

use crate::communicator::{Purpose, Reduce};
use crate::error::CommError;
use crate::group::Group;

/// What can be timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    /// Unequal parts: 60 % to rank 0 and 40 % to rank 1 of two ranks; equal ones among more.
    AllToAll,
    /// Equal parts.
    AllGather,
    /// Equal parts, summed.
    ReduceScatter,
    /// Summed.
    AllReduce,
    /// From rank 0 to rank 1.
    SendReceive,
}

impl Collective {
    /// Everything that can be timed.
    pub const ALL: [Collective; 5] = [
        Collective::AllToAll,
        Collective::AllGather,
        Collective::ReduceScatter,
        Collective::AllReduce,
        Collective::SendReceive,
    ];

    /// Name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Collective::AllToAll => "all_to_all",
            Collective::AllGather => "all_gather",
            Collective::ReduceScatter => "reduce_scatter",
            Collective::AllReduce => "all_reduce",
            Collective::SendReceive => "send_receive",
        }
    }

    /// Rounds of the ring algorithm among `size` ranks.
    pub fn rounds(self, size: usize) -> u64 {
        let others = size as u64 - 1;
        match self {
            Collective::AllReduce => 2 * others,
            Collective::AllGather | Collective::ReduceScatter | Collective::AllToAll => others,
            Collective::SendReceive => others.min(1),
        }
    }

    /// Bytes that a rank sends for a buffer of that size, in equal parts.
    pub fn sent_bytes(self, size: usize, buffer_bytes: u64) -> u64 {
        let (size, others) = (size as u64, size as u64 - 1);
        match self {
            Collective::AllReduce => 2 * buffer_bytes * others / size,
            Collective::AllGather | Collective::ReduceScatter | Collective::AllToAll => {
                buffer_bytes * others / size
            }
            Collective::SendReceive => buffer_bytes * others.min(1),
        }
    }
}

/// Times of one collective at one size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// What was timed.
    pub collective: Collective,
    /// Bytes of the buffer.
    pub buffer_bytes: u64,
    /// Median over the repetitions, of the slowest rank.
    pub median_ns: f64,
    /// Fastest repetition.
    pub min_ns: f64,
    /// Slowest repetition.
    pub max_ns: f64,
}

impl Measured {
    /// Buffer bytes over median time, in 10⁹ bytes a second.
    pub fn gb_per_s(&self) -> f64 {
        self.buffer_bytes as f64 / self.median_ns
    }
}

/// How fast ranks copy inside their own memory, all at once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CopyRate {
    /// Bytes that each rank copied.
    pub bytes: u64,
    /// Median time, of the slowest rank.
    pub median_ns: f64,
    /// Fastest repetition.
    pub min_ns: f64,
}

impl CopyRate {
    /// Copied bytes of one rank over time, in 10⁹ bytes a second; memory traffic (read and write) is twice it.
    pub fn gb_per_s(&self) -> f64 {
        self.bytes as f64 / self.median_ns
    }
}

/// Runs that are not counted, before those that are.
const WARM_UP: usize = 3;

/// Times one collective over a buffer of about that many bytes (whole f32 elements, equal parts where needed).
///
/// # Errors
/// As [`crate::Started::finish`].
pub fn time_collective(
    group: &Group,
    collective: Collective,
    buffer_bytes: usize,
    repetitions: usize,
) -> Result<Measured, CommError> {
    let (size, own) = (group.size(), group.rank());
    let part = (buffer_bytes / 4).div_ceil(size);
    let n = part * size;
    let zeros = |n: usize| Tensor::<f32>::zeros(group.device(), [n], Category::Workspace);
    let x = zeros(if collective == Collective::AllGather { part } else { n });
    let send = match size {
        2 => vec![n * 6 / 10, n - n * 6 / 10],
        _ => vec![part; size],
    };
    let receive = vec![send[own]; size];
    let run = || -> Result<(), CommError> {
        match collective {
            Collective::AllToAll => group.all_to_all(Purpose::Control, &x, &send, &receive).map(drop),
            Collective::AllGather => group.all_gather(Purpose::Control, &x).map(drop),
            Collective::ReduceScatter => group.reduce_scatter(Purpose::Control, &x).map(drop),
            Collective::AllReduce => group.all_reduce(Purpose::Control, &x, Reduce::Sum).map(drop),
            Collective::SendReceive if size == 1 => Ok(()),
            Collective::SendReceive => match own {
                0 => group.send(Purpose::Control, &x, 1),
                1 => group.receive::<f32>(Purpose::Control, group.device(), 0, [n]).map(drop),
                _ => Ok(()),
            },
        }
    };
    let [median_ns, min_ns, max_ns] = time(group, repetitions, run)?;
    Ok(Measured { collective, buffer_bytes: (n * 4) as u64, median_ns, min_ns, max_ns })
}

/// Times every collective at every size.
///
/// # Errors
/// As [`crate::Started::finish`].
pub fn time_collectives(
    group: &Group,
    buffer_bytes: &[usize],
    repetitions: usize,
) -> Result<Vec<Measured>, CommError> {
    let mut all = Vec::new();
    for &bytes in buffer_bytes {
        for collective in Collective::ALL {
            all.push(time_collective(group, collective, bytes, repetitions)?);
        }
    }
    Ok(all)
}

/// Times a copy between two tensors of each rank, all ranks at once: what the collectives are held against.
///
/// # Errors
/// As [`crate::Started::finish`].
pub fn time_copy(group: &Group, bytes: usize, repetitions: usize) -> Result<CopyRate, CommError> {
    let n = bytes.div_ceil(4);
    let source = Tensor::<f32>::zeros(group.device(), [n], Category::Workspace);
    let mut target = Tensor::<f32>::zeros(group.device(), [n], Category::Workspace);
    let [median_ns, min_ns, _] = time(group, repetitions, || {
        copy_range(&mut target, 0, &source, 0..n);
        Ok(())
    })?;
    Ok(CopyRate { bytes: (n * 4) as u64, median_ns, min_ns })
}

/// Median, fastest and slowest time of the slowest rank, in nanoseconds.
fn time(
    group: &Group,
    repetitions: usize,
    mut run: impl FnMut() -> Result<(), CommError>,
) -> Result<[f64; 3], CommError> {
    assert!(repetitions > 0, "a median needs a repetition");
    let mut times = Vec::with_capacity(repetitions);
    for repetition in 0..WARM_UP + repetitions {
        group.barrier(Purpose::Control)?;
        let started = Instant::now();
        run()?;
        group.barrier(Purpose::Control)?;
        if repetition >= WARM_UP {
            times.push(started.elapsed().as_nanos() as f64);
        }
    }
    let mut slowest = group.all_reduce_f64(Purpose::Control, group.device(), &times, Reduce::Max)?;
    slowest.sort_by(f64::total_cmp);
    let at = |i: usize| slowest[i].max(1.0);
    Ok([at(repetitions / 2), at(0), at(repetitions - 1)])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::{LaunchOptions, run_ranks};

    #[test]
    fn every_collective_is_timed_and_sends_what_the_formula_says() {
        for size in [1, 2, 3] {
            run_ranks(size, LaunchOptions::default(), |ctx| -> Result<(), CommError> {
                for collective in Collective::ALL {
                    ctx.recorder.reset_traffic();
                    let measured = time_collective(&ctx.world, collective, 12_000, 2)?;
                    assert!(measured.min_ns <= measured.median_ns && measured.median_ns <= measured.max_ns);
                    assert_eq!(measured.buffer_bytes, 12_000);
                    assert!(measured.gb_per_s() > 0.0);
                    // The final exchange of two times is an all-reduce of two f64.
                    let books = ctx.recorder.by_purpose(Purpose::Control).sent_bytes;
                    let times = if size == 1 {
                        0
                    } else {
                        16 - even_f64(size, ctx.rank) + even_f64(size, ctx.rank) * (size as u64 - 1)
                    };
                    let runs = (WARM_UP + 2) as u64;
                    let equal_parts = size != 2 || collective != Collective::AllToAll;
                    if equal_parts && collective != Collective::SendReceive {
                        assert_eq!(
                            books - times,
                            runs * collective.sent_bytes(size, 12_000),
                            "{collective:?}"
                        );
                    }
                }
                assert!(time_copy(&ctx.world, 5_000, 2)?.gb_per_s() > 0.0);
                Ok(())
            })
            .expect("no rank fails");
        }
    }

    fn even_f64(size: usize, rank: usize) -> u64 {
        8 * plica_folding::even_range(2, size, rank).len() as u64
    }
}
