//! A build without MPI and NCCL that a launcher started several times, and a recipe that wants several
//! processes.

use super::{rloss, train};

/// By what mpirun says how many processes there are and which this is.
const MPIRUN: [&str; 2] = ["OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"];

/// What the process of `rank` of two says, and its exit code.
fn one_of_two([size, own]: [&str; 2], rank: &str, command: &str) -> (String, Option<i32>) {
    let folder = tempfile::tempdir().unwrap();
    let mut process = match command {
        "train" => train(&folder.path().join("run"), &[]),
        _ => {
            let mut process = rloss();
            process.args([command, "quickstart"]);
            process
        }
    };
    let output = process
        .current_dir(folder.path())
        .envs([(size, "2"), (own, rank), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29500")])
        .output()
        .unwrap();
    assert!(!folder.path().join("run").exists(), "nothing is written");
    (String::from_utf8(output.stderr).unwrap(), output.status.code())
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
    let folder = tempfile::tempdir().unwrap();
    let output = train(&folder.path().join("run"), &["parallel.sequence=2"]).output().unwrap();
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(told.contains("parallel.sequence: 2 does not divide the one process of this run"), "{told}");
    assert!(told.contains("mpirun -np") && output.status.code() == Some(2), "{told}");
}

#[test]
fn check_plans_the_memory_of_one_of_several_processes() {
    let plan = |processes: &str| {
        let output = rloss().args(["check", "quickstart", "--processes", processes]).output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(!plan("1").contains("gathered"));
    let several = plan("4");
    assert!(several.contains("in each of 4 processes") && several.contains("weights, gathered"), "{several}");
}
