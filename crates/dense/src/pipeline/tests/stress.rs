//! The executor, the lowering and the validator together: schedules run on threads over a mailbox, with random delays,
//! with sends that wait for their receivers, and from random rows that went through a CSV file. What is computed is a
//! mixing of numbers in which every operand and every order counts.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use plica_kernels::rng::{Purpose, Stream};

use crate::error::Error;
use crate::pipeline::simulate::Times;
use crate::pipeline::{
    Action, Kind, Lowering, Schedule, ScheduleKind, StageRunner, Timeline, execute, generate, lower, measure,
    simulate, validate,
};

/// Half of a transfer on the receiving side.
type Key = (Kind, usize, usize);

#[derive(Default)]
struct Mailbox {
    state: Mutex<(BTreeMap<Key, u64>, BTreeSet<Key>)>,
    changed: Condvar,
}

impl Mailbox {
    /// Waits until `done`; an error after a minute, which only a deadlock takes.
    fn until<R>(
        &self,
        mut done: impl FnMut(&mut (BTreeMap<Key, u64>, BTreeSet<Key>)) -> Option<R>,
    ) -> Result<R, Error> {
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut state = self.state.lock().unwrap();
        loop {
            if let Some(result) = done(&mut state) {
                self.changed.notify_all();
                return Ok(result);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::Setting("a message that never comes".into()));
            }
            state = self.changed.wait_timeout(state, left).unwrap().0;
        }
    }
}

fn mix(a: u64, b: u64) -> u64 {
    let x = (a ^ b.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^ (x >> 29)
}

/// Output of a stage, input gradient of a stage, weight gradient of a stage.
fn output(stage: usize, x: u64) -> u64 {
    mix(x, stage as u64 + 1)
}

fn input_gradient(stage: usize, x: u64, dy: u64) -> u64 {
    mix(mix(dy, x), stage as u64 + 101)
}

fn weight_gradient(stage: usize, x: u64, dy: u64) -> u64 {
    mix(mix(x, dy), stage as u64 + 1001)
}

/// Weight gradients of a stage: their sum, and a chain in which their order counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Gradient {
    sum: u64,
    chain: u64,
}

impl Gradient {
    fn add(&mut self, value: u64) {
        self.sum = self.sum.wrapping_add(value);
        self.chain = mix(self.chain, value);
    }
}

/// What one rank computes: every stage of every micro-batch in order.
fn reference(stages: usize, micro_batches: usize) -> Vec<Gradient> {
    let mut gradients = vec![Gradient::default(); stages];
    for micro_batch in 0..micro_batches {
        let mut inputs = vec![micro_batch as u64];
        (0..stages).for_each(|stage| inputs.push(output(stage, inputs[stage])));
        let mut dy = inputs[stages];
        for stage in (0..stages).rev() {
            gradients[stage].add(weight_gradient(stage, inputs[stage], dy));
            dy = input_gradient(stage, inputs[stage], dy);
        }
    }
    gradients
}

struct Runner<'a> {
    schedule: &'a Schedule,
    mailbox: Arc<Mailbox>,
    /// Sends wait for their receivers.
    strict: bool,
    delays: Option<(Stream, u64)>,
    /// Inputs and output gradients that are here; inputs that a backward needs; what a weight gradient needs.
    inputs: BTreeMap<(usize, usize), u64>,
    gradients: BTreeMap<(usize, usize), u64>,
    saved: BTreeMap<(usize, usize), u64>,
    put_off: BTreeMap<(usize, usize), u64>,
    outgoing: BTreeMap<(Kind, usize, usize), u64>,
    weights: Vec<Gradient>,
    gathered: Option<BTreeSet<usize>>,
    peak: usize,
}

impl Runner<'_> {
    /// 0 to 50 ms, where there are delays.
    fn pause(&mut self) {
        if let Some((stream, index)) = &mut self.delays {
            *index += 1;
            std::thread::sleep(Duration::from_millis(stream.below(*index, 51)));
        }
    }

    fn compute(&mut self, stage: usize) {
        self.pause();
        assert!(self.gathered.as_ref().is_none_or(|set| set.contains(&stage)), "weights of stage {stage}");
    }

    fn backwards(&mut self, stage: usize, micro_batch: usize) -> (u64, u64) {
        self.compute(stage);
        let place = (stage, micro_batch);
        let dy = self.gradients.remove(&place).expect("an output gradient");
        let x = self.saved.remove(&place).expect("a forward");
        let dx = input_gradient(stage, x, dy);
        if stage > 0 && self.schedule.leaves_rank(stage - 1) {
            self.outgoing.insert((Kind::SendBackward, stage, micro_batch), dx);
        } else if stage > 0 {
            self.gradients.insert((stage - 1, micro_batch), dx);
        }
        (x, dy)
    }

    fn send(&mut self, kind: Kind, stage: usize, micro_batch: usize) -> Result<(), Error> {
        self.pause();
        let value = self.outgoing.remove(&(kind, stage, micro_batch)).expect("something to send");
        let key = match kind {
            Kind::SendForward => (Kind::ReceiveForward, stage + 1, micro_batch),
            _ => (Kind::ReceiveBackward, stage - 1, micro_batch),
        };
        let strict = self.strict;
        self.mailbox.until(|(sent, posted)| {
            let goes = !strict || posted.contains(&key);
            goes.then(|| assert!(sent.insert(key, value).is_none(), "sent twice"))
        })
    }

    fn receive(&mut self, kind: Kind, stage: usize, micro_batch: usize) -> Result<(), Error> {
        self.pause();
        let is_new = self.mailbox.until(|(_, posted)| Some(posted.insert((kind, stage, micro_batch))))?;
        assert!(is_new, "received twice");
        Ok(())
    }
}

impl StageRunner for Runner<'_> {
    fn wait(&mut self, kind: Kind, stage: usize, micro_batch: usize) -> Result<(), Error> {
        let (enters, returns) =
            (stage > 0 && self.schedule.leaves_rank(stage - 1), self.schedule.leaves_rank(stage));
        let place = (stage, micro_batch);
        let (receive, into) = match kind {
            Kind::Forward if enters => (Kind::ReceiveForward, &mut self.inputs),
            Kind::Backward | Kind::InputGradient if returns => (Kind::ReceiveBackward, &mut self.gradients),
            _ => return Ok(()),
        };
        let key = (receive, stage, micro_batch);
        let value = self.mailbox.until(|(sent, posted)| {
            assert!(posted.contains(&key), "arithmetic before its receive");
            sent.remove(&key)
        })?;
        assert!(into.insert(place, value).is_none());
        Ok(())
    }

    fn forward(&mut self, stage: usize, micro_batch: usize) -> Result<(), Error> {
        self.compute(stage);
        let place = (stage, micro_batch);
        let x = if stage == 0 { micro_batch as u64 } else { self.inputs.remove(&place).expect("an input") };
        self.saved.insert(place, x);
        self.peak = self.peak.max(self.saved.len() + self.put_off.len());
        let y = output(stage, x);
        if stage + 1 == self.schedule.stages() {
            self.gradients.insert(place, y);
        } else if self.schedule.leaves_rank(stage) {
            self.outgoing.insert((Kind::SendForward, stage, micro_batch), y);
        } else {
            self.inputs.insert((stage + 1, micro_batch), y);
        }
        Ok(())
    }

    fn backward(&mut self, stage: usize, micro_batch: usize) -> Result<(), Error> {
        let (x, dy) = self.backwards(stage, micro_batch);
        self.weights[stage].add(weight_gradient(stage, x, dy));
        Ok(())
    }

    fn input_gradient(&mut self, stage: usize, micro_batch: usize) -> Result<(), Error> {
        let (x, dy) = self.backwards(stage, micro_batch);
        self.put_off.insert((stage, micro_batch), weight_gradient(stage, x, dy));
        Ok(())
    }

    fn weight_gradient(&mut self, stage: usize, micro_batch: usize) -> Result<(), Error> {
        self.compute(stage);
        let value = self.put_off.remove(&(stage, micro_batch)).expect("a put-off weight gradient");
        self.weights[stage].add(value);
        Ok(())
    }

    fn unshard(&mut self, stage: usize) -> Result<(), Error> {
        assert!(self.gathered.as_mut().expect("sharded weights").insert(stage));
        Ok(())
    }

    fn reshard(&mut self, stage: usize) -> Result<(), Error> {
        assert!(self.gathered.as_mut().expect("sharded weights").remove(&stage));
        Ok(())
    }

    fn reduce_gradient(&mut self, stage: usize) -> Result<(), Error> {
        let of_stage = |map: &BTreeMap<(usize, usize), u64>| map.keys().any(|(s, _)| *s == stage);
        assert!(!of_stage(&self.saved) && !of_stage(&self.put_off), "gradients of stage {stage} to come");
        Ok(())
    }

    fn send_forward(&mut self, stage: usize, micro_batch: usize) -> Result<(), Error> {
        self.send(Kind::SendForward, stage, micro_batch)
    }

    fn receive_forward(&mut self, stage: usize, micro_batch: usize) -> Result<(), Error> {
        self.receive(Kind::ReceiveForward, stage, micro_batch)
    }

    fn send_backward(&mut self, stage: usize, micro_batch: usize) -> Result<(), Error> {
        self.send(Kind::SendBackward, stage, micro_batch)
    }

    fn receive_backward(&mut self, stage: usize, micro_batch: usize) -> Result<(), Error> {
        self.receive(Kind::ReceiveBackward, stage, micro_batch)
    }
}

/// Executes a lowered schedule, a thread a rank; the weight gradients by stage. Holds what every run must.
fn run(case: &str, lowered: &Schedule, strict: bool, delays: Option<u64>) -> Vec<Gradient> {
    let mailbox = Arc::new(Mailbox::default());
    let origin = Instant::now();
    let is_sharded = lowered.ranks().iter().flatten().flatten().any(|action| action.kind == Kind::Unshard);
    let rank_runs = |rank: usize| {
        let mut runner = Runner {
            schedule: lowered,
            mailbox: mailbox.clone(),
            strict,
            delays: delays.map(|seed| (Stream::new(seed, Purpose::Named("delays")), 1_000_000 * rank as u64)),
            inputs: BTreeMap::new(),
            gradients: BTreeMap::new(),
            saved: BTreeMap::new(),
            put_off: BTreeMap::new(),
            outgoing: BTreeMap::new(),
            weights: vec![Gradient::default(); lowered.stages()],
            gathered: is_sharded.then(BTreeSet::new),
            peak: 0,
        };
        let mut timeline = Timeline::since(origin);
        execute(lowered, rank, &mut runner, &mut timeline).unwrap_or_else(|error| panic!("{case}: {error}"));
        assert!(runner.saved.is_empty() && runner.put_off.is_empty() && runner.outgoing.is_empty(), "{case}");
        assert!(runner.inputs.is_empty() && runner.gradients.is_empty(), "{case}");
        (runner.weights, runner.peak, timeline.spans().to_vec())
    };
    let rank_runs = &rank_runs;
    let results: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..lowered.ranks().len()).map(|rank| scope.spawn(move || rank_runs(rank))).collect();
        threads.into_iter().map(|thread| thread.join().expect(case)).collect()
    });
    let validated = validate(lowered).unwrap_or_else(|error| panic!("{case}: {error}"));
    let peaks: Vec<usize> = results.iter().map(|(_, peak, _)| *peak).collect();
    assert_eq!(peaks, validated.in_flight_peak, "{case}: in flight");
    let spans: Vec<_> = results.iter().map(|(_, _, spans)| spans.clone()).collect();
    let observed = measure(lowered, &spans).observed;
    let count = |rank: usize| lowered.actions(rank).count();
    assert!((0..spans.len()).all(|rank| observed.ranks[rank].spans.len() == count(rank)), "{case}: spans");
    (0..lowered.stages()).map(|stage| results[lowered.rank_of_stage(stage)].0[stage]).collect()
}

#[test]
fn s19_four_ranks_with_one_to_five_micro_batches_and_random_delays() {
    let seed = 1_902;
    println!("seed {seed}");
    std::thread::scope(|scope| {
        for kind in ScheduleKind::ALL {
            for (micro_batches, strict) in (1..=5).flat_map(|m| [(m, false), (m, true)]) {
                scope.spawn(move || {
                    let case = format!("{kind} m={micro_batches} strict={strict}");
                    let chunks = kind.default_chunks();
                    let schedule = generate(kind, 4, chunks, micro_batches).unwrap();
                    let lowering = Lowering { sharded_weights: strict, ..Lowering::default() };
                    let delays = seed + 100 * micro_batches as u64 + u64::from(strict);
                    let found = run(&case, &lower(&schedule, lowering), strict, Some(delays));
                    assert_eq!(found, reference(4 * chunks, micro_batches), "{case}");
                });
            }
        }
    });
}

/// Work that can be done next, as an action.
fn ready(stages: usize, micro_batches: usize, done: &BTreeSet<(usize, Kind, usize)>) -> Vec<Action> {
    use Kind::{Backward, Forward, InputGradient, WeightGradient};
    let has = |stage, kind, m| done.contains(&(stage, kind, m));
    let backward = |stage, m| has(stage, Backward, m) || has(stage, InputGradient, m);
    let mut out = Vec::new();
    for (stage, m) in (0..stages).flat_map(|stage| (0..micro_batches).map(move |m| (stage, m))) {
        if !has(stage, Forward, m) && (stage == 0 || has(stage - 1, Forward, m)) {
            out.push(Action::forward(stage, m));
        }
        if has(stage, Forward, m) && !backward(stage, m) && (stage + 1 == stages || backward(stage + 1, m)) {
            out.extend([Action::backward(stage, m), Action::input_gradient(stage, m)]);
        }
        if has(stage, InputGradient, m) && !has(stage, WeightGradient, m) {
            out.push(Action::weight_gradient(stage, m));
        }
    }
    out
}

/// Rows in a random order, stages on random ranks, with some idle slots and some overlapped pairs.
fn random_schedule(mut draw: impl FnMut(usize) -> usize) -> Schedule {
    let ranks = 1 + draw(4);
    let (stages, micro_batches) = (ranks + draw(4), 1 + draw(6));
    let mut rank_of: Vec<usize> = (0..stages).map(|s| if s < ranks { s } else { draw(ranks) }).collect();
    (1..stages).for_each(|s| rank_of.swap(s, draw(s + 1)));
    let mut rows = vec![Vec::new(); ranks];
    let mut done = BTreeSet::new();
    loop {
        let choices = ready(stages, micro_batches, &done);
        if choices.is_empty() {
            return Schedule::new(rows).unwrap();
        }
        let mut action = choices[draw(choices.len())].clone();
        let rank = rank_of[action.stage];
        let partner = choices.iter().find(|other| {
            matches!(other.kind, Kind::Backward | Kind::InputGradient) && rank_of[other.stage] == rank
        });
        if let (Kind::Forward, Some(partner), 0) = (action.kind, partner, draw(3)) {
            action = Action::overlap(action, partner.clone());
        }
        done.extend(action.simple().iter().map(|part| (part.stage, part.kind, part.micro_batch.unwrap())));
        rows[rank].push(Some(action));
        if draw(8) == 0 {
            rows[rank].push(None);
        }
    }
}

#[test]
fn random_rows_are_valid_lower_and_run_to_the_same_gradients() {
    let seed = 3_141;
    println!("seed {seed}");
    let random = Stream::new(seed, Purpose::Named("rows"));
    let mut index = 0;
    for case in 0..150 {
        let schedule = random_schedule(|bound| {
            index += 1;
            random.below(index, bound as u64) as usize
        });
        let name = format!("case {case}:\n{}", schedule.to_csv());
        let schedule = Schedule::from_csv(&schedule.to_csv()).unwrap_or_else(|e| panic!("{name}: {e}"));
        validate(&schedule).unwrap_or_else(|error| panic!("{name}: {error}"));
        let times = Times { transfer: 0.5, ..Times::uniform(schedule.stages(), 1.0, 1.0, 1.0) };
        let strict = case % 2 == 0;
        for sharded_weights in [false, true] {
            let lowered = lower(&schedule, Lowering { sharded_weights, gathered_stages_max: 1 + case % 3 });
            let lowered = Schedule::from_csv(&lowered.to_csv()).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_eq!(simulate(&lowered, &times).makespan, simulate(&schedule, &times).makespan, "{name}");
            let found = run(&name, &lowered, strict, None);
            let sums: Vec<u64> = found.iter().map(|gradient| gradient.sum).collect();
            let expected = reference(schedule.stages(), schedule.micro_batches());
            assert_eq!(sums, expected.iter().map(|gradient| gradient.sum).collect::<Vec<_>>(), "{name}");
        }
    }
}
