//! The one thread that makes every call of the library which carries bytes between ranks. None of its calls waits: what is
//! under way is polled, so that an exchange which a rank does not come to ends with a message and not in silence.

use super::{Communicator, Exchange, Pending};
use anyhow::{Context, Result, anyhow};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Polls before the thread begins to sleep between them: what is on its way mostly comes at once.
const POLLS_AWAKE: u32 = 200;
/// How long it sleeps then.
const NAP: Duration = Duration::from_micros(50);
/// How long an exchange may wait until the recipe is read.
pub(super) const LIMIT: Duration = Duration::from_secs(600);
/// How long the end may take.
pub(super) const LEAVE_LIMIT: Duration = Duration::from_secs(10);

/// A library that carries bytes, on the one thread that calls it. No call waits for another rank.
pub(super) trait Carrier {
    /// An exchange under way, with the buffers that it uses.
    type UnderWay;

    /// Whether [`Self::missing`] knows who of an exchange's ranks did not come.
    const TELLS_WHO: bool;

    /// This process.
    fn rank(&self) -> usize;
    /// How many there are.
    fn ranks(&self) -> usize;
    /// Begins `exchange`, for which other ranks are waited for no longer than `limit`, where the library must.
    fn post(&mut self, exchange: Exchange, limit: Duration) -> Result<Self::UnderWay>;
    /// The ranks whose parts have not come or not gone, one entry a part.
    fn missing(&mut self, under_way: &mut Self::UnderWay) -> Result<Vec<usize>>;
    /// What came, once nothing is missing.
    fn received(&mut self, under_way: Self::UnderWay) -> Result<Vec<Vec<u8>>>;
    /// Gives up an exchange that did not end, whose buffers may still be written.
    fn abandon(&mut self, under_way: Self::UnderWay);
    /// The last call.
    fn leave(&mut self);
}

/// What the thread is asked.
enum Order {
    Exchange(Exchange, Sender<Result<Vec<Vec<u8>>>>),
    Limit(Duration),
    Leave(Sender<()>),
}

/// This process's connection to the others, whatever carries it.
pub(super) struct Connection {
    rank: usize,
    ranks: usize,
    orders: Mutex<Sender<Order>>,
}

impl Connection {
    /// Connects by what `open` makes, on a thread of its own.
    ///
    /// # Errors
    /// Those of `open`.
    pub fn open<C: Carrier>(open: impl FnOnce() -> Result<C> + Send + 'static) -> Result<Self> {
        let (orders, inbox) = channel();
        let (tell, told) = channel();
        let work = move || match open() {
            Ok(carrier) => {
                let _ = tell.send(Ok((carrier.rank(), carrier.ranks())));
                serve(carrier, &inbox);
            }
            Err(error) => drop(tell.send(Err(error))),
        };
        std::thread::Builder::new().name("exchanges".into()).spawn(work).context("starting a thread")?;
        let (rank, ranks) = told.recv().context("the thread that exchanges with other ranks has ended")??;
        Ok(Self { rank, ranks, orders: Mutex::new(orders) })
    }

    fn order(&self, order: Order) -> Result<()> {
        let orders = self.orders.lock().unwrap_or_else(PoisonError::into_inner);
        orders.send(order).map_err(|_| anyhow!("the thread that exchanges with other ranks has ended"))
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

/// One exchange under way, and who waits for it.
struct Awaited<U> {
    what: String,
    begun: Instant,
    under_way: U,
    missing: usize,
    tell: Sender<Result<Vec<Vec<u8>>>>,
}

/// Does what is ordered until the end.
fn serve<C: Carrier>(mut carrier: C, inbox: &Receiver<Order>) {
    let mut limit = LIMIT;
    let mut awaited: Vec<Awaited<C::UnderWay>> = vec![];
    let mut idle_polls = 0;
    loop {
        let order = match awaited.is_empty() {
            true => inbox.recv().map_err(|_| TryRecvError::Disconnected),
            false => inbox.try_recv(),
        };
        match order {
            Ok(Order::Exchange(exchange, tell)) => {
                let (what, begun) = (exchange.what.clone(), Instant::now());
                match carrier.post(exchange, limit) {
                    Ok(under_way) => {
                        awaited.push(Awaited { what, begun, under_way, missing: usize::MAX, tell });
                    }
                    Err(error) => drop(tell.send(Err(error.context(what)))),
                }
                idle_polls = 0;
                continue;
            }
            Ok(Order::Limit(asked)) => {
                limit = asked;
                continue;
            }
            Ok(Order::Leave(tell)) => {
                carrier.leave();
                let _ = tell.send(());
                return;
            }
            // The process ends without having left: what it leaves behind is the launcher's.
            Err(TryRecvError::Disconnected) => return,
            Err(TryRecvError::Empty) => {}
        }
        let before = awaited.iter().map(|one| one.missing).collect::<Vec<_>>();
        awaited = awaited.into_iter().filter_map(|one| polled(&mut carrier, one, limit)).collect();
        idle_polls = match before.into_iter().eq(awaited.iter().map(|one| one.missing)) {
            true => idle_polls + 1,
            false => 0,
        };
        match idle_polls < POLLS_AWAKE {
            true => std::thread::yield_now(),
            false => std::thread::sleep(NAP),
        }
    }
}

/// `one` after another look at it; `None` once it has ended, which its owner is told.
fn polled<C: Carrier>(
    carrier: &mut C,
    mut one: Awaited<C::UnderWay>,
    limit: Duration,
) -> Option<Awaited<C::UnderWay>> {
    let error = match carrier.missing(&mut one.under_way) {
        Ok(missing) if missing.is_empty() => {
            let _ = one.tell.send(carrier.received(one.under_way).context(one.what));
            return None;
        }
        Ok(missing) if one.begun.elapsed() < limit => {
            one.missing = missing.len();
            return Some(one);
        }
        Ok(mut missing) => {
            missing.sort_unstable();
            missing.dedup();
            let who = if C::TELLS_WHO { "they hang, or make" } else { "one of them hangs, or makes" };
            anyhow!(
                "rank {} has waited {:.0} s in \"{}\" for ranks {missing:?}: {who} other calls",
                carrier.rank(),
                one.begun.elapsed().as_secs_f64(),
                one.what
            )
        }
        Err(error) => error.context(one.what),
    };
    let _ = one.tell.send(Err(error));
    carrier.abandon(one.under_way);
    None
}
