//! Processes that share a run: their launcher, the exchange on which all collectives are built, and the
//! detection of a dead process.
//!
//! Every collective is an exchange of bytes: a rank sends a part to each rank of a group and receives a part
//! from each. This crate adds sums itself, in rank order. The reduction of a library would use an order that
//! depends on topology and size. So a run on N ranks is reproducible bit by bit.

#[cfg(any(feature = "mpi", feature = "nccl"))]
mod connection;
mod device_exchange;
mod group;
pub mod launch;
mod liveness;
mod mesh;
#[cfg(feature = "mpi")]
mod mpi;
#[cfg(feature = "nccl")]
mod nccl;
#[cfg(any(test, feature = "nccl"))]
mod rendezvous;
pub mod serialization;
mod settings;
mod shard;
mod tcp;

pub use device_exchange::{DeviceEvent, DeviceExchange, DeviceGather, DevicePart, PendingDeviceExchange};
pub use mesh::{Mesh, PendingExchange};
#[cfg(feature = "nccl")]
pub use nccl::self_test as check_nccl_alone;
pub use settings::{ExpertPlacement, PackedWeightPlacement, ParallelSettings, RolloutWeightPlacement};
pub use shard::{
    SHARD_ALIGNMENT, Sharding, expert_range, first_shard_rank, rotated_shard_range, shard_length, shard_range,
};

use anyhow::{Context, Result};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;

/// The parts that one rank sends to other ranks and receives from them.
#[cfg_attr(not(any(feature = "mpi", feature = "nccl")), allow(dead_code))]
pub struct Exchange {
    /// The name of the exchange in messages. It is equal on every rank.
    pub name: String,
    /// For each receiving rank, the rank and the part.
    pub send: Vec<(usize, Arc<Vec<u8>>)>,
    /// For each sending rank, the rank and the number of bytes.
    pub receive: Vec<(usize, usize)>,
}

/// Time limit of an exchange, until the recipe sets another one.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Returns `ranks` references to `part`, one for each rank.
pub fn replicate(part: Vec<u8>, ranks: usize) -> Vec<Arc<Vec<u8>>> {
    std::iter::repeat_n(Arc::new(part), ranks).collect()
}

/// Returns the tag of an exchange. With tags, ranks in different exchanges do not accept each other's parts.
#[cfg(any(feature = "mpi", feature = "nccl"))]
fn tag(name: &str) -> u32 {
    name.bytes().fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

/// Sends parts between ranks. Every rank starts the same exchanges in the same order.
pub trait Communicator: Send + Sync {
    /// Returns this process's rank, below [`Self::ranks`].
    fn rank(&self) -> usize;
    /// Returns the number of ranks.
    fn ranks(&self) -> usize;
    /// Starts `exchange` and returns at once.
    ///
    /// # Errors
    /// When the communication thread has ended.
    fn start(&self, exchange: Exchange) -> Result<PendingMessages>;
    /// Returns whether the ranks can exchange memory of their GPUs.
    fn exchanges_on_devices(&self) -> bool;
    /// Starts `exchange` and returns at once.
    ///
    /// # Errors
    /// When the communication thread has ended.
    fn start_on_device(&self, exchange: DeviceExchange) -> Result<PendingDeviceExchange>;
    /// Returns the error of the first exchange between GPUs that failed, if any did.
    fn device_failure(&self) -> Option<String>;
    /// Sets the time limit of later exchanges.
    fn set_timeout(&self, limit: Duration);
    /// Disconnects, after every rank has finished.
    fn disconnect(&self);
}

/// The parts of a pending exchange.
pub struct PendingMessages(Receiver<Result<Vec<Vec<u8>>>>);

impl PendingMessages {
    /// Waits for the parts and returns them in the order of [`Exchange::receive`].
    ///
    /// # Errors
    /// When the time limit is reached. The message names this rank, the exchange and the missing ranks.
    pub fn wait(self) -> Result<Vec<Vec<u8>>> {
        self.0.recv().context("the communication thread has ended")?
    }
}
