//! The mpirun that belongs to the MPI library in this program, and the flags with which it starts more processes than
//! cores, as any user, without words of its own.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// The families of MPI that can be told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    OpenMpi,
    Mpich,
}

impl Family {
    /// The family of a library or of a launcher, by what it says of its version.
    fn of(version: &str) -> Option<Family> {
        let has = |words: &[&str]| words.iter().any(|word| version.contains(word));
        if has(&["Open MPI", "OpenRTE", "open-mpi"]) {
            Some(Family::OpenMpi)
        } else if has(&["MPICH", "HYDRA", "Intel(R) MPI", "MVAPICH"]) {
            Some(Family::Mpich)
        } else {
            None
        }
    }

    /// Names that its launcher has.
    const fn programs(self) -> [&'static str; 4] {
        match self {
            Family::OpenMpi => ["mpirun.openmpi", "mpirun", "mpiexec.openmpi", "mpiexec"],
            Family::Mpich => ["mpirun.mpich", "mpiexec.hydra", "mpirun", "mpiexec"],
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Family::OpenMpi => "OpenMPI",
            Family::Mpich => "MPICH",
        }
    }
}

/// A launcher of the right family.
#[derive(Debug)]
pub(super) struct MpiRun {
    pub(super) program: PathBuf,
    family: Family,
}

impl MpiRun {
    /// Flags for so many processes on this machine.
    pub(super) fn flags(&self, count: usize) -> Vec<OsString> {
        let count = count.to_string();
        let flags: &[&str] = match self.family {
            // Without a place each process may use every core; the ranks' threads are few enough.
            Family::OpenMpi => &["--oversubscribe", "--bind-to", "none", "-n", &count],
            Family::Mpich => &["-bind-to", "none", "-n", &count],
        };
        flags.iter().map(OsString::from).collect()
    }

    /// Variables that it needs.
    pub(super) fn variables(&self) -> Vec<(&'static str, &'static str)> {
        match self.family {
            // Refusing root is for clusters; in a container there is nobody else.
            Family::OpenMpi => {
                vec![("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]
            }
            Family::Mpich => Vec::new(),
        }
    }
}

/// The version of the MPI library in this program.
#[cfg(feature = "mpi")]
fn library() -> anyhow::Result<String> {
    Ok(plica_comm::mpi::library_version()?)
}

/// There is none.
#[cfg(not(feature = "mpi"))]
fn library() -> anyhow::Result<String> {
    anyhow::bail!(super::NO_MPI)
}

/// Finds the launcher of the library in this program.
///
/// # Errors
/// A build without MPI, a library of another family, or no launcher of that family.
pub(super) fn find() -> anyhow::Result<MpiRun> {
    let library = library()?;
    let family = Family::of(&library).ok_or_else(|| {
        anyhow::anyhow!(
            "the MPI library says {library:?}, of which the launcher is not known: start with your own mpirun"
        )
    })?;
    for program in family.programs() {
        let version = Command::new(program).arg("--version").stdin(Stdio::null()).output();
        let Ok(version) = version else { continue };
        let text = [version.stdout, version.stderr].concat();
        if Family::of(&String::from_utf8_lossy(&text)) == Some(family) {
            return Ok(MpiRun { program: program.into(), family });
        }
    }
    anyhow::bail!(
        "no mpirun of {} in PATH (looked for {}): install it, start with your own, or use --over tcp",
        family.name(),
        family.programs().join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_are_told_by_what_libraries_and_launchers_say() {
        for (version, family) in [
            ("Open MPI v4.1.4, package: Debian OpenMPI", Some(Family::OpenMpi)),
            ("mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org", Some(Family::OpenMpi)),
            ("MPICH Version:\t4.0.2\nMPICH Release date:", Some(Family::Mpich)),
            ("HYDRA build details:\n    Version:                                 4.0.2", Some(Family::Mpich)),
            ("Intel(R) MPI Library for Linux* OS", Some(Family::Mpich)),
            ("slurm 22.05", None),
        ] {
            assert_eq!(Family::of(version), family, "{version}");
        }
    }
}
