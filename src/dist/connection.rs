//! The communication thread. This one thread makes every call to the library that sends bytes between ranks.
//!
//! No call waits without a time limit. The thread polls pending exchanges. So an exchange that a rank never
//! joins ends with an error at its time limit.

use super::{
    Communicator, DeviceEvent, DeviceExchange, Exchange, PendingDeviceExchange, PendingMessages, TIMEOUT,
};
use anyhow::{Context, Result, anyhow, bail};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Number of polls without a sleep in between. Most exchanges end before the first sleep.
const SPIN_POLLS: u32 = 200;
/// Sleep between later polls.
const POLL_SLEEP: Duration = Duration::from_micros(50);
/// Time limit of the disconnect.
pub(super) const DISCONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// A library that sends bytes between ranks. One thread calls it. No call waits for another rank without a
/// time limit.
pub(super) trait TransportBackend {
    /// A pending exchange, with its buffers.
    type Active;

    /// Whether [`Self::missing_ranks`] returns exactly the ranks whose parts are missing. If not, it returns
    /// all ranks of the exchange until no part is missing.
    const NAMES_MISSING_RANKS: bool;
    /// Whether the library exchanges memory of GPUs.
    const EXCHANGES_ON_DEVICES: bool;

    /// Returns this process's rank.
    fn rank(&self) -> usize;
    /// Returns the number of ranks.
    fn ranks(&self) -> usize;
    /// Starts `exchange`. If the library must wait for other ranks, it waits at most `limit`.
    fn post(&mut self, exchange: Exchange, limit: Duration) -> Result<Self::Active>;
    /// Starts an exchange between GPUs. Also returns the event at its end.
    fn post_on_device(
        &mut self,
        exchange: DeviceExchange,
        _: Duration,
    ) -> Result<(Self::Active, DeviceEvent)> {
        bail!("{}: these ranks cannot exchange memory of GPUs", exchange.name)
    }
    /// Returns the ranks whose parts are not sent or received yet, one entry per part.
    fn missing_ranks(&mut self, active: &mut Self::Active) -> Result<Vec<usize>>;
    /// Returns the received parts. Call it when no part is missing.
    fn take_messages(&mut self, active: Self::Active) -> Result<Vec<Vec<u8>>>;
    /// Drops an exchange that has not ended. The library may still write to its buffers.
    fn abandon(&mut self, active: Self::Active);
    /// Disconnects. This is the last call.
    fn disconnect(&mut self);
}

/// A request to the communication thread.
enum Request {
    Exchange(Exchange, Sender<Result<Vec<Vec<u8>>>>),
    OnDevice(DeviceExchange, Sender<Result<DeviceEvent>>),
    Failure(Sender<Option<String>>),
    Limit(Duration),
    Disconnect(Sender<()>),
}

/// This process's connection to the other ranks, through any backend.
pub(super) struct Connection {
    rank: usize,
    ranks: usize,
    exchanges_on_devices: bool,
    requests: Mutex<Sender<Request>>,
}

impl Connection {
    /// Opens a backend with `open`, on a thread of its own.
    ///
    /// # Errors
    /// The errors of `open`.
    pub fn open<C: TransportBackend>(open: impl FnOnce() -> Result<C> + Send + 'static) -> Result<Self> {
        let (requests, inbox) = channel();
        let (reply, receiver) = channel();
        let work = move || match open() {
            Ok(backend) => {
                let _ = reply.send(Ok((backend.rank(), backend.ranks())));
                serve(backend, &inbox);
            }
            Err(error) => drop(reply.send(Err(error))),
        };
        let thread = std::thread::Builder::new().name("exchanges".into()).spawn(work);
        thread.context("starting the communication thread")?;
        let (rank, ranks) = receiver.recv().context("the communication thread has ended")??;
        let exchanges_on_devices = C::EXCHANGES_ON_DEVICES;
        Ok(Self { rank, ranks, exchanges_on_devices, requests: Mutex::new(requests) })
    }

    fn send(&self, request: Request) -> Result<()> {
        let requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        requests.send(request).map_err(|_| anyhow!("the communication thread has ended"))
    }
}

impl Communicator for Connection {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn start(&self, exchange: Exchange) -> Result<PendingMessages> {
        let (reply, receiver) = channel();
        self.send(Request::Exchange(exchange, reply))?;
        Ok(PendingMessages(receiver))
    }

    fn exchanges_on_devices(&self) -> bool {
        self.exchanges_on_devices
    }

    fn start_on_device(&self, exchange: DeviceExchange) -> Result<PendingDeviceExchange> {
        let (reply, receiver) = channel();
        self.send(Request::OnDevice(exchange, reply))?;
        Ok(PendingDeviceExchange(receiver))
    }

    fn device_failure(&self) -> Option<String> {
        let (reply, receiver) = channel();
        self.send(Request::Failure(reply)).ok()?;
        receiver.recv().ok()?
    }

    fn set_timeout(&self, limit: Duration) {
        // If the thread has ended, the next exchange returns the error.
        let _ = self.send(Request::Limit(limit));
    }

    fn disconnect(&self) {
        let (reply, receiver) = channel();
        if self.send(Request::Disconnect(reply)).is_ok() {
            // This process must end, even if the disconnect of the library does not return.
            let _ = receiver.recv_timeout(DISCONNECT_TIMEOUT);
        }
    }
}

/// A pending exchange, and the channel to its caller. `None` for an exchange between GPUs, whose caller does
/// not wait.
struct ActiveExchange<U> {
    name: String,
    started: Instant,
    active: U,
    missing: usize,
    reply: Option<Sender<Result<Vec<Vec<u8>>>>>,
}

/// Serves requests until the connection ends. After a failed exchange, all later exchanges return its error:
/// the ranks make different calls, and after an exchange between GPUs these computed with undefined memory.
fn serve<C: TransportBackend>(mut backend: C, inbox: &Receiver<Request>) {
    let mut limit = TIMEOUT;
    let mut exchanges: Vec<ActiveExchange<C::Active>> = vec![];
    let mut failure: Option<String> = None;
    let mut idle_polls = 0;
    loop {
        let request = match exchanges.is_empty() {
            true => inbox.recv().map_err(|_| TryRecvError::Disconnected),
            false => inbox.try_recv(),
        };
        match request {
            Ok(Request::Exchange(exchange, reply)) => {
                let (name, started) = (exchange.name.clone(), Instant::now());
                let posted = unless_failed(&failure, || backend.post(exchange, limit));
                match posted {
                    Ok(active) => {
                        let reply = Some(reply);
                        exchanges.push(ActiveExchange { name, started, active, missing: usize::MAX, reply });
                    }
                    Err(error) => drop(reply.send(Err(error.context(name)))),
                }
                idle_polls = 0;
                continue;
            }
            Ok(Request::OnDevice(exchange, reply)) => {
                let (name, started) = (exchange.name.clone(), Instant::now());
                let posted = unless_failed(&failure, || backend.post_on_device(exchange, limit));
                let event = posted.map(|(active, event)| {
                    let name = name.clone();
                    exchanges.push(ActiveExchange {
                        name,
                        started,
                        active,
                        missing: usize::MAX,
                        reply: None,
                    });
                    event
                });
                // The caller may have failed meanwhile.
                let _ = reply.send(event.context(name));
                idle_polls = 0;
                continue;
            }
            Ok(Request::Failure(reply)) => {
                let _ = reply.send(failure.clone());
                continue;
            }
            Ok(Request::Limit(asked)) => {
                limit = asked;
                continue;
            }
            Ok(Request::Disconnect(reply)) => {
                backend.disconnect();
                let _ = reply.send(());
                return;
            }
            // This process ends without a disconnect. The launcher cleans up.
            Err(TryRecvError::Disconnected) => return,
            Err(TryRecvError::Empty) => {}
        }
        let before = exchanges.iter().map(|one| one.missing).collect::<Vec<_>>();
        exchanges =
            exchanges.into_iter().filter_map(|one| poll(&mut backend, one, limit, &mut failure)).collect();
        idle_polls =
            if before.into_iter().eq(exchanges.iter().map(|one| one.missing)) { idle_polls + 1 } else { 0 };
        if idle_polls < SPIN_POLLS { std::thread::yield_now() } else { std::thread::sleep(POLL_SLEEP) }
    }
}

/// Calls `post`, unless an exchange has failed.
fn unless_failed<T>(failure: &Option<String>, post: impl FnOnce() -> Result<T>) -> Result<T> {
    if let Some(failure) = failure { Err(anyhow!("{failure}")) } else { post() }
}

/// Polls one exchange. Returns the exchange if it is still pending; otherwise sends its result to the caller.
/// The error of the first failed exchange becomes `failure`.
fn poll<C: TransportBackend>(
    backend: &mut C,
    mut one: ActiveExchange<C::Active>,
    limit: Duration,
    failure: &mut Option<String>,
) -> Option<ActiveExchange<C::Active>> {
    let error = match backend.missing_ranks(&mut one.active) {
        Ok(missing) if missing.is_empty() => {
            let messages = backend.take_messages(one.active).context(one.name);
            if let Some(reply) = one.reply {
                let _ = reply.send(messages);
            }
            return None;
        }
        Ok(missing) if one.started.elapsed() < limit => {
            one.missing = missing.len();
            return Some(one);
        }
        Ok(mut missing) => {
            missing.sort_unstable();
            missing.dedup();
            let who = if C::NAMES_MISSING_RANKS { "they hang or make" } else { "one of them hangs or makes" };
            anyhow!(
                "rank {} has waited {:.0} s in \"{}\" for ranks {missing:?}: {who} different calls",
                backend.rank(),
                one.started.elapsed().as_secs_f64(),
                one.name
            )
        }
        Err(error) => error.context(one.name),
    };
    failure.get_or_insert_with(|| format!("{error:#}"));
    if let Some(reply) = one.reply {
        // The caller may have failed meanwhile.
        let _ = reply.send(Err(error));
    }
    backend.abandon(one.active);
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dist::Mesh;
    use std::sync::Arc;

    /// A backend whose exchanges begin, and then fail. The first failure closes the connection.
    #[derive(Default)]
    struct LostPeer {
        is_closed: bool,
    }

    impl TransportBackend for LostPeer {
        type Active = ();

        const NAMES_MISSING_RANKS: bool = false;
        const EXCHANGES_ON_DEVICES: bool = true;

        fn rank(&self) -> usize {
            0
        }
        fn ranks(&self) -> usize {
            2
        }
        fn post(&mut self, _: Exchange, _: Duration) -> Result<()> {
            anyhow::ensure!(!self.is_closed, "the connection was closed");
            Ok(())
        }
        fn post_on_device(&mut self, _: DeviceExchange, _: Duration) -> Result<((), DeviceEvent)> {
            Ok(((), Arc::new(())))
        }
        fn missing_ranks(&mut self, (): &mut ()) -> Result<Vec<usize>> {
            bail!("rank 1 is gone")
        }
        fn take_messages(&mut self, (): ()) -> Result<Vec<Vec<u8>>> {
            Ok(vec![])
        }
        fn abandon(&mut self, (): ()) {
            self.is_closed = true;
        }
        fn disconnect(&mut self) {}
    }

    /// Saving a checkpoint, rank 0 waits for a shard in vain. Then it tells the others that it is done.
    #[test]
    fn the_error_of_rank_zeros_work_is_that_of_its_first_failed_exchange() {
        let mesh = Mesh::connected(Arc::new(Connection::open(|| Ok(LostPeer::default())).unwrap()));
        let error = mesh.run_on_rank_zero(|| mesh.request(7), |_: i32| Ok(())).unwrap_err();
        assert_eq!(format!("{error:#}"), "a request of rank 0: rank 1 is gone");
        let later = format!("{:#}", mesh.any("stop", false).unwrap_err());
        assert_eq!(later, "stop: a request of rank 0: rank 1 is gone");
    }

    #[test]
    fn an_error_after_a_failed_exchange_between_gpus_is_that_of_the_exchange() {
        let mesh = Mesh::connected(Arc::new(Connection::open(|| Ok(LostPeer::default())).unwrap()));
        let nan = || anyhow!("the model's logits are not finite");
        assert_eq!(mesh.explain(nan()).to_string(), nan().to_string());
        let exchange = DeviceExchange {
            name: "layer 3".to_owned(),
            gathers: vec![],
            send: vec![],
            receive: vec![],
            ready: Arc::new(()),
        };
        mesh.start_on_device(exchange).unwrap().posted().unwrap();
        let started = Instant::now();
        while mesh.explain(nan()).to_string() == nan().to_string() {
            assert!(started.elapsed() < TIMEOUT, "the failure is never seen");
        }
        assert_eq!(mesh.explain(nan()).to_string(), "layer 3: rank 1 is gone");
    }
}
