//! `plica launch`: starts the processes of a job on this machine, passes their words on, and ends all of them when one
//! fails, when the user asks, or when it is ended itself. Over sockets it starts each process with the variables that
//! torchrun would set; over MPI it finds the mpirun of the library and its flags.

mod mpirun;
mod output;
mod supervise;
mod watch;

use std::ffi::OsString;
use std::process::{Command, ExitCode, Stdio};

use clap::{Args, Parser};
use plica_comm::environment::VARIABLES;
use plica_comm::rendezvous::free_port;

use super::Surroundings;
use super::job::{HAS_MPI, Over};
use output::Output;
use supervise::Started;
use watch::Watch;

pub(super) use watch::follow;

/// Name of the variable that says what connects processes.
pub(super) const TRANSPORT: &str = "PLICA_TRANSPORT";
/// Name of the variable that says where the launcher listens; processes that it started follow it.
pub(super) const WATCH: &str = "PLICA_WATCH";
/// Most processes of a job on one machine: more is a slip of the finger.
const MOST: usize = 256;

/// What a build without MPI says.
#[cfg(not(feature = "mpi"))]
pub(super) const NO_MPI: &str = "this plica was built without MPI: build it with `cargo build --release --features mpi` \
                                 (OpenMPI or MPICH with headers, and libclang), or use --over tcp";

const AFTER: &str = "\
Each process runs one rank. Everything after -- is a command of plica, as it is typed without a launcher; --nproc takes \
the place of --ranks. Rank 0 prints and writes for all; errors come from the rank that failed.

Examples:
  plica launch --nproc 4 -- pretrain --set layout.tp=2 --set layout.ep=2
  plica launch --nproc 2 --over tcp --deadline 30 -- pretrain --preset tiny
  plica launch --nproc 8 -- verify

Over MPI the same with your own mpirun: mpirun -n 4 plica pretrain. On several machines: torchrun, srun or mpirun; see \
docs/launch.md for the variables, the errors and recipes.

One process that ends with an error, or is killed, ends the job within seconds; one that hangs at the deadline \
(--deadline). Ctrl-C stops after the step with a checkpoint, twice at once.";

/// Arguments of `plica launch`.
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub(super) struct Launch {
    /// Processes to start on this machine.
    #[arg(long, value_name = "N")]
    nproc: usize,
    /// The command of plica and its arguments.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

impl Launch {
    pub(super) fn run(mut self, surroundings: &Surroundings) -> anyhow::Result<ExitCode> {
        let program =
            |name: &OsString| std::path::Path::new(name).file_stem().is_some_and(|stem| stem == "plica");
        if self.command.first().is_some_and(program) {
            self.command.remove(0);
        }
        // A mistake in the command is told once, before anything starts.
        let typed = [OsString::from("plica")].into_iter().chain(self.command.iter().cloned());
        if let Err(error) = super::Arguments::try_parse_from(typed) {
            error.print()?;
            return Ok(ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2)));
        }
        let deadline = surroundings.deadline.map(|limit| limit.as_secs().to_string());
        let given = deadline.map_or(Vec::new(), |seconds| vec!["--deadline".into(), seconds.into()]);
        let over = surroundings.over.unwrap_or(if HAS_MPI { Over::Mpi } else { Over::Tcp });
        start(surroundings, over, self.nproc, given.into_iter().chain(self.command).collect())
    }
}

/// Starts so many processes of this program with these arguments, and stays until they have ended.
///
/// # Errors
/// Nothing could be started.
pub(super) fn start(
    surroundings: &Surroundings,
    over: Over,
    count: usize,
    arguments: Vec<OsString>,
) -> anyhow::Result<ExitCode> {
    anyhow::ensure!((1..=MOST).contains(&count), "{count} processes: from 1 to {MOST} on one machine");
    if let Some(seat) = surroundings.seat()? {
        anyhow::bail!(
            "this is already rank {} of {} (from {}): start the processes with that launcher or with plica launch, not both",
            seat.rank,
            seat.world,
            seat.source.name()
        );
    }
    let watch = Watch::new()?;
    let job = Job { executable: std::env::current_exe()?, arguments, count, over, watch: &watch };
    let output = Output::default();
    let started = match over {
        Over::Tcp => job.over_sockets(&output)?,
        Over::Mpi => job.over_mpi(&output)?,
    };
    Ok(supervise::stay(started, &watch, output, surroundings.stop))
}

/// What is to be started.
struct Job<'a> {
    executable: std::path::PathBuf,
    arguments: Vec<OsString>,
    count: usize,
    over: Over,
    watch: &'a Watch,
}

impl Job<'_> {
    /// A command that knows no other launcher, and is out of reach of the keys that this terminal sends.
    fn command(&self, program: &std::path::Path) -> Command {
        let mut command = Command::new(program);
        for name in VARIABLES {
            command.env_remove(name);
        }
        command.env(TRANSPORT, self.over.name()).env(WATCH, self.watch.address()).stdin(Stdio::null());
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        command
    }

    fn over_sockets(&self, output: &Output) -> anyhow::Result<Vec<Started>> {
        let port = free_port().ok_or_else(|| anyhow::anyhow!("no free port on this machine"))?;
        let mut started = Vec::new();
        for rank in 0..self.count {
            let mut command = self.command(&self.executable);
            command
                .args(&self.arguments)
                .env("MASTER_ADDR", "127.0.0.1")
                .env("MASTER_PORT", port.to_string());
            for (name, value) in [
                ("RANK", rank),
                ("LOCAL_RANK", rank),
                ("WORLD_SIZE", self.count),
                ("LOCAL_WORLD_SIZE", self.count),
            ] {
                command.env(name, value.to_string());
            }
            // Rank 0 draws its progress on the terminal, where there is one.
            let draws = rank == 0 && super::interactive();
            command.stderr(if draws { Stdio::inherit() } else { Stdio::piped() });
            // When one cannot start, those before it see the launcher go.
            started.push(Started::new(Some(rank), command, output)?);
        }
        Ok(started)
    }

    fn over_mpi(&self, output: &Output) -> anyhow::Result<Vec<Started>> {
        let mpirun = mpirun::find()?;
        let mut command = self.command(&mpirun.program);
        command.args(mpirun.flags(self.count)).arg(&self.executable).args(&self.arguments);
        command.envs(mpirun.variables()).stderr(Stdio::piped());
        Ok(vec![Started::new(None, command, output)?])
    }
}
