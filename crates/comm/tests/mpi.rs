//! The MPI transport with really separate processes. Run by `cargo test --features mpi`, this program starts
//! itself under the launcher of the MPI library that it was built with, once for each mode, and looks at how the
//! job ends. Run by the launcher it is one process of that job. Under a launcher of your own, `bench` (and, if you
//! like, the most bytes of one call) times collectives.

use std::io::Read as _;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use plica_comm::bench::{Collective, time_collective};
use plica_comm::mpi::{MpiOptions, connect, library_version};
use plica_comm::{CommError, LaunchOptions, ProcessOptions, Processes, Purpose, RankContext, Reduce, suite};
use plica_kernels::{Category, Tensor};

/// Longest time of one job.
const JOB_WITHIN: Duration = Duration::from_secs(240);

type Check = fn(&Ended) -> Result<(), String>;

/// Name of a mode, processes, and how its job must end.
const MODES: [(&str, usize, Check); 5] = [
    ("suite", 5, |end| end.succeeds("suite passed")),
    ("cut", 3, |end| end.succeeds("cut transfers arrive")),
    ("panic", 3, |end| end.fails("rank 1 panics outside of a run")),
    ("kill", 3, |end| end.fails("")),
    ("deadline", 2, |end| end.fails("not arrived: [1]; ranks in no operation: [1]")),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    match arguments.first().map(String::as_str) {
        Some("process") => one_process(&arguments[1]),
        Some("bench") => bench(arguments.get(1).map(|bytes| bytes.parse().expect("bytes of a call"))),
        filter => all_modes(filter.unwrap_or_default()),
    }
}

/// How a job ended.
struct Ended {
    code: Option<i32>,
    output: String,
}

impl Ended {
    fn succeeds(&self, text: &str) -> Result<(), String> {
        let whole = self.code == Some(0) && self.output.contains(text);
        if whole { Ok(()) } else { Err(format!("exit code {:?}, output:\n{}", self.code, self.output)) }
    }

    fn fails(&self, text: &str) -> Result<(), String> {
        let whole = self.code != Some(0) && self.code.is_some() && self.output.contains(text);
        if whole { Ok(()) } else { Err(format!("exit code {:?}, output:\n{}", self.code, self.output)) }
    }
}

/// Starts a job for every mode.
fn all_modes(filter: &str) -> ExitCode {
    let version = library_version().expect("a version");
    println!("{version}");
    let mut failed = 0;
    for (name, processes, check) in MODES.iter().filter(|(name, ..)| name.contains(filter)) {
        let started = Instant::now();
        let result = run(&version, name, *processes).and_then(|ended| check(&ended));
        let verdict = if result.is_ok() { "ok" } else { "FAILED" };
        println!("{name} over {processes} processes: {verdict}, {:.1} s", started.elapsed().as_secs_f64());
        if let Err(text) = result {
            println!("{text}");
            failed += 1;
        }
    }
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn run(version: &str, mode: &str, processes: usize) -> Result<Ended, String> {
    let is_open_mpi = version.contains("Open MPI");
    let names = if is_open_mpi { ["mpirun.openmpi", "mpirun"] } else { ["mpirun.mpich", "mpirun"] };
    let mut last = String::new();
    for name in names {
        let mut command = Command::new(name);
        if is_open_mpi {
            command.args(["--oversubscribe", "--allow-run-as-root"]);
        }
        command.arg("-n").arg(processes.to_string());
        command.arg(std::env::current_exe().map_err(|e| e.to_string())?).args(["process", mode]);
        match command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn() {
            Ok(child) => return wait(child),
            Err(error) => last = format!("{name}: {error}"),
        }
    }
    Err(format!("no launcher: {last}"))
}

fn wait(mut child: Child) -> Result<Ended, String> {
    let (mut out, mut err) = (child.stdout.take().expect("piped"), child.stderr.take().expect("piped"));
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        out.read_to_string(&mut text).map(|_| text)
    });
    let errors = std::thread::spawn(move || {
        let mut text = String::new();
        err.read_to_string(&mut text).map(|_| text)
    });
    let until = Instant::now() + JOB_WITHIN;
    let status = loop {
        if let Some(status) = child.try_wait().map_err(|e| e.to_string())? {
            break status;
        }
        if Instant::now() > until {
            child.kill().map_err(|e| e.to_string())?;
            return Err(format!("the job did not end within {JOB_WITHIN:?}"));
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    let text = |thread: std::thread::JoinHandle<std::io::Result<String>>| {
        thread.join().expect("a reader does not panic").unwrap_or_else(|e| e.to_string())
    };
    Ok(Ended { code: status.code().or(Some(-1)), output: text(reader) + &text(errors) })
}

fn seat(options: MpiOptions) -> Processes {
    let transport = connect(options).expect("the launcher has started this process");
    let world = transport.world();
    let processes = Processes::new(transport, ProcessOptions::new(world));
    processes.abort_on_panic();
    processes
}

/// What one process of a job does.
fn one_process(mode: &str) -> ExitCode {
    let call_bytes = if mode == "cut" { 1000 } else { MpiOptions::default().call_bytes };
    let processes = seat(MpiOptions { call_bytes });
    let rank = processes.rank();
    let result = match mode {
        "suite" => passes_the_suite(&processes),
        "cut" => cut(&processes),
        "panic" => {
            processes.exchange("start", &[], Duration::from_secs(60)).expect("all are here");
            assert!(rank != 1, "rank 1 panics outside of a run");
            processes.exchange("end", &[], Duration::from_secs(200)).map(|_| ()).map_err(|e| e.to_string())
        }
        "kill" => {
            processes.exchange("start", &[], Duration::from_secs(60)).expect("all are here");
            if rank == 1 {
                let own = std::process::id().to_string();
                Command::new("kill").args(["-9", &own]).status().expect("a shell tool");
            }
            processes.exchange("end", &[], Duration::from_secs(200)).map(|_| ()).map_err(|e| e.to_string())
        }
        "deadline" => late(&processes),
        other => Err(format!("no mode {other}")),
    };
    match result {
        Ok(()) => match processes.close() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("rank {rank}: {error}");
                ExitCode::FAILURE
            }
        },
        Err(error) => {
            eprintln!("rank {rank}: {error}");
            processes.abort(1);
            ExitCode::FAILURE
        }
    }
}

fn passes_the_suite(processes: &Processes) -> Result<(), String> {
    let results = suite::run_over(processes);
    let failed: Vec<String> = results
        .iter()
        .filter_map(|(name, result)| result.as_ref().err().map(|error| format!("{name}: {error}")))
        .collect();
    if processes.rank() == 0 && failed.is_empty() {
        println!("suite passed: {} cases", results.len());
    }
    if failed.is_empty() { Ok(()) } else { Err(failed.join("\n")) }
}

/// Transfers that take several calls each.
fn cut(processes: &Processes) -> Result<(), String> {
    let run = processes.run(3, LaunchOptions::default(), |ctx: RankContext| -> Result<(), CommError> {
        let x = Tensor::<f32>::full(&ctx.device, [50_001], ctx.rank as f32, Category::Activation);
        let all = ctx.world.all_gather(Purpose::Metrics, &x)?.to_vec();
        let expected = |(i, v): (usize, &f32)| *v == (i / 50_001) as f32;
        assert!(all.iter().enumerate().all(expected), "gathered over several calls");
        let sum = ctx.world.all_reduce(Purpose::Metrics, &x, Reduce::Sum)?.to_vec();
        assert!(sum.iter().all(|&v| v == 3.0), "summed over several calls");
        Ok(())
    });
    if processes.rank() == 0 && run.is_ok() {
        println!("cut transfers arrive");
    }
    run.map(|_| ()).map_err(|error| error.to_string())
}

/// Rank 1 computes for longer than the deadline.
fn late(processes: &Processes) -> Result<(), String> {
    let options = LaunchOptions { deadline: Duration::from_secs(2), ..LaunchOptions::default() };
    let run = processes.run(2, options, |ctx| {
        if ctx.rank == 1 {
            std::thread::sleep(Duration::from_secs(8));
            return Ok(());
        }
        ctx.world.barrier(Purpose::Control)
    });
    run.map(|_| ()).map_err(|error| error.to_string())
}

/// Times of the collectives as the processes of a job that somebody else has started.
fn bench(call_bytes: Option<usize>) -> ExitCode {
    let call_bytes = call_bytes.unwrap_or(MpiOptions::default().call_bytes);
    let processes = seat(MpiOptions { call_bytes });
    let run = processes.run(processes.world(), LaunchOptions::default(), |ctx| -> Result<(), CommError> {
        for bytes in [4 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20] {
            for collective in Collective::ALL {
                let repetitions = if bytes < 1 << 20 { 50 } else { 9 };
                let measured = time_collective(&ctx.world, collective, bytes, repetitions)?;
                if ctx.rank == 0 {
                    let (us, rate) = (measured.median_ns / 1e3, measured.gb_per_s());
                    println!("{:>14} {bytes:>9} bytes: {us:>10.1} us, {rate:.2} GB/s", collective.name());
                }
            }
        }
        Ok(())
    });
    match run {
        Ok(_) => processes.close().map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS),
        Err(error) => {
            eprintln!("{error}");
            processes.abort(1);
            ExitCode::FAILURE
        }
    }
}
