//! TCP connections between processes. Rank 0 listens. The other ranks connect and send a token that only the
//! processes of this run know.

use anyhow::{Context, Result, bail};
use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

pub(super) const TOKEN_BYTES: usize = 16;
/// Time limit for the ranks to connect to each other.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(10);
/// Bytes of a greeting: a token and a rank.
const GREETING_BYTES: usize = TOKEN_BYTES + 8;
/// Time limit for a greeting to arrive.
const GREETING_LIMIT: Duration = Duration::from_secs(5);
/// Maximum number of connections whose greeting has not arrived. If there are more ranks, it is the number of
/// ranks.
const NEW_CONNECTIONS_MAX: usize = 256;

/// A secret that all processes of one run share.
pub(super) type Token = [u8; TOKEN_BYTES];

/// Accepts one connection from every other rank. Drops connections with a different token. All greetings are
/// read concurrently, so a silent connection delays no rank.
///
/// # Errors
/// When a rank does not connect within [`CONNECT_TIMEOUT`].
pub(super) fn accept(listener: &TcpListener, token: &Token, ranks: usize) -> Result<Vec<(usize, TcpStream)>> {
    let started = Instant::now();
    let mut streams: Vec<(usize, TcpStream)> = vec![];
    let mut new_connections: VecDeque<NewConnection> = VecDeque::new();
    let port = listener.local_addr().context("the port for the other ranks")?.port();
    listener.set_nonblocking(true).context("listening for the other ranks")?;
    while streams.len() + 1 < ranks {
        if started.elapsed() > CONNECT_TIMEOUT {
            bail!(
                "{} of {} ranks did not connect to rank 0 on port {port} within {} s",
                ranks - 1 - streams.len(),
                ranks - 1,
                CONNECT_TIMEOUT.as_secs()
            );
        }
        while let Ok((stream, _)) = listener.accept() {
            if stream.set_nonblocking(true).is_ok() {
                new_connections.push_back(NewConnection {
                    stream,
                    started: Instant::now(),
                    greeting: vec![],
                });
            }
            // A rank sends its greeting at once, so the oldest connection without a greeting is not from a
            // rank.
            if new_connections.len() > NEW_CONNECTIONS_MAX.max(ranks) {
                new_connections.pop_front();
            }
        }
        let mut silent = VecDeque::new();
        for mut connection in new_connections {
            match connection.read_greeting() {
                Some(greeting) => {
                    let (shown, rank) = greeting.split_at(TOKEN_BYTES);
                    let rank = rank.iter().rev().fold(0usize, |sum, &byte| sum << 8 | usize::from(byte));
                    let known = (1..ranks).contains(&rank) && streams.iter().all(|(other, _)| *other != rank);
                    if shown == token && known && connection.stream.set_nonblocking(false).is_ok() {
                        streams.push((rank, connection.stream));
                    }
                }
                None if connection.started.elapsed() < GREETING_LIMIT => silent.push_back(connection),
                None => {}
            }
        }
        new_connections = silent;
        std::thread::sleep(POLL);
    }
    Ok(streams)
}

/// A connection without a complete greeting.
struct NewConnection {
    stream: TcpStream,
    started: Instant,
    greeting: Vec<u8>,
}

impl NewConnection {
    /// Reads the bytes that have arrived. Returns the greeting if it is complete.
    fn read_greeting(&mut self) -> Option<Vec<u8>> {
        let mut buffer = [0; GREETING_BYTES];
        let rest = buffer.get_mut(self.greeting.len()..)?;
        match self.stream.read(rest) {
            Ok(count) if count > 0 => self.greeting.extend_from_slice(rest.get(..count)?),
            Err(e) if e.kind() == ErrorKind::WouldBlock => {}
            // The connection is closed. It is dropped at its time limit.
            _ => {}
        }
        (self.greeting.len() == GREETING_BYTES).then(|| std::mem::take(&mut self.greeting))
    }
}

/// Connects rank `rank` to rank 0 at `host` and `port`. Retries for the duration `patience`.
///
/// # Errors
/// When nothing listens there.
pub(super) fn join(
    host: &str,
    port: u16,
    token: &Token,
    rank: usize,
    patience: Duration,
) -> Result<TcpStream> {
    let started = Instant::now();
    let connect = || -> std::io::Result<TcpStream> {
        let mut stream = TcpStream::connect((host, port))?;
        stream.write_all(token)?;
        stream.write_all(&(rank as u64).to_le_bytes())?;
        Ok(stream)
    };
    loop {
        match connect() {
            Err(_) if started.elapsed() < patience => std::thread::sleep(POLL),
            done => return done.with_context(|| format!("connecting to rank 0 at {host}, port {port}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A silent connection must not delay rank 0, which reads all greetings concurrently.
    #[test]
    fn new_connections_that_say_nothing_keep_no_rank_waiting() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let token = [7; TOKEN_BYTES];
        let silent: Vec<_> = (0..20).map(|_| TcpStream::connect(("127.0.0.1", port)).unwrap()).collect();
        let mut wrong = TcpStream::connect(("127.0.0.1", port)).unwrap();
        wrong.write_all(&[8; GREETING_BYTES]).unwrap();
        let started = Instant::now();
        let ranks = [1, 2].map(|rank| {
            std::thread::spawn(move || join("127.0.0.1", port, &token, rank, Duration::ZERO).unwrap())
        });
        let mut found: Vec<usize> =
            accept(&listener, &token, 3).unwrap().into_iter().map(|(rank, _)| rank).collect();
        found.sort_unstable();
        assert_eq!(found, [1, 2]);
        assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
        ranks.into_iter().for_each(|rank| drop(rank.join().unwrap()));
        drop((silent, wrong));
    }
}
