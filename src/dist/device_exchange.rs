//! Exchanges between the memories of GPUs. The communication thread gets addresses and events, no bytes.
//!
//! An exchange runs on a stream of its own. That stream waits for the event `ready` of the caller's stream.
//! The caller's stream must wait for the event that [`PendingDeviceExchange::posted`] returns before it reads
//! or frees the memory. No thread of the host waits for the GPU.

use anyhow::{Context, Result};
use std::any::Any;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

/// An event of a GPU: cudarc's `CudaEvent`, a type that builds without a GPU do not have.
pub type DeviceEvent = Arc<dyn Any + Send + Sync>;

/// Memory that all ranks fill: part r of equal parts comes from rank r. A rank's own part is there already.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "nccl"), allow(dead_code))]
pub struct DeviceGather {
    /// The address of the first part on this GPU.
    pub address: u64,
    /// The size of one part.
    pub part_bytes: usize,
}

/// Memory of this GPU that is sent to another rank, or received from it.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "nccl"), allow(dead_code))]
pub struct DevicePart {
    /// The other rank.
    pub rank: usize,
    pub address: u64,
    /// Not 0. Equal on both ranks.
    pub bytes: usize,
}

/// The parts that one rank exchanges with the others, in the memory of its GPU.
#[cfg_attr(not(feature = "nccl"), allow(dead_code))]
pub struct DeviceExchange {
    /// The name of the exchange in messages. It is equal on every rank.
    pub name: String,
    /// In the same order on every rank.
    pub gathers: Vec<DeviceGather>,
    /// Between two ranks, parts are received in the order in which they are sent.
    pub send: Vec<DevicePart>,
    pub receive: Vec<DevicePart>,
    /// The exchange begins after this event.
    pub ready: DeviceEvent,
}

/// An exchange that the communication thread enqueues.
pub struct PendingDeviceExchange(pub(super) Receiver<Result<DeviceEvent>>);

impl PendingDeviceExchange {
    /// Waits until the exchange is enqueued. Returns the event at its end.
    ///
    /// # Errors
    /// When the exchange cannot be enqueued, or an earlier one failed. If this exchange fails later, its
    /// memory is undefined, and every later exchange returns the error.
    pub fn posted(&self) -> Result<DeviceEvent> {
        self.0.recv().context("the communication thread has ended")?
    }
}
