//! How processes meet over TCP: one listens, the others connect and show a token that only this run's processes have.

use anyhow::{Context, Result, bail};
use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

pub(super) const TOKEN_BYTES: usize = 16;
/// How long ranks may take to connect to each other.
pub(super) const CONNECT_LIMIT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(10);
/// A token and a rank.
const GREETING_BYTES: usize = TOKEN_BYTES + 8;
/// How long they may take to come.
const GREETING_LIMIT: Duration = Duration::from_secs(5);
/// Connections that have said nothing yet, beside which no more are kept than there are ranks.
const STRANGERS_MAX: usize = 256;

/// What the processes of one run show each other.
pub(super) type Token = [u8; TOKEN_BYTES];

/// Takes one connection of every other rank; whoever does not know the token is turned away. All that connect
/// are heard at once, so that one who says nothing keeps no rank waiting.
///
/// # Errors
/// When a rank does not come within [`CONNECT_LIMIT`].
pub(super) fn accept(listener: &TcpListener, token: &Token, ranks: usize) -> Result<Vec<(usize, TcpStream)>> {
    let begun = Instant::now();
    let mut streams: Vec<(usize, TcpStream)> = vec![];
    let mut strangers: VecDeque<Stranger> = VecDeque::new();
    let port = listener.local_addr().context("the port for the other ranks")?.port();
    listener.set_nonblocking(true).context("listening for the other ranks")?;
    while streams.len() + 1 < ranks {
        if begun.elapsed() > CONNECT_LIMIT {
            bail!(
                "{} of {} ranks did not connect to rank 0 on port {port} within {} s",
                ranks - 1 - streams.len(),
                ranks - 1,
                CONNECT_LIMIT.as_secs()
            );
        }
        while let Ok((stream, _)) = listener.accept() {
            if stream.set_nonblocking(true).is_ok() {
                strangers.push_back(Stranger { stream, begun: Instant::now(), greeting: vec![] });
            }
            // A rank speaks at once, so the oldest is none.
            if strangers.len() > STRANGERS_MAX.max(ranks) {
                strangers.pop_front();
            }
        }
        let mut silent = VecDeque::new();
        for mut stranger in strangers {
            match stranger.listen() {
                Some(greeting) => {
                    let (shown, rank) = greeting.split_at(TOKEN_BYTES);
                    let rank = rank.iter().rev().fold(0usize, |sum, &byte| sum << 8 | usize::from(byte));
                    let known = (1..ranks).contains(&rank) && streams.iter().all(|(other, _)| *other != rank);
                    if shown == token && known && stranger.stream.set_nonblocking(false).is_ok() {
                        streams.push((rank, stranger.stream));
                    }
                }
                None if stranger.begun.elapsed() < GREETING_LIMIT => silent.push_back(stranger),
                None => {}
            }
        }
        strangers = silent;
        std::thread::sleep(POLL);
    }
    Ok(streams)
}

/// Who has connected and not said yet who it is.
struct Stranger {
    stream: TcpStream,
    begun: Instant,
    greeting: Vec<u8>,
}

impl Stranger {
    /// Its token and rank, once both have come.
    fn listen(&mut self) -> Option<Vec<u8>> {
        let mut piece = [0; GREETING_BYTES];
        let room = piece.get_mut(self.greeting.len()..)?;
        match self.stream.read(room) {
            Ok(count) if count > 0 => self.greeting.extend_from_slice(room.get(..count)?),
            Err(e) if e.kind() == ErrorKind::WouldBlock => {}
            // It has gone, and is forgotten when its time is over.
            _ => {}
        }
        (self.greeting.len() == GREETING_BYTES).then(|| std::mem::take(&mut self.greeting))
    }
}

/// Connects rank `rank` to the leader, which listens at `host` and `port`, or will within `patience`.
///
/// # Errors
/// When nobody listens there.
pub(super) fn join(
    host: &str,
    port: u16,
    token: &Token,
    rank: usize,
    patience: Duration,
) -> Result<TcpStream> {
    let begun = Instant::now();
    let connect = || -> std::io::Result<TcpStream> {
        let mut stream = TcpStream::connect((host, port))?;
        stream.write_all(token)?;
        stream.write_all(&(rank as u64).to_le_bytes())?;
        Ok(stream)
    };
    loop {
        match connect() {
            Err(_) if begun.elapsed() < patience => std::thread::sleep(POLL),
            done => return done.with_context(|| format!("connecting to rank 0 at {host}, port {port}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each was waited for, 5 s long.
    #[test]
    fn strangers_that_say_nothing_keep_no_rank_waiting() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let token = [7; TOKEN_BYTES];
        let silent: Vec<_> = (0..20).map(|_| TcpStream::connect(("127.0.0.1", port)).unwrap()).collect();
        let mut wrong = TcpStream::connect(("127.0.0.1", port)).unwrap();
        wrong.write_all(&[8; GREETING_BYTES]).unwrap();
        let begun = Instant::now();
        let ranks = [1, 2].map(|rank| {
            std::thread::spawn(move || join("127.0.0.1", port, &token, rank, Duration::ZERO).unwrap())
        });
        let mut found: Vec<usize> =
            accept(&listener, &token, 3).unwrap().into_iter().map(|(rank, _)| rank).collect();
        found.sort_unstable();
        assert_eq!(found, [1, 2]);
        assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
        ranks.into_iter().for_each(|rank| drop(rank.join().unwrap()));
        drop((silent, wrong));
    }
}
