//! A small HTTP/1.1 server with one request per connection and one thread per connection. Sizes, times and
//! connections are bounded, so that no client can exhaust memory or block another client.

use anyhow::{Context, Result};
use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;
use std::time::{Duration, Instant};

/// Interval between checks for a stop.
const POLL: Duration = Duration::from_millis(200);
/// Maximum bytes of a request's head.
const HEAD_BYTES_MAX: usize = 16 << 10;
/// Time limit for a client to send its head.
const HEAD_WAIT: Duration = Duration::from_secs(5);
/// Time limit for a client to send its body.
const BODY_WAIT: Duration = Duration::from_secs(30);
/// Time limit for a client to receive a response, or one part of a streamed response.
const ANSWER_WAIT: Duration = Duration::from_secs(10);
/// Time for which the server discards input after the response. An earlier close could reset the connection
/// before the client has read the response.
const LINGER: Duration = Duration::from_millis(200);
const LINGER_BYTES_MAX: usize = 64 << 10;
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
    /// The value of its `X-Episode-Id` header: the episode of an agent that it belongs to.
    pub episode: Option<String>,
    pub body: Vec<u8>,
    body_format: BodyFormat,
    /// Whether the client waits for `100 Continue` before it sends the body.
    expects_continue: bool,
}

/// How a request tells the end of its body.
#[derive(Debug, Default, PartialEq)]
enum BodyFormat {
    #[default]
    None,
    Bytes(usize),
    Chunked,
}

/// The status and message for a request that is refused while it is read.
#[derive(Debug, PartialEq)]
pub struct Refusal {
    /// Status code and phrase, such as `404 Not Found`.
    pub status: &'static str,
    pub message: &'static str,
}

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
    /// Is called with the connection, and writes the body part by part.
    Stream(Box<dyn FnOnce(&mut Stream) + 'a>),
}

impl<'a> Response<'a> {
    pub fn text(status: &'static str, text: &str) -> Self {
        Self::whole(status, "text/plain; charset=utf-8", text.into())
    }

    /// Returns a response with a body that is already complete.
    pub fn whole(status: &'static str, content_type: &'static str, body: Arc<str>) -> Self {
        Self { status, content_type, body: Body::Whole(body) }
    }
}

/// The connection to the client. A handler uses it to check that the client is still there.
#[derive(Clone, Copy)]
pub struct Peer<'a>(&'a TcpStream);

impl Peer<'_> {
    /// Returns whether the client has closed its end.
    pub fn has_left(&self) -> bool {
        let mut byte = [0];
        if self.0.set_nonblocking(true).is_err() {
            return true;
        }
        let peeked = self.0.peek(&mut byte);
        let blocking = self.0.set_nonblocking(false);
        match peeked {
            Ok(count) => count == 0 || blocking.is_err(),
            Err(e) => !matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
        }
    }
}

/// A body that is written part by part.
pub struct Stream<'a> {
    stream: &'a TcpStream,
    failed: bool,
}

impl Stream<'_> {
    /// Writes a part. It must not be empty, because an empty chunk ends the body. Returns whether the client
    /// is still there.
    pub fn write(&mut self, part: &str) -> bool {
        let chunk = format!("{:x}\r\n{part}\r\n", part.len());
        let written = write(self.stream, chunk.as_bytes(), Instant::now() + ANSWER_WAIT);
        self.failed |= written.is_none();
        !self.failed
    }

    /// Returns whether the client has closed its end.
    pub fn has_left(&self) -> bool {
        self.failed || Peer(self.stream).has_left()
    }
}

/// Answers requests, including those that the server refuses while it reads them.
pub trait Handler: Sync {
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
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while the lock is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a connection. At `connections_max` open ones it closes the first idle one. Returns false if twice
    /// as many stay open for [`ROOM_WAIT`].
    fn begin(&self, number: u64, stream: &TcpStream) -> bool {
        let Ok(kept) = stream.try_clone() else { return false };
        let begun = Instant::now();
        loop {
            let mut state = self.lock();
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
        self.lock().idle.retain(|(other, _)| *other != number);
    }

    /// Marks the connection as idle after its response. It is then the first to be closed.
    fn mark_idle(&self, number: u64, stream: &TcpStream) {
        if let Ok(kept) = stream.try_clone() {
            self.lock().idle.push_front((number, kept));
        }
    }

    fn end(&self, number: u64) {
        self.mark_busy(number);
        self.lock().open -= 1;
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
                converse(&stream, limits, handler, connections, number);
                connections.end(number);
            };
            // If no thread starts, the client sees its connection closed.
            if Builder::new().name("request".into()).spawn_scoped(scope, work).is_err() {
                connections.end(number);
            }
        }
        // Do not wait for clients that send nothing.
        connections.lock().idle.iter().for_each(|(_, stream)| drop(stream.shutdown(Shutdown::Both)));
        Ok(())
    })
}

/// Handles one request and its response.
fn converse(
    stream: &TcpStream,
    limits: HttpLimits,
    handler: &dyn Handler,
    connections: &Connections,
    number: u64,
) {
    // A response has few parts. Without Nagle's algorithm, no part waits until an earlier one is
    // acknowledged.
    let _ = stream.set_nodelay(true);
    let request = read_request(stream, limits.body_bytes_max);
    connections.mark_busy(number);
    let request = match request {
        Some(Ok(request)) => Ok(request),
        Some(Err(refusal)) => Err(refusal),
        // The client left or was too slow, or its connection was closed in favour of another one.
        None => return,
    };
    let response = match &request {
        Ok(request) => handler.answer(Ok(request), Peer(stream)),
        Err(Refusal { status, message }) => handler.answer(Err(Refusal { status, message }), Peer(stream)),
    };
    if send(stream, response).is_some() {
        let _ = stream.shutdown(Shutdown::Write);
        connections.mark_idle(number, stream);
        let (mut piece, mut bytes, until) = ([0; 4096], 0, Instant::now() + LINGER);
        while bytes < LINGER_BYTES_MAX {
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
    let deadline = Instant::now() + ANSWER_WAIT;
    let head = |length: &str| {
        format!("HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\n{length}\r\n{HEADERS}\r\n")
    };
    match body {
        Body::Whole(body) => {
            let head = head(&format!("Content-Length: {}", body.len()));
            write(stream, head.as_bytes(), deadline)?;
            write(stream, body.as_bytes(), deadline)
        }
        Body::Stream(produce) => {
            write(stream, head("Transfer-Encoding: chunked").as_bytes(), deadline)?;
            let mut parts = Stream { stream, failed: false };
            produce(&mut parts);
            let whole = !parts.failed;
            whole.then(|| write(stream, b"0\r\n\r\n", Instant::now() + ANSWER_WAIT)).flatten()
        }
    }
}

/// Reads a request. Returns a refusal for an invalid one, and `None` if the client does not send all of it.
fn read_request(stream: &TcpStream, body_bytes_max: usize) -> Option<Result<HttpRequest, Refusal>> {
    let deadline = Instant::now() + HEAD_WAIT;
    let (mut bytes, mut searched) = (vec![], 0);
    let end = loop {
        let start = searched.min(bytes.len());
        if let Some(end) = bytes[start..].windows(4).position(|bytes| bytes == b"\r\n\r\n") {
            break start + end;
        }
        searched = bytes.len().saturating_sub(3);
        if bytes.len() > HEAD_BYTES_MAX {
            return Some(Err(Refusal {
                status: "431 Request Header Fields Too Large",
                message: "the head is too long",
            }));
        }
        read_more(stream, &mut bytes, deadline)?;
    };
    let mut request = match parsed(bytes.get(..end)?, body_bytes_max) {
        Ok(request) => request,
        Err(refusal) => return Some(Err(refusal)),
    };
    bytes.drain(..end + 4);
    let deadline = Instant::now() + BODY_WAIT;
    if request.expects_continue && request.body_format != BodyFormat::None && bytes.is_empty() {
        write(stream, b"HTTP/1.1 100 Continue\r\n\r\n", deadline)?;
    }
    match request.body_format {
        BodyFormat::None => {}
        BodyFormat::Bytes(length) => {
            while bytes.len() < length {
                read_more(stream, &mut bytes, deadline)?;
            }
            bytes.truncate(length);
            request.body = bytes;
        }
        BodyFormat::Chunked => match read_chunks(stream, bytes, body_bytes_max, deadline)? {
            Ok(body) => request.body = body,
            Err(refusal) => return Some(Err(refusal)),
        },
    }
    Some(Ok(request))
}

/// Reads the client's next bytes and appends them to `bytes`; `None` if no more bytes come.
fn read_more(stream: &TcpStream, bytes: &mut Vec<u8>, deadline: Instant) -> Option<()> {
    let mut piece = [0; 16 << 10];
    match read(stream, &mut piece, deadline)? {
        0 => None,
        count => {
            bytes.extend_from_slice(piece.get(..count)?);
            Some(())
        }
    }
}

/// Reads a chunked body. `bytes` is the part that was already received.
fn read_chunks(
    stream: &TcpStream,
    mut bytes: Vec<u8>,
    body_bytes_max: usize,
    deadline: Instant,
) -> Option<Result<Vec<u8>, Refusal>> {
    let mut body = vec![];
    loop {
        let line = loop {
            match bytes.windows(2).position(|end| end == b"\r\n") {
                Some(end) => break end,
                None if bytes.len() > HEAD_BYTES_MAX => return Some(Err(WRONG_REQUEST)),
                None => read_more(stream, &mut bytes, deadline)?,
            }
        };
        let digits = std::str::from_utf8(bytes.get(..line)?).unwrap_or_default();
        let digits = digits.split(';').next().unwrap_or_default().trim();
        let Ok(length) = usize::from_str_radix(digits, 16) else { return Some(Err(WRONG_REQUEST)) };
        bytes.drain(..line + 2);
        if length == 0 {
            // Trailers are not read.
            return Some(Ok(body));
        }
        if length > body_bytes_max.saturating_sub(body.len()) {
            return Some(Err(TOO_LARGE));
        }
        while bytes.len() < length + 2 {
            read_more(stream, &mut bytes, deadline)?;
        }
        if bytes.get(length..length + 2)? != b"\r\n" {
            return Some(Err(WRONG_REQUEST));
        }
        body.extend_from_slice(bytes.get(..length)?);
        bytes.drain(..length + 2);
    }
}

const WRONG_REQUEST: Refusal =
    Refusal { status: "400 Bad Request", message: "this is not an HTTP/1.1 request" };
const TOO_LARGE: Refusal =
    Refusal { status: "413 Content Too Large", message: "the body of the request is too large" };

fn parsed(head: &[u8], body_bytes_max: usize) -> Result<HttpRequest, Refusal> {
    let wrong = || WRONG_REQUEST;
    let head = std::str::from_utf8(head).map_err(|_| wrong())?;
    let mut lines = head.split("\r\n");
    let mut words = lines.next().unwrap_or_default().split(' ');
    let (Some(method), Some(path), Some(version), None) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return Err(wrong());
    };
    if !version.starts_with("HTTP/1.") {
        return Err(wrong());
    }
    let mut request =
        HttpRequest { method: method.to_owned(), path: path.to_owned(), ..HttpRequest::default() };
    let mut hosts = vec![];
    for line in lines {
        let (name, value) = line.split_once(':').ok_or_else(wrong)?;
        let value = value.trim();
        match name.to_ascii_lowercase().as_str() {
            "host" => hosts.push(value.to_owned()),
            "origin" => request.origin = Some(value.to_owned()),
            "authorization" => request.authorization = Some(value.to_owned()),
            "x-episode-id" => request.episode = Some(value.to_owned()),
            // A request with two lengths could be smuggled past a proxy.
            "content-length" | "transfer-encoding" if request.body_format != BodyFormat::None => {
                return Err(wrong());
            }
            "content-length" => {
                let is_number = !value.is_empty() && value.bytes().all(|digit| digit.is_ascii_digit());
                match value.parse() {
                    Ok(length) if is_number && length <= body_bytes_max => {
                        request.body_format = BodyFormat::Bytes(length);
                    }
                    _ if is_number => return Err(TOO_LARGE),
                    _ => return Err(wrong()),
                }
            }
            "transfer-encoding" if body_bytes_max == 0 => return Err(TOO_LARGE),
            "transfer-encoding" if value.eq_ignore_ascii_case("chunked") => {
                request.body_format = BodyFormat::Chunked;
            }
            "transfer-encoding" => return Err(wrong()),
            "expect" => request.expects_continue = true,
            _ => {}
        }
    }
    request.host = if hosts.len() == 1 { hosts.pop() } else { None };
    Ok(request)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_is_parsed_and_one_that_announces_a_body_is_refused() {
        let status = |head: &str| match parsed(head.as_bytes(), 0) {
            Ok(request) => format!("{} {} {:?}", request.method, request.path, request.host),
            Err(answer) => answer.status.to_owned(),
        };
        for (head, expected) in [
            ("GET /a HTTP/1.1\r\nhost:  b ", "GET /a Some(\"b\")"),
            ("POST / HTTP/1.0\r\nContent-Length: 0", "POST / None"),
            ("GET / HTTP/1.1\r\nHost: a\r\nHost: b", "GET / None"),
            ("GET / HTTP/1.1\r\nContent-Length: 18446744073709551615", "413 Content Too Large"),
            ("GET / HTTP/1.1\r\nTransfer-Encoding: chunked", "413 Content Too Large"),
            ("GET / HTTP/2", "400 Bad Request"),
            ("GET  / HTTP/1.1", "400 Bad Request"),
            ("GET / HTTP/1.1\r\nno header", "400 Bad Request"),
            ("", "400 Bad Request"),
        ] {
            assert_eq!(status(head), expected, "{head:?}");
        }
    }

    #[test]
    fn a_body_has_one_length_within_the_limit() {
        let body = |head: &str| {
            let request = parsed(format!("POST / HTTP/1.1\r\n{head}").as_bytes(), 100);
            request.map(|request| request.body_format).map_err(|refusal| refusal.status)
        };
        for (head, expected) in [
            ("Content-Length: 100", Ok(BodyFormat::Bytes(100))),
            ("Transfer-Encoding: chunked", Ok(BodyFormat::Chunked)),
            ("Host: a", Ok(BodyFormat::None)),
            ("Content-Length: 101", Err("413 Content Too Large")),
            ("Content-Length: +1", Err("400 Bad Request")),
            ("Content-Length: ", Err("400 Bad Request")),
            ("Content-Length: 1\r\nContent-Length: 1", Err("400 Bad Request")),
            ("Transfer-Encoding: chunked\r\nContent-Length: 1", Err("400 Bad Request")),
            ("Transfer-Encoding: gzip", Err("400 Bad Request")),
        ] {
            assert_eq!(body(head), expected, "{head}");
        }
    }
}
