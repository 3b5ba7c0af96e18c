//! Ranks on MPI. One thread makes every call, and none of its calls waits: requests are posted and polled, so that an exchange
//! which a rank does not come to ends with a message and not in silence.

use super::{Communicator, Exchange, Pending};
use anyhow::{Context, Result, anyhow, bail};
use mpi::ffi;
use std::os::raw::{c_int, c_void};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Longest message, bytes: MPI counts in 32 bits.
const MESSAGE_BYTES_MAX: usize = 1 << 30;
/// Polls before the thread begins to sleep between them: what is on its way mostly comes at once.
const POLLS_AWAKE: u32 = 200;
/// How long it sleeps then.
const NAP: Duration = Duration::from_micros(50);
/// How long an exchange may wait until the recipe is read.
const LIMIT: Duration = Duration::from_secs(600);
/// How long the end may take.
const LEAVE_LIMIT: Duration = Duration::from_secs(10);

/// What the thread is asked.
enum Order {
    Exchange(Exchange, Sender<Result<Vec<Vec<u8>>>>),
    Limit(Duration),
    Leave(Sender<()>),
}

/// This process's connection.
pub struct Connection {
    rank: usize,
    ranks: usize,
    orders: Mutex<Sender<Order>>,
}

impl Connection {
    /// Connects to the processes that were started with this one.
    ///
    /// # Errors
    /// When MPI cannot start.
    pub fn open() -> Result<Self> {
        let (orders, inbox) = channel();
        let (tell, told) = channel();
        let work = move || match World::open() {
            Ok(world) => {
                let _ = tell.send(Ok((world.rank, world.ranks)));
                world.serve(&inbox);
            }
            Err(error) => drop(tell.send(Err(error))),
        };
        std::thread::Builder::new().name("mpi".into()).spawn(work).context("starting a thread")?;
        let (rank, ranks) = told.recv().context("the thread of MPI has ended")??;
        Ok(Self { rank, ranks, orders: Mutex::new(orders) })
    }

    fn order(&self, order: Order) -> Result<()> {
        let orders = self.orders.lock().unwrap_or_else(PoisonError::into_inner);
        orders.send(order).map_err(|_| anyhow!("the thread of MPI has ended"))
    }
}

impl Communicator for Connection {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn start(&self, exchange: Exchange) -> Result<Pending> {
        let (tell, told) = channel();
        self.order(Order::Exchange(exchange, tell))?;
        Ok(Pending(told))
    }

    fn set_limit(&self, limit: Duration) {
        // A thread that has ended says so at the next exchange.
        let _ = self.order(Order::Limit(limit));
    }

    fn leave(&self) {
        let (tell, told) = channel();
        if self.order(Order::Leave(tell)).is_ok() {
            // A launcher that does not let go is not waited for.
            let _ = told.recv_timeout(LEAVE_LIMIT);
        }
    }
}

/// MPI's world, on the one thread that calls it.
struct World {
    rank: usize,
    ranks: usize,
}

/// One exchange under way, with the buffers that its requests use.
struct UnderWay {
    what: String,
    begun: Instant,
    /// The rank at the other end of each request that has not ended.
    requests: Vec<(usize, ffi::MPI_Request)>,
    receive: Vec<Vec<u8>>,
    _send: Exchange,
    tell: Sender<Result<Vec<Vec<u8>>>>,
}

/// An error of MPI where `code` is one.
fn check(call: &str, code: c_int) -> Result<()> {
    if code == ffi::MPI_SUCCESS as c_int { Ok(()) } else { bail!("{call} failed with code {code}") }
}

/// What tells one kind of exchange from another, so that ranks which disagree do not take each other's parts.
fn tag(what: &str) -> c_int {
    let hash =
        what.bytes().fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    (hash & 0x7fff) as c_int
}

impl World {
    fn open() -> Result<Self> {
        let (mut given, mut rank, mut ranks) = (0, 0, 0);
        // SAFETY: the calls of MPI's start, once in this process and on this thread; every pointer is to a local that outlives
        // its call, and MPI takes null for the arguments.
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

    /// Does what is ordered until the end.
    fn serve(&self, inbox: &Receiver<Order>) {
        let mut limit = LIMIT;
        let mut under_way: Vec<UnderWay> = vec![];
        let mut idle_polls = 0;
        loop {
            let order = match under_way.is_empty() {
                true => inbox.recv().map_err(|_| TryRecvError::Disconnected),
                false => inbox.try_recv(),
            };
            match order {
                Ok(Order::Exchange(exchange, tell)) => {
                    match self.post(exchange, tell.clone()) {
                        Ok(posted) => under_way.push(posted),
                        Err(error) => drop(tell.send(Err(error))),
                    }
                    idle_polls = 0;
                    continue;
                }
                Ok(Order::Limit(asked)) => {
                    limit = asked;
                    continue;
                }
                Ok(Order::Leave(tell)) => {
                    // SAFETY: the last call of MPI in this process, on the thread that began it.
                    unsafe { ffi::MPI_Finalize() };
                    let _ = tell.send(());
                    return;
                }
                // The process ends without having left: what it leaves behind is the launcher's.
                Err(TryRecvError::Disconnected) => return,
                Err(TryRecvError::Empty) => {}
            }
            let before = under_way.iter().map(|one| one.requests.len()).sum::<usize>();
            under_way = under_way.into_iter().filter_map(|one| self.polled(one, limit)).collect();
            let after = under_way.iter().map(|one| one.requests.len()).sum::<usize>();
            idle_polls = if after < before { 0 } else { idle_polls + 1 };
            match idle_polls < POLLS_AWAKE {
                true => std::thread::yield_now(),
                false => std::thread::sleep(NAP),
            }
        }
    }

    /// Posts every request of `exchange`.
    fn post(&self, exchange: Exchange, tell: Sender<Result<Vec<Vec<u8>>>>) -> Result<UnderWay> {
        let tag = tag(&exchange.what);
        let mut requests = vec![];
        let mut receive: Vec<Vec<u8>> = exchange.receive.iter().map(|&(_, bytes)| vec![0; bytes]).collect();
        for (&(from, _), buffer) in exchange.receive.iter().zip(&mut receive) {
            for part in buffer.chunks_mut(MESSAGE_BYTES_MAX) {
                // SAFETY: any bits are a request before MPI writes it.
                let mut request: ffi::MPI_Request = unsafe { std::mem::zeroed() };
                let (start, count) = (part.as_mut_ptr().cast::<c_void>(), part.len() as c_int);
                // SAFETY: the buffer is `count` bytes, is touched by nobody else, and is kept with its request until that has
                // ended (`UnderWay`); where it does not end in time the buffer is leaked.
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
                // SAFETY: as for what is received; MPI only reads the bytes.
                let code = unsafe {
                    let world = ffi::RSMPI_COMM_WORLD;
                    ffi::MPI_Isend(start, count, ffi::RSMPI_UINT8_T, *to as c_int, tag, world, &mut request)
                };
                check("MPI_Isend", code)?;
                requests.push((*to, request));
            }
        }
        let what = exchange.what.clone();
        Ok(UnderWay { what, begun: Instant::now(), requests, receive, _send: exchange, tell })
    }

    /// `one` after another look at it; `None` once it has ended, which its owner is told.
    fn polled(&self, mut one: UnderWay, limit: Duration) -> Option<UnderWay> {
        let mut failed = None;
        one.requests.retain_mut(|(_, request)| {
            let mut done = 0;
            // SAFETY: the request was posted on this thread and has not ended; the status is not asked for.
            let code = unsafe { ffi::MPI_Test(request, &mut done, ffi::RSMPI_STATUS_IGNORE) };
            if let Err(error) = check("MPI_Test", code) {
                failed = Some(error);
            }
            done == 0
        });
        if one.requests.is_empty() && failed.is_none() {
            let _ = one.tell.send(Ok(std::mem::take(&mut one.receive)));
            return None;
        }
        if failed.is_none() && one.begun.elapsed() < limit {
            return Some(one);
        }
        let error = failed.unwrap_or_else(|| {
            let mut missing: Vec<usize> = one.requests.iter().map(|(rank, _)| *rank).collect();
            missing.dedup();
            anyhow!(
                "rank {} has waited {:.0} s in \"{}\" for ranks {missing:?}: they hang, or make other calls",
                self.rank,
                one.begun.elapsed().as_secs_f64(),
                one.what
            )
        });
        let _ = one.tell.send(Err(error));
        // Requests that have not ended may still write.
        std::mem::forget(one);
        None
    }
}
