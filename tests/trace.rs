//! The trace of a run, read back as JSON: spans nest in every row and every begin has an end; bytes of the operations
//! are those of the traffic counters; memory returns to where it was; exposed and hidden time computed again from the
//! single events are the figures of the step and of the metrics; actions of a pipeline stand in the order of their
//! schedule; a modelled link hides behind computing. Over threads, and over processes with their own clocks.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use plica::config::Config;
use plica::metrics::{StepRecord, read_records};
use plica::trace::{StepRange, TraceRequest};
use plica::trainer::{RunContext, pretrain};
use plica_comm::RecordOptions;
use plica_comm::record::Link;
use serde_json::Value;

use crate::runs::{FOLDED, Runs};

/// Rows of the format.
const STEPS: u64 = 1;
const INSIDE: u64 = 3;
const PIPELINE: u64 = 4;
const COMMUNICATION: u64 = 200;

/// One event, times in nanoseconds.
#[derive(Clone, Debug)]
struct Event {
    name: String,
    kind: String,
    rank: u64,
    row: u64,
    start: u64,
    end: u64,
    args: Value,
}

impl Event {
    fn read(value: &Value) -> Event {
        let text = |key: &str| value[key].as_str().unwrap_or_else(|| panic!("{key}: {value}")).to_string();
        let whole = |key: &str| value[key].as_u64().unwrap_or_else(|| panic!("{key}: {value}"));
        let ns = |key: &str| {
            (value[key].as_f64().unwrap_or_else(|| panic!("{key}: {value}")) * 1e3).round() as u64
        };
        let kind = text("ph");
        let length = if kind == "X" { ns("dur") } else { 0 };
        let (rank, row, start) = (whole("pid"), whole("tid"), ns("ts"));
        Event { name: text("name"), kind, rank, row, start, end: start + length, args: value["args"].clone() }
    }

    fn purpose(&self) -> &str {
        self.args["purpose"].as_str().unwrap_or_else(|| panic!("a purpose: {self:?}"))
    }

    fn number(&self, key: &str) -> u64 {
        self.args[key].as_u64().unwrap_or_else(|| panic!("{key}: {self:?}"))
    }

    fn is_operation(&self) -> bool {
        self.kind == "X" && self.row >= COMMUNICATION
    }
}

/// A trace and what belongs to it.
struct Traced {
    events: Vec<Event>,
    about: Value,
    records: Vec<StepRecord>,
    config: Config,
}

impl Traced {
    fn read(file: &Path, run: &Path, config: Config) -> Traced {
        let text = std::fs::read_to_string(file).expect("the trace is there");
        let whole: Value = serde_json::from_str(&text).expect("a trace is JSON");
        let events = whole["traceEvents"].as_array().expect("events").iter().map(Event::read).collect();
        let metrics = std::fs::read_to_string(run.join("metrics.jsonl")).expect("metrics");
        let records = read_records(&metrics).expect("valid lines");
        Traced { events, about: whole["otherData"].clone(), records, config }
    }

    fn ranks(&self) -> u64 {
        self.config.layout.world() as u64
    }

    fn of(&self, rank: u64) -> impl Iterator<Item = &Event> + Clone {
        self.events.iter().filter(move |event| event.rank == rank)
    }

    fn steps(&self, rank: u64) -> Vec<&Event> {
        self.of(rank).filter(|e| e.row == STEPS && e.name.starts_with("step ")).collect()
    }

    /// Everything that holds of any trace.
    fn check(&self, steps: std::ops::RangeInclusive<u64>) {
        let ranks: BTreeSet<u64> = self.events.iter().map(|e| e.rank).collect();
        assert_eq!(ranks, (0..self.ranks()).collect());
        for rank in 0..self.ranks() {
            let traced: Vec<u64> = self.steps(rank).iter().map(|e| e.number("step")).collect();
            assert_eq!(traced, steps.clone().collect::<Vec<u64>>(), "rank {rank}");
            self.rows_nest_and_have_names(rank);
            self.halves_belong_to_operations(rank);
            self.bytes_are_the_counters(rank);
            self.memory_returns(rank);
        }
        for step in steps {
            self.exposed_time_is_that_of_the_step(step);
        }
    }

    fn rows_nest_and_have_names(&self, rank: u64) {
        let name = |row: u64| self.of(rank).any(|e| e.kind == "M" && e.name == "thread_name" && e.row == row);
        let mut rows: BTreeMap<u64, Vec<&Event>> = BTreeMap::new();
        self.of(rank).filter(|e| e.kind == "X").for_each(|e| rows.entry(e.row).or_default().push(e));
        for (row, mut spans) in rows {
            assert!(name(row), "rank {rank} row {row} has a name");
            spans.sort_by_key(|e| (e.start, std::cmp::Reverse(e.end)));
            let mut open: Vec<&Event> = Vec::new();
            for span in spans {
                open.retain(|outer| outer.end > span.start);
                let nests = open.iter().all(|outer| span.end <= outer.end);
                assert!(nests, "rank {rank} row {row}: {span:?} crosses {open:?}");
                assert!(
                    row < COMMUNICATION || open.is_empty(),
                    "operations of one row are disjoint: {span:?}"
                );
                open.push(span);
            }
        }
    }

    /// Every operation has a begin half where it starts, and (none is given up here) a finish half after it.
    fn halves_belong_to_operations(&self, rank: u64) {
        let halves = |name: &str| -> BTreeMap<u64, &Event> {
            let of_name = self.of(rank).filter(|e| e.row == INSIDE && e.name.starts_with(name));
            of_name.map(|e| (e.number("index"), e)).collect()
        };
        let (begins, finishes) = (halves("begin "), halves("finish "));
        let operations: Vec<&Event> = self.of(rank).filter(|e| e.is_operation()).collect();
        assert!(operations.len() == begins.len() && begins.len() == finishes.len() && !begins.is_empty());
        for operation in operations {
            let (begin, finish) = (begins[&operation.number("index")], finishes[&operation.number("index")]);
            assert!(begin.start == operation.start && begin.end <= finish.start, "{operation:?}");
            assert!(operation.end <= finish.end, "{operation:?} {finish:?}");
            assert_eq!(operation.args["end"], "finished");
            assert_eq!((begin.purpose(), finish.purpose()), (operation.purpose(), operation.purpose()));
        }
    }

    fn bytes_are_the_counters(&self, rank: u64) {
        let mut sums: BTreeMap<String, [u64; 3]> = BTreeMap::new();
        for event in self.of(rank).filter(|e| e.is_operation() || e.kind == "i") {
            let sum = sums.entry(event.purpose().to_string()).or_default();
            sum[0] += event.number("sent_bytes");
            sum[1] += event.number("received_bytes");
            sum[2] += u64::from(event.is_operation());
        }
        let facts = &self.about["ranks"][rank as usize];
        assert_eq!(facts["rank"], rank);
        let counters = facts["traffic"].as_object().expect("counters").iter().map(|(purpose, counted)| {
            let number = |key: &str| counted[key].as_u64().expect("a count");
            let counts = [number("sent_bytes"), number("received_bytes"), number("operations")];
            (purpose.clone(), counts)
        });
        assert_eq!(sums, counters.collect::<BTreeMap<_, _>>(), "rank {rank}");
    }

    fn memory_returns(&self, rank: u64) {
        let samples: Vec<&Event> = self.of(rank).filter(|e| e.kind == "C").collect();
        let (first, last) = (samples.first().expect("samples"), samples.last().expect("samples"));
        assert_eq!(first.args, last.args, "rank {rank}");
        let total =
            |e: &Event| e.args.as_object().expect("categories").values().filter_map(Value::as_u64).sum();
        let most: u64 = samples.iter().map(|e| total(e)).max().expect("samples");
        assert!(most > total(first), "rank {rank}: a step needs memory");
    }

    /// From the single events, by purpose and over all; exact against the step's own figures, and against the metrics,
    /// which hold the mean over ranks in whole nanoseconds.
    fn exposed_time_is_that_of_the_step(&self, step: u64) {
        let record = self.records.iter().find(|r| r.step == step).expect("a record of the step");
        let mut sums: BTreeMap<String, [u64; 2]> = BTreeMap::new();
        for rank in 0..self.ranks() {
            let steps = self.steps(rank);
            let span = steps.iter().find(|e| e.number("step") == step).expect("the step");
            let told = span.args["communication"].as_object().expect("communication");
            for (name, [exposed, hidden]) in self.exposures(rank, span) {
                let of = |key: &str| told.get(&name).map_or(0, |time| time[key].as_u64().expect("a time"));
                assert_eq!(
                    [exposed, hidden],
                    [of("exposed_ns"), of("hidden_ns")],
                    "rank {rank} {step} {name}"
                );
                let sum = sums.entry(name).or_default();
                (sum[0], sum[1]) = (sum[0] + exposed, sum[1] + hidden);
            }
        }
        for (name, [exposed, hidden]) in sums {
            for (times, sum) in [(&record.exposed_ns, exposed), (&record.hidden_ns, hidden)] {
                let mean = sum as f64 / self.ranks() as f64;
                let told = *times.get(&name).unwrap_or_else(|| panic!("{name} is in the metrics")) as f64;
                assert!((told - mean).abs() <= 1.0, "step {step} {name}: {told} in the metrics, {mean} here");
            }
        }
    }

    /// (exposed, hidden) by purpose and of `all`: lengths of unions.
    fn exposures(&self, rank: u64, step: &Event) -> BTreeMap<String, [u64; 2]> {
        let within = |e: &&Event| step.start <= e.start && e.start < step.end;
        let inside: Vec<&Event> =
            self.of(rank).filter(|e| e.row == INSIDE && e.kind == "X").filter(within).collect();
        let operations: Vec<&Event> = self.of(rank).filter(|e| e.is_operation()).filter(within).collect();
        let all_inside = times(&inside, |_| true);
        let mut names: BTreeSet<&str> = inside.iter().map(|e| e.purpose()).collect();
        names.insert("all");
        let of = |name: &str| {
            let own = |e: &Event| name == "all" || e.purpose() == name;
            let busy: Vec<_> = all_inside.iter().copied().chain(times(&operations, own)).collect();
            [union_ns(times(&inside, own)), union_ns(busy) - union_ns(all_inside.clone())]
        };
        names.into_iter().map(|name| (name.to_string(), of(name))).collect()
    }
}

fn times(events: &[&Event], of: impl Fn(&Event) -> bool) -> Vec<(u64, u64)> {
    events.iter().filter(|e| of(e)).map(|e| (e.start, e.end)).collect()
}

/// Length of the union of intervals.
fn union_ns(mut intervals: Vec<(u64, u64)>) -> u64 {
    intervals.sort();
    let (mut sum, mut until) = (0, 0);
    for (from, to) in intervals {
        sum += to.saturating_sub(from.max(until));
        until = until.max(to);
    }
    sum
}

fn context<'a>(
    runs: &Runs,
    stop: &'a AtomicBool,
    steps: Option<StepRange>,
    links: Vec<Link>,
) -> RunContext<'a> {
    let trace = Some(TraceRequest { file: runs.path().join("trace.json"), steps });
    let record = RecordOptions { links, ..RecordOptions::default() };
    RunContext { trace, record, ..runs.context(None, stop) }
}

/// Trains and reads the trace.
fn traced(name: &str, sets: &[&[&str]], steps: Option<StepRange>, links: Vec<Link>) -> Traced {
    let runs = Runs::new(name);
    let dir = format!("run.dir={}", runs.run("run").display());
    let mut all = sets.to_vec();
    let dir = [dir.as_str()];
    all.push(&dir);
    let (config, stop) = (runs.config(&all), AtomicBool::new(false));
    pretrain(&config, &context(&runs, &stop, steps, links)).unwrap_or_else(|e| panic!("{e:#}"));
    Traced::read(&runs.path().join("trace.json"), &runs.run("run"), config)
}

#[test]
fn events_of_folded_ranks_add_up_with_either_dispatcher() {
    for dispatcher in ["direct", "all-to-all"] {
        let dispatcher = format!("moe.dispatcher={dispatcher}");
        let sets: &[&[&str]] = &[FOLDED, &["run.steps=6", &dispatcher]];
        let traced = traced("trace-folded", sets, None, Vec::new());
        traced.check(2..=4);
        let pulled = traced.events.iter().any(|e| e.kind == "i");
        assert_eq!(pulled, dispatcher.ends_with("direct"), "rows read in place are no operation");
        let micro_batches = traced.of(0).filter(|e| e.row == STEPS && e.name.starts_with("forward ")).count();
        assert_eq!(micro_batches, 3 * traced.config.train.micro_batches);
    }
}

#[test]
fn actions_of_a_pipeline_stand_in_the_order_of_their_schedule() {
    let pipeline = &["layout.ranks=4", "layout.pp=2", "layout.dp=2", "layout.ep=2", "shard.zero=3"];
    let steps = Some(StepRange { first: 3, last: 4 });
    let sets: &[&[&str]] = &[pipeline, &["run.steps=4", "pipeline.schedule=1f1b"]];
    let traced = traced("trace-pipeline", sets, steps, Vec::new());
    traced.check(3..=4);
    let plan = traced.config.pipeline.as_ref().expect("a pipeline");
    for rank in 0..traced.ranks() {
        let stage = traced.config.layout.coordinates(rank as usize).pp;
        let row = &plan.lowered().ranks()[stage];
        let expected: Vec<String> = row.iter().flatten().map(ToString::to_string).collect();
        for step in traced.steps(rank) {
            let of_step =
                |e: &&Event| e.row == PIPELINE && e.kind == "X" && step.start <= e.start && e.end <= step.end;
            let actions: Vec<&Event> = traced.of(rank).filter(of_step).collect();
            assert!(actions.is_sorted_by_key(|e| e.start), "rank {rank}");
            let names: Vec<&str> = actions.iter().map(|e| e.name.as_str()).collect();
            assert_eq!(names, expected, "rank {rank} {}", step.name);
        }
        let units: Vec<&Event> = traced.of(rank).filter(|e| (100..COMMUNICATION).contains(&e.row)).collect();
        assert!(
            units.iter().any(|e| e.kind == "X" && e.number("bytes") > 0),
            "rank {rank}: gathered weights"
        );
    }
}

#[test]
fn a_modelled_link_hides_behind_computing() {
    let sets: &[&[&str]] = &[&["layout.ranks=2", "layout.dp=2", "shard.zero=3", "run.steps=3"]];
    let alpha = Duration::from_millis(20);
    let link = Link { group: Some("dp_cp".into()), alpha, bytes_per_second: 1e9 };
    let traced = traced("trace-link", sets, None, vec![link]);
    traced.check(2..=3);
    for rank in 0..2 {
        let hidden = |e: &&Event| e.args["communication"]["gather weights"]["hidden_ns"].as_u64() > Some(0);
        assert!(
            traced.steps(rank).iter().any(hidden),
            "rank {rank}: the next unit travels under the present one"
        );
        let linked = |e: &&Event| e.is_operation() && e.args["group"] == "dp_cp";
        let shortest = traced.of(rank).filter(linked).map(|e| e.end - e.start).min();
        assert!(shortest >= Some(20_000_000), "rank {rank}: a round of the link takes 20 ms: {shortest:?}");
    }
}

#[test]
fn one_step_is_enough_and_wrong_requests_are_refused_before_the_run() {
    let one = traced("trace-one", &[&["layout.ranks=2", "layout.dp=2", "run.steps=1"]], None, Vec::new());
    one.check(1..=1);
    let (runs, stop) = (Runs::new("trace-wrong"), AtomicBool::new(false));
    let dir = format!("run.dir={}", runs.run("run").display());
    let config = runs.config(&[&["run.steps=5", &dir]]);
    let late = Some(StepRange { first: 6, last: 9 });
    let error = pretrain(&config, &context(&runs, &stop, late, Vec::new())).expect_err("no such step");
    assert!(error.to_string().contains("this run does the steps 1 to 5"), "{error}");
    let file = runs.path().join("nowhere/trace.json");
    let nowhere = RunContext { trace: Some(TraceRequest { file, steps: None }), ..runs.context(None, &stop) };
    let error = pretrain(&config, &nowhere).expect_err("no such folder");
    assert!(error.to_string().contains("its folder does not exist"), "{error}");
    assert!(!runs.run("run").exists(), "nothing is written");
}

#[test]
fn processes_share_one_clock_within_the_stated_error() {
    let runs = Runs::new("trace-processes");
    let dir = format!("run.dir={}", runs.run("run").display());
    let config = runs.config(&[&["layout.ranks=2", "layout.dp=2", "layout.ep=2", "run.steps=4", &dir]]);
    let (file, trace) = (runs.path().join("run.toml"), runs.path().join("trace.json"));
    std::fs::write(&file, config.to_toml()).expect("a configuration");
    let mut command = Command::new(env!("CARGO_BIN_EXE_plica"));
    command.args(["launch", "--nproc", "2", "--over", "tcp", "--", "pretrain", "--config"]).arg(&file);
    let done = command.arg("--trace").arg(&trace).output().expect("the program runs");
    let text = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{text}{}", String::from_utf8_lossy(&done.stdout));
    let traced = Traced::read(&trace, &runs.run("run"), config);
    traced.check(2..=4);
    let error = |rank: usize| traced.about["ranks"][rank]["clock"]["error_ns"].as_u64().expect("an error");
    assert!(error(0) == 0 && error(1) > 0, "{}", traced.about);
    // Nobody has all of a collective before everybody has begun it.
    let begins = |rank: u64| -> BTreeMap<(String, u64), &Event> {
        let of = traced.of(rank).filter(|e| e.is_operation() && e.args["group"] == "world");
        of.map(|e| ((e.args["group"].to_string(), e.number("sequence")), e)).collect()
    };
    let (first, second) = (begins(0), begins(1));
    assert!(!first.is_empty() && first.len() == second.len());
    for (key, one) in &first {
        let other = second[key];
        let slack = error(1);
        assert!(
            one.end + slack >= other.start && other.end + slack >= one.start,
            "{slack}: {one:?} {other:?}"
        );
    }
}
