//! Ranks on NCCL, each with a GPU of its own: parts go through memory of the devices, every part with a head that says what it
//! belongs to. The communicator is one that never waits; an exchange is one group, watched by an event and ended by
//! `ncclCommAbort` where it takes too long.

use super::connection::{Carrier, LEAVE_LIMIT, LIMIT};
use super::launch::Place;
use super::{Exchange, rendezvous, tag};
use crate::error::BadInput;
use anyhow::{Context, Result, bail};
use cudarc::driver::{
    CudaContext, CudaEvent, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DriverError, SyncOnDrop,
};
use cudarc::nccl::result::{self, NcclError, NcclStatus};
use cudarc::nccl::sys;
use std::ffi::{CStr, c_int};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Before each part: what it belongs to and its length, 8 bytes each.
const HEAD_BYTES: usize = 16;
/// Of `ncclConfig_t`, as NCCL's header begins it: whatever is not said has this value.
const UNSAID: c_int = c_int::MIN;
const CONFIG_MAGIC: u32 = 0xcafe_beef;
/// The version whose configuration cudarc's feature `nccl-02024` describes; newer ones take it.
const CONFIG_VERSION: u32 = 22_400;

/// The communicator of all ranks, on the one thread that calls NCCL.
pub(super) struct Comm {
    rank: usize,
    ranks: usize,
    /// `None` once it was ended.
    comm: Option<sys::ncclComm_t>,
    /// Where NCCL works.
    exchanges: Arc<CudaStream>,
    /// Where bytes come from and go to the host.
    copies: Arc<CudaStream>,
}

/// One exchange under way.
pub(super) struct Group {
    /// After the last of it.
    end: CudaEvent,
    /// From whom, what head it must have, and where it is put.
    receive: Vec<(usize, [u8; HEAD_BYTES], CudaSlice<u8>)>,
    /// To whom; many may get the same.
    to: Vec<usize>,
    _send: Vec<CudaSlice<u8>>,
}

fn head(what: &str, bytes: usize) -> [u8; HEAD_BYTES] {
    let mut head = [0; HEAD_BYTES];
    head[..4].copy_from_slice(&tag(what).to_le_bytes());
    head[8..].copy_from_slice(&(bytes as u64).to_le_bytes());
    head
}

fn driver<T>(result: std::result::Result<T, DriverError>, what: &str) -> Result<T> {
    result.map_err(|error| anyhow::anyhow!("{what}: {error}"))
}

/// The GPU of the process that is number `local_rank` on its machine: a launcher may show each its own alone.
fn device(local_rank: usize) -> Result<Arc<CudaContext>> {
    let devices = driver(CudaContext::device_count(), "looking for GPUs")? as usize;
    let ordinal = if devices == 1 { 0 } else { local_rank };
    if ordinal >= devices {
        return Err(BadInput(format!(
            "process {local_rank} of this machine, counted from 0, has no GPU: there are {devices}; start one process a GPU"
        ))
        .into());
    }
    driver(CudaContext::new(ordinal), "opening the GPU")
}

impl Comm {
    /// Meets the other ranks and opens the communicator of all.
    ///
    /// # Errors
    /// When there is no GPU for this process, or a rank does not come.
    pub fn open(place: &Place) -> Result<Self> {
        let device = device(place.local_rank)?;
        let made = rendezvous::share(place, || {
            let id = result::get_uniqueid().map_err(|error| said(None, "ncclGetUniqueId", &error))?;
            Ok(id.internal.map(|byte| byte as u8))
        })?;
        Self::of(&device, place.rank, place.ranks, made)
    }

    /// The communicator of `ranks` that share the id `made`.
    fn of(device: &Arc<CudaContext>, rank: usize, ranks: usize, made: [u8; 128]) -> Result<Self> {
        let stream = || driver(device.new_stream(), "a stream of the GPU");
        let (exchanges, copies) = (stream()?, stream()?);
        driver(device.bind_to_thread(), "the GPU")?;
        let mut config = sys::ncclConfig_t {
            size: size_of::<sys::ncclConfig_t>(),
            magic: CONFIG_MAGIC,
            version: CONFIG_VERSION,
            // No call waits for another rank.
            blocking: 0,
            cgaClusterSize: UNSAID,
            minCTAs: UNSAID,
            maxCTAs: UNSAID,
            netName: std::ptr::null(),
            splitShare: UNSAID,
        };
        let id = sys::ncclUniqueId { internal: made.map(|byte| byte as _) };
        let mut comm = std::ptr::null_mut();
        // SAFETY: both pointers are to locals that outlive the call; the device is this thread's.
        let begun = unsafe {
            result::comm_init_rank_config(&mut comm, ranks as c_int, id, rank as c_int, &mut config)
        };
        let mut ring = Self { rank, ranks, comm: Some(comm), exchanges, copies };
        ring.settled("ncclCommInitRankConfig", begun, LIMIT)?;
        Ok(ring)
    }

    fn comm(&self) -> Result<sys::ncclComm_t> {
        self.comm.context("the connection of all ranks was ended after an exchange that failed")
    }

    /// Waits until `call` is through, `limit` at most: NCCL answers at once and works on, where ranks meet for the first time until
    /// the other comes. Its work on the device is not waited for. After an error the communicator is ended, so that nothing of it
    /// is under way.
    fn settled(&mut self, call: &str, answer: Result<NcclStatus, NcclError>, limit: Duration) -> Result<()> {
        let comm = self.comm()?;
        let settled = self.polled((comm, call), answer, limit);
        if settled.is_err() {
            self.abort();
        }
        settled
    }

    fn polled(
        &self,
        (comm, call): (sys::ncclComm_t, &str),
        answer: Result<NcclStatus, NcclError>,
        limit: Duration,
    ) -> Result<()> {
        answer.map_err(|error| said(Some(comm), call, &error))?;
        let begun = Instant::now();
        loop {
            let mut state = sys::ncclResult_t::ncclSuccess;
            // SAFETY: the communicator is open, the pointer is to a local.
            let asked = unsafe { sys::ncclCommGetAsyncError(comm, &mut state) };
            asked.result().and(state.result()).map_err(|error| said(Some(comm), call, &error))?;
            if state != sys::ncclResult_t::ncclInProgress {
                return Ok(());
            }
            if begun.elapsed() > limit {
                bail!("rank {} has waited {:.0} s in {call}: a rank hangs", self.rank, limit.as_secs_f64());
            }
            std::thread::yield_now();
        }
    }

    /// Ends the communicator whatever is under way; the other ranks' exchanges with this one end by their own limits.
    fn abort(&mut self) {
        if let Some(comm) = self.comm.take() {
            // SAFETY: the communicator is open, and never used again.
            let _ = unsafe { result::comm_abort(comm) };
        }
    }

    /// `part` with its head, in memory of the device.
    fn upload(&self, what: &str, part: &[u8]) -> Result<CudaSlice<u8>, DriverError> {
        let mut memory = memory(&self.copies, part.len())?;
        self.copies.memcpy_htod(&head(what, part.len()), &mut memory.slice_mut(..HEAD_BYTES))?;
        if !part.is_empty() {
            self.copies.memcpy_htod(part, &mut memory.slice_mut(HEAD_BYTES..))?;
        }
        Ok(memory)
    }
}

/// Memory for a part of `bytes`, which `stream` is the first to use.
fn memory(stream: &Arc<CudaStream>, bytes: usize) -> Result<CudaSlice<u8>, DriverError> {
    // SAFETY: every byte is written before it is read, by a copy or by NCCL.
    unsafe { stream.alloc(HEAD_BYTES + bytes) }
}

/// Gives NCCL a group on `stream`: `to` has a rank and the number of its part in `send`. What comes back tells other streams to
/// wait for it, and is dropped when the work is on the stream.
fn launch<'a>(
    (comm, stream): (sys::ncclComm_t, &'a CudaStream),
    (to, send): (&[(usize, usize)], &'a [CudaSlice<u8>]),
    receive: &'a mut [(usize, [u8; HEAD_BYTES], CudaSlice<u8>)],
) -> (Vec<SyncOnDrop<'a>>, Result<NcclStatus, NcclError>) {
    let mut guards = vec![];
    let (place, byte) = (stream.cu_stream().cast(), sys::ncclDataType_t::ncclUint8);
    let mut begun = result::group_start();
    for (from, _, memory) in receive {
        let length = memory.len();
        let (address, guard) = memory.device_ptr_mut(stream);
        guards.push(guard);
        // SAFETY: the memory is `length` bytes of this device and is kept until the group has ended (`Group`), or after an
        // abort; the stream is this communicator's device's.
        let call = || unsafe { result::recv(address as *mut _, length, byte, *from as c_int, comm, place) };
        begun = begun.and_then(|_| call());
    }
    for &(to, part) in to {
        let (address, guard) = send[part].device_ptr(stream);
        guards.push(guard);
        let length = send[part].len();
        // SAFETY: as above.
        let call = || unsafe { result::send(address as *const _, length, byte, to as c_int, comm, place) };
        begun = begun.and_then(|_| call());
    }
    // A group is ended whatever failed in it.
    let ended = result::group_end();
    (guards, begun.and(ended))
}

/// What NCCL says of a call that failed.
fn said(comm: Option<sys::ncclComm_t>, call: &str, error: &NcclError) -> anyhow::Error {
    // SAFETY: NCCL's texts live as long as the process, or until its next call on this thread.
    let text = unsafe {
        let last = comm.map_or(std::ptr::null(), |comm| sys::ncclGetLastError(comm));
        let text = if last.is_null() { sys::ncclGetErrorString(error.0) } else { last };
        CStr::from_ptr(text).to_string_lossy().into_owned()
    };
    anyhow::anyhow!("{call} failed with {:?}: {text}", error.0)
}

impl Carrier for Comm {
    type UnderWay = Group;

    const TELLS_WHO: bool = false;

    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn post(&mut self, exchange: Exchange, limit: Duration) -> Result<Group> {
        let comm = self.comm()?;
        let Exchange { what, send, receive } = exchange;
        // What many get goes to the device once.
        let mut parts: Vec<&Arc<Vec<u8>>> = vec![];
        let mut to = vec![];
        for (rank, part) in &send {
            let known = parts.iter().position(|known| Arc::ptr_eq(known, part));
            to.push((*rank, known.unwrap_or(parts.len())));
            if known.is_none() {
                parts.push(part);
            }
        }
        let room = "memory of the GPU for what ranks exchange";
        let send =
            parts.iter().map(|part| driver(self.upload(&what, part), room)).collect::<Result<Vec<_>>>()?;
        let mut receive = receive
            .into_iter()
            .map(|(from, bytes)| {
                Ok((from, head(&what, bytes), driver(memory(&self.exchanges, bytes), room)?))
            })
            .collect::<Result<Vec<_>>>()?;
        let stream = self.exchanges.clone();
        let (guards, launched) = launch((comm, &stream), (&to, &send), &mut receive);
        // NCCL puts its work on the stream when it has settled, and no sooner.
        self.settled("ncclGroupEnd", launched, limit)?;
        drop(guards);
        let end = driver(stream.record_event(None), "an event of the GPU").inspect_err(|_| self.abort())?;
        Ok(Group { end, receive, to: to.into_iter().map(|(rank, _)| rank).collect(), _send: send })
    }

    fn missing(&mut self, group: &mut Group) -> Result<Vec<usize>> {
        // NCCL's own errors first: with them the event may never come.
        self.settled("an exchange", Ok(NcclStatus::Success), LIMIT)?;
        match driver(group.end.try_is_complete(), "an exchange")? {
            true => Ok(vec![]),
            false => {
                Ok(group.receive.iter().map(|(from, ..)| *from).chain(group.to.iter().copied()).collect())
            }
        }
    }

    fn received(&mut self, group: Group) -> Result<Vec<Vec<u8>>> {
        let download = |memory: &CudaSlice<u8>| -> Result<([u8; HEAD_BYTES], Vec<u8>), DriverError> {
            let (mut head, mut bytes) = ([0; HEAD_BYTES], vec![0; memory.len() - HEAD_BYTES]);
            self.copies.memcpy_dtoh(&memory.slice(..HEAD_BYTES), &mut head)?;
            if !bytes.is_empty() {
                self.copies.memcpy_dtoh(&memory.slice(HEAD_BYTES..), &mut bytes)?;
            }
            self.copies.synchronize()?;
            Ok((head, bytes))
        };
        let check = |(from, expected, memory): &(usize, [u8; HEAD_BYTES], CudaSlice<u8>)| {
            let (found, bytes) = driver(download(memory), "reading what came from the GPU")?;
            if found != *expected {
                bail!("rank {} and rank {from} make different exchanges", self.rank);
            }
            Ok(bytes)
        };
        group.receive.iter().map(check).collect()
    }

    fn abandon(&mut self, group: Group) {
        self.abort();
        drop(group);
    }

    fn leave(&mut self) {
        let Some(comm) = self.comm else { return };
        // SAFETY: the communicator is open.
        let answer = unsafe { result::comm_finalize(comm) };
        if self.settled("ncclCommFinalize", answer, LEAVE_LIMIT).is_err() {
            return;
        }
        self.comm = None;
        // SAFETY: the communicator is open, and never used again.
        let _ = unsafe { result::comm_destroy(comm) };
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        self.abort();
    }
}

/// Whether NCCL works on the GPU `ordinal` as far as one rank can tell: it opens a communicator, gives itself parts of 1 byte to
/// `bytes_max` and compares what comes. The version of NCCL.
///
/// # Errors
/// NCCL's and the driver's; when a byte differs.
pub fn check_alone(ordinal: usize, bytes_max: usize) -> Result<String> {
    let device = driver(CudaContext::new(ordinal), "opening the GPU")?;
    let id = result::get_uniqueid().map_err(|error| said(None, "ncclGetUniqueId", &error))?;
    let mut ring = Comm::of(&device, 0, 1, id.internal.map(|byte| byte as u8))?;
    let mut bytes = 1;
    while bytes <= bytes_max {
        let part: Vec<u8> = (0..bytes).map(|i| (i * 31 % 251) as u8).collect();
        let what = format!("{bytes} bytes to itself");
        let send = vec![(0, Arc::new(part.clone()))];
        let mut group = ring.post(Exchange { what: what.clone(), send, receive: vec![(0, bytes)] }, LIMIT)?;
        let begun = Instant::now();
        while !ring.missing(&mut group)?.is_empty() {
            if begun.elapsed() > super::meeting::CONNECT_LIMIT {
                bail!("{what} did not come");
            }
            std::thread::yield_now();
        }
        if ring.received(group)? != [part] {
            bail!("{what} came as others");
        }
        bytes *= 16;
    }
    ring.leave();
    let version = result::get_nccl_version().map_err(|error| said(None, "ncclGetVersion", &error))?;
    Ok(format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100))
}
