//! Processes that share a run: what started them, the one exchange by which they meet, and how a dead one is noticed.
//!
//! Every collective is an exchange of bytes: a rank hands over a part for each rank of a group and gets one from each. Sums
//! are our own additions of what came, in rank order, never a library's reduction, whose order follows topology and size;
//! so a run on N ranks is reproducible to the bit.

#[cfg(any(feature = "mpi", feature = "nccl"))]
mod connection;
mod cut;
pub mod launch;
mod meeting;
mod mesh;
#[cfg(feature = "mpi")]
mod mpi;
#[cfg(feature = "nccl")]
mod nccl;
#[cfg(any(test, feature = "nccl"))]
mod rendezvous;
mod settings;
mod watch;
pub mod wire;

pub use cut::{CUT, in_order, piece};
pub use mesh::{Mesh, Started};
#[cfg(feature = "nccl")]
pub use nccl::check_alone as check_nccl_alone;
pub use settings::{PackedWeights, ParallelSettings, RolloutWeights};

use anyhow::{Context, Result};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;

/// What one rank gives to and expects from others.
#[cfg_attr(not(any(feature = "mpi", feature = "nccl")), allow(dead_code))]
pub struct Exchange {
    /// Says in messages what waits; the same on every rank.
    pub what: String,
    /// Rank, and what it is sent.
    pub send: Vec<(usize, Arc<Vec<u8>>)>,
    /// Rank, and how many bytes come from it.
    pub receive: Vec<(usize, usize)>,
}

/// One part for each of `ranks` ranks, the same.
pub fn to_each(part: Vec<u8>, ranks: usize) -> Vec<Arc<Vec<u8>>> {
    std::iter::repeat_n(Arc::new(part), ranks).collect()
}

/// What tells one kind of exchange from another, so that ranks which disagree do not take each other's parts.
#[cfg(any(feature = "mpi", feature = "nccl"))]
fn tag(what: &str) -> u32 {
    what.bytes().fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

/// Carries parts between ranks. Every rank starts the same exchanges in the same order.
pub trait Communicator: Send + Sync {
    /// This process, below [`Self::ranks`].
    fn rank(&self) -> usize;
    /// How many processes there are.
    fn ranks(&self) -> usize;
    /// Begins `exchange` and returns at once.
    ///
    /// # Errors
    /// When the exchange's thread has ended.
    fn start(&self, exchange: Exchange) -> Result<Pending>;
    /// From now on an exchange ends with an error after `limit`.
    fn set_limit(&self, limit: Duration);
    /// Ends the connection in order, once every rank has said that it is done.
    fn leave(&self);
}

/// An exchange under way.
pub struct Pending(Receiver<Result<Vec<Vec<u8>>>>);

impl Pending {
    /// What came, in the order of [`Exchange::receive`].
    ///
    /// # Errors
    /// When nothing came in time: the message names this rank, what it waits for and from whom.
    pub fn wait(self) -> Result<Vec<Vec<u8>>> {
        self.0.recv().context("the thread that exchanges with other ranks has ended")?
    }
}
