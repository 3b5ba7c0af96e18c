//! What started this process: alone, or as one of several; and what connects it to the others.

use crate::error::{BadInput, ToldElsewhere};
use anyhow::Result;
#[cfg(any(test, feature = "nccl"))]
use std::io::{ErrorKind, Read, Write};
#[cfg(any(test, feature = "nccl"))]
use std::path::Path;

/// Who started the processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Launcher {
    Torchrun,
    /// Open MPI's mpirun, or PMI of MPICH and Slurm.
    Mpi,
    Slurm,
}

/// Variables by which launchers say how many processes there are, and which this is. torchrun comes first: Slurm may start it.
const SAID: [(Launcher, [&str; 2]); 4] = [
    (Launcher::Torchrun, ["WORLD_SIZE", "RANK"]),
    (Launcher::Mpi, ["OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"]),
    (Launcher::Mpi, ["PMI_SIZE", "PMI_RANK"]),
    (Launcher::Slurm, ["SLURM_STEP_NUM_TASKS", "SLURM_PROCID"]),
];

/// What a launcher says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Said {
    launcher: Launcher,
    processes: usize,
    rank: usize,
}

/// What `variable` says of this process, which may be alone.
fn said(variable: impl Fn(&str) -> Option<String>) -> Option<Said> {
    let number = |name: &str| variable(name)?.parse().ok();
    SAID.iter().find_map(|&(launcher, [processes, rank])| {
        // Others set such names too; torchrun's are a whole.
        let whole = ["MASTER_ADDR", "MASTER_PORT"].iter().all(|name| variable(name).is_some());
        let said = Said { launcher, processes: number(processes)?, rank: number(rank)? };
        (launcher != Launcher::Torchrun || whole).then_some(said)
    })
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// How many processes a launcher says there are; 1 for a process that was started alone.
pub fn processes() -> usize {
    said(variable).map_or(1, |said| said.processes)
}

/// An error that every process finds for itself before they are connected: the first tells `what`, the others are silent.
fn told_once(what: String) -> anyhow::Error {
    match said(variable) {
        None | Some(Said { rank: 0, .. }) => BadInput(what).into(),
        Some(_) => ToldElsewhere { is_bad_input: true }.into(),
    }
}

/// Refuses several processes for `command`, which is made for one.
///
/// # Errors
/// [`BadInput`] when a launcher started several.
pub fn refuse_several(command: &str) -> Result<()> {
    match processes() {
        0 | 1 => Ok(()),
        several => Err(told_once(format!(
            "`{command}` runs in one process, and this is one of {several}; start it without mpirun, srun or torchrun"
        ))),
    }
}

/// What carries bytes between processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Transport {
    Mpi,
    Nccl,
}

/// What connects the processes: MPI where it started them or may have, NCCL under torchrun; `RLOSS_RANKS_BY` says otherwise.
///
/// # Errors
/// [`BadInput`] when this build has not what it takes.
pub(super) fn transport() -> Result<Transport> {
    let asked = variable("RLOSS_RANKS_BY");
    let launcher = said(variable).map(|said| said.launcher);
    let built = (cfg!(feature = "mpi"), cfg!(feature = "nccl"));
    transport_by(built, launcher, asked.as_deref()).ok_or_else(|| {
        let (has, remedy) = match built {
            (false, false) => {
                ("neither MPI nor NCCL", "build with --features mpi or nccl, or start one process")
            }
            (true, false) => ("MPI alone", "start them by mpirun or srun, or build with --features nccl"),
            (false, true) => ("NCCL alone", "start them by torchrun or srun, or build with --features mpi"),
            (true, true) => {
                ("MPI for mpirun and srun, NCCL for torchrun and srun", "set RLOSS_RANKS_BY to mpi or nccl")
            }
        };
        let by = asked.map_or(String::new(), |asked| format!(" by RLOSS_RANKS_BY={asked}"));
        told_once(format!(
            "this is one of {} processes, and this build cannot connect them{by}: it has {has}; {remedy}",
            processes()
        ))
    })
}

fn transport_by(
    (mpi, nccl): (bool, bool),
    launcher: Option<Launcher>,
    asked: Option<&str>,
) -> Option<Transport> {
    // mpirun says nothing of where processes meet, torchrun connects none by MPI.
    let by_mpi = mpi && launcher != Some(Launcher::Torchrun) && asked.is_none_or(|asked| asked == "mpi");
    let by_nccl = nccl && launcher != Some(Launcher::Mpi) && asked.is_none_or(|asked| asked == "nccl");
    let nccl = by_nccl.then_some(Transport::Nccl);
    if by_mpi { Some(Transport::Mpi) } else { nccl }
}

/// Where this process is among all, and where they meet.
#[cfg(any(test, feature = "nccl"))]
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    pub rank: usize,
    pub ranks: usize,
    /// This process's number on its machine.
    pub local_rank: usize,
    /// Where rank 0 listens.
    pub host: String,
    pub port: u16,
    /// What only this job's processes know.
    pub token: super::meeting::Token,
}

/// [`Place`] as torchrun or Slurm say it.
///
/// # Errors
/// [`BadInput`] when a variable lacks or is no number.
#[cfg(feature = "nccl")]
pub(super) fn place() -> Result<Place> {
    let secret = || match (variable("RLOSS_JOB_TOKEN"), variable("XDG_CONFIG_HOME"), variable("HOME")) {
        (Some(token), _, _) => Ok(token.into_bytes()),
        (None, Some(config), _) => user_key(&Path::new(&config).join("rloss")),
        (None, None, Some(home)) => user_key(&Path::new(&home).join(".config/rloss")),
        (None, None, None) => Err(format!("HOME is not set; {SECRET_REMEDY}")),
    };
    place_by(variable, secret).map_err(told_once)
}

/// What to do where the user's key cannot be had.
#[cfg(any(test, feature = "nccl"))]
const SECRET_REMEDY: &str = "set RLOSS_JOB_TOKEN to a secret of this job, the same on all ranks";

/// A key that only this user's processes can read, made by the first that looks for it: what ranks show each
/// other must not be known to who knows the job.
#[cfg(any(test, feature = "nccl"))]
fn user_key(folder: &Path) -> Result<Vec<u8>, String> {
    use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
    let file = folder.join("ranks.key");
    let make = || -> std::io::Result<()> {
        let mut key = [0; 32];
        std::fs::File::open("/dev/urandom")?.read_exact(&mut key)?;
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        let aside = folder.join(format!(".ranks.key.{}", blake3::hash(&key)));
        std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&aside)?.write_all(&key)?;
        // The first one stays, and is whole.
        let linked = std::fs::hard_link(&aside, &file);
        std::fs::remove_file(&aside)?;
        linked.or_else(|e| if e.kind() == ErrorKind::AlreadyExists { Ok(()) } else { Err(e) })
    };
    let read = || {
        if !file.exists() {
            make()?;
        }
        let about = std::fs::metadata(&file)?;
        if about.mode() & 0o077 != 0 || about.uid() != rustix::process::getuid().as_raw() || about.len() != 32
        {
            return Err(std::io::Error::other("it is not 32 bytes that its owner alone may read: remove it"));
        }
        std::fs::read(&file)
    };
    read().map_err(|e| format!("{}: {e}; or {SECRET_REMEDY}", file.display()))
}

#[cfg(any(test, feature = "nccl"))]
fn place_by(
    variable: impl Fn(&str) -> Option<String>,
    secret: impl Fn() -> Result<Vec<u8>, String>,
) -> Result<Place, String> {
    let needed = |name: &str| {
        variable(name).ok_or(format!(
            "{name} is not set: torchrun and srun set what processes need to meet; start them by one of these"
        ))
    };
    let number = |name: &str, text: String| {
        text.parse::<usize>().map_err(|_| format!("{name}: \"{text}\" is no whole number from 0 on"))
    };
    let of = |name: &str| number(name, needed(name)?);
    let said = said(&variable).ok_or("no launcher said which of several processes this is")?;
    let one_machine = |names: [&str; 2], count: usize| {
        names.iter().find_map(|name| variable(name)).is_some_and(|said| said == count.to_string())
    };
    let (local, host, port, job, alone) = match said.launcher {
        Launcher::Torchrun => {
            let (host, port) = (needed("MASTER_ADDR")?, of("MASTER_PORT")?);
            // On its own port torchrun listens itself.
            let job = format!("{}:{host}:{port}", variable("TORCHELASTIC_RUN_ID").unwrap_or_default());
            let alone = one_machine(["LOCAL_WORLD_SIZE"; 2], said.processes);
            (of("LOCAL_RANK")?, host, port + 1, job, alone)
        }
        _ => {
            let (job, step) = (of("SLURM_JOB_ID")?, of("SLURM_STEP_ID")?);
            let nodes = variable("SLURM_STEP_NODELIST").map_or_else(|| needed("SLURM_JOB_NODELIST"), Ok)?;
            // Jobs of one machine seldom meet on one port, and do not take each other for one.
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
    let port = u16::try_from(port).map_err(|_| format!("port {port}: ports end at 65535; set RLOSS_PORT"))?;
    // Nobody else's machine can connect then.
    let host = if alone { "127.0.0.1".to_owned() } else { host };
    let key = blake3::derive_key("rloss 2025 what the ranks of a job show each other", &secret()?);
    let hash = blake3::keyed_hash(&key, job.as_bytes());
    let mut token = super::meeting::Token::default();
    token.copy_from_slice(&hash.as_bytes()[..super::meeting::TOKEN_BYTES]);
    Ok(Place { rank: said.rank, ranks: said.processes, local_rank: local, host, port, token })
}

/// The first of Slurm's list of nodes, as `gpu[07-09,12],login1`.
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
        let found = |variables: &[(&str, &str)]| said(given(variables));
        let is = |launcher, processes, rank| Some(Said { launcher, processes, rank });
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
        for (built, launcher, asked, expected) in [
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
            assert_eq!(transport_by(built, launcher, asked), expected, "{built:?} {launcher:?} {asked:?}");
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
        let found = |variables: &[(&str, &str)]| place_by(given(variables), || Ok(b"secret".to_vec()));
        let place = found(&torchrun).unwrap();
        assert_eq!((place.rank, place.ranks, place.local_rank), (9, 16, 1));
        assert_eq!((place.host.as_str(), place.port), ("gpu1", 29501), "torchrun has its own port");
        let with = |name, value| found(&[&torchrun[..], &[(name, value)]].concat());
        assert_ne!(with("TORCHELASTIC_RUN_ID", "8").unwrap().token, place.token);
        let other = place_by(given(&torchrun), || Ok(b"another".to_vec())).unwrap();
        assert_ne!(other.token, place.token, "the launcher's words are public");
        assert_eq!(with("LOCAL_WORLD_SIZE", "8").unwrap().host, "gpu1");
        assert_eq!(
            with("LOCAL_WORLD_SIZE", "16").unwrap().host,
            "127.0.0.1",
            "nobody else's machine connects"
        );
        assert_eq!(with("RLOSS_PORT", "4000").unwrap().port, 4000);
        assert!(with("RLOSS_PORT", "x").unwrap_err().contains("RLOSS_PORT: \"x\" is no whole number"));
        assert!(with("RLOSS_PORT", "65536").unwrap_err().contains("ports end at 65535"));

        let slurm = [
            ("SLURM_STEP_NUM_TASKS", "4"),
            ("SLURM_PROCID", "3"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_JOB_ID", "123456"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_JOB_NODELIST", "gpu[07-09,12],login1"),
        ];
        let place = found(&slurm).unwrap();
        assert_eq!((place.rank, place.local_rank, place.host.as_str()), (3, 1, "gpu07"));
        let one = found(&[&slurm[..], &[("SLURM_JOB_NUM_NODES", "1")]].concat()).unwrap();
        assert_eq!(one.host, "127.0.0.1");
        assert!(found(&slurm[..5]).unwrap_err().contains("SLURM_JOB_NODELIST is not set"));
        for (nodes, first) in [("a1,a2", "a1"), ("a1", "a1"), ("a[3,5]", "a3"), ("a[1-2]-ib,b", "a1-ib")] {
            assert_eq!(first_node(nodes), first);
        }
    }
    /// The token was made of the job's number and the user's, which everybody knows.
    #[test]
    fn the_ranks_of_a_user_share_a_key_that_nobody_else_can_read() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("config/rloss");
        let keys: Vec<Vec<u8>> = std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..8).map(|_| scope.spawn(|| user_key(&place).unwrap())).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        assert!(keys[0].len() == 32 && keys.iter().all(|key| *key == keys[0]));
        assert_eq!(std::fs::read_dir(&place).unwrap().count(), 1, "nothing is left aside");
        let file = place.join("ranks.key");
        std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o640)).unwrap();
        let refused = user_key(&place).unwrap_err();
        assert!(refused.contains("ranks.key") && refused.contains("RLOSS_JOB_TOKEN"), "{refused}");
        assert!(user_key(&folder.path().join("nowhere\0")).is_err());
    }
}
