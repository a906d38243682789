//! The job that this process belongs to: its seat, the network to the other processes, and who says what when it ends.
//! Without a launcher's variables all ranks are threads of this process, and nothing here does anything.

use std::process::ExitCode;
use std::time::Duration;

use clap::ValueEnum;
use plica_comm::CommError;
use plica_comm::environment::{Seat, Source};
use plica_comm::launch::{Backend, Cause, LaunchError};
use plica_comm::process::{ProcessOptions, Processes, Transport};
use plica_comm::tcp;

use super::Surroundings;
use crate::agreement::{Agreement, Elsewhere};
use crate::trainer::{DEADLINE, Ranks};

/// How long processes wait for each other at the start where nothing else is said.
const MEETING: Duration = Duration::from_secs(60);
/// How long a process that did not fail itself leaves the floor to the one that did, by transport: an abort over MPI
/// ends that one too.
const COURTESY: [(&str, Duration); 2] =
    [("mpi", Duration::from_secs(2)), ("tcp", Duration::from_millis(300))];

/// Whether this program was built with MPI.
pub(super) const HAS_MPI: bool = cfg!(feature = "mpi");

/// What connects processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Over {
    /// The MPI library that plica was built with (feature `mpi`).
    Mpi,
    /// Sockets.
    Tcp,
}

impl Over {
    /// Word on the command line.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Over::Mpi => "mpi",
            Over::Tcp => "tcp",
        }
    }
}

/// This process's part of a job.
pub(super) struct Job {
    pub(super) backend: Backend,
    seat: Option<Seat>,
    deadline: Option<Duration>,
}

impl Job {
    /// Runs a command in the job of the surroundings: connects, runs, and ends in order, or with the first cause on
    /// every process.
    ///
    /// # Errors
    /// There is no way to the other processes.
    pub(super) fn run(
        surroundings: &Surroundings,
        command: impl FnOnce(&Job) -> anyhow::Result<ExitCode>,
    ) -> anyhow::Result<ExitCode> {
        let job = Job::connect(surroundings)?;
        let version = format!("version = {:?}", env!("CARGO_PKG_VERSION"));
        match job.agreement().alike("program", &version).and_then(|()| command(&job)) {
            Ok(code) => {
                job.close()?;
                Ok(code)
            }
            Err(error) => Ok(job.fail(&error)),
        }
    }

    fn connect(surroundings: &Surroundings) -> anyhow::Result<Job> {
        let seat = surroundings.seat()?;
        let backend = match &seat {
            None => Backend::Threads,
            Some(seat) => {
                let limit = surroundings.deadline.unwrap_or(MEETING);
                let transport = match choose(seat, surroundings.over)? {
                    Over::Tcp => tcp::connect(seat, limit)?,
                    Over::Mpi => connect_mpi(seat)?,
                };
                let here = seat.local_world.unwrap_or(seat.world);
                let options = ProcessOptions { local_rank: seat.local_rank, ..ProcessOptions::new(here) };
                let processes = Processes::new(transport, options);
                processes.abort_on_panic();
                Backend::Processes(processes)
            }
        };
        Ok(Job { backend, seat, deadline: surroundings.deadline })
    }

    /// Whether this process prints and writes for all.
    pub(super) fn is_first(&self) -> bool {
        self.backend.is_first()
    }

    /// What the processes agree on outside of runs.
    pub(super) fn agreement(&self) -> Agreement<'_> {
        Agreement { backend: &self.backend, limit: self.deadline() }
    }

    /// How long a rank waits for another.
    pub(super) fn deadline(&self) -> Duration {
        self.deadline.unwrap_or(DEADLINE)
    }

    /// Where the ranks of a run are.
    pub(super) fn ranks(&self) -> Ranks<'_> {
        let here = self.seat.as_ref().and_then(|seat| seat.local_world);
        let machines = self.seat.as_ref().zip(here).map_or(1, |(seat, here)| seat.world.div_ceil(here));
        Ranks { backend: &self.backend, machines, deadline: self.deadline() }
    }

    fn close(self) -> anyhow::Result<()> {
        match self.backend {
            Backend::Threads => Ok(()),
            Backend::Processes(processes) => Ok(processes.close()?),
        }
    }

    /// Says why the job ends, and ends it: the process that failed first says its error, the others one line.
    fn fail(&self, error: &anyhow::Error) -> ExitCode {
        let Backend::Processes(processes) = &self.backend else { return super::fail(error) };
        let own = processes.rank();
        match verdict(error, own) {
            Verdict::Own(text) => eprintln!("error: {text}"),
            Verdict::Other(rank) => {
                let pause = COURTESY.iter().find(|(name, _)| *name == processes.transport());
                std::thread::sleep(pause.map_or(Duration::ZERO, |(_, pause)| *pause));
                eprintln!("rank {own}: stopped, because rank {rank} failed first");
            }
        }
        processes.abort(1);
        ExitCode::FAILURE
    }
}

/// Who has to say what.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    /// This process, and this text.
    Own(String),
    /// The process of that rank.
    Other(usize),
}

/// What the process of rank `own` says about an error. The first cause is told by its own rank; that of a process
/// which is gone or does not answer by the lowest of the others.
fn verdict(error: &anyhow::Error, own: usize) -> Verdict {
    let speaks_for = |lost: usize| usize::from(lost == 0);
    if let Some(launch) = error.downcast_ref::<LaunchError>() {
        let speaker = match launch.cause {
            Cause::Lost(_) => speaks_for(launch.rank),
            _ => launch.rank,
        };
        return if speaker == own { Verdict::Own(launch.to_string()) } else { Verdict::Other(launch.rank) };
    }
    if let Some(CommError::Aborted { rank, cause, .. }) = error.downcast_ref::<CommError>()
        && *rank != own
    {
        let text = format!("rank {rank}: {cause}");
        return if speaks_for(*rank) == own { Verdict::Own(text) } else { Verdict::Other(*rank) };
    }
    if let Some(elsewhere) = error.downcast_ref::<Elsewhere>() {
        return Verdict::Other(elsewhere.rank);
    }
    Verdict::Own(format!("rank {own}: {error:#}"))
}

/// What connects the processes of a seat: what was asked for, else MPI where it can start from what the launcher has
/// set up, else sockets.
fn choose(seat: &Seat, over: Option<Over>) -> anyhow::Result<Over> {
    let over = match over {
        Some(over) => over,
        None if HAS_MPI && seat.offers_mpi => Over::Mpi,
        None => Over::Tcp,
    };
    let by_mpi = matches!(seat.source, Source::OpenMpi | Source::Mpich);
    anyhow::ensure!(
        over == Over::Mpi || !by_mpi || seat.master.is_some(),
        "{} started this process as rank {} of {}, and {}: build with `cargo build --release --features mpi`, or set \
         MASTER_ADDR and MASTER_PORT to a host and a free port for sockets",
        seat.source.name(),
        seat.rank,
        seat.world,
        if HAS_MPI { "--over tcp needs a meeting place" } else { "this plica was built without MPI" },
    );
    Ok(over)
}

#[cfg(feature = "mpi")]
fn connect_mpi(seat: &Seat) -> anyhow::Result<Box<dyn Transport>> {
    let transport = plica_comm::mpi::connect(plica_comm::mpi::MpiOptions::default())?;
    let found = (transport.rank(), transport.world());
    anyhow::ensure!(
        found == (seat.rank, seat.world),
        "the launcher's variables (of {}) say rank {} of {}, the MPI library ({}) says rank {} of {}: start plica with the \
         mpirun of the library that it was built with",
        seat.source.name(),
        seat.rank,
        seat.world,
        plica_comm::mpi::library_version()?,
        found.0,
        found.1
    );
    Ok(transport)
}

#[cfg(not(feature = "mpi"))]
fn connect_mpi(_: &Seat) -> anyhow::Result<Box<dyn Transport>> {
    anyhow::bail!(super::launch::NO_MPI)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(rank: usize, cause: Cause) -> anyhow::Error {
        LaunchError { rank, cause, consequences: Vec::new() }.into()
    }

    #[test]
    fn the_first_cause_is_said_once_by_its_own_rank() {
        let error = launch(2, Cause::Panic("broken".into()));
        assert_eq!(verdict(&error, 2), Verdict::Own("rank 2: panicked: broken".into()));
        assert_eq!(verdict(&error, 0), Verdict::Other(2));
        // A rank that cannot speak is spoken for by one other.
        let lost = |rank| launch(rank, Cause::Lost("its process is gone".into()));
        let own =
            |rank, own| matches!(verdict(&lost(rank), own), Verdict::Own(text) if text.contains("gone"));
        assert!(own(3, 0) && !own(3, 1) && own(0, 1) && !own(0, 2));
        let elsewhere: anyhow::Error = Elsewhere { rank: 1, text: "no data".into() }.into();
        assert_eq!(verdict(&elsewhere, 0), Verdict::Other(1));
        let own = anyhow::anyhow!("no such file");
        assert_eq!(verdict(&own, 5), Verdict::Own("rank 5: no such file".into()));
    }
}
