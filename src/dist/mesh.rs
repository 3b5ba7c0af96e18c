//! The ranks of a run, and their collectives.

#[cfg(any(feature = "mpi", feature = "nccl"))]
use super::connection::Connection;
use super::group::Group;
#[cfg(any(feature = "mpi", feature = "nccl"))]
use super::launch::Transport;
use super::liveness::LivenessMonitor;
use super::serialization::{deserialize, serialize};
use super::{
    Communicator, DeviceExchange, Exchange, PendingDeviceExchange, PendingMessages, Sharding, TIMEOUT,
    replicate,
};
use crate::error::{BadInput, ErrorOnOtherRank};
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// The name of the exchange that sends rank 0's requests.
const REQUEST: &str = "a request of rank 0";

/// All processes of a run. A single process is a mesh of one rank, which exchanges nothing.
pub struct Mesh {
    /// `None` for a single process.
    communicator: Option<Arc<dyn Communicator>>,
    /// Ends this process when another process dies.
    monitor: Option<LivenessMonitor>,
    /// Whether rank 0 works alone while the other ranks serve its requests.
    rank_zero_alone: AtomicBool,
    /// The number of ranks on this machine.
    pub ranks_on_host: usize,
    /// This process's rank among the processes of its machine, from 0.
    pub local_rank: usize,
    /// The number of ranks on this machine that share this process's cores. A launcher may bind each
    /// rank to cores of its own.
    pub ranks_on_cores: usize,
    /// Number of ranks in a sequence-parallel group.
    sequence_ranks: AtomicUsize,
    /// Whether expert tensors are sharded by expert.
    shards_by_expert: AtomicBool,
    /// Set if several groups of ranks each share a copy of the weights.
    groups: OnceLock<Groups>,
}

/// The groups of a rank with hybrid sharding.
struct Groups {
    /// The ranks that share a copy of the weights.
    shards: Arc<Mesh>,
    /// The ranks with the same shard, one of each copy.
    replicas: Arc<Mesh>,
}

/// The host of a rank, and the cores that it may use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Peer {
    host: String,
    /// The cores that the rank may use.
    cores: Vec<usize>,
}

impl Peer {
    fn this() -> Result<Self> {
        let allowed =
            rustix::thread::sched_getaffinity(None).context("reading this process's CPU affinity")?;
        let cores = (0..rustix::thread::CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).collect();
        Ok(Self { host: rustix::system::uname().nodename().to_string_lossy().into_owned(), cores })
    }
}

/// Time limit of the first exchanges. All ranks are connected, but no monitor detects a lost one yet.
const STARTUP_TIMEOUT: Duration = Duration::from_secs(120);

/// A rank's result of a stage that must succeed on all ranks.
#[derive(Serialize, Deserialize)]
struct RankResult {
    error: Option<String>,
    is_bad_input: bool,
}

impl Mesh {
    /// Creates the mesh of a single process.
    pub fn single() -> Arc<Self> {
        Arc::new(Self::single_rank())
    }

    /// Connects the processes that the launcher started. A single process needs no connection.
    ///
    /// # Errors
    /// [`BadInput`] when there are several processes and this build cannot connect them. Other errors when
    /// the connection fails.
    pub fn connect() -> Result<Arc<Self>> {
        let processes = super::launch::process_count();
        if processes == 1 {
            return Ok(Self::single());
        }
        let mut mesh = Self { communicator: Some(connect_transport(processes)?), ..Self::single_rank() };
        mesh.set_timeout(STARTUP_TIMEOUT);
        let own = Peer::this()?;
        let peers = mesh.all_gather_records("hosts and cores", &own)?;
        mesh.ranks_on_host = peers.iter().filter(|peer| peer.host == own.host).count();
        mesh.local_rank = peers[..mesh.rank()].iter().filter(|peer| peer.host == own.host).count();
        mesh.ranks_on_cores = peers.iter().filter(|peer| **peer == own).count();
        let hosts: Vec<String> = peers.into_iter().map(|peer| peer.host).collect();
        mesh.monitor = Some(LivenessMonitor::start(&mesh, &hosts)?);
        mesh.set_timeout(TIMEOUT);
        Ok(Arc::new(mesh))
    }

    fn single_rank() -> Self {
        Self {
            communicator: None,
            monitor: None,
            rank_zero_alone: AtomicBool::new(false),
            ranks_on_host: 1,
            local_rank: 0,
            ranks_on_cores: 1,
            sequence_ranks: AtomicUsize::new(1),
            shards_by_expert: AtomicBool::new(false),
            groups: OnceLock::new(),
        }
    }

    /// Groups every `ranks` consecutive ranks into one sequence-parallel group. `ranks` must divide the
    /// number of all ranks.
    pub fn set_sequence_ranks(&self, ranks: usize) {
        self.sequence_ranks.store(ranks.max(1), Ordering::Relaxed);
    }

    /// Sets whether expert tensors are sharded by expert. Must be called before a tensor is sharded.
    pub fn set_shards_by_expert(&self, by_expert: bool) {
        self.shards_by_expert.store(by_expert, Ordering::Relaxed);
    }

    /// Lets every `ranks` consecutive ranks share a copy of the weights (hybrid sharding). `ranks` must
    /// divide the number of all ranks, and sequence-parallel groups must divide `ranks`. Must be called once,
    /// after the other settings and before a tensor is sharded.
    ///
    /// # Errors
    /// When it was called before.
    pub fn set_shard_group_size(&self, ranks: usize) -> Result<()> {
        let (Some(communicator), true) = (&self.communicator, ranks < self.ranks()) else { return Ok(()) };
        let group = |members: Vec<usize>| -> Result<Arc<Self>> {
            let communicator: Arc<dyn Communicator> = Arc::new(Group::new(communicator, members)?);
            let mesh = Self { communicator: Some(communicator), ..Self::single_rank() };
            mesh.set_shards_by_expert(self.sharding().by_expert);
            Ok(Arc::new(mesh))
        };
        let first = self.rank() - self.rank() % ranks;
        let shards = group((first..first + ranks).collect())?;
        let replicas = group((self.rank() % ranks..self.ranks()).step_by(ranks).collect())?;
        let set = self.groups.set(Groups { shards, replicas });
        set.ok().context("the groups of shards are set already")
    }

    /// Returns the ranks that share a copy of the weights: all ranks, or a group of them.
    pub fn shard_group(self: &Arc<Self>) -> &Arc<Self> {
        self.groups.get().map_or(self, |groups| &groups.shards)
    }

    /// Returns whether this rank shares a copy of the weights with rank 0, which writes that copy.
    pub fn shares_with_rank_zero(&self) -> bool {
        self.groups.get().is_none_or(|groups| self.rank() < groups.shards.ranks())
    }

    /// Returns the ranks with the same shard as this one, in the order of their copies. `None` if all ranks
    /// share one copy.
    pub fn replica_group(&self) -> Option<&Arc<Self>> {
        self.groups.get().map(|groups| &groups.replicas)
    }

    /// Returns how tensors are sharded over these ranks.
    pub fn sharding(&self) -> Sharding {
        Sharding { ranks: self.ranks(), by_expert: self.shards_by_expert.load(Ordering::Relaxed) }
    }

    /// Returns the number of ranks in a sequence-parallel group.
    pub fn sequence_ranks(&self) -> usize {
        self.sequence_ranks.load(Ordering::Relaxed)
    }

    /// Returns this process's rank within its sequence-parallel group.
    pub fn sequence_rank(&self) -> usize {
        self.rank() % self.sequence_ranks()
    }

    /// Returns the ranks of this process's sequence-parallel group.
    pub fn sequence_group(&self) -> Vec<usize> {
        let first = self.rank() - self.sequence_rank();
        (first..first + self.sequence_ranks()).collect()
    }

    /// Returns the number of sequence-parallel groups. Each group has its own micro-batches (data
    /// parallelism).
    pub fn data_ranks(&self) -> usize {
        self.ranks() / self.sequence_ranks()
    }

    /// Returns the index of this process's sequence-parallel group.
    pub fn data_rank(&self) -> usize {
        self.rank() / self.sequence_ranks()
    }

    /// Sets the time limit of later exchanges.
    pub fn set_timeout(&self, limit: Duration) {
        if let Some(communicator) = &self.communicator {
            communicator.set_timeout(limit);
        }
    }

    /// Returns this process's rank.
    pub fn rank(&self) -> usize {
        self.communicator.as_ref().map_or(0, |c| c.rank())
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.communicator.as_ref().map_or(1, |c| c.ranks())
    }

    /// Returns whether this process is rank 0, which writes the console, the metrics and the checkpoints.
    pub fn is_rank_zero(&self) -> bool {
        self.rank() == 0
    }

    /// Returns all ranks, in order.
    pub fn all_ranks(&self) -> Vec<usize> {
        (0..self.ranks()).collect()
    }

    /// Starts an exchange among the ranks `group`, which includes this rank. `parts` has one part for each
    /// rank of the group. `lengths` has the number of bytes that each rank sends.
    ///
    /// # Errors
    /// When the connection has ended.
    pub fn start(
        &self,
        name: &str,
        group: &[usize],
        parts: Vec<Arc<Vec<u8>>>,
        lengths: &[usize],
    ) -> Result<PendingExchange> {
        let rank = self.rank();
        let place = group.iter().position(|&other| other == rank).context("this rank is not in the group")?;
        let own = parts.get(place).cloned().context("there is no part for this rank")?;
        let (Some(communicator), true) = (&self.communicator, group.len() > 1) else {
            return Ok(PendingExchange { own: (own, 0), others: None });
        };
        let others = |(to, _): &(usize, _)| *to != rank;
        let send = group.iter().copied().zip(parts).filter(|(to, _)| *to != rank).collect();
        let receive = group.iter().copied().zip(lengths.iter().copied()).filter(others).collect();
        let pending = communicator.start(Exchange { name: name.to_owned(), send, receive })?;
        Ok(PendingExchange { own: (own, place), others: Some(pending) })
    }

    /// Returns whether the ranks can exchange memory of their GPUs. False for a single process.
    pub fn exchanges_on_devices(&self) -> bool {
        self.communicator.as_ref().is_some_and(|c| c.exchanges_on_devices())
    }

    /// Starts an exchange between the GPUs of all ranks.
    ///
    /// # Errors
    /// When the connection has ended, or the ranks cannot exchange memory of GPUs.
    pub fn start_on_device(&self, exchange: DeviceExchange) -> Result<PendingDeviceExchange> {
        let communicator = self.communicator.as_ref();
        communicator.context("a single process exchanges nothing")?.start_on_device(exchange)
    }

    /// Returns the cause of `error`. After a failed exchange, GPUs compute with undefined memory, so an error
    /// such as a NaN comes from the exchange.
    pub fn explain(&self, error: anyhow::Error) -> anyhow::Error {
        let failure = self.communicator.as_ref().and_then(|communicator| communicator.device_failure());
        failure.map_or(error, |failure| anyhow::anyhow!(failure))
    }

    /// Gathers the parts of all ranks, in rank order. A part may have any length.
    ///
    /// # Errors
    /// When a rank does not answer in time.
    pub fn all_gather(&self, name: &str, part: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        if self.communicator.is_none() {
            return Ok(vec![part]);
        }
        let length = (part.len() as u64).to_le_bytes().to_vec();
        let (ranks, all_ranks) = (self.ranks(), self.all_ranks());
        let lengths = self.start(name, &all_ranks, replicate(length, ranks), &vec![8; ranks])?.wait()?;
        let lengths = lengths.iter().map(|bytes| read_length(bytes)).collect::<Result<Vec<_>>>()?;
        self.start(name, &all_ranks, replicate(part, ranks), &lengths)?.wait()
    }

    /// Gathers the records of all ranks, in rank order.
    ///
    /// # Errors
    /// The errors of [`Self::all_gather`].
    pub fn all_gather_records<T: Serialize + for<'a> Deserialize<'a>>(
        &self,
        name: &str,
        own: &T,
    ) -> Result<Vec<T>> {
        self.all_gather(name, serialize(own)?)?.iter().map(|bytes| deserialize(bytes)).collect()
    }

    /// Gathers one byte from every rank, in rank order, in a single exchange.
    ///
    /// # Errors
    /// The errors of [`Self::all_gather`].
    pub fn all_gather_byte(&self, name: &str, own: u8) -> Result<Vec<u8>> {
        let ranks = self.ranks();
        let parts =
            self.start(name, &self.all_ranks(), replicate(vec![own], ranks), &vec![1; ranks])?.wait()?;
        Ok(parts.concat())
    }

    /// Returns whether `own` is true on any rank.
    ///
    /// # Errors
    /// The errors of [`Self::all_gather`].
    pub fn any(&self, name: &str, own: bool) -> Result<bool> {
        Ok(self.all_gather_byte(name, u8::from(own))?.contains(&1))
    }

    /// Sends rank 0's record to every rank. Returns the record.
    ///
    /// # Errors
    /// The errors of [`Self::all_gather`].
    pub fn broadcast<T: Serialize + for<'a> Deserialize<'a>>(&self, name: &str, own: &T) -> Result<T> {
        let part = if self.is_rank_zero() { serialize(own)? } else { vec![] };
        let parts = self.all_gather(name, part)?;
        deserialize(parts.first().context("rank 0 sent no part")?)
    }

    /// Returns `result` if all ranks succeeded. Otherwise every rank fails, and the first failed rank reports
    /// its error.
    ///
    /// # Errors
    /// The error of this rank, or [`ErrorOnOtherRank`].
    pub fn require_success<T>(&self, name: &str, result: Result<T>) -> Result<T> {
        if self.communicator.is_none() {
            return result;
        }
        let verdict = match &result {
            Ok(_) => RankResult { error: None, is_bad_input: false },
            Err(error) => RankResult {
                error: Some(format!("{error:#}")),
                is_bad_input: error.chain().any(|cause| cause.is::<BadInput>()),
            },
        };
        let verdicts = self.all_gather_records(name, &verdict)?;
        let Some(first) = verdicts.iter().position(|verdict| verdict.error.is_some()) else { return result };
        // All ranks end now. After a disconnect, no rank reports another rank as lost.
        self.disconnect();
        let RankResult { error, is_bad_input } = &verdicts[first];
        if first != self.rank() {
            return Err(ErrorOnOtherRank { is_bad_input: *is_bad_input }.into());
        }
        match (result, error) {
            (Err(own), Some(error)) if verdicts.iter().any(|other| other.error.as_ref() != Some(error)) => {
                let message = format!("rank {first}: {error}");
                Err(if *is_bad_input {
                    BadInput(message).into()
                } else {
                    own.context(format!("rank {first}"))
                })
            }
            (result, _) => result,
        }
    }

    /// Checks that `own` is equal on all ranks.
    ///
    /// # Errors
    /// [`BadInput`] on every rank if a rank differs from rank 0. The message has `name` and the `remedy`.
    pub fn check_equal(&self, name: &str, own: &str, remedy: &str) -> Result<()> {
        let all = self.all_gather_records(name, &own.to_owned())?;
        let Some(other) = all.iter().position(|found| *found != all[0]) else { return Ok(()) };
        self.disconnect();
        let message = format!("ranks 0 and {other} have different {name}; {remedy}");
        if self.is_rank_zero() {
            Err(BadInput(message).into())
        } else {
            Err(ErrorOnOtherRank { is_bad_input: true }.into())
        }
    }

    /// Runs `work`, such as writing a file, on rank 0 alone. The other ranks call `answer` on each request
    /// that rank 0 makes with [`Self::request`].
    ///
    /// # Errors
    /// On rank 0, the error of `work`; on the other ranks, [`ErrorOnOtherRank`]. Also the errors of `answer`.
    pub fn run_on_rank_zero<R: Serialize + for<'a> Deserialize<'a>>(
        &self,
        work: impl FnOnce() -> Result<()>,
        answer: impl Fn(R) -> Result<()>,
    ) -> Result<()> {
        if self.communicator.is_none() {
            return work();
        }
        if self.is_rank_zero() {
            self.rank_zero_alone.store(true, Ordering::Relaxed);
            let result = work();
            self.rank_zero_alone.store(false, Ordering::Relaxed);
            // After a failed exchange of `work`, its error says more than that of the next exchange.
            if let Err(error) = self.broadcast(REQUEST, &None::<R>) {
                return Err(result.err().unwrap_or(error));
            }
            return self.require_success("the work of rank 0", result);
        }
        while let Some(request) = self.broadcast(REQUEST, &None::<R>)? {
            answer(request)?;
        }
        self.require_success("the work of rank 0", Ok(()))
    }

    /// Sends rank 0's request to the other ranks. Outside [`Self::run_on_rank_zero`] it does nothing, because
    /// all ranks then make the same calls themselves.
    ///
    /// # Errors
    /// The errors of [`Self::all_gather`].
    pub fn request<R: Serialize + for<'a> Deserialize<'a>>(&self, request: R) -> Result<()> {
        if self.rank_zero_alone.load(Ordering::Relaxed) {
            self.broadcast(REQUEST, &Some(request))?;
        }
        Ok(())
    }

    /// Disconnects. Afterwards, a rank may end without counting as lost.
    pub fn disconnect(&self) {
        if let Some(monitor) = &self.monitor {
            monitor.stop();
        }
        if let Some(communicator) = &self.communicator {
            communicator.disconnect();
        }
    }
}

/// A pending exchange, and the part that this rank keeps for itself.
pub struct PendingExchange {
    own: (Arc<Vec<u8>>, usize),
    others: Option<PendingMessages>,
}

impl PendingExchange {
    /// Returns the parts of all ranks of the group, including this rank, in the group's order.
    ///
    /// # Errors
    /// When a rank does not answer in time.
    pub fn wait(self) -> Result<Vec<Vec<u8>>> {
        let (own, rank) = self.own;
        let mut parts = self.others.map_or(Ok(vec![]), PendingMessages::wait)?;
        let own = Arc::try_unwrap(own).unwrap_or_else(|shared| shared.to_vec());
        parts.insert(rank, own);
        Ok(parts)
    }
}

fn read_length(bytes: &[u8]) -> Result<usize> {
    Ok(u64::from_le_bytes(bytes.try_into().context("a length of 8 bytes")?) as usize)
}

/// Connects with the transport that [`super::launch::transport`] returns.
fn connect_transport(processes: usize) -> Result<Arc<dyn Communicator>> {
    let transport = super::launch::transport()?;
    let connection: Result<Arc<dyn Communicator>> = match transport {
        #[cfg(feature = "mpi")]
        Transport::Mpi => Ok(Arc::new(Connection::open(super::mpi::World::open)?)),
        #[cfg(feature = "nccl")]
        Transport::Nccl => {
            let address = super::launch::rank_address()?;
            Ok(Arc::new(Connection::open(move || super::nccl::Comm::open(&address))?))
        }
        #[cfg(not(all(feature = "mpi", feature = "nccl")))]
        other => Err(anyhow::anyhow!("this build has no {other:?}")),
    };
    let connection = connection?;
    if connection.ranks() != processes {
        anyhow::bail!("the launcher started {processes} processes, but {} are connected", connection.ranks());
    }
    Ok(connection)
}

#[cfg(test)]
impl Mesh {
    /// Creates rank `rank` of `ranks` without a connection, for tests of each rank's shards.
    pub fn without_connection(rank: usize, ranks: usize) -> Arc<Self> {
        Self::connected(Self::stub(rank, ranks))
    }

    /// Returns a communicator of rank `rank` of `ranks` that exchanges nothing.
    pub(super) fn stub(rank: usize, ranks: usize) -> Arc<dyn Communicator> {
        struct StubCommunicator(usize, usize);
        impl Communicator for StubCommunicator {
            fn rank(&self) -> usize {
                self.0
            }
            fn ranks(&self) -> usize {
                self.1
            }
            fn start(&self, exchange: Exchange) -> Result<PendingMessages> {
                anyhow::bail!("{}: these ranks have no connection", exchange.name)
            }
            fn exchanges_on_devices(&self) -> bool {
                false
            }
            fn start_on_device(&self, exchange: DeviceExchange) -> Result<PendingDeviceExchange> {
                anyhow::bail!("{}: these ranks have no connection", exchange.name)
            }
            fn device_failure(&self) -> Option<String> {
                None
            }
            fn set_timeout(&self, _: Duration) {}
            fn disconnect(&self) {}
        }
        Arc::new(StubCommunicator(rank, ranks))
    }

    /// Creates a rank that exchanges by `communicator`, without a liveness monitor.
    pub fn connected(communicator: Arc<dyn Communicator>) -> Arc<Self> {
        Arc::new(Self { communicator: Some(communicator), ..Self::single_rank() })
    }
}
