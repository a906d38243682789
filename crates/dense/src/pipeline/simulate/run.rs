//! The clock under the simulator and the validator: goes through the rows of all ranks as far as inputs allow. The
//! order in which ranks are looked at changes nothing, because every time follows from times before it.

use super::{RankUse, SimulatedSpan, Simulation, Times, Transfers};
use crate::pipeline::action::{Action, Kind};
use crate::pipeline::schedule::Schedule;

/// A finished or stuck run.
pub(crate) struct Run {
    /// What was done.
    pub simulation: Simulation,
    /// For each rank that cannot go on: where it is and what it waits for. Empty at a good end.
    pub stuck: Vec<String>,
}

/// Runs a schedule; transfers of a lowered one as `times.transfers` says.
pub(crate) fn run(schedule: &Schedule, times: &Times) -> Run {
    let mut clock = Clock::new(schedule, times);
    let mut moved = true;
    while moved {
        moved = false;
        for rank in 0..schedule.ranks().len() {
            moved |= clock.advance(rank);
        }
    }
    clock.finish()
}

/// When a fact became true; NaN while it is not.
type Moments = Vec<f64>;

struct Clock<'a> {
    schedule: &'a Schedule,
    times: &'a Times,
    has_transfers: bool,
    /// By stage and micro-batch: forward done, input gradient done, the same sent by the neighbour, and receive
    /// started (asynchronous) or done (rendezvous).
    forward: Moments,
    gradient: Moments,
    sent_forward: Moments,
    sent_backward: Moments,
    received_forward: Moments,
    received_backward: Moments,
    /// By stage: weights gathered; 0 for stages whose weights are never gathered.
    gathered: Moments,
    ranks: Vec<RankClock>,
}

#[derive(Default)]
struct RankClock {
    next: usize,
    now: f64,
    background: f64,
    spans: Vec<SimulatedSpan>,
    /// Begin of the first and end of the last arithmetic.
    extent: Option<(f64, f64)>,
    work: f64,
    in_flight: usize,
    in_flight_peak: usize,
    memory: f64,
    memory_peak: f64,
}

impl<'a> Clock<'a> {
    fn new(schedule: &'a Schedule, times: &'a Times) -> Clock<'a> {
        let unknown = vec![f64::NAN; schedule.stages() * schedule.micro_batches()];
        let all = || schedule.ranks().iter().flatten().flatten();
        let mut gathered = vec![0.0; schedule.stages()];
        all().filter(|a| a.kind == Kind::Unshard).for_each(|a| gathered[a.stage] = f64::NAN);
        Clock {
            schedule,
            times,
            has_transfers: all().any(|a| a.kind.is_transfer()),
            forward: unknown.clone(),
            gradient: unknown.clone(),
            sent_forward: unknown.clone(),
            sent_backward: unknown.clone(),
            received_forward: unknown.clone(),
            received_backward: unknown,
            gathered,
            ranks: schedule.ranks().iter().map(|_| RankClock::default()).collect(),
        }
    }

    /// The next action of a rank, idle slots left out.
    fn head(&self, rank: usize) -> Option<(usize, &'a Action)> {
        let (schedule, next) = (self.schedule, self.ranks[rank].next);
        let row = &schedule.ranks()[rank];
        (next..row.len()).find_map(|index| row[index].as_ref().map(|action| (index, action)))
    }

    fn at(&self, stage: usize, action: &Action) -> usize {
        stage * self.schedule.micro_batches() + action.micro_batch.unwrap_or(0)
    }

    /// Does what a rank can do; whether that was anything.
    fn advance(&mut self, rank: usize) -> bool {
        let mut moved = false;
        while let Some((index, action)) = self.head(rank) {
            let rendezvous = self.times.transfers == Transfers::Rendezvous && action.kind.is_transfer();
            let done = if rendezvous { self.meet(rank, action) } else { self.act(rank, index, action) };
            if !done {
                break;
            }
            moved = true;
        }
        moved
    }

    /// Carries out an action whose inputs are there.
    fn act(&mut self, rank: usize, index: usize, action: &Action) -> bool {
        let Ok(ready) = self.ready(action) else { return false };
        let start = self.ranks[rank].now.max(ready);
        let work = self.times.of(action);
        let end = start + work + self.times.overhead;
        self.end(rank, index, start, end);
        if action.kind.is_compute() {
            let own = &mut self.ranks[rank];
            own.work += work;
            own.extent = Some((own.extent.map_or(start, |(first, _)| first), end));
        }
        for part in action.simple() {
            self.learn(rank, part);
        }
        true
    }

    /// A transfer for which both sides wait: done when the partner's next action is the other half.
    fn meet(&mut self, rank: usize, action: &Action) -> bool {
        let Some(partner) = self.partner(action) else { return false };
        let Some((partner_index, other)) = self.head(partner.0) else { return false };
        let is_pair =
            (other.kind, other.stage, other.micro_batch) == (partner.1, partner.2, action.micro_batch);
        let (Ok(ready), Some((index, _))) = (self.ready(action), self.head(rank)) else { return false };
        let Ok(other_ready) = self.ready(other) else { return false };
        if !is_pair || partner.0 == rank {
            return false;
        }
        let both = [ready, other_ready, self.ranks[rank].now, self.ranks[partner.0].now];
        let start = both.into_iter().fold(0.0, f64::max);
        let end = start + self.times.transfer + self.times.overhead;
        for (rank, index, action) in [(rank, index, action), (partner.0, partner_index, other)] {
            self.end(rank, index, start, end);
            self.learn(rank, action);
        }
        true
    }

    /// Rank, kind and stage of the other half of a transfer, where there is such a stage.
    fn partner(&self, action: &Action) -> Option<(usize, Kind, usize)> {
        let (kind, stage) = other_half(action, self.schedule.stages())?;
        Some((self.schedule.rank_of_stage(stage), kind, stage))
    }

    fn end(&mut self, rank: usize, action_index: usize, start: f64, end: f64) {
        let rank = &mut self.ranks[rank];
        rank.spans.push(SimulatedSpan { action_index, start, end });
        (rank.now, rank.next) = (end, action_index + 1);
    }

    /// When all inputs of an action are there, or the first that is not.
    fn ready(&self, action: &Action) -> Result<f64, String> {
        action.simple().iter().try_fold(0.0, |latest: f64, part| Ok(latest.max(self.ready_part(part)?)))
    }

    fn ready_part(&self, action: &Action) -> Result<f64, String> {
        let (stage, last) = (action.stage, self.schedule.stages() - 1);
        let here = self.at(stage, action);
        let known = |moment: f64, what: Kind, stage: usize| {
            let micro_batch = action.micro_batch.map(|m| m.to_string()).unwrap_or_default();
            if moment.is_nan() { Err(format!("{stage}{what}{micro_batch}")) } else { Ok(moment) }
        };
        let gathered = || known(self.gathered[stage], Kind::Unshard, stage);
        match action.kind {
            Kind::Forward if stage == 0 => gathered(),
            Kind::Forward => {
                let before = self.at(stage - 1, action);
                let (own, sent) = (self.forward[before], self.sent_forward[before]);
                let input = match self.way(stage - 1, stage) {
                    Way::Local => known(own, Kind::Forward, stage - 1)?,
                    Way::Implied => known(own, Kind::Forward, stage - 1)? + self.times.transfer,
                    Way::Explicit => {
                        let received = known(self.received_forward[here], Kind::ReceiveForward, stage)?;
                        known(sent, Kind::SendForward, stage - 1)?.max(received)
                    }
                };
                Ok(input.max(gathered()?))
            }
            Kind::Backward | Kind::InputGradient => {
                let own = known(self.forward[here], Kind::Forward, stage)?.max(gathered()?);
                if stage == last {
                    return Ok(own);
                }
                let after = self.at(stage + 1, action);
                let input = match self.way(stage, stage + 1) {
                    Way::Local => known(self.gradient[after], Kind::Backward, stage + 1)?,
                    Way::Implied => {
                        known(self.gradient[after], Kind::Backward, stage + 1)? + self.times.transfer
                    }
                    Way::Explicit => {
                        let received = known(self.received_backward[here], Kind::ReceiveBackward, stage)?;
                        known(self.sent_backward[after], Kind::SendBackward, stage + 1)?.max(received)
                    }
                };
                Ok(own.max(input))
            }
            Kind::WeightGradient => {
                Ok(known(self.gradient[here], Kind::InputGradient, stage)?.max(gathered()?))
            }
            Kind::SendForward => known(self.forward[here], Kind::Forward, stage),
            Kind::SendBackward => known(self.gradient[here], Kind::Backward, stage),
            _ => Ok(0.0),
        }
    }

    fn way(&self, from: usize, to: usize) -> Way {
        match (self.schedule.rank_of_stage(from) == self.schedule.rank_of_stage(to), self.has_transfers) {
            (true, _) => Way::Local,
            (false, true) => Way::Explicit,
            (false, false) => Way::Implied,
        }
    }

    /// Books what is true after an action of a rank, whose clock stands at its end.
    fn learn(&mut self, rank: usize, action: &Action) {
        let (stage, now) = (action.stage, self.ranks[rank].now);
        let here = self.at(stage, action);
        let arrives = match self.times.transfers {
            Transfers::Asynchronous => now + self.times.transfer,
            Transfers::Rendezvous => now,
        };
        let (activation, weight_input) = (self.times.activation[stage], self.times.weight_input[stage]);
        let own = &mut self.ranks[rank];
        match action.kind {
            Kind::Forward => {
                self.forward[here] = now;
                own.hold(1, activation);
            }
            Kind::Backward => {
                self.gradient[here] = now;
                own.release(1, activation);
            }
            Kind::InputGradient => {
                self.gradient[here] = now;
                own.release(0, activation - weight_input);
            }
            Kind::WeightGradient => own.release(1, weight_input),
            Kind::SendForward => self.sent_forward[here] = arrives,
            Kind::SendBackward => self.sent_backward[here] = arrives,
            Kind::ReceiveForward => self.received_forward[here] = now,
            Kind::ReceiveBackward => self.received_backward[here] = now,
            Kind::Unshard => self.gathered[stage] = now + self.times.unshard,
            Kind::Reshard => self.gathered[stage] = f64::NAN,
            Kind::ReduceGradient => own.background = own.background.max(now + self.times.reduce_gradient),
            Kind::Overlap => {}
        }
    }

    fn finish(self) -> Run {
        let stuck = (0..self.ranks.len()).filter_map(|rank| {
            let (index, action) = self.head(rank)?;
            let missing = self.ready(action).err().or_else(|| {
                let (_, kind, stage) = self.partner(action)?;
                Some(Action::new(stage, kind, action.micro_batch?).to_string())
            });
            let missing = missing.unwrap_or_else(|| "a stage that does not exist".into());
            Some(format!("rank {rank} at {action} (column {}) waits for {missing}", index + 1))
        });
        let stuck = stuck.collect();
        let ends = self.ranks.iter().map(|rank| rank.now.max(rank.background));
        let makespan = ends.fold(0.0, f64::max);
        let ranks = self.ranks.into_iter().map(RankClock::finish).collect();
        Run { simulation: Simulation { ranks, makespan }, stuck }
    }
}

/// Kind and stage of the other half of a transfer, where there is such a stage.
pub(crate) fn other_half(action: &Action, stages: usize) -> Option<(Kind, usize)> {
    let next = Some(action.stage + 1).filter(|stage| *stage < stages);
    let before = action.stage.checked_sub(1);
    match action.kind {
        Kind::SendForward => Some((Kind::ReceiveForward, next?)),
        Kind::ReceiveForward => Some((Kind::SendForward, before?)),
        Kind::SendBackward => Some((Kind::ReceiveBackward, before?)),
        Kind::ReceiveBackward => Some((Kind::SendBackward, next?)),
        _ => None,
    }
}

/// How a tensor gets from one stage to a neighbour.
enum Way {
    /// Both are on one rank.
    Local,
    /// By a transfer that is not in the rows.
    Implied,
    /// By a send and a receive in the rows.
    Explicit,
}

impl RankClock {
    fn hold(&mut self, pairs: usize, memory: f64) {
        self.in_flight += pairs;
        self.memory += memory;
        self.in_flight_peak = self.in_flight_peak.max(self.in_flight);
        self.memory_peak = self.memory_peak.max(self.memory);
    }

    fn release(&mut self, pairs: usize, memory: f64) {
        self.in_flight = self.in_flight.saturating_sub(pairs);
        self.memory -= memory;
    }

    fn finish(self) -> RankUse {
        RankUse {
            start: self.extent.map_or(0.0, |(start, _)| start),
            end: self.extent.map_or(0.0, |(_, end)| end),
            spans: self.spans,
            work: self.work,
            in_flight_peak: self.in_flight_peak,
            memory_peak: self.memory_peak,
        }
    }
}
