//! A small HTTP/1.1 server for one page: it reads the head of a request, and never a body. Sizes, times and
//! connections are bounded, so that no client takes memory or keeps another one waiting.

use anyhow::{Context, Result};
use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How often a stop is looked for.
const POLL: Duration = Duration::from_millis(200);
/// Longest head of a request.
const HEAD_BYTES_MAX: usize = 16 << 10;
/// How long a client may take to send its head.
const HEAD_WAIT: Duration = Duration::from_secs(5);
/// How long it may take to receive an answer.
const ANSWER_WAIT: Duration = Duration::from_secs(10);
/// Time for which the server discards what a client still sends after the answer. An earlier close could reset
/// the connection before the client has read the answer.
const LINGER: Duration = Duration::from_millis(200);
const LINGER_BYTES_MAX: usize = 64 << 10;
/// Connections at a time. A further one takes the place of the oldest that is not being answered.
const CONNECTIONS_MAX: usize = 64;
/// How often room for another connection is looked for, and how long.
const ROOM_POLL: Duration = Duration::from_millis(1);
const ROOM_WAIT: Duration = Duration::from_millis(500);
const HEADERS: &str = "Cache-Control: no-store\r\nReferrer-Policy: no-referrer\r\nX-Content-Type-Options: nosniff\r\n\
     X-Frame-Options: DENY\r\nConnection: close\r\n";

/// The head of a request that has no body.
pub struct RequestHead {
    pub method: String,
    pub path: String,
    /// The value of its one `Host`.
    pub host: Option<String>,
}

/// What a request is answered with.
pub struct Answer {
    /// Status and its phrase, such as `404 Not Found`.
    pub status: &'static str,
    pub content_type: &'static str,
    pub body: Arc<str>,
}

impl Answer {
    pub fn text(status: &'static str, text: &str) -> Self {
        Self { status, content_type: "text/plain; charset=utf-8", body: text.into() }
    }
}

/// Connections that are open, and those among them that are not being answered, oldest first.
#[derive(Default)]
struct Connections(Mutex<State>);

#[derive(Default)]
struct State {
    open: usize,
    idle: VecDeque<(u64, TcpStream)>,
}

impl Connections {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it is held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a connection in, where another gives way if there are too many. False where none does.
    fn begin(&self, number: u64, stream: &TcpStream) -> bool {
        let Ok(kept) = stream.try_clone() else { return false };
        let begun = Instant::now();
        loop {
            let mut state = self.lock();
            if state.open >= CONNECTIONS_MAX
                && let Some((_, oldest)) = state.idle.pop_front()
            {
                // Its thread ends a moment later, so there may be more than that for as long.
                let _ = oldest.shutdown(Shutdown::Both);
            }
            if state.open < 2 * CONNECTIONS_MAX {
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

    /// From now on the connection is being answered.
    fn answering(&self, number: u64) {
        self.lock().idle.retain(|(other, _)| *other != number);
    }

    /// It was answered, and is the first to give way.
    fn answered(&self, number: u64, stream: &TcpStream) {
        if let Ok(kept) = stream.try_clone() {
            self.lock().idle.push_front((number, kept));
        }
    }

    fn end(&self, number: u64) {
        self.answering(number);
        self.lock().open -= 1;
    }
}

/// Answers requests by `answer`, each on a thread of its own, until `stopped`.
///
/// # Errors
/// When the system refuses to bound the wait for a connection.
pub fn serve(
    listener: &TcpListener,
    answer: &(dyn Fn(&RequestHead) -> Answer + Sync),
    stopped: &dyn Fn() -> bool,
) -> Result<()> {
    // Linux gives up accepting after that time.
    rustix::net::sockopt::set_socket_timeout(listener, rustix::net::sockopt::Timeout::Recv, Some(POLL))
        .context("waiting for a request")?;
    let connections = &Connections::default();
    std::thread::scope(|scope| {
        let mut number = 0u64;
        while !stopped() {
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => continue,
                // Of descriptors, perhaps, which others give back; or a client that is gone.
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
            // Without a thread the client sees its connection closed.
            if std::thread::Builder::new().name("page".into()).spawn_scoped(scope, work).is_err() {
                connections.end(number);
            }
        }
        // Nobody waits for those that say nothing.
        connections.lock().idle.iter().for_each(|(_, stream)| drop(stream.shutdown(Shutdown::Both)));
        Ok(())
    })
}

/// One request and its answer.
fn converse(
    stream: &TcpStream,
    answer: &dyn Fn(&RequestHead) -> Answer,
    connections: &Connections,
    number: u64,
) {
    let head = read_head(stream, Instant::now() + HEAD_WAIT);
    connections.answering(number);
    let answer = match head {
        Some(Ok(request)) => answer(&request),
        Some(Err(refusal)) => refusal,
        // It went, was too slow, or gave way to another.
        None => return,
    };
    let Answer { status, content_type, body } = answer;
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
        connections.answered(number, stream);
        let (mut piece, mut bytes, until) = ([0; 4096], 0, Instant::now() + LINGER);
        while bytes < LINGER_BYTES_MAX {
            match read(stream, &mut piece, until) {
                Some(count) if count > 0 => bytes += count,
                _ => break,
            }
        }
    }
}

/// The head of a request, or what a head that cannot be answered gets; nothing for a client that sends none.
fn read_head(stream: &TcpStream, deadline: Instant) -> Option<Result<RequestHead, Answer>> {
    let (mut head, mut piece) = (vec![], [0; 1024]);
    let end = loop {
        if let Some(end) = head.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
            break end;
        }
        if head.len() > HEAD_BYTES_MAX {
            return Some(Err(Answer::text("431 Request Header Fields Too Large", "the head is too long\n")));
        }
        match read(stream, &mut piece, deadline)? {
            0 => return None,
            count => head.extend_from_slice(piece.get(..count)?),
        }
    };
    Some(parsed(head.get(..end)?))
}

fn parsed(head: &[u8]) -> Result<RequestHead, Answer> {
    let wrong = || Answer::text("400 Bad Request", "this is no request of HTTP/1.1\n");
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
                return Err(Answer::text("413 Content Too Large", "no request may have a body\n"));
            }
            _ => {}
        }
    }
    let host = if hosts.len() == 1 { hosts.pop() } else { None };
    Ok(RequestHead { method: method.to_owned(), path: path.to_owned(), host })
}

/// What comes before `deadline`; nothing after it, or when the connection is broken.
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

/// The time until `deadline`, if there is any.
fn left(deadline: Instant) -> Option<Duration> {
    deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_is_parsed_and_one_that_announces_a_body_is_refused() {
        let status = |head: &str| match parsed(head.as_bytes()) {
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
