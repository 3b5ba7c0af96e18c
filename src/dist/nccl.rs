//! NCCL backend with one GPU per rank. Parts are copied to device memory, each with a header that identifies
//! its exchange.
//!
//! The communicator is non-blocking. An exchange is one NCCL group, followed by an event. At the time limit,
//! `ncclCommAbort` ends the exchange.

use super::connection::{DISCONNECT_TIMEOUT, TransportBackend};
use super::launch::RankAddress;
use super::{DeviceEvent, DeviceExchange, DeviceGather, DevicePart, Exchange, TIMEOUT, rendezvous, tag};
use crate::error::BadInput;
use anyhow::{Context, Result, bail};
use cudarc::driver::{
    CudaContext, CudaEvent, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DriverError, SyncOnDrop,
};
use cudarc::nccl::result::{self, NcclError, NcclStatus};
use cudarc::nccl::sys;
use std::collections::BTreeSet;
use std::ffi::{CStr, c_int};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of a part's header: its tag and its length, with 8 bytes each.
const HEADER_BYTES: usize = 16;
/// `NCCL_CONFIG_UNDEF_INT` in NCCL's header: the value of fields that are not set.
const UNDEFINED: c_int = c_int::MIN;
const CONFIG_MAGIC: u32 = 0xcafe_beef;
/// The version of the configuration in cudarc's feature `nccl-02024`. Newer versions of NCCL accept it.
const CONFIG_VERSION: u32 = 22_400;

/// The communicator of all ranks. One thread uses it.
pub(super) struct Comm {
    rank: usize,
    ranks: usize,
    /// `None` after the communicator was aborted or destroyed.
    comm: Option<sys::ncclComm_t>,
    /// The stream on which NCCL works.
    exchanges: Arc<CudaStream>,
    /// The stream for copies from and to the host.
    copies: Arc<CudaStream>,
}

/// A pending exchange.
pub(super) struct PendingGroup {
    /// The event after the group.
    end: Arc<CudaEvent>,
    /// For each part: sending rank, expected header, device memory.
    receive: Vec<(usize, [u8; HEADER_BYTES], CudaSlice<u8>)>,
    /// Receiving ranks. Several ranks may receive the same part.
    to: Vec<usize>,
    _send: Vec<CudaSlice<u8>>,
}

fn header(name: &str, bytes: usize) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..4].copy_from_slice(&tag(name).to_le_bytes());
    header[8..].copy_from_slice(&(bytes as u64).to_le_bytes());
    header
}

fn driver<T>(result: std::result::Result<T, DriverError>, name: &str) -> Result<T> {
    result.map_err(|error| anyhow::anyhow!("{name}: {error}"))
}

/// Opens the GPU of the process with rank `local_rank` on its machine. The launcher may let each process see
/// only its own GPU.
fn device(local_rank: usize) -> Result<Arc<CudaContext>> {
    let devices = driver(CudaContext::device_count(), "looking for GPUs")? as usize;
    let ordinal = if devices == 1 { 0 } else { local_rank };
    if ordinal >= devices {
        return Err(BadInput(format!(
            "process {local_rank} of this machine (index from 0) has no GPU: the machine has {devices}; start one process per GPU"
        ))
        .into());
    }
    driver(CudaContext::new(ordinal), "opening the GPU")
}

impl Comm {
    /// Connects to the other ranks and opens the communicator of all ranks.
    ///
    /// # Errors
    /// When this process has no GPU, or a rank does not connect.
    pub fn open(address: &RankAddress) -> Result<Self> {
        let device = device(address.local_rank)?;
        let id = rendezvous::broadcast_from_rank_zero(address, nccl_version()?, || {
            let id = result::get_uniqueid().map_err(|error| nccl_error(None, "ncclGetUniqueId", &error))?;
            Ok(id.internal.map(|byte| byte as u8))
        })?;
        Self::open_with_id(&device, address.rank, address.ranks, id)
    }

    /// Opens the communicator of the `ranks` ranks that share `id`.
    fn open_with_id(device: &Arc<CudaContext>, rank: usize, ranks: usize, id: [u8; 128]) -> Result<Self> {
        let stream = || driver(device.new_stream(), "a stream of the GPU");
        let (exchanges, copies) = (stream()?, stream()?);
        driver(device.bind_to_thread(), "the GPU")?;
        let mut config = sys::ncclConfig_t {
            size: size_of::<sys::ncclConfig_t>(),
            magic: CONFIG_MAGIC,
            version: CONFIG_VERSION,
            // No call blocks on another rank.
            blocking: 0,
            cgaClusterSize: UNDEFINED,
            minCTAs: UNDEFINED,
            maxCTAs: UNDEFINED,
            netName: std::ptr::null(),
            splitShare: UNDEFINED,
        };
        let id = sys::ncclUniqueId { internal: id.map(|byte| byte as _) };
        let mut comm = std::ptr::null_mut();
        // SAFETY: both pointers are to locals that outlive the call. The device is the current one of this
        // thread.
        let started = unsafe {
            result::comm_init_rank_config(&mut comm, ranks as c_int, id, rank as c_int, &mut config)
        };
        let mut connection = Self { rank, ranks, comm: Some(comm), exchanges, copies };
        connection.wait_for_call("ncclCommInitRankConfig", started, TIMEOUT)?;
        Ok(connection)
    }

    fn comm(&self) -> Result<sys::ncclComm_t> {
        self.comm.context("the connection of the ranks was closed, because an exchange failed")
    }

    /// Waits, at most `limit`, until the communicator has accepted `call`. Does not wait for the work on the
    /// device.
    ///
    /// NCCL returns at once and continues in the background. Ranks that communicate for the first time wait
    /// for each other. After an error the communicator is aborted, so no work of it is pending.
    fn wait_for_call(
        &mut self,
        call: &str,
        answer: Result<NcclStatus, NcclError>,
        limit: Duration,
    ) -> Result<()> {
        let comm = self.comm()?;
        let settled = self.poll_state((comm, call), answer, limit);
        if settled.is_err() {
            self.abort();
        }
        settled
    }

    fn poll_state(
        &self,
        (comm, call): (sys::ncclComm_t, &str),
        answer: Result<NcclStatus, NcclError>,
        limit: Duration,
    ) -> Result<()> {
        answer.map_err(|error| nccl_error(Some(comm), call, &error))?;
        let started = Instant::now();
        loop {
            let mut state = sys::ncclResult_t::ncclSuccess;
            // SAFETY: the communicator is open, the pointer is to a local.
            let asked = unsafe { sys::ncclCommGetAsyncError(comm, &mut state) };
            asked.result().and(state.result()).map_err(|error| nccl_error(Some(comm), call, &error))?;
            if state != sys::ncclResult_t::ncclInProgress {
                return Ok(());
            }
            if started.elapsed() > limit {
                bail!("rank {} has waited {:.0} s in {call}: a rank hangs", self.rank, limit.as_secs_f64());
            }
            std::thread::yield_now();
        }
    }

    /// Aborts the communicator and its pending work. On the other ranks, exchanges with this rank end at
    /// their time limits.
    fn abort(&mut self) {
        if let Some(comm) = self.comm.take() {
            // SAFETY: the communicator is open, and is never used again.
            let _ = unsafe { result::comm_abort(comm) };
        }
    }

    /// Returns the event after all groups that were enqueued before.
    fn end_of_group(&mut self) -> Result<Arc<CudaEvent>> {
        let event = driver(self.exchanges.record_event(None), "an event of the GPU");
        event.map(Arc::new).inspect_err(|_| self.abort())
    }

    /// Copies `part` and its header to the device.
    fn upload(&self, name: &str, part: &[u8]) -> Result<CudaSlice<u8>, DriverError> {
        let mut memory = memory(&self.copies, part.len())?;
        self.copies.memcpy_htod(&header(name, part.len()), &mut memory.slice_mut(..HEADER_BYTES))?;
        if !part.is_empty() {
            self.copies.memcpy_htod(part, &mut memory.slice_mut(HEADER_BYTES..))?;
        }
        Ok(memory)
    }
}

/// Allocates memory for a part of `bytes`. `stream` must be the first stream that uses the memory.
fn memory(stream: &Arc<CudaStream>, bytes: usize) -> Result<CudaSlice<u8>, DriverError> {
    // SAFETY: a copy or NCCL writes every byte before it is read.
    unsafe { stream.alloc(HEADER_BYTES + bytes) }
}

/// Enqueues an NCCL group on `stream`. `to` holds ranks, each with the index of its part in `send`.
///
/// The returned guards make other streams wait for the memory. Drop them after the work is enqueued on the
/// stream.
fn enqueue_group<'a>(
    (comm, stream): (sys::ncclComm_t, &'a CudaStream),
    (to, send): (&[(usize, usize)], &'a [CudaSlice<u8>]),
    receive: &'a mut [(usize, [u8; HEADER_BYTES], CudaSlice<u8>)],
) -> (Vec<SyncOnDrop<'a>>, Result<NcclStatus, NcclError>) {
    let mut guards = vec![];
    let (place, byte) = (stream.cu_stream().cast(), sys::ncclDataType_t::ncclUint8);
    let mut started = result::group_start();
    for (from, _, memory) in receive {
        let length = memory.len();
        let (address, guard) = memory.device_ptr_mut(stream);
        guards.push(guard);
        // SAFETY: the memory has `length` bytes on this device. `PendingGroup` keeps the memory until the
        // group has ended or was aborted. The stream belongs to this communicator's device.
        let call = || unsafe { result::recv(address as *mut _, length, byte, *from as c_int, comm, place) };
        started = started.and_then(|_| call());
    }
    for &(to, part) in to {
        let (address, guard) = send[part].device_ptr(stream);
        guards.push(guard);
        let length = send[part].len();
        // SAFETY: as above.
        let call = || unsafe { result::send(address as *const _, length, byte, to as c_int, comm, place) };
        started = started.and_then(|_| call());
    }
    // The group must be ended, even if a call in it failed.
    let ended = result::group_end();
    (guards, started.and(ended))
}

/// Enqueues `exchange` of rank `rank` on `stream`, as one group.
fn enqueue_on_device(
    comm: sys::ncclComm_t,
    stream: &CudaStream,
    rank: usize,
    exchange: &DeviceExchange,
) -> Result<NcclStatus, NcclError> {
    let (place, byte) = (stream.cu_stream().cast(), sys::ncclDataType_t::ncclUint8);
    let mut started = result::group_start();
    for &DeviceGather { address, part_bytes } in &exchange.gathers {
        let own = address + (rank * part_bytes) as u64;
        // SAFETY: the caller's memory has one part of `part_bytes` for each rank. It stays allocated until
        // the caller's stream has waited for the end of the group. The stream belongs to this communicator's
        // device.
        let call = || unsafe {
            result::all_gather(own as *const _, address as *mut _, part_bytes, byte, comm, place)
        };
        started = started.and_then(|_| call());
    }
    for &DevicePart { rank, address, bytes } in &exchange.receive {
        // SAFETY: the caller's memory has `bytes` bytes, and lives as above.
        let call = || unsafe { result::recv(address as *mut _, bytes, byte, rank as c_int, comm, place) };
        started = started.and_then(|_| call());
    }
    for &DevicePart { rank, address, bytes } in &exchange.send {
        // SAFETY: as above.
        let call = || unsafe { result::send(address as *const _, bytes, byte, rank as c_int, comm, place) };
        started = started.and_then(|_| call());
    }
    // The group must be ended, even if a call in it failed.
    let ended = result::group_end();
    started.and(ended)
}

/// Returns NCCL's message for a failed call.
fn nccl_error(comm: Option<sys::ncclComm_t>, call: &str, error: &NcclError) -> anyhow::Error {
    // SAFETY: NCCL's texts live as long as the process, or until the next call of NCCL on this thread.
    let text = unsafe {
        let last = comm.map_or(std::ptr::null(), |comm| sys::ncclGetLastError(comm));
        let text = if last.is_null() { sys::ncclGetErrorString(error.0) } else { last };
        CStr::from_ptr(text).to_string_lossy().into_owned()
    };
    anyhow::anyhow!("{call} failed with {:?}: {text}", error.0)
}

impl TransportBackend for Comm {
    type Active = PendingGroup;

    const NAMES_MISSING_RANKS: bool = false;
    const EXCHANGES_ON_DEVICES: bool = true;

    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn post(&mut self, exchange: Exchange, limit: Duration) -> Result<PendingGroup> {
        let comm = self.comm()?;
        let Exchange { name, send, receive } = exchange;
        // A part for several ranks is copied to the device only once.
        let mut parts: Vec<&Arc<Vec<u8>>> = vec![];
        let mut to = vec![];
        for (rank, part) in &send {
            let known = parts.iter().position(|known| Arc::ptr_eq(known, part));
            to.push((*rank, known.unwrap_or(parts.len())));
            if known.is_none() {
                parts.push(part);
            }
        }
        let purpose = "GPU memory for an exchange between ranks";
        let send =
            parts.iter().map(|part| driver(self.upload(&name, part), purpose)).collect::<Result<Vec<_>>>()?;
        let mut receive = receive
            .into_iter()
            .map(|(from, bytes)| {
                Ok((from, header(&name, bytes), driver(memory(&self.exchanges, bytes), purpose)?))
            })
            .collect::<Result<Vec<_>>>()?;
        let stream = self.exchanges.clone();
        let (guards, launched) = enqueue_group((comm, &stream), (&to, &send), &mut receive);
        // NCCL's work is enqueued on the stream only after this call.
        self.wait_for_call("ncclGroupEnd", launched, limit)?;
        drop(guards);
        let end = self.end_of_group()?;
        Ok(PendingGroup { end, receive, to: to.into_iter().map(|(rank, _)| rank).collect(), _send: send })
    }

    fn post_on_device(
        &mut self,
        exchange: DeviceExchange,
        limit: Duration,
    ) -> Result<(PendingGroup, DeviceEvent)> {
        let comm = self.comm()?;
        let ready =
            exchange.ready.downcast_ref::<CudaEvent>().context("the exchange has no event of a GPU")?;
        driver(self.exchanges.wait(ready), "an event of the GPU")?;
        let launched = enqueue_on_device(comm, &self.exchanges, self.rank, &exchange);
        self.wait_for_call("ncclGroupEnd", launched, limit)?;
        let end = self.end_of_group()?;
        let others = exchange.send.iter().chain(&exchange.receive).map(|part| part.rank);
        let mut to: Vec<usize> = others.collect::<BTreeSet<_>>().into_iter().collect();
        // A gather needs all ranks.
        if to.is_empty() || !exchange.gathers.is_empty() {
            to = (0..self.ranks).filter(|rank| *rank != self.rank).collect();
        }
        Ok((PendingGroup { end: end.clone(), receive: vec![], to, _send: vec![] }, end))
    }

    fn missing_ranks(&mut self, group: &mut PendingGroup) -> Result<Vec<usize>> {
        // Check NCCL's own errors first, because after an error the event may never be reached.
        self.wait_for_call("an exchange", Ok(NcclStatus::Success), TIMEOUT)?;
        match driver(group.end.try_is_complete(), "an exchange")? {
            true => Ok(vec![]),
            false => {
                Ok(group.receive.iter().map(|(from, ..)| *from).chain(group.to.iter().copied()).collect())
            }
        }
    }

    fn take_messages(&mut self, group: PendingGroup) -> Result<Vec<Vec<u8>>> {
        let download = |memory: &CudaSlice<u8>| -> Result<([u8; HEADER_BYTES], Vec<u8>), DriverError> {
            let (mut header, mut bytes) = ([0; HEADER_BYTES], vec![0; memory.len() - HEADER_BYTES]);
            self.copies.memcpy_dtoh(&memory.slice(..HEADER_BYTES), &mut header)?;
            if !bytes.is_empty() {
                self.copies.memcpy_dtoh(&memory.slice(HEADER_BYTES..), &mut bytes)?;
            }
            self.copies.synchronize()?;
            Ok((header, bytes))
        };
        let check = |(from, expected, memory): &(usize, [u8; HEADER_BYTES], CudaSlice<u8>)| {
            let (found, bytes) = driver(download(memory), "copying a part from the GPU")?;
            if found != *expected {
                bail!("ranks {} and {from} are in different exchanges", self.rank);
            }
            Ok(bytes)
        };
        group.receive.iter().map(check).collect()
    }

    fn abandon(&mut self, group: PendingGroup) {
        self.abort();
        drop(group);
    }

    fn disconnect(&mut self) {
        let Some(comm) = self.comm else { return };
        // SAFETY: the communicator is open.
        let answer = unsafe { result::comm_finalize(comm) };
        if self.wait_for_call("ncclCommFinalize", answer, DISCONNECT_TIMEOUT).is_err() {
            return;
        }
        self.comm = None;
        // SAFETY: the communicator is open, and is never used again.
        let _ = unsafe { result::comm_destroy(comm) };
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        self.abort();
    }
}

/// Tests NCCL on the GPU `ordinal` alone. Opens a communicator of one rank, sends parts of 1 byte to
/// `bytes_max` bytes to itself, and compares them. Returns NCCL's version.
///
/// # Errors
/// The errors of NCCL and of the driver. Also when a byte differs.
pub fn self_test(ordinal: usize, bytes_max: usize) -> Result<String> {
    let device = driver(CudaContext::new(ordinal), "opening the GPU")?;
    let id = result::get_uniqueid().map_err(|error| nccl_error(None, "ncclGetUniqueId", &error))?;
    let mut comm = Comm::open_with_id(&device, 0, 1, id.internal.map(|byte| byte as u8))?;
    let mut bytes = 1;
    while bytes <= bytes_max {
        let part: Vec<u8> = (0..bytes).map(|i| (i * 31 % 251) as u8).collect();
        let name = format!("{bytes} bytes to itself");
        let send = vec![(0, Arc::new(part.clone()))];
        let mut group =
            comm.post(Exchange { name: name.clone(), send, receive: vec![(0, bytes)] }, TIMEOUT)?;
        let started = Instant::now();
        while !comm.missing_ranks(&mut group)?.is_empty() {
            if started.elapsed() > super::tcp::CONNECT_TIMEOUT {
                bail!("{name} did not arrive");
            }
            std::thread::yield_now();
        }
        if comm.take_messages(group)? != [part] {
            bail!("{name} arrived changed");
        }
        bytes *= 16;
    }
    comm.disconnect();
    Ok(rendezvous::version_text(nccl_version()?))
}

fn nccl_version() -> Result<u32> {
    let version = result::get_nccl_version().map_err(|error| nccl_error(None, "ncclGetVersion", &error))?;
    Ok(version as u32)
}
