//! The launcher that started this process (and possibly others), and the transport between the processes.

use crate::error::{BadInput, ErrorOnOtherRank};
#[cfg(feature = "nccl")]
use crate::user_key::{key_folder, user_key};
use anyhow::Result;

/// A launcher of processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Launcher {
    Torchrun,
    /// mpirun of Open MPI, or the PMI of MPICH and Slurm.
    Mpi,
    Slurm,
}

/// Environment variables that hold the number of processes and this process's rank. torchrun comes first,
/// because Slurm may start torchrun.
const LAUNCHER_VARIABLES: [(Launcher, [&str; 2]); 4] = [
    (Launcher::Torchrun, ["WORLD_SIZE", "RANK"]),
    (Launcher::Mpi, ["OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"]),
    (Launcher::Mpi, ["PMI_SIZE", "PMI_RANK"]),
    (Launcher::Slurm, ["SLURM_STEP_NUM_TASKS", "SLURM_PROCID"]),
];

/// The launcher's information about this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct LaunchInfo {
    launcher: Launcher,
    processes: usize,
    rank: usize,
}

/// Reads the launcher's variables. Returns `None` for a process without a launcher.
fn launch_info(variable: impl Fn(&str) -> Option<String>) -> Option<LaunchInfo> {
    let number = |name: &str| variable(name)?.parse().ok();
    LAUNCHER_VARIABLES.iter().find_map(|&(launcher, [processes, rank])| {
        // Other programs set these two names too, but only torchrun also sets the address and the port.
        let has_address = ["MASTER_ADDR", "MASTER_PORT"].iter().all(|name| variable(name).is_some());
        let info = LaunchInfo { launcher, processes: number(processes)?, rank: number(rank)? };
        (launcher != Launcher::Torchrun || has_address).then_some(info)
    })
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Returns the number of processes, read from the launcher's variables; 1 without a launcher.
pub fn process_count() -> usize {
    launch_info(variable).map_or(1, |info| info.processes)
}

/// Returns the error `message`, which occurs in every process before the processes are connected. Only rank 0
/// prints the message.
fn report_once(message: String) -> anyhow::Error {
    match launch_info(variable) {
        None | Some(LaunchInfo { rank: 0, .. }) => BadInput(message).into(),
        Some(_) => ErrorOnOtherRank { is_bad_input: true }.into(),
    }
}

/// Checks that there is only one process, because `command` runs in one process.
///
/// # Errors
/// [`BadInput`] when a launcher started several processes.
pub fn require_single_process(command: &str) -> Result<()> {
    match process_count() {
        0 | 1 => Ok(()),
        several => Err(report_once(format!(
            "`{command}` runs in one process, but this is one of {several}; start it without mpirun, srun or torchrun"
        ))),
    }
}

/// A library that sends bytes between processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Transport {
    Mpi,
    Nccl,
}

/// Returns the transport. Under mpirun it is MPI; under torchrun it is NCCL. Under other launchers it is MPI
/// if this build has MPI, else NCCL. `RLOSS_RANKS_BY` selects one of them.
///
/// # Errors
/// [`BadInput`] when this build has no transport for the launcher.
pub(super) fn transport() -> Result<Transport> {
    let requested = variable("RLOSS_RANKS_BY");
    let launcher = launch_info(variable).map(|info| info.launcher);
    let built = (cfg!(feature = "mpi"), cfg!(feature = "nccl"));
    transport_by(built, launcher, requested.as_deref()).ok_or_else(|| {
        let (has, remedy) = match built {
            (false, false) => {
                ("neither MPI nor NCCL", "build with --features mpi or nccl, or start one process")
            }
            (true, false) => ("only MPI", "start them with mpirun or srun, or build with --features nccl"),
            (false, true) => ("only NCCL", "start them with torchrun or srun, or build with --features mpi"),
            (true, true) => {
                ("MPI for mpirun and srun, NCCL for torchrun and srun", "set RLOSS_RANKS_BY to mpi or nccl")
            }
        };
        let by = requested.map_or(String::new(), |requested| format!(" with RLOSS_RANKS_BY={requested}"));
        report_once(format!(
            "this is one of {} processes, but this build cannot connect them{by}: it has {has}; {remedy}",
            process_count()
        ))
    })
}

fn transport_by(
    (mpi, nccl): (bool, bool),
    launcher: Option<Launcher>,
    requested: Option<&str>,
) -> Option<Transport> {
    // NCCL needs the address of rank 0, which mpirun does not give. torchrun does not start MPI.
    let by_mpi =
        mpi && launcher != Some(Launcher::Torchrun) && requested.is_none_or(|requested| requested == "mpi");
    let by_nccl =
        nccl && launcher != Some(Launcher::Mpi) && requested.is_none_or(|requested| requested == "nccl");
    if by_mpi { Some(Transport::Mpi) } else { by_nccl.then_some(Transport::Nccl) }
}

/// This process's rank, and the address where rank 0 listens.
#[cfg(any(test, feature = "nccl"))]
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RankAddress {
    pub rank: usize,
    pub ranks: usize,
    /// This process's rank among the processes of its machine.
    pub local_rank: usize,
    /// The host of rank 0.
    pub host: String,
    pub port: u16,
    /// A token that only the processes of this job know.
    pub token: super::tcp::Token,
}

/// Reads [`RankAddress`] from the variables of torchrun or Slurm.
///
/// # Errors
/// [`BadInput`] when a variable is missing or is not a number.
#[cfg(feature = "nccl")]
pub(super) fn rank_address() -> Result<RankAddress> {
    // Other users can read the launcher's variables, so the token needs a secret.
    let secret = || match (variable("RLOSS_JOB_TOKEN"), key_folder()) {
        (Some(token), _) => Ok(token.into_bytes()),
        (None, Some(folder)) => {
            user_key(&folder, "ranks.key").map(Vec::from).map_err(|e| format!("{e}; or {SECRET_REMEDY}"))
        }
        (None, None) => Err(format!("HOME is not set; {SECRET_REMEDY}")),
    };
    rank_address_by(variable, secret).map_err(report_once)
}

/// The remedy for a missing or unreadable user key.
#[cfg(feature = "nccl")]
const SECRET_REMEDY: &str = "set RLOSS_JOB_TOKEN to the same secret on all ranks of this job";

#[cfg(any(test, feature = "nccl"))]
fn rank_address_by(
    variable: impl Fn(&str) -> Option<String>,
    secret: impl Fn() -> Result<Vec<u8>, String>,
) -> Result<RankAddress, String> {
    let needed = |name: &str| {
        variable(name)
            .ok_or(format!("{name} is not set; start the processes with torchrun or srun, which set it"))
    };
    let number = |name: &str, text: String| {
        text.parse::<usize>().map_err(|_| format!("{name}: \"{text}\" is not a whole number of at least 0"))
    };
    let of = |name: &str| number(name, needed(name)?);
    let info = launch_info(&variable).ok_or("the launcher's variables do not hold this process's rank")?;
    let one_machine = |names: [&str; 2], count: usize| {
        names.iter().find_map(|name| variable(name)).is_some_and(|text| text == count.to_string())
    };
    let (local, host, port, job, is_one_machine) = match info.launcher {
        Launcher::Torchrun => {
            let (host, port) = (needed("MASTER_ADDR")?, of("MASTER_PORT")?);
            // torchrun itself listens on MASTER_PORT.
            let job = format!("{}:{host}:{port}", variable("TORCHELASTIC_RUN_ID").unwrap_or_default());
            let is_one_machine = one_machine(["LOCAL_WORLD_SIZE"; 2], info.processes);
            (of("LOCAL_RANK")?, host, port + 1, job, is_one_machine)
        }
        _ => {
            let (job, step) = (of("SLURM_JOB_ID")?, of("SLURM_STEP_ID")?);
            let nodes = variable("SLURM_STEP_NODELIST").map_or_else(|| needed("SLURM_JOB_NODELIST"), Ok)?;
            // Two jobs on one machine rarely have the same port. If they do, their tokens differ, so they do
            // not connect.
            (
                of("SLURM_LOCALID")?,
                first_node(&nodes),
                20_000 + (job * 7 + step) % 40_000,
                format!("{job}.{step}"),
                one_machine(["SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES"], 1),
            )
        }
    };
    let port = variable("RLOSS_PORT").map_or(Ok(port), |text| number("RLOSS_PORT", text))?;
    let port = u16::try_from(port).map_err(|_| format!("port {port} is above 65535; set RLOSS_PORT"))?;
    // If there is only one machine, listen on the loopback interface, so that no other machine can connect.
    let host = if is_one_machine { "127.0.0.1".to_owned() } else { host };
    let key = blake3::derive_key("rloss 2025 what the ranks of a job show each other", &secret()?);
    let hash = blake3::keyed_hash(&key, job.as_bytes());
    let mut token = super::tcp::Token::default();
    token.copy_from_slice(&hash.as_bytes()[..super::tcp::TOKEN_BYTES]);
    Ok(RankAddress { rank: info.rank, ranks: info.processes, local_rank: local, host, port, token })
}

/// Returns the first host of Slurm's node list. An example of a list is `gpu[07-09,12],login1`.
#[cfg(any(test, feature = "nccl"))]
fn first_node(nodes: &str) -> String {
    let end = nodes.find([',', '[']).unwrap_or(nodes.len());
    let (stem, rest) = nodes.split_at(end);
    let Some(numbers) = rest.strip_prefix('[') else { return stem.to_owned() };
    let (numbers, tail) = numbers.split_once(']').unwrap_or((numbers, ""));
    let first = numbers.split([',', '-']).next().unwrap_or_default();
    format!("{stem}{first}{}", tail.split(',').next().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given<'a>(variables: &'a [(&'a str, &'a str)]) -> impl Fn(&str) -> Option<String> + 'a {
        |name| variables.iter().find(|(other, _)| *other == name).map(|(_, value)| (*value).to_owned())
    }

    #[test]
    fn the_launcher_that_started_this_process_is_known_by_its_variables() {
        let slurm = [("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_PROCID", "1")];
        let torchrun =
            [("WORLD_SIZE", "16"), ("RANK", "9"), ("MASTER_ADDR", "gpu1"), ("MASTER_PORT", "29500")];
        let found = |variables: &[(&str, &str)]| launch_info(given(variables));
        let is = |launcher, processes, rank| Some(LaunchInfo { launcher, processes, rank });
        assert_eq!(found(&[]), None);
        assert_eq!(found(&slurm), is(Launcher::Slurm, 2, 1));
        assert_eq!(found(&[&slurm[..], &torchrun].concat()), is(Launcher::Torchrun, 16, 9));
        assert_eq!(found(&torchrun[..2]), None, "others set these two as well");
        assert_eq!(
            found(&[("OMPI_COMM_WORLD_SIZE", "4"), ("OMPI_COMM_WORLD_RANK", "3")]),
            is(Launcher::Mpi, 4, 3)
        );
    }

    #[test]
    fn processes_are_connected_by_what_is_built_and_can_connect_what_started_them() {
        let (torchrun, mpi, slurm) = (Some(Launcher::Torchrun), Some(Launcher::Mpi), Some(Launcher::Slurm));
        let (both, by_mpi, by_nccl) = ((true, true), Some(Transport::Mpi), Some(Transport::Nccl));
        for (built, launcher, requested, expected) in [
            ((false, false), slurm, None, None),
            ((true, false), slurm, None, by_mpi),
            ((true, false), torchrun, None, None),
            ((false, true), mpi, None, None),
            ((false, true), slurm, None, by_nccl),
            (both, mpi, None, by_mpi),
            (both, slurm, None, by_mpi),
            (both, torchrun, None, by_nccl),
            (both, slurm, Some("nccl"), by_nccl),
            (both, mpi, Some("nccl"), None),
            (both, torchrun, Some("mpi"), None),
            (both, slurm, Some("gloo"), None),
        ] {
            assert_eq!(
                transport_by(built, launcher, requested),
                expected,
                "{built:?} {launcher:?} {requested:?}"
            );
        }
    }

    #[test]
    fn processes_meet_where_the_launcher_says_and_know_their_job() {
        let torchrun = [
            ("WORLD_SIZE", "16"),
            ("RANK", "9"),
            ("LOCAL_RANK", "1"),
            ("MASTER_ADDR", "gpu1"),
            ("MASTER_PORT", "29500"),
        ];
        let found = |variables: &[(&str, &str)]| rank_address_by(given(variables), || Ok(b"secret".to_vec()));
        let environment = found(&torchrun).unwrap();
        assert_eq!((environment.rank, environment.ranks, environment.local_rank), (9, 16, 1));
        assert_eq!(
            (environment.host.as_str(), environment.port),
            ("gpu1", 29501),
            "torchrun itself uses the other port"
        );
        let with = |name, value| found(&[&torchrun[..], &[(name, value)]].concat());
        assert_ne!(with("TORCHELASTIC_RUN_ID", "8").unwrap().token, environment.token);
        let other = rank_address_by(given(&torchrun), || Ok(b"another".to_vec())).unwrap();
        assert_ne!(other.token, environment.token, "the launcher's variables are public");
        assert_eq!(with("LOCAL_WORLD_SIZE", "8").unwrap().host, "gpu1");
        assert_eq!(with("LOCAL_WORLD_SIZE", "16").unwrap().host, "127.0.0.1", "no other machine can connect");
        assert_eq!(with("RLOSS_PORT", "4000").unwrap().port, 4000);
        assert!(with("RLOSS_PORT", "x").unwrap_err().contains("RLOSS_PORT: \"x\" is not a whole number"));
        assert!(with("RLOSS_PORT", "65536").unwrap_err().contains("is above 65535"));

        let slurm = [
            ("SLURM_STEP_NUM_TASKS", "4"),
            ("SLURM_PROCID", "3"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_JOB_ID", "123456"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_JOB_NODELIST", "gpu[07-09,12],login1"),
        ];
        let environment = found(&slurm).unwrap();
        assert_eq!((environment.rank, environment.local_rank, environment.host.as_str()), (3, 1, "gpu07"));
        let one = found(&[&slurm[..], &[("SLURM_JOB_NUM_NODES", "1")]].concat()).unwrap();
        assert_eq!(one.host, "127.0.0.1");
        assert!(found(&slurm[..5]).unwrap_err().contains("SLURM_JOB_NODELIST is not set"));
        for (nodes, first) in [("a1,a2", "a1"), ("a1", "a1"), ("a[3,5]", "a3"), ("a[1-2]-ib,b", "a1-ib")] {
            assert_eq!(first_node(nodes), first);
        }
    }
}
