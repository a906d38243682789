//! Which rank of which job this process is, from the variables that launchers set. A pure function of a look-up, so
//! that only the command line touches the real environment.
//!
//! | launcher | rank | world | rank on the machine | ranks on the machine |
//! |---|---|---|---|---|
//! | torchrun, `plica launch` | `RANK` | `WORLD_SIZE` | `LOCAL_RANK` | `LOCAL_WORLD_SIZE` |
//! | OpenMPI's mpirun | `OMPI_COMM_WORLD_RANK` | `OMPI_COMM_WORLD_SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK` | `OMPI_COMM_WORLD_LOCAL_SIZE` |
//! | MPICH's mpirun | `PMI_RANK` | `PMI_SIZE` | `MPI_LOCALRANKID` | `MPI_LOCALNRANKS` |
//! | Slurm's srun | `SLURM_PROCID` | `SLURM_STEP_NUM_TASKS`, `SLURM_NTASKS` | `SLURM_LOCALID` | |
//!
//! Two launchers that disagree are refused, with two exceptions in which one of them started the other: an MPI launcher
//! inside a Slurm job (Slurm then numbers mpirun's daemons), and torchrun inside one (it sets `TORCHELASTIC_RUN_ID`).
//! Slurm also sets `SLURM_PROCID` in the batch script itself, which is no task: there `SLURM_STEP_ID` is missing.
//! Leaves out how the processes meet: that is `rendezvous`, or the MPI library.

#[cfg(test)]
mod tests;

/// Who started this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Variables in the manner of torchrun; `plica launch` sets them too.
    Torchrun,
    /// Slurm's srun.
    Slurm,
    /// OpenMPI's mpirun.
    OpenMpi,
    /// The mpirun of MPICH and its relatives.
    Mpich,
}

impl Source {
    /// Name in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Source::Torchrun => "torchrun-style variables",
            Source::Slurm => "Slurm",
            Source::OpenMpi => "OpenMPI's mpirun",
            Source::Mpich => "MPICH's mpirun",
        }
    }
}

/// This process's place in a job of several processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seat {
    /// Own rank.
    pub rank: usize,
    /// Processes of the job.
    pub world: usize,
    /// Own rank among the processes of this machine, where the launcher says it.
    pub local_rank: Option<usize>,
    /// Processes of this machine, where the launcher says it.
    pub local_world: Option<usize>,
    /// Who says so.
    pub source: Source,
    /// Name of the variable that holds the world's size, for messages.
    pub world_variable: &'static str,
    /// Whether an MPI library can start from what the launcher has set up.
    pub offers_mpi: bool,
    /// Where rank 0 listens when processes meet without MPI: host and port.
    pub master: Option<(String, u16)>,
}

/// Variables that do not describe a seat.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EnvironmentError {
    /// One of two that belong together is not there.
    #[error(
        "{missing} is not set, but {present} = {value:?} is: a job of several processes needs both; set {missing}, or unset \
         {present} to run in one process"
    )]
    Missing {
        /// What is not there.
        missing: &'static str,
        /// What is.
        present: &'static str,
        /// Its value.
        value: String,
    },
    /// A variable without a value.
    #[error("{variable} = \"\" is empty: {rule}; set it, or unset it to run in one process")]
    Empty {
        /// Its name.
        variable: &'static str,
        /// What it has to be.
        rule: &'static str,
    },
    /// A value of another kind.
    #[error("{variable} = {value:?}: {rule}")]
    Value {
        /// Its name.
        variable: &'static str,
        /// Its value.
        value: String,
        /// What it has to be.
        rule: &'static str,
    },
    /// A rank that the world does not have.
    #[error(
        "{variable} = {rank}, but {world_variable} = {world}: ranks go from 0 to {}; each process needs its own rank below the \
         number of processes",
        world - 1
    )]
    Outside {
        /// Variable of the rank.
        variable: &'static str,
        /// The rank.
        rank: usize,
        /// Variable of the world.
        world_variable: &'static str,
        /// The world.
        world: usize,
    },
    /// Two launchers that do not agree.
    #[error(
        "{} = {}, but {} = {}: two launchers give this process different places; unset the variables of the one that did \
         not start it",
        first.0, first.1, second.0, second.1
    )]
    Contradiction {
        /// A variable and its value.
        first: (&'static str, usize),
        /// The one that says otherwise.
        second: (&'static str, usize),
    },
}

/// What one launcher calls its variables.
struct Names {
    source: Source,
    rank: &'static str,
    world: &'static [&'static str],
    local_rank: &'static str,
    local_world: Option<&'static str>,
}

const TORCHRUN: Names = Names {
    source: Source::Torchrun,
    rank: "RANK",
    world: &["WORLD_SIZE"],
    local_rank: "LOCAL_RANK",
    local_world: Some("LOCAL_WORLD_SIZE"),
};
const OPEN_MPI: Names = Names {
    source: Source::OpenMpi,
    rank: "OMPI_COMM_WORLD_RANK",
    world: &["OMPI_COMM_WORLD_SIZE"],
    local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
    local_world: Some("OMPI_COMM_WORLD_LOCAL_SIZE"),
};
const MPICH: Names = Names {
    source: Source::Mpich,
    rank: "PMI_RANK",
    world: &["PMI_SIZE"],
    local_rank: "MPI_LOCALRANKID",
    local_world: Some("MPI_LOCALNRANKS"),
};
const SLURM: Names = Names {
    source: Source::Slurm,
    rank: "SLURM_PROCID",
    world: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
    local_rank: "SLURM_LOCALID",
    local_world: None,
};

/// Every variable by which a process takes itself for one of several; a launcher inside another's job clears them.
pub const VARIABLES: &[&str] = &[
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "PMIX_RANK",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    "SLURM_PROCID",
    "SLURM_STEP_ID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NTASKS",
    "SLURM_LOCALID",
];

/// The value of a variable.
type Get<'a> = &'a dyn Fn(&str) -> Option<String>;

const COUNT: &str = "it has to be the number of processes, 1 or more";
const RANK: &str = "it has to be a rank, a whole number from 0";
const PORT: &str = "it has to be a port, a whole number from 1 to 65535";
const HOST: &str = "it has to be the host name or address of rank 0";

/// The seat of this process; none where no launcher has set anything.
///
/// # Errors
/// Variables that are missing, empty, of another kind, or contradict each other.
pub fn read_environment(get: impl Fn(&str) -> Option<String>) -> Result<Option<Seat>, EnvironmentError> {
    let get: Get<'_> = &get;
    let torchrun = read(&TORCHRUN, get)?;
    let mpi = match (read(&OPEN_MPI, get)?, read(&MPICH, get)?) {
        (Some(open_mpi), Some(mpich)) => Some(agreed(open_mpi, &mpich)?),
        (open_mpi, mpich) => open_mpi.or(mpich),
    };
    let in_batch_script = get("SLURM_JOB_ID").is_some() && get("SLURM_STEP_ID").is_none();
    // Read only where nobody else has spoken, or to compare: the daemons of an MPI launcher are Slurm's tasks.
    let slurm = || if in_batch_script { Ok(None) } else { read(&SLURM, get) };
    let nested = get("TORCHELASTIC_RUN_ID").is_some();
    let found = match (mpi, torchrun) {
        (Some(mpi), Some(torchrun)) => Some(agreed(mpi, &torchrun)?),
        (Some(mpi), None) => Some(mpi),
        (None, Some(torchrun)) if nested => Some(torchrun),
        (None, Some(torchrun)) => match slurm()? {
            Some(slurm) => Some(agreed(slurm, &torchrun)?),
            None => Some(torchrun),
        },
        (None, None) => slurm()?,
    };
    let Some(mut seat) = found else { return Ok(None) };
    seat.master = master(get)?;
    if seat.source == Source::Slurm {
        seat.offers_mpi = ["PMI_RANK", "PMIX_RANK"].iter().any(|name| get(name).is_some());
        seat.master = seat.master.or_else(|| slurm_master(get));
    }
    Ok(Some(seat))
}

/// The seat that one launcher's variables describe.
fn read(names: &Names, get: Get<'_>) -> Result<Option<Seat>, EnvironmentError> {
    let world_variable = names.world.iter().copied().find(|name| get(name).is_some());
    let (world_variable, rank) = match (world_variable, get(names.rank)) {
        (None, None) => return Ok(None),
        // In a Slurm job of one task these may be all there is.
        (Some(_), None) if names.source == Source::Slurm => return Ok(None),
        (Some(present), None) => return Err(missing(names.rank, present, get)),
        (None, Some(_)) => return Err(missing(names.world[0], names.rank, get)),
        (Some(world), Some(rank)) => (world, rank),
    };
    let world = number(world_variable, &get(world_variable).unwrap_or_default(), COUNT)?;
    if world == 0 {
        return Err(EnvironmentError::Value { variable: world_variable, value: "0".into(), rule: COUNT });
    }
    let rank = number(names.rank, &rank, RANK)?;
    let below = |variable: &'static str, rank: usize, world_variable: &'static str, world: usize| {
        let outside = EnvironmentError::Outside { variable, rank, world_variable, world };
        if rank < world { Ok(()) } else { Err(outside) }
    };
    below(names.rank, rank, world_variable, world)?;
    let optional = |name: &'static str, rule| get(name).map(|text| number(name, &text, rule)).transpose();
    let local_rank = optional(names.local_rank, RANK)?;
    let local_world = names.local_world.map(|name| optional(name, COUNT)).transpose()?.flatten();
    if let Some(local_rank) = local_rank {
        below(names.local_rank, local_rank, world_variable, world)?;
    }
    Ok(Some(Seat {
        rank,
        world,
        local_rank,
        local_world: local_world.filter(|count| (1..=world).contains(count)),
        source: names.source,
        world_variable,
        offers_mpi: matches!(names.source, Source::OpenMpi | Source::Mpich),
        master: None,
    }))
}

fn missing(missing: &'static str, present: &'static str, get: Get<'_>) -> EnvironmentError {
    EnvironmentError::Missing { missing, present, value: get(present).unwrap_or_default() }
}

fn number(variable: &'static str, text: &str, rule: &'static str) -> Result<usize, EnvironmentError> {
    match text.trim() {
        "" => Err(EnvironmentError::Empty { variable, rule }),
        trimmed => {
            trimmed.parse().map_err(|_| EnvironmentError::Value { variable, value: text.into(), rule })
        }
    }
}

/// The first of two seats, unless the second says otherwise.
fn agreed(first: Seat, second: &Seat) -> Result<Seat, EnvironmentError> {
    let names = |seat: &Seat| match seat.source {
        Source::Torchrun => TORCHRUN.rank,
        Source::Slurm => SLURM.rank,
        Source::OpenMpi => OPEN_MPI.rank,
        Source::Mpich => MPICH.rank,
    };
    if first.world != second.world {
        return Err(EnvironmentError::Contradiction {
            first: (first.world_variable, first.world),
            second: (second.world_variable, second.world),
        });
    }
    if first.rank != second.rank {
        return Err(EnvironmentError::Contradiction {
            first: (names(&first), first.rank),
            second: (names(second), second.rank),
        });
    }
    Ok(first)
}

/// MASTER_ADDR and MASTER_PORT.
fn master(get: Get<'_>) -> Result<Option<(String, u16)>, EnvironmentError> {
    let (host, port) = match (get("MASTER_ADDR"), get("MASTER_PORT")) {
        (None, None) => return Ok(None),
        (Some(_), None) => return Err(missing("MASTER_PORT", "MASTER_ADDR", get)),
        (None, Some(_)) => return Err(missing("MASTER_ADDR", "MASTER_PORT", get)),
        (Some(host), Some(port)) => (host.trim().to_string(), port),
    };
    if host.is_empty() {
        return Err(EnvironmentError::Empty { variable: "MASTER_ADDR", rule: HOST });
    }
    let number = number("MASTER_PORT", &port, PORT)?;
    match u16::try_from(number) {
        Ok(number) if number > 0 => Ok(Some((host, number))),
        _ => Err(EnvironmentError::Value { variable: "MASTER_PORT", value: port, rule: PORT }),
    }
}

/// Ports from which one is taken by the number of a Slurm job: below the range that systems hand out themselves.
const SLURM_PORTS: (u64, u64) = (20_000, 12_000);

/// The first host of a Slurm job, and a port that follows from its number: the same on every task.
fn slurm_master(get: Get<'_>) -> Option<(String, u16)> {
    let hosts = get("SLURM_STEP_NODELIST").or_else(|| get("SLURM_JOB_NODELIST"))?;
    let id = |name: &str| get(name).and_then(|text| text.trim().parse::<u64>().ok());
    let job = id("SLURM_JOB_ID")?;
    let step = id("SLURM_STEP_ID").unwrap_or(0);
    let port = SLURM_PORTS.0 + (job + 101 * (step % 1000)) % SLURM_PORTS.1;
    Some((first_host(&hosts)?, u16::try_from(port).ok()?))
}

/// The first host of a list as Slurm writes it: `gpu[03-07,9],login` has `gpu03` first.
fn first_host(list: &str) -> Option<String> {
    let (name, brackets) = match list.find(['[', ',']) {
        Some(at) if list[at..].starts_with('[') => (&list[..at], Some(&list[at + 1..])),
        Some(at) => (&list[..at], None),
        None => (list, None),
    };
    let digits = brackets.map_or("", |rest| &rest[..rest.find([']', ',', '-']).unwrap_or(rest.len())]);
    let host = format!("{}{digits}", name.trim());
    (!host.is_empty()).then_some(host)
}
