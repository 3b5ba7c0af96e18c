//! A build without MPI that a launcher started several times, and a recipe that wants several processes.

use super::{rloss, train};

/// What the process of `rank` of two says, and its exit code.
fn one_of_two(rank: &str, command: &str) -> (String, Option<i32>) {
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
        .env("OMPI_COMM_WORLD_SIZE", "2")
        .env("OMPI_COMM_WORLD_RANK", rank)
        .output()
        .unwrap();
    assert!(!folder.path().join("run").exists(), "nothing is written");
    (String::from_utf8(output.stderr).unwrap(), output.status.code())
}

#[test]
#[cfg(not(feature = "mpi"))]
fn a_build_without_mpi_refuses_several_processes_with_one_message() {
    let (told, code) = one_of_two("0", "train");
    assert!(told.contains("this build has no MPI") && told.contains("build with --features mpi"), "{told}");
    assert_eq!((code, told.lines().count()), (Some(2), 1));
    assert_eq!(one_of_two("1", "train"), (String::new(), Some(2)));
}

#[test]
fn a_command_of_one_process_is_not_started_several_times() {
    let (told, code) = one_of_two("0", "rollout");
    assert!(told.contains("`rollout` runs in one process, and this is one of 2"), "{told}");
    assert_eq!(code, Some(2));
    assert_eq!(one_of_two("1", "rollout"), (String::new(), Some(2)));
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
