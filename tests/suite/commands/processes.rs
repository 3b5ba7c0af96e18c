//! A build without MPI and NCCL that a launcher started several times, and a recipe that wants several
//! processes.

use super::*;

/// By what mpirun says how many processes there are and which this is.
const MPIRUN: [&str; 2] = ["OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"];

/// What the process of `rank` of two says, and its exit code.
fn one_of_two([size, own]: [&str; 2], rank: &str, command: &str) -> (String, Option<i32>) {
    let (folder, [out]) = scratch(["run"]);
    let mut process = rloss();
    process.args([command, "quickstart"]).current_dir(folder.path());
    if command == "train" {
        process.arg("--out").arg(&out);
    }
    process.envs([(size, "2"), (own, rank), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29500")]);
    let ended = output(&mut process);
    assert!(!out.exists(), "nothing is written");
    (ended.stderr, ended.code)
}

#[test]
#[cfg(not(any(feature = "mpi", feature = "nccl")))]
fn a_build_without_mpi_and_nccl_refuses_several_processes_with_one_message() {
    let torchrun = ["WORLD_SIZE", "RANK"];
    for launcher in [MPIRUN, torchrun] {
        let (told, code) = one_of_two(launcher, "0", "train");
        assert!(told.contains("this is one of 2 processes"), "{told}");
        assert!(told.contains("neither MPI nor NCCL; build with --features mpi or nccl"), "{told}");
        assert_eq!((code, told.lines().count()), (Some(2), 1));
        assert_eq!(one_of_two(launcher, "1", "train"), (String::new(), Some(2)));
    }
}

#[test]
fn a_command_of_one_process_is_not_started_several_times() {
    let (told, code) = one_of_two(MPIRUN, "0", "rollout");
    assert!(told.contains("`rollout` runs in one process, but this is one of 2"), "{told}");
    assert_eq!(code, Some(2));
    assert_eq!(one_of_two(MPIRUN, "1", "rollout"), (String::new(), Some(2)));
}

#[test]
fn sequences_shared_by_processes_that_are_not_there_are_refused() {
    let (_folder, [out]) = scratch(["run"]);
    let told = "parallel.sequence: 2 does not divide the one process of this run";
    refused(&mut train(&out, &["parallel.sequence=2"]), &[told, "mpirun -np"]);
}

#[test]
fn check_plans_the_memory_of_one_of_several_processes() {
    let plan = |processes| done(rloss().args(["check", "quickstart", "--processes", processes])).stdout;
    assert!(!plan("1").contains("gathered"));
    let several = plan("4");
    assert!(several.contains("in each of 4 processes") && several.contains("weights, gathered"), "{several}");
}
