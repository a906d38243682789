//! S30: every way in which the variables of launchers are right or wrong.

use super::*;

/// The seat of such variables.
fn seat(variables: &[(&str, &str)]) -> Result<Option<Seat>, EnvironmentError> {
    read_environment(|name| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_string()))
}

/// Rank, world, who says so, and whether MPI can start.
fn found(variables: &[(&str, &str)]) -> (usize, usize, Source, bool) {
    let seat = seat(variables).expect("fit each other").expect("a seat");
    (seat.rank, seat.world, seat.source, seat.offers_mpi)
}

fn refused(variables: &[(&str, &str)], parts: &[&str]) {
    let text = seat(variables).expect_err("do not fit").to_string();
    for part in parts {
        assert!(text.contains(part), "no {part:?} in {text:?} of {variables:?}");
    }
}

#[test]
fn seats_of_every_launcher() {
    assert_eq!(seat(&[]), Ok(None));
    assert_eq!(seat(&[("LOCAL_RANK", "x"), ("MASTER_ADDR", "here")]), Ok(None), "no rank, no job");
    assert_eq!(found(&[("RANK", "3"), ("WORLD_SIZE", "4")]), (3, 4, Source::Torchrun, false));
    let open = [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2")];
    assert_eq!(found(&open), (1, 2, Source::OpenMpi, true));
    assert_eq!(found(&[("PMI_RANK", "0"), ("PMI_SIZE", "8")]), (0, 8, Source::Mpich, true));
    assert_eq!(found(&[("SLURM_PROCID", "5"), ("SLURM_NTASKS", "6")]), (5, 6, Source::Slurm, false));
    let step = [("SLURM_PROCID", "1"), ("SLURM_NTASKS", "16"), ("SLURM_STEP_NUM_TASKS", "2")];
    assert_eq!(found(&step), (1, 2, Source::Slurm, false), "a step may be smaller than its job");
    let pmix = [("SLURM_PROCID", "1"), ("SLURM_NTASKS", "2"), ("PMIX_RANK", "1")];
    assert_eq!(found(&pmix), (1, 2, Source::Slurm, true));
    let all = seat(&[
        ("RANK", "5"),
        ("WORLD_SIZE", "8"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "4"),
        ("MASTER_ADDR", "node1"),
        ("MASTER_PORT", "29500"),
    ]);
    let all = all.expect("fit each other").expect("a seat");
    assert_eq!((all.local_rank, all.local_world), (Some(1), Some(4)));
    assert_eq!(all.master, Some(("node1".into(), 29500)));
}

#[test]
fn s30_missing_variables_are_named() {
    refused(&[("RANK", "0")], &["WORLD_SIZE is not set", "RANK = \"0\""]);
    refused(&[("WORLD_SIZE", "4")], &["RANK is not set", "WORLD_SIZE = \"4\""]);
    refused(&[("OMPI_COMM_WORLD_RANK", "0")], &["OMPI_COMM_WORLD_SIZE is not set"]);
    refused(&[("PMI_SIZE", "2")], &["PMI_RANK is not set", "PMI_SIZE = \"2\""]);
    refused(&[("SLURM_PROCID", "1")], &["SLURM_STEP_NUM_TASKS is not set", "SLURM_PROCID = \"1\""]);
    let job = [("RANK", "0"), ("WORLD_SIZE", "2")];
    refused(&[job[0], job[1], ("MASTER_ADDR", "a")], &["MASTER_PORT is not set", "MASTER_ADDR = \"a\""]);
    refused(&[job[0], job[1], ("MASTER_PORT", "1")], &["MASTER_ADDR is not set", "MASTER_PORT = \"1\""]);
}

#[test]
fn s30_empty_and_wrong_values_are_named() {
    for value in ["", " "] {
        refused(&[("RANK", value), ("WORLD_SIZE", "2")], &["RANK = \"\" is empty", "from 0"]);
        refused(&[("RANK", "0"), ("WORLD_SIZE", value)], &["WORLD_SIZE = \"\" is empty", "1 or more"]);
    }
    for value in ["two", "-1", "1.5", "0x1", "99999999999999999999"] {
        refused(&[("RANK", value), ("WORLD_SIZE", "2")], &[&format!("RANK = {value:?}"), "a whole number"]);
        refused(&[("RANK", "0"), ("WORLD_SIZE", value)], &[&format!("WORLD_SIZE = {value:?}")]);
        refused(&[("PMI_RANK", "0"), ("PMI_SIZE", value)], &[&format!("PMI_SIZE = {value:?}")]);
        let local = [("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", value)];
        refused(&local, &[&format!("LOCAL_RANK = {value:?}")]);
    }
    refused(&[("RANK", "0"), ("WORLD_SIZE", "0")], &["WORLD_SIZE = \"0\"", "1 or more"]);
    refused(&[("RANK", "4"), ("WORLD_SIZE", "4")], &["RANK = 4", "WORLD_SIZE = 4", "from 0 to 3"]);
    let local = [("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "2")];
    refused(&local, &["LOCAL_RANK = 2", "WORLD_SIZE = 2"]);
    for port in ["0", "65536", "http"] {
        let job = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a"), ("MASTER_PORT", port)];
        refused(&job, &[&format!("MASTER_PORT = {port:?}"), "65535"]);
    }
    let job = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", ""), ("MASTER_PORT", "1")];
    refused(&job, &["MASTER_ADDR = \"\" is empty", "rank 0"]);
}

#[test]
fn s30_launchers_that_disagree_are_refused_unless_one_started_the_other() {
    let open = [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "4")];
    let with = |more: &[(&'static str, &'static str)]| [&open[..], more].concat();
    refused(&with(&[("RANK", "0"), ("WORLD_SIZE", "4")]), &["OMPI_COMM_WORLD_RANK = 1", "RANK = 0"]);
    refused(&with(&[("RANK", "1"), ("WORLD_SIZE", "8")]), &["OMPI_COMM_WORLD_SIZE = 4", "WORLD_SIZE = 8"]);
    refused(&with(&[("PMI_RANK", "2"), ("PMI_SIZE", "4")]), &["OMPI_COMM_WORLD_RANK = 1", "PMI_RANK = 2"]);
    assert_eq!(found(&with(&[("RANK", "1"), ("WORLD_SIZE", "4")])), (1, 4, Source::OpenMpi, true));
    // mpirun's daemons are Slurm's tasks.
    let daemons = [("SLURM_STEP_ID", "0"), ("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2")];
    assert_eq!(found(&with(&daemons)), (1, 4, Source::OpenMpi, true));
    // The old mistake of a rank that was read in the batch script, once for all tasks.
    let wrong = [("RANK", "0"), ("WORLD_SIZE", "2"), ("SLURM_PROCID", "1"), ("SLURM_NTASKS", "2")];
    refused(&wrong, &["SLURM_PROCID = 1", "RANK = 0"]);
    let elastic = [&wrong[..], &[("TORCHELASTIC_RUN_ID", "x")]].concat();
    assert_eq!(found(&elastic), (0, 2, Source::Torchrun, false));
}

#[test]
fn a_slurm_batch_script_is_no_task() {
    let script = [("SLURM_JOB_ID", "7"), ("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4")];
    assert_eq!(seat(&script), Ok(None));
    let task = [&script[..], &[("SLURM_STEP_ID", "0")]].concat();
    assert_eq!(found(&task), (0, 4, Source::Slurm, false));
}

#[test]
fn slurm_tasks_meet_at_the_first_host() {
    for (list, first) in [
        ("node7", Some("node7")),
        ("gpu[03-07,9],login", Some("gpu03")),
        ("a[1,2]", Some("a1")),
        ("one,two", Some("one")),
        ("", None),
    ] {
        assert_eq!(first_host(list).as_deref(), first, "{list}");
    }
    let task = [
        ("SLURM_JOB_ID", "70001"),
        ("SLURM_STEP_ID", "2"),
        ("SLURM_PROCID", "0"),
        ("SLURM_NTASKS", "4"),
        ("SLURM_STEP_NODELIST", "gpu[03-07]"),
    ];
    let master = seat(&task).expect("fit").expect("a seat").master;
    assert_eq!(master, Some(("gpu03".into(), 30_203)));
    let own = [&task[..], &[("MASTER_ADDR", "other"), ("MASTER_PORT", "5000")]].concat();
    assert_eq!(seat(&own).expect("fit").expect("a seat").master, Some(("other".into(), 5000)));
}

#[test]
fn every_variable_that_makes_a_seat_is_listed() {
    for names in [TORCHRUN, OPEN_MPI, MPICH, SLURM] {
        let all = [names.rank, names.local_rank].into_iter().chain(names.world.iter().copied());
        for name in all.chain(names.local_world) {
            assert!(VARIABLES.contains(&name), "{name}");
        }
    }
}
