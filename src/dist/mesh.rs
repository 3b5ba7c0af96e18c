//! The ranks of a run as its rooms see them, and the collectives they use.

#[cfg(any(feature = "mpi", feature = "nccl"))]
use super::connection::Connection;
#[cfg(any(feature = "mpi", feature = "nccl"))]
use super::launch::Transport;
use super::watch::Watch;
use super::wire::{pack, unpack};
use super::{Communicator, Exchange, Pending, to_each};
use crate::error::{BadInput, ToldElsewhere};
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

/// Names the exchange by which the leader asks.
const ASKED: &str = "what the leader asks";

/// All processes of a run. One alone is a mesh of one, which exchanges nothing.
pub struct Mesh {
    /// `None` for one process.
    communicator: Option<Box<dyn Communicator>>,
    /// What ends this process when another one is gone.
    watch: Option<Watch>,
    /// Whether the leader works alone and the others answer what it asks.
    leading: AtomicBool,
    on_host: usize,
    host_place: usize,
    on_cores: usize,
    /// How many ranks share a sequence.
    sequence: AtomicUsize,
}

/// Where a rank runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Peer {
    host: String,
    /// The cores that it may use.
    cores: Vec<usize>,
}

impl Peer {
    fn this() -> Result<Self> {
        let allowed = rustix::thread::sched_getaffinity(None).context("asking for this process's cores")?;
        let cores = (0..rustix::thread::CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).collect();
        Ok(Self { host: rustix::system::uname().nodename().to_string_lossy().into_owned(), cores })
    }
}

/// What a rank says of a stage that all must pass.
#[derive(Serialize, Deserialize)]
struct Verdict {
    error: Option<String>,
    is_bad_input: bool,
}

impl Mesh {
    /// One process.
    pub fn single() -> Arc<Self> {
        Arc::new(Self::alone())
    }

    /// The processes that the launcher started, or this one alone.
    ///
    /// # Errors
    /// [`BadInput`] when there are several and this build cannot connect them; any other error when they do not connect.
    pub fn connect() -> Result<Arc<Self>> {
        let processes = super::launch::processes();
        if processes == 1 {
            return Ok(Self::single());
        }
        let mut mesh = Self { communicator: Some(connected(processes)?), ..Self::alone() };
        let own = Peer::this()?;
        let peers = mesh.all_records("hosts and cores", &own)?;
        mesh.on_host = peers.iter().filter(|peer| peer.host == own.host).count();
        mesh.host_place = peers[..mesh.rank()].iter().filter(|peer| peer.host == own.host).count();
        mesh.on_cores = peers.iter().filter(|peer| **peer == own).count();
        let hosts: Vec<String> = peers.into_iter().map(|peer| peer.host).collect();
        mesh.watch = Some(Watch::begin(&mesh, &hosts)?);
        Ok(Arc::new(mesh))
    }

    fn alone() -> Self {
        Self {
            communicator: None,
            watch: None,
            leading: AtomicBool::new(false),
            on_host: 1,
            host_place: 0,
            on_cores: 1,
            sequence: AtomicUsize::new(1),
        }
    }

    /// How many of the processes run on this machine.
    pub fn on_host(&self) -> usize {
        self.on_host
    }

    /// The number of this one among them, from 0.
    pub fn host_place(&self) -> usize {
        self.host_place
    }

    /// How many of them share this one's cores: a launcher may have given each its own.
    pub fn on_cores(&self) -> usize {
        self.on_cores
    }

    /// Has each `ranks` neighbours share their sequences. They must divide all ranks.
    pub fn share_sequences(&self, ranks: usize) {
        self.sequence.store(ranks.max(1), Ordering::Relaxed);
    }

    /// How many ranks share a sequence.
    pub fn sequence_ranks(&self) -> usize {
        self.sequence.load(Ordering::Relaxed)
    }

    /// This rank's place among those that share its sequences.
    pub fn sequence_place(&self) -> usize {
        self.rank() % self.sequence_ranks()
    }

    /// The ranks that share this one's sequences, itself among them.
    pub fn sequence_group(&self) -> Vec<usize> {
        let first = self.rank() - self.sequence_place();
        (first..first + self.sequence_ranks()).collect()
    }

    /// How many such groups there are, each with micro-batches of its own.
    pub fn data_ranks(&self) -> usize {
        self.ranks() / self.sequence_ranks()
    }

    /// The number of this rank's group.
    pub fn data_rank(&self) -> usize {
        self.rank() / self.sequence_ranks()
    }

    /// From now on an exchange ends with an error after `limit`.
    pub fn set_limit(&self, limit: Duration) {
        if let Some(communicator) = &self.communicator {
            communicator.set_limit(limit);
        }
    }

    /// This process.
    pub fn rank(&self) -> usize {
        self.communicator.as_ref().map_or(0, |c| c.rank())
    }

    /// How many processes there are.
    pub fn ranks(&self) -> usize {
        self.communicator.as_ref().map_or(1, |c| c.ranks())
    }

    /// Whether this process writes the console, the metrics and the checkpoints.
    pub fn is_leader(&self) -> bool {
        self.rank() == 0
    }

    /// All ranks, in order.
    pub fn everyone(&self) -> Vec<usize> {
        (0..self.ranks()).collect()
    }

    /// Begins an exchange among the ranks `group`, this one among them: `parts` has one part for each, `lengths` the bytes that
    /// come from each.
    ///
    /// # Errors
    /// When the connection has ended.
    pub fn start(
        &self,
        what: &str,
        group: &[usize],
        parts: Vec<Arc<Vec<u8>>>,
        lengths: &[usize],
    ) -> Result<Started> {
        let rank = self.rank();
        let place = group.iter().position(|&other| other == rank).context("a group without this rank")?;
        let own = parts.get(place).cloned().context("no part for this rank")?;
        let (Some(communicator), true) = (&self.communicator, group.len() > 1) else {
            return Ok(Started { own: (own, 0), others: None });
        };
        let others = |(to, _): &(usize, _)| *to != rank;
        let send = group.iter().copied().zip(parts).filter(|(to, _)| *to != rank).collect();
        let receive = group.iter().copied().zip(lengths.iter().copied()).filter(others).collect();
        let pending = communicator.start(Exchange { what: what.to_owned(), send, receive })?;
        Ok(Started { own: (own, place), others: Some(pending) })
    }

    /// What every rank gives, in rank order, of whatever length.
    ///
    /// # Errors
    /// When a rank does not come in time.
    pub fn all_gather(&self, what: &str, part: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        if self.communicator.is_none() {
            return Ok(vec![part]);
        }
        let length = (part.len() as u64).to_le_bytes().to_vec();
        let (ranks, everyone) = (self.ranks(), self.everyone());
        let lengths = self.start(what, &everyone, to_each(length, ranks), &vec![8; ranks])?.wait()?;
        let lengths = lengths.iter().map(|bytes| read_length(bytes)).collect::<Result<Vec<_>>>()?;
        self.start(what, &everyone, to_each(part, ranks), &lengths)?.wait()
    }

    /// What every rank's record is, in rank order.
    ///
    /// # Errors
    /// As [`Self::all_gather`].
    pub fn all_records<T: Serialize + for<'a> Deserialize<'a>>(&self, what: &str, own: &T) -> Result<Vec<T>> {
        self.all_gather(what, pack(own)?)?.iter().map(|bytes| unpack(bytes)).collect()
    }

    /// Every rank's byte, in rank order, in one exchange.
    ///
    /// # Errors
    /// As [`Self::all_gather`].
    pub fn all_bytes(&self, what: &str, own: u8) -> Result<Vec<u8>> {
        let ranks = self.ranks();
        let came = self.start(what, &self.everyone(), to_each(vec![own], ranks), &vec![1; ranks])?.wait()?;
        Ok(came.concat())
    }

    /// Whether it is so on any rank.
    ///
    /// # Errors
    /// As [`Self::all_gather`].
    pub fn any(&self, what: &str, own: bool) -> Result<bool> {
        Ok(self.all_bytes(what, u8::from(own))?.contains(&1))
    }

    /// The record of the leader, on every rank.
    ///
    /// # Errors
    /// As [`Self::all_gather`].
    pub fn leaders<T: Serialize + for<'a> Deserialize<'a>>(&self, what: &str, own: &T) -> Result<T> {
        let part = if self.is_leader() { pack(own)? } else { vec![] };
        let parts = self.all_gather(what, part)?;
        unpack(parts.first().context("no leader")?)
    }

    /// `result` where all ranks succeeded. Otherwise every rank fails, and the first that did tells why.
    ///
    /// # Errors
    /// This rank's own, or [`ToldElsewhere`].
    pub fn agree<T>(&self, what: &str, result: Result<T>) -> Result<T> {
        if self.communicator.is_none() {
            return result;
        }
        let verdict = match &result {
            Ok(_) => Verdict { error: None, is_bad_input: false },
            Err(error) => Verdict {
                error: Some(format!("{error:#}")),
                is_bad_input: error.chain().any(|cause| cause.is::<BadInput>()),
            },
        };
        let verdicts = self.all_records(what, &verdict)?;
        let Some(first) = verdicts.iter().position(|verdict| verdict.error.is_some()) else { return result };
        // All end now, and none is missed.
        self.leave();
        let Verdict { error, is_bad_input } = &verdicts[first];
        if first != self.rank() {
            return Err(ToldElsewhere { is_bad_input: *is_bad_input }.into());
        }
        match (result, error) {
            (Err(own), Some(error)) if verdicts.iter().any(|other| other.error.as_ref() != Some(error)) => {
                let told = format!("rank {first}: {error}");
                Err(if *is_bad_input { BadInput(told).into() } else { own.context(format!("rank {first}")) })
            }
            (result, _) => result,
        }
    }

    /// Refuses ranks that differ in something that must be one: `own` is this rank's.
    ///
    /// # Errors
    /// [`BadInput`] on every rank that differs from the first, named by `what` with its `remedy`.
    pub fn same(&self, what: &str, own: &str, remedy: &str) -> Result<()> {
        let all = self.all_records(what, &own.to_owned())?;
        let Some(other) = all.iter().position(|found| *found != all[0]) else { return Ok(()) };
        self.leave();
        let told = format!("ranks 0 and {other} have different {what}; {remedy}");
        if self.is_leader() {
            Err(BadInput(told).into())
        } else {
            Err(ToldElsewhere { is_bad_input: true }.into())
        }
    }

    /// Has the leader do `work` alone, as writing a file, while the others `answer` each request that it makes by [`Self::ask`].
    ///
    /// # Errors
    /// The leader's; on the others [`ToldElsewhere`] in its place, and those of `answer`.
    pub fn lead<R: Serialize + for<'a> Deserialize<'a>>(
        &self,
        work: impl FnOnce() -> Result<()>,
        answer: impl Fn(R) -> Result<()>,
    ) -> Result<()> {
        if self.communicator.is_none() {
            return work();
        }
        if self.is_leader() {
            self.leading.store(true, Ordering::Relaxed);
            let result = work();
            self.leading.store(false, Ordering::Relaxed);
            self.leaders(ASKED, &None::<R>)?;
            return self.agree("the leader's work", result);
        }
        while let Some(request) = self.leaders(ASKED, &None::<R>)? {
            answer(request)?;
        }
        self.agree("the leader's work", Ok(()))
    }

    /// Within [`Self::lead`] tells the others what is asked of them; elsewhere all ranks do the same and need no telling.
    ///
    /// # Errors
    /// As [`Self::all_gather`].
    pub fn ask<R: Serialize + for<'a> Deserialize<'a>>(&self, request: R) -> Result<()> {
        if self.leading.load(Ordering::Relaxed) {
            self.leaders(ASKED, &Some(request))?;
        }
        Ok(())
    }

    /// Ends the connection in order: after this no rank is missed.
    pub fn leave(&self) {
        if let Some(watch) = &self.watch {
            watch.end();
        }
        if let Some(communicator) = &self.communicator {
            communicator.leave();
        }
    }
}

/// An exchange under way, and this rank's own part of it.
pub struct Started {
    own: (Arc<Vec<u8>>, usize),
    others: Option<Pending>,
}

impl Started {
    /// What came from each rank of the group, this one included, in the group's order.
    ///
    /// # Errors
    /// When a rank does not come in time.
    pub fn wait(self) -> Result<Vec<Vec<u8>>> {
        let (own, rank) = self.own;
        let mut parts = self.others.map_or(Ok(vec![]), Pending::wait)?;
        let own = Arc::try_unwrap(own).unwrap_or_else(|shared| shared.to_vec());
        parts.insert(rank, own);
        Ok(parts)
    }
}

fn read_length(bytes: &[u8]) -> Result<usize> {
    Ok(u64::from_le_bytes(bytes.try_into().context("a length of 8 bytes")?) as usize)
}

/// Connected by what the launcher and this build allow: [`super::launch::transport`].
fn connected(processes: usize) -> Result<Box<dyn Communicator>> {
    let transport = super::launch::transport()?;
    let connection: Result<Box<dyn Communicator>> = match transport {
        #[cfg(feature = "mpi")]
        Transport::Mpi => Ok(Box::new(Connection::open(super::mpi::World::open)?)),
        #[cfg(feature = "nccl")]
        Transport::Nccl => {
            let place = super::launch::place()?;
            Ok(Box::new(Connection::open(move || super::nccl::Comm::open(&place))?))
        }
        #[cfg(not(all(feature = "mpi", feature = "nccl")))]
        other => Err(anyhow::anyhow!("{other:?} is not in this build")),
    };
    let connection = connection?;
    if connection.ranks() != processes {
        anyhow::bail!("the launcher started {processes} processes, and {} are connected", connection.ranks());
    }
    Ok(connection)
}

#[cfg(test)]
impl Mesh {
    /// Rank `rank` of `ranks` that never meet: for what each holds.
    pub fn apart(rank: usize, ranks: usize) -> Arc<Self> {
        struct Apart(usize, usize);
        impl Communicator for Apart {
            fn rank(&self) -> usize {
                self.0
            }
            fn ranks(&self) -> usize {
                self.1
            }
            fn start(&self, exchange: Exchange) -> Result<Pending> {
                anyhow::bail!("{}: these ranks never meet", exchange.what)
            }
            fn set_limit(&self, _: Duration) {}
            fn leave(&self) {}
        }
        Arc::new(Self { communicator: Some(Box::new(Apart(rank, ranks))), ..Self::alone() })
    }
}
