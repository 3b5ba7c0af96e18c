//! A small HTTP/1.1 server for one page. It reads the head of a request, but never a body. Sizes, times and
//! connections are bounded, so no client can exhaust memory or block another client.

use anyhow::{Context, Result};
use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Interval between checks for a stop.
const POLL: Duration = Duration::from_millis(200);
/// Maximum size of a request's head, in bytes.
const HEAD_BYTES_MAX: usize = 16 << 10;
/// Time limit for a client to send its head.
const HEAD_WAIT: Duration = Duration::from_secs(5);
/// Time limit for a client to receive a response.
const ANSWER_WAIT: Duration = Duration::from_secs(10);
/// Time for which the server reads and discards input after the response. If it closed earlier, the
/// connection could be reset before the client has read the response.
const LINGER: Duration = Duration::from_millis(200);
const LINGER_BYTES_MAX: usize = 64 << 10;
/// Maximum number of connections. A new connection replaces the oldest one that has no response in progress.
const CONNECTIONS_MAX: usize = 64;
/// Interval of checks for a free connection slot.
const SLOT_POLL: Duration = Duration::from_millis(1);
/// Time limit of the wait for a free connection slot.
const SLOT_WAIT: Duration = Duration::from_millis(500);
const HEADERS: &str = "Cache-Control: no-store\r\nReferrer-Policy: no-referrer\r\nX-Content-Type-Options: nosniff\r\n\
     X-Frame-Options: DENY\r\nConnection: close\r\n";

/// The head of a request that has no body.
pub struct RequestHead {
    pub method: String,
    pub path: String,
    /// The value of the `Host` header, if there is exactly one.
    pub host: Option<String>,
}

/// A response.
pub struct Response {
    /// Status code and phrase, such as `404 Not Found`.
    pub status: &'static str,
    pub content_type: &'static str,
    pub body: Arc<str>,
}

impl Response {
    pub fn text(status: &'static str, text: &str) -> Self {
        Self { status, content_type: "text/plain; charset=utf-8", body: text.into() }
    }
}

/// The number of open connections, and the idle connections, oldest first.
#[derive(Default)]
struct Connections(Mutex<State>);

#[derive(Default)]
struct State {
    open: usize,
    idle: VecDeque<(u64, TcpStream)>,
}

impl Connections {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No code panics while it holds the lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a connection. If there are too many, closes the oldest idle one. Returns false if none is idle.
    fn begin(&self, number: u64, stream: &TcpStream) -> bool {
        let Ok(kept) = stream.try_clone() else { return false };
        let begun = Instant::now();
        loop {
            let mut state = self.lock();
            if state.open >= CONNECTIONS_MAX
                && let Some((_, oldest)) = state.idle.pop_front()
            {
                // The thread of a closed connection ends slightly later. For that time, the count can exceed
                // the limit.
                let _ = oldest.shutdown(Shutdown::Both);
            }
            if state.open < 2 * CONNECTIONS_MAX {
                state.open += 1;
                state.idle.push_back((number, kept));
                return true;
            }
            drop(state);
            if begun.elapsed() > SLOT_WAIT {
                return false;
            }
            std::thread::sleep(SLOT_POLL);
        }
    }

    /// Marks the connection as busy, because its response is in progress.
    fn mark_busy(&self, number: u64) {
        self.lock().idle.retain(|(other, _)| *other != number);
    }

    /// Marks the connection as idle after its response. It becomes the first to be closed.
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

/// Serves requests with `answer`, each on its own thread, until `stopped` returns true.
///
/// # Errors
/// When the socket's timeout cannot be set.
pub fn serve(
    listener: &TcpListener,
    answer: &(dyn Fn(&RequestHead) -> Response + Sync),
    stopped: &dyn Fn() -> bool,
) -> Result<()> {
    // On Linux, this also limits the time that `accept` waits.
    rustix::net::sockopt::set_socket_timeout(listener, rustix::net::sockopt::Timeout::Recv, Some(POLL))
        .context("waiting for a request")?;
    let connections = &Connections::default();
    std::thread::scope(|scope| {
        let mut number = 0u64;
        while !stopped() {
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => continue,
                // The process may have no free file descriptor until a connection closes, or the client has
                // closed.
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
                converse(&stream, answer, connections, number);
                connections.end(number);
            };
            // If no thread can start, the connection is closed.
            if std::thread::Builder::new().name("page".into()).spawn_scoped(scope, work).is_err() {
                connections.end(number);
            }
        }
        // The server does not wait for clients that send nothing.
        connections.lock().idle.iter().for_each(|(_, stream)| drop(stream.shutdown(Shutdown::Both)));
        Ok(())
    })
}

/// Handles one request and its response.
fn converse(
    stream: &TcpStream,
    answer: &dyn Fn(&RequestHead) -> Response,
    connections: &Connections,
    number: u64,
) {
    let head = read_head(stream, Instant::now() + HEAD_WAIT);
    connections.mark_busy(number);
    let answer = match head {
        Some(Ok(request)) => answer(&request),
        Some(Err(refusal)) => refusal,
        // The client closed the connection, was too slow, or was replaced by another connection.
        None => return,
    };
    let Response { status, content_type, body } = answer;
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {length}\r\n{HEADERS}\r\n"
    );
    let deadline = Instant::now() + ANSWER_WAIT;
    if write(stream, head.as_bytes(), deadline)
        .and_then(|()| write(stream, body.as_bytes(), deadline))
        .is_some()
    {
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

/// Reads the head of a request. Returns an error response if the head is invalid, and `None` if the client
/// sends no head.
fn read_head(stream: &TcpStream, deadline: Instant) -> Option<Result<RequestHead, Response>> {
    let (mut head, mut piece) = (vec![], [0; 1024]);
    let end = loop {
        if let Some(end) = head.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
            break end;
        }
        if head.len() > HEAD_BYTES_MAX {
            return Some(Err(Response::text(
                "431 Request Header Fields Too Large",
                "the head is too long\n",
            )));
        }
        match read(stream, &mut piece, deadline)? {
            0 => return None,
            count => head.extend_from_slice(piece.get(..count)?),
        }
    };
    Some(parse_head(head.get(..end)?))
}

fn parse_head(head: &[u8]) -> Result<RequestHead, Response> {
    let wrong = || Response::text("400 Bad Request", "this is not an HTTP/1.1 request\n");
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
    let mut hosts = vec![];
    for line in lines {
        let (name, value) = line.split_once(':').ok_or_else(wrong)?;
        let value = value.trim();
        match name.to_ascii_lowercase().as_str() {
            "host" => hosts.push(value.to_owned()),
            "content-length" if value == "0" => {}
            "content-length" | "transfer-encoding" | "expect" => {
                return Err(Response::text("413 Content Too Large", "a request must not have a body\n"));
            }
            _ => {}
        }
    }
    let host = if hosts.len() == 1 { hosts.pop() } else { None };
    Ok(RequestHead { method: method.to_owned(), path: path.to_owned(), host })
}

/// Reads bytes until `deadline`. `None` after the deadline, or if the connection is broken.
fn read(mut stream: &TcpStream, piece: &mut [u8], deadline: Instant) -> Option<usize> {
    stream.set_read_timeout(Some(time_left(deadline)?)).ok()?;
    stream.read(piece).ok()
}

fn write(mut stream: &TcpStream, mut bytes: &[u8], deadline: Instant) -> Option<()> {
    while !bytes.is_empty() {
        stream.set_write_timeout(Some(time_left(deadline)?)).ok()?;
        let count = stream.write(bytes).ok().filter(|count| *count > 0)?;
        bytes = bytes.get(count..)?;
    }
    Some(())
}

/// Returns the time until `deadline`. `None` after the deadline.
fn time_left(deadline: Instant) -> Option<Duration> {
    deadline.checked_duration_since(Instant::now()).filter(|time_left| !time_left.is_zero())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_is_parsed_and_a_head_that_announces_a_body_is_refused() {
        let status = |head: &str| match parse_head(head.as_bytes()) {
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
}
