//! A small HTTP/1.1 server with one request per connection and one thread per connection. Sizes, times and
//! connections are bounded, so that no client can exhaust memory or block another client.

mod budget;
mod json;
mod read;

pub use budget::{Budget, Share};
pub use json::Json;

use anyhow::{Context, Result};
use json::RequestBody;
use read::{BodyFormat, Input, Memory};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;
use std::time::{Duration, Instant};

/// Locks `mutex`. A panic of another thread leaves its value usable.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Interval between checks for a stop.
const POLL: Duration = Duration::from_millis(200);
/// Time limit for a client to receive a response, or one part of a streamed response.
const ANSWER_WAIT: Duration = Duration::from_secs(10);
/// Time for which the server discards input after the response. An earlier close could reset the connection
/// before the client has read the response.
const LINGER: Duration = Duration::from_millis(200);
const LINGER_BYTES_MAX: usize = 64 << 10;
/// Time limit of the wait for memory that other requests use.
const MEMORY_WAIT: Duration = Duration::from_secs(10);
/// Interval and time limit of the wait for a free connection slot.
const ROOM_POLL: Duration = Duration::from_millis(1);
const ROOM_WAIT: Duration = Duration::from_millis(500);
const HEADERS: &str = "Cache-Control: no-store\r\nReferrer-Policy: no-referrer\r\nX-Content-Type-Options: nosniff\r\n\
     X-Frame-Options: DENY\r\nConnection: close\r\n";

/// The limits of a server.
#[derive(Debug, Clone, Copy)]
pub struct HttpLimits {
    /// If this many connections are open, a new one closes the oldest connection without a response in
    /// progress. At most twice as many are open.
    pub connections_max: usize,
    /// Maximum bytes of a request's body; 0 refuses every body.
    pub body_bytes_max: usize,
    /// Maximum bytes of all bodies and of the JSON values that they become. A request waits for its share.
    pub memory_bytes_max: usize,
}

/// A request.
#[derive(Debug, Default)]
pub struct HttpRequest {
    pub method: String,
    /// The path with the query, as sent.
    pub path: String,
    /// The value of its `Host` header, if there is exactly one.
    pub host: Option<String>,
    /// The value of its `Origin` header: the site whose page sent the request.
    pub origin: Option<String>,
    /// The value of its `Authorization` header.
    pub authorization: Option<String>,
    /// The value of its `X-API-Key` header.
    pub api_key: Option<String>,
    /// The value of its `Content-Encoding` header.
    pub content_encoding: Option<String>,
    /// The value of its `X-Episode-Id` header: the episode of an agent that it belongs to.
    pub episode: Option<String>,
    body: RefCell<Option<RequestBody>>,
    body_format: BodyFormat,
    /// Whether the client waits for `100 Continue` before it sends the body.
    expects_continue: bool,
}

impl HttpRequest {
    /// Returns the path without the query.
    pub fn path_alone(&self) -> &str {
        self.path.split('?').next().unwrap_or_default()
    }

    /// Calls `f` with the bytes of the body.
    pub fn with_body<R>(&self, f: impl FnOnce(&[u8]) -> R) -> R {
        let body = self.body.borrow();
        f(body.as_ref().and_then(|body| body.map.get(..body.length)).unwrap_or_default())
    }
}

/// The status and message for a request that is refused while it is read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Refusal {
    /// Status code and phrase, such as `404 Not Found`.
    pub status: &'static str,
    pub message: &'static str,
}

const SPENT: Refusal =
    Refusal { status: "503 Service Unavailable", message: "other requests use the memory; try again later" };

/// A response.
pub struct Response<'a> {
    /// Status code and phrase, such as `404 Not Found`.
    pub status: &'static str,
    pub content_type: &'static str,
    pub body: Body<'a>,
}

/// The body of a response.
pub enum Body<'a> {
    Whole(Arc<str>),
    Bytes(Arc<[u8]>),
    /// Is called with the connection, and writes the body part by part.
    Stream(Box<dyn FnOnce(&mut Stream) + 'a>),
    /// A body, and a function that is called after it: with true if its last byte was written without an
    /// error and the client had not left before. A stream must end with [`Stream::end`].
    Watched(Box<Body<'a>>, Box<dyn FnOnce(bool) + 'a>),
}

impl<'a> Response<'a> {
    pub fn text(status: &'static str, text: &str) -> Self {
        Self::whole(status, "text/plain; charset=utf-8", text.into())
    }

    /// Returns a response with a body that is already complete.
    pub fn whole(status: &'static str, content_type: &'static str, body: Arc<str>) -> Self {
        Self { status, content_type, body: Body::Whole(body) }
    }

    /// Returns a response with a body of bytes.
    pub fn bytes(status: &'static str, content_type: &'static str, body: Arc<[u8]>) -> Self {
        Self { status, content_type, body: Body::Bytes(body) }
    }
}

/// The connection to the client. A handler uses it to check that the client is still there.
#[derive(Clone, Copy)]
pub struct Peer<'a>(&'a TcpStream);

impl Peer<'_> {
    /// Returns whether the client has closed its end.
    pub fn has_left(&self) -> bool {
        self.shows(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR)
    }

    fn shows(&self, flags: PollFlags) -> bool {
        let mut polled = [PollFd::new(self.0, PollFlags::RDHUP)];
        // A failed call says nothing about the client.
        poll(&mut polled, Some(&Timespec::default())).is_ok() && polled[0].revents().intersects(flags)
    }

    /// Returns a handle for other threads; `None` if no file descriptor is free.
    pub fn handle(&self) -> Option<PeerHandle> {
        self.0.try_clone().ok().map(PeerHandle)
    }
}

/// A connection to a client for other threads. It stays open as long as the handle.
pub struct PeerHandle(TcpStream);

impl PeerHandle {
    /// Returns whether the client has closed its end.
    pub fn has_left(&self) -> bool {
        Peer(&self.0).has_left()
    }
}

/// A body that is written part by part.
pub struct Stream<'a> {
    stream: &'a TcpStream,
    is_watched: bool,
    failed: bool,
    /// Whether the end of the body is written.
    has_ended: bool,
}

impl Stream<'_> {
    /// Writes a part. It must not be empty, because an empty chunk ends the body. Returns whether the client
    /// is still there.
    pub fn write(&mut self, part: &str) -> bool {
        self.write_bytes(format!("{:x}\r\n{part}\r\n", part.len()).as_bytes())
    }

    /// Writes the last part together with the end of the body. A client that closes as soon as it knows the
    /// last part has then received all of the body. A watched body is not ended if the client has left.
    pub fn end(&mut self, part: &str) {
        self.failed |= self.is_watched && self.has_left();
        if !self.failed {
            self.has_ended = self.write_bytes(format!("{:x}\r\n{part}\r\n0\r\n\r\n", part.len()).as_bytes());
        }
    }

    fn write_bytes(&mut self, bytes: &[u8]) -> bool {
        self.failed |= write(self.stream, bytes, Instant::now() + ANSWER_WAIT).is_none();
        !self.failed
    }

    /// Returns whether the client has closed its end.
    pub fn has_left(&self) -> bool {
        self.failed || Peer(self.stream).has_left()
    }
}

/// Answers requests, including those that the server refuses while it reads them.
pub trait Handler: Sync {
    /// Refuses a request by its head, before its body is read. Only a client that may ask can make the server
    /// read a body.
    fn check_head(&self, head: &HttpRequest) -> Result<(), Response<'static>>;

    fn answer<'r>(&'r self, request: Result<&'r HttpRequest, Refusal>, peer: Peer<'r>) -> Response<'r>;
}

/// The number of open connections, and a list of the idle ones. The first in the list is closed first.
struct Connections {
    connections_max: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    open: usize,
    idle: VecDeque<(u64, TcpStream)>,
}

impl Connections {
    /// Adds a connection. At `connections_max` open ones it closes the first idle one. Returns false if twice
    /// as many stay open for [`ROOM_WAIT`].
    fn begin(&self, number: u64, stream: &TcpStream) -> bool {
        let Ok(kept) = stream.try_clone() else { return false };
        let begun = Instant::now();
        loop {
            let mut state = lock(&self.state);
            if state.open >= self.connections_max
                && let Some((_, oldest)) = state.idle.pop_front()
            {
                // Its thread ends slightly later, so the count can exceed `connections_max` for that time.
                let _ = oldest.shutdown(Shutdown::Both);
            }
            if state.open < 2 * self.connections_max {
                state.open += 1;
                state.idle.push_back((number, kept));
                return true;
            }
            drop(state);
            if begun.elapsed() > ROOM_WAIT {
                return false;
            }
            std::thread::sleep(ROOM_POLL);
        }
    }

    /// Marks the connection as busy: its response is in progress.
    fn mark_busy(&self, number: u64) {
        lock(&self.state).idle.retain(|(other, _)| *other != number);
    }

    /// Marks the connection as idle after its response. It is then the first to be closed.
    fn mark_idle(&self, number: u64, stream: &TcpStream) {
        if let Ok(kept) = stream.try_clone() {
            lock(&self.state).idle.push_front((number, kept));
        }
    }

    fn end(&self, number: u64) {
        self.mark_busy(number);
        lock(&self.state).open -= 1;
    }
}

/// Serves requests with `handler`, each on its own thread, until `stopped` returns true.
///
/// # Errors
/// When the socket's timeout cannot be set.
pub fn serve(
    listener: &TcpListener,
    limits: HttpLimits,
    handler: &dyn Handler,
    stopped: &dyn Fn() -> bool,
) -> Result<()> {
    // On Linux, this also limits how long `accept` waits.
    rustix::net::sockopt::set_socket_timeout(listener, rustix::net::sockopt::Timeout::Recv, Some(POLL))
        .context("waiting for a request")?;
    let connections = &Connections { connections_max: limits.connections_max, state: Mutex::default() };
    let memory = &Memory::new(limits.memory_bytes_max);
    std::thread::scope(|scope| {
        let mut number = 0u64;
        while !stopped() {
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => continue,
                // The client left, or no file descriptor is free before another connection closes.
                Err(_) => {
                    std::thread::sleep(POLL);
                    continue;
                }
            };
            number += 1;
            if !connections.begin(number, &stream) {
                continue;
            }
            let work = move || {
                converse(&stream, (limits, memory), handler, connections, number);
                connections.end(number);
            };
            // If no thread starts, the client sees its connection closed.
            if Builder::new().name("request".into()).spawn_scoped(scope, work).is_err() {
                connections.end(number);
            }
        }
        // Do not wait for clients that send nothing.
        lock(&connections.state).idle.iter().for_each(|(_, stream)| drop(stream.shutdown(Shutdown::Both)));
        Ok(())
    })
}

/// Handles one request and its response.
fn converse(
    stream: &TcpStream,
    (limits, memory): (HttpLimits, &Memory),
    handler: &dyn Handler,
    connections: &Connections,
    number: u64,
) {
    // A response has few parts. Without Nagle's algorithm, no part waits until an earlier one is
    // acknowledged.
    let _ = stream.set_nodelay(true);
    let mut input = Input::new(stream);
    let head = input.head(limits.body_bytes_max);
    let checked = head.as_ref().map_or(Ok(()), |request| handler.check_head(request));
    let body = match &head {
        Ok(request) if checked.is_ok() => input.body(request, limits, memory),
        _ => Ok(()),
    };
    drop(input);
    connections.mark_busy(number);
    let response = match (&head, checked, &body) {
        (Ok(_), Err(response), _) => response,
        (Ok(request), _, Ok(())) => handler.answer(Ok(request), Peer(stream)),
        (Err(Some(refusal)), ..) | (_, _, Err(Some(refusal))) => handler.answer(Err(*refusal), Peer(stream)),
        // The client left or was too slow, or its connection was closed in favour of another one.
        _ => return,
    };
    if send(stream, response).is_some() {
        let _ = stream.shutdown(Shutdown::Write);
        connections.mark_idle(number, stream);
        let (mut piece, mut bytes, until) = ([0; 4096], 0, Instant::now() + LINGER);
        while bytes < limits.body_bytes_max.max(LINGER_BYTES_MAX) {
            match read(stream, &mut piece, until) {
                Some(count) if count > 0 => bytes += count,
                _ => break,
            }
        }
    }
}

/// Sends a response; `None` if the client did not take it.
fn send(stream: &TcpStream, response: Response) -> Option<()> {
    let Response { status, content_type, body } = response;
    let Body::Watched(body, tell) = body else { return send_body(stream, status, content_type, body, false) };
    let sent = send_body(stream, status, content_type, *body, true);
    tell(sent.is_some());
    sent
}

/// Sends a response. If it is watched, the client must not leave before the last byte.
fn send_body(
    stream: &TcpStream,
    status: &str,
    content_type: &str,
    body: Body,
    is_watched: bool,
) -> Option<()> {
    let deadline = Instant::now() + ANSWER_WAIT;
    let head = |length: &str| {
        format!("HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\n{length}\r\n{HEADERS}\r\n")
    };
    let whole = |body: &[u8]| {
        let head = head(&format!("Content-Length: {}", body.len()));
        write(stream, head.as_bytes(), deadline)?;
        if is_watched && Peer(stream).has_left() {
            return None;
        }
        write(stream, body, deadline)?;
        // A client resets the connection if it closes before it has read all bytes.
        (!is_watched || !Peer(stream).shows(PollFlags::ERR)).then_some(())
    };
    match body {
        Body::Whole(body) => whole(body.as_bytes()),
        Body::Bytes(body) => whole(&body),
        Body::Stream(produce) => {
            write(stream, head("Transfer-Encoding: chunked").as_bytes(), deadline)?;
            let mut parts = Stream { stream, is_watched, failed: false, has_ended: false };
            produce(&mut parts);
            let is_whole = parts.has_ended || (!parts.failed && parts.write_bytes(b"0\r\n\r\n"));
            (is_whole && (parts.has_ended || !is_watched)).then_some(())
        }
        Body::Watched(body, _) => send_body(stream, status, content_type, *body, is_watched),
    }
}

/// Reads bytes into `piece`. Returns `None` after `deadline` or if the connection is broken.
fn read(mut stream: &TcpStream, piece: &mut [u8], deadline: Instant) -> Option<usize> {
    stream.set_read_timeout(Some(left(deadline)?)).ok()?;
    stream.read(piece).ok()
}

fn write(mut stream: &TcpStream, mut bytes: &[u8], deadline: Instant) -> Option<()> {
    while !bytes.is_empty() {
        stream.set_write_timeout(Some(left(deadline)?)).ok()?;
        let count = stream.write(bytes).ok().filter(|count| *count > 0)?;
        bytes = bytes.get(count..)?;
    }
    Some(())
}

/// Returns the time until `deadline`; `None` after it.
fn left(deadline: Instant) -> Option<Duration> {
    deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
}
