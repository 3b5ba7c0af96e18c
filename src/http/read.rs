//! Reads a request: the head first, and the body only after the head was accepted. What RFC 9112 forbids is
//! refused, because another program on the way could understand it in another way.

use super::budget::Budget;
use super::json::RequestBody;
use super::{HttpLimits, HttpRequest, MEMORY_WAIT, Refusal, SPENT, read, write};
use memmap2::MmapMut;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum bytes of a request's head or of a line of its body's framing, and maximum number of headers.
const HEAD_BYTES_MAX: usize = 16 << 10;
const HEADERS_MAX: usize = 100;
/// Time limit for a client to send its head.
const HEAD_WAIT: Duration = Duration::from_secs(5);
/// Time limit for a client to send its body.
const BODY_WAIT: Duration = Duration::from_secs(30);

const WRONG_REQUEST: Refusal =
    Refusal { status: "400 Bad Request", message: "this is not an HTTP/1.1 request" };
const TOO_LARGE: Refusal =
    Refusal { status: "413 Content Too Large", message: "the body of the request is too large" };
const LONG_HEAD: Refusal =
    Refusal { status: "431 Request Header Fields Too Large", message: "the head is too long" };

/// The result of reading. `Err(None)`: the client left or was too slow.
pub(super) type Read<T> = Result<T, Option<Refusal>>;

/// How a request tells the end of its body.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
pub(super) enum BodyFormat {
    #[default]
    None,
    Bytes(usize),
    Chunked,
}

/// The memory of all bodies, and that of the values which they become. A value is made while its body is
/// still there. With one budget for both, bodies could wait for each other. The other half is what the
/// allocator keeps of values for the threads that parsed them.
pub(super) struct Memory {
    bodies: Arc<Budget>,
    values: Arc<Budget>,
}

impl Memory {
    pub fn new(bytes: usize) -> Self {
        Self { bodies: Budget::new(bytes / 4), values: Budget::new(bytes / 4) }
    }
}

/// The bytes that a client sends.
pub(super) struct Input<'s> {
    stream: &'s TcpStream,
    /// Bytes that were received and are not used yet.
    bytes: Vec<u8>,
}

impl<'s> Input<'s> {
    pub fn new(stream: &'s TcpStream) -> Self {
        Self { stream, bytes: vec![] }
    }

    /// Reads the head.
    pub fn head(&mut self, body_bytes_max: usize) -> Read<HttpRequest> {
        let deadline = Instant::now() + HEAD_WAIT;
        loop {
            let parsed = parsed(&self.bytes, body_bytes_max)?;
            if parsed.as_ref().map_or(self.bytes.len(), |(_, end)| *end) > HEAD_BYTES_MAX {
                return Err(Some(LONG_HEAD));
            }
            if let Some((request, end)) = parsed {
                self.bytes.drain(..end);
                return Ok(request);
            }
            self.fill(deadline)?;
        }
    }

    /// Reads the body of `request`.
    pub fn body(&mut self, request: &HttpRequest, limits: HttpLimits, memory: &Memory) -> Read<()> {
        let bytes_max = match request.body_format {
            BodyFormat::None | BodyFormat::Bytes(0) => return Ok(()),
            BodyFormat::Bytes(length) => length,
            BodyFormat::Chunked => limits.body_bytes_max,
        };
        let share = memory.bodies.take(bytes_max, MEMORY_WAIT).ok_or(SPENT)?;
        let deadline = Instant::now() + BODY_WAIT;
        if request.expects_continue && self.bytes.is_empty() {
            write(self.stream, b"HTTP/1.1 100 Continue\r\n\r\n", deadline).ok_or(None)?;
        }
        let mut map = MmapMut::map_anon(bytes_max).map_err(|_| SPENT)?;
        let length = match request.body_format {
            BodyFormat::Chunked => self.chunks(&mut map, deadline)?,
            _ => self.copy(&mut map, deadline).map(|()| bytes_max)?,
        };
        request.body.replace(Some(RequestBody { map, length, _share: share, values: memory.values.clone() }));
        Ok(())
    }

    /// Reads a body in chunks, and returns its length.
    fn chunks(&mut self, body: &mut [u8], deadline: Instant) -> Read<usize> {
        let mut bytes = 0;
        loop {
            let length = chunk_bytes(&self.line(deadline)?).ok_or(WRONG_REQUEST)?;
            if length == 0 {
                break;
            }
            let chunk = body.get_mut(bytes..).and_then(|rest| rest.get_mut(..length)).ok_or(TOO_LARGE)?;
            self.copy(chunk, deadline)?;
            bytes += length;
            if !self.line(deadline)?.is_empty() {
                return Err(Some(WRONG_REQUEST));
            }
        }
        // Trailers are checked and dropped.
        for _ in 0..=HEADERS_MAX {
            let line = [&self.line(deadline)?, &b"\r\n"[..]].concat();
            match httparse::parse_headers(&line, &mut [httparse::EMPTY_HEADER; 1]) {
                Ok(httparse::Status::Complete(_)) => return Ok(bytes),
                Ok(httparse::Status::Partial) => {}
                Err(_) => return Err(Some(WRONG_REQUEST)),
            }
        }
        Err(Some(LONG_HEAD))
    }

    /// Removes the next line, without its end.
    fn line(&mut self, deadline: Instant) -> Read<Vec<u8>> {
        let end = loop {
            match self.bytes.iter().position(|byte| *byte == b'\n') {
                Some(end) => break end,
                None if self.bytes.len() > HEAD_BYTES_MAX => return Err(Some(WRONG_REQUEST)),
                None => self.fill(deadline)?,
            }
        };
        let line: Vec<u8> = self.bytes.drain(..=end).collect();
        Ok(line.strip_suffix(b"\r\n").ok_or(WRONG_REQUEST)?.to_vec())
    }

    /// Fills `body` with the next bytes.
    fn copy(&mut self, mut body: &mut [u8], deadline: Instant) -> Read<()> {
        while !body.is_empty() {
            if self.bytes.is_empty() {
                self.fill(deadline)?;
            }
            let (now, rest) = body.split_at_mut(self.bytes.len().min(body.len()));
            let count = now.len();
            now.iter_mut().zip(self.bytes.drain(..count)).for_each(|(to, from)| *to = from);
            body = rest;
        }
        Ok(())
    }

    /// Receives more bytes.
    fn fill(&mut self, deadline: Instant) -> Read<()> {
        let mut piece = [0; 16 << 10];
        let count = read(self.stream, &mut piece, deadline).filter(|count| *count > 0).ok_or(None)?;
        self.bytes.extend_from_slice(piece.get(..count).unwrap_or_default());
        Ok(())
    }
}

/// Returns the length of the chunk whose first line this is.
fn chunk_bytes(line: &[u8]) -> Option<usize> {
    let digits = line.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
    let (digits, extension) = line.split_at(digits);
    let is_extension = extension.is_empty() || extension.trim_ascii_start().starts_with(b";");
    let is_plain = extension.iter().all(|byte| *byte == b'\t' || !byte.is_ascii_control());
    let length = usize::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    (is_extension && is_plain).then_some(length)
}

/// The headers that the server reads. A second one of a name could be the one that another program reads.
const NAMES: [&str; 9] = [
    "host",
    "origin",
    "authorization",
    "x-api-key",
    "content-encoding",
    "x-episode-id",
    "content-length",
    "transfer-encoding",
    "expect",
];

/// Parses the head at the start of `bytes`, and returns its length too; `None` if it is not complete.
fn parsed(bytes: &[u8], body_bytes_max: usize) -> Result<Option<(HttpRequest, usize)>, Refusal> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut head = httparse::Request::new(&mut headers);
    let end = match head.parse(bytes) {
        Ok(httparse::Status::Complete(end)) => end,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(httparse::Error::TooManyHeaders) => return Err(LONG_HEAD),
        Err(_) => return Err(WRONG_REQUEST),
    };
    let mut lines = bytes.get(..end).unwrap_or_default().split_inclusive(|byte| *byte == b'\n');
    let (Some(method), Some(path), Some(version), true) =
        (head.method, head.path, head.version, lines.all(|line| line.ends_with(b"\r\n")))
    else {
        return Err(WRONG_REQUEST);
    };
    let mut fields = NAMES.map(|_| None);
    for header in head.headers {
        if let Some(field) = NAMES.iter().position(|name| header.name.eq_ignore_ascii_case(name)) {
            let value = std::str::from_utf8(header.value).map_err(|_| WRONG_REQUEST)?;
            if fields[field].replace(value.trim()).is_some() {
                return Err(WRONG_REQUEST);
            }
        }
    }
    let [host, origin, authorization, api_key, content_encoding, episode, length, encoding, expect] = fields;
    let is_host = |host: &str| {
        host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,;=:[]%".contains(&byte))
    };
    // HTTP/1.0 needs no host, and has no chunks.
    if host.map_or(version == 1, |host| !is_host(host)) || !(path.starts_with('/') || path == "*") {
        return Err(WRONG_REQUEST);
    }
    let body_format = match (length, encoding) {
        (None, None) => BodyFormat::None,
        (Some(length), None) if !length.is_empty() && length.bytes().all(|byte| byte.is_ascii_digit()) => {
            BodyFormat::Bytes(length.parse().unwrap_or(usize::MAX))
        }
        (None, Some(encoding)) if version == 1 && encoding.eq_ignore_ascii_case("chunked") => {
            BodyFormat::Chunked
        }
        _ => return Err(WRONG_REQUEST),
    };
    let is_too_large = match body_format {
        BodyFormat::Bytes(length) => length > body_bytes_max,
        BodyFormat::Chunked => body_bytes_max == 0,
        BodyFormat::None => false,
    };
    if is_too_large {
        return Err(TOO_LARGE);
    }
    if ["GET", "HEAD"].contains(&method) && ![BodyFormat::None, BodyFormat::Bytes(0)].contains(&body_format) {
        return Err(Refusal { status: "400 Bad Request", message: "this method takes no body" });
    }
    let text = |value: Option<&str>| value.map(str::to_owned);
    let request = HttpRequest {
        method: method.to_owned(),
        path: path.to_owned(),
        host: text(host),
        origin: text(origin),
        authorization: text(authorization),
        api_key: text(api_key),
        content_encoding: text(content_encoding),
        episode: text(episode),
        body: Default::default(),
        body_format,
        expects_continue: expect.is_some_and(|expected| expected.eq_ignore_ascii_case("100-continue")),
    };
    Ok(Some((request, end)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns method, path and host, or the status of the refusal.
    fn status(head: &str, body_bytes_max: usize) -> String {
        match parsed(head.as_bytes(), body_bytes_max) {
            Ok(Some((request, end))) => {
                assert_eq!(end, head.len());
                let HttpRequest { method, path, host, body_format, .. } = request;
                format!("{method} {path} {} {body_format:?}", host.as_deref().unwrap_or("-"))
            }
            Ok(None) => "more".to_owned(),
            Err(refusal) => refusal.status.split(' ').next().unwrap().to_owned(),
        }
    }

    #[test]
    fn a_head_is_parsed() {
        for (head, expected) in [
            ("GET /a HTTP/1.1\r\nhost:  b \r\n\r\n", "GET /a b None"),
            ("\r\nGET /a HTTP/1.1\r\nhost:b\r\n\r\n", "GET /a b None"),
            ("POST / HTTP/1.0\r\nContent-Length: 0\r\n\r\n", "POST / - Bytes(0)"),
            ("GET / HTTP/1.0\r\nContent-Length: 18446744073709551616\r\n\r\n", "413"),
            ("GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n", "413"),
            ("GET / HTTP/1.1\r\nHost: a\r\n", "more"),
            ("", "more"),
        ] {
            assert_eq!(status(head, 0), expected, "{head:?}");
        }
    }

    #[test]
    fn a_body_has_one_length_within_the_limit() {
        for (headers, expected) in [
            ("Content-Length: 100", "POST / a Bytes(100)"),
            ("Transfer-Encoding: Chunked", "POST / a Chunked"),
            ("Content-Length: 101", "413"),
            ("Content-Length: +1", "400"),
            ("Content-Length: ", "400"),
            ("Content-Length: 1, 1", "400"),
            ("Content-Length: 1\r\nContent-Length: 1", "400"),
            ("Transfer-Encoding: chunked\r\nContent-Length: 1", "400"),
            ("Content-Length: 1\r\nTransfer-Encoding: chunked", "400"),
            ("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked", "400"),
            ("Transfer-Encoding: chunked, chunked", "400"),
            ("Transfer-Encoding: gzip", "400"),
        ] {
            let head = format!("POST / HTTP/1.1\r\nHost: a\r\n{headers}\r\n\r\n");
            assert_eq!(status(&head, 100), expected, "{headers}");
        }
        let chunked = "POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n";
        assert_eq!(status(chunked, 100), "400");
        assert_eq!(status("GET / HTTP/1.0\r\nContent-Length: 1\r\n\r\n", 100), "400");
    }

    /// A second `Origin`, a space before a colon, and other breaches of RFC 9112 were accepted.
    #[test]
    fn bug_a_head_that_programs_could_read_differently_is_refused() {
        for head in [
            "GET / HTTP/2\r\n\r\n",
            "GET  / HTTP/1.0\r\n\r\n",
            "GET\t/ HTTP/1.0\r\n\r\n",
            "G(T / HTTP/1.0\r\n\r\n",
            "GET / HTTP/1.0 \r\n\r\n",
            "GET a HTTP/1.0\r\n\r\n",
            "GET / HTTP/1.0\r\nno header\r\n\r\n",
            "GET / HTTP/1.0\r\nContent-Length : 0\r\n\r\n",
            "GET / HTTP/1.0\r\n Host: a\r\n\r\n",
            "GET / HTTP/1.0\r\nA: b\r\n c\r\n\r\n",
            "GET / HTTP/1.0\r\nA: b\0c\r\n\r\n",
            "GET / HTTP/1.0\r\nA: b\rc\r\n\r\n",
            "GET / HTTP/1.0\nA: b\n\n",
            "GET / HTTP/1.0\r\nA: b\nC: d\r\n\r\n",
            "GET / HTTP/1.0\r\n: b\r\n\r\n",
            "GET / HTTP/1.0\r\nHost: a b\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
            "GET / HTTP/1.1\r\n\r\n",
            "GET / HTTP/1.0\r\nOrigin: a\r\norigin: b\r\n\r\n",
            "GET / HTTP/1.0\r\nAuthorization: a\r\nAuthorization: a\r\n\r\n",
            "GET / HTTP/1.0\r\nX-Episode-Id: a\r\nX-Episode-Id: b\r\n\r\n",
        ] {
            assert_eq!(status(head, 100), "400", "{head:?}");
        }
        let many = format!("GET / HTTP/1.0\r\n{}\r\n", "A: b\r\n".repeat(HEADERS_MAX + 1));
        assert_eq!(status(&many, 100), "431");
    }

    /// `+5` was the length of a chunk.
    #[test]
    fn bug_the_length_of_a_chunk_has_only_digits() {
        for (line, expected) in [
            ("5", Some(5)),
            ("0aF", Some(0xaf)),
            ("5;a=b", Some(5)),
            ("5 \t; a=\"b\"", Some(5)),
            ("+5", None),
            ("-5", None),
            (" 5", None),
            ("5 ", None),
            ("0x5", None),
            ("5;a\0", None),
            ("5;a\r", None),
            ("5g", None),
            ("", None),
            (";a", None),
            ("10000000000000000", None),
        ] {
            assert_eq!(chunk_bytes(line.as_bytes()), expected, "{line:?}");
        }
    }
}
