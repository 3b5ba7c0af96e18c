//! MPI backend with non-blocking requests, which are polled.

use super::connection::TransportBackend;
use super::{Exchange, tag};
use anyhow::{Result, bail};
use mpi::ffi;
use std::os::raw::{c_int, c_void};
use std::time::Duration;

/// Maximum length of a message in bytes. MPI counts in 32 bits.
const MESSAGE_BYTES_MAX: usize = 1 << 30;

/// MPI's world communicator. One thread uses it.
pub(super) struct World {
    rank: usize,
    ranks: usize,
}

/// A pending exchange, with the buffers of its requests.
pub(super) struct PendingRequests {
    /// The other rank of each pending request, and the request.
    requests: Vec<(usize, ffi::MPI_Request)>,
    receive: Vec<Vec<u8>>,
    _send: Exchange,
}

/// Returns an error if `code` is an MPI error.
fn check(call: &str, code: c_int) -> Result<()> {
    if code == ffi::MPI_SUCCESS as c_int { Ok(()) } else { bail!("{call} failed with code {code}") }
}

impl World {
    /// Connects to the processes that were started with this one.
    ///
    /// # Errors
    /// When MPI cannot start.
    pub fn open() -> Result<Self> {
        let (mut given, mut rank, mut ranks) = (0, 0, 0);
        // SAFETY: these calls initialise MPI once in this process, on this thread. Every pointer is to a
        // local that outlives its call, and MPI accepts null for the arguments.
        unsafe {
            let (none, nothing) = (std::ptr::null_mut(), std::ptr::null_mut());
            check(
                "MPI_Init_thread",
                ffi::MPI_Init_thread(none, nothing, ffi::RSMPI_THREAD_FUNNELED, &mut given),
            )?;
            let world = ffi::RSMPI_COMM_WORLD;
            check("MPI_Comm_set_errhandler", ffi::MPI_Comm_set_errhandler(world, ffi::RSMPI_ERRORS_RETURN))?;
            check("MPI_Comm_rank", ffi::MPI_Comm_rank(world, &mut rank))?;
            check("MPI_Comm_size", ffi::MPI_Comm_size(world, &mut ranks))?;
        }
        Ok(Self { rank: rank as usize, ranks: ranks as usize })
    }
}

impl TransportBackend for World {
    type Active = PendingRequests;

    const NAMES_MISSING_RANKS: bool = true;
    const EXCHANGES_ON_DEVICES: bool = false;

    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn post(&mut self, exchange: Exchange, _: Duration) -> Result<PendingRequests> {
        let tag = (tag(&exchange.name) & 0x7fff) as c_int;
        let mut requests = vec![];
        let mut receive: Vec<Vec<u8>> = exchange.receive.iter().map(|&(_, bytes)| vec![0; bytes]).collect();
        for (&(from, _), buffer) in exchange.receive.iter().zip(&mut receive) {
            for part in buffer.chunks_mut(MESSAGE_BYTES_MAX) {
                // SAFETY: a request may have any bits before MPI writes it.
                let mut request: ffi::MPI_Request = unsafe { std::mem::zeroed() };
                let (start, count) = (part.as_mut_ptr().cast::<c_void>(), part.len() as c_int);
                // SAFETY: the buffer has `count` bytes, and nothing else uses it. `PendingRequests` keeps the
                // buffer until its request has ended. `abandon` leaks the buffer.
                let code = unsafe {
                    let world = ffi::RSMPI_COMM_WORLD;
                    ffi::MPI_Irecv(start, count, ffi::RSMPI_UINT8_T, from as c_int, tag, world, &mut request)
                };
                check("MPI_Irecv", code)?;
                requests.push((from, request));
            }
        }
        for (to, buffer) in &exchange.send {
            for part in buffer.chunks(MESSAGE_BYTES_MAX) {
                // SAFETY: as above.
                let mut request: ffi::MPI_Request = unsafe { std::mem::zeroed() };
                let (start, count) = (part.as_ptr().cast::<c_void>(), part.len() as c_int);
                // SAFETY: as for `MPI_Irecv` above. MPI only reads the bytes.
                let code = unsafe {
                    let world = ffi::RSMPI_COMM_WORLD;
                    ffi::MPI_Isend(start, count, ffi::RSMPI_UINT8_T, *to as c_int, tag, world, &mut request)
                };
                check("MPI_Isend", code)?;
                requests.push((*to, request));
            }
        }
        Ok(PendingRequests { requests, receive, _send: exchange })
    }

    fn missing_ranks(&mut self, posted: &mut PendingRequests) -> Result<Vec<usize>> {
        let mut failed = Ok(());
        posted.requests.retain_mut(|(_, request)| {
            let mut done = 0;
            // SAFETY: the request was posted on this thread and has not ended; the status is ignored.
            let code = unsafe { ffi::MPI_Test(request, &mut done, ffi::RSMPI_STATUS_IGNORE) };
            if let Err(error) = check("MPI_Test", code) {
                failed = Err(error);
            }
            done == 0
        });
        failed?;
        Ok(posted.requests.iter().map(|(rank, _)| *rank).collect())
    }

    fn take_messages(&mut self, posted: PendingRequests) -> Result<Vec<Vec<u8>>> {
        Ok(posted.receive)
    }

    fn abandon(&mut self, posted: PendingRequests) {
        // Pending requests may still write to the buffers.
        std::mem::forget(posted);
    }

    fn disconnect(&mut self) {
        // SAFETY: this is the last MPI call in this process, on the thread that initialised MPI.
        unsafe { ffi::MPI_Finalize() };
    }
}
