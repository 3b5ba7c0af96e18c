//! How processes meet over TCP: one listens, the others connect and show a token that only this run's processes have.

use anyhow::{Context, Result, bail};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

pub(super) const TOKEN_BYTES: usize = 16;
/// How long ranks may take to connect to each other.
pub(super) const CONNECT_LIMIT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(10);

/// What the processes of one run show each other.
pub(super) type Token = [u8; TOKEN_BYTES];

/// Takes one connection of every other rank; whoever does not know the token is turned away.
///
/// # Errors
/// When a rank does not come within [`CONNECT_LIMIT`].
pub(super) fn accept(listener: &TcpListener, token: &Token, ranks: usize) -> Result<Vec<(usize, TcpStream)>> {
    let begun = Instant::now();
    let mut streams: Vec<(usize, TcpStream)> = vec![];
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
        let Ok((mut stream, _)) = listener.accept() else {
            std::thread::sleep(POLL);
            continue;
        };
        let mut greeting = [0; TOKEN_BYTES + 8];
        let heard = stream
            .set_nonblocking(false)
            .and_then(|()| stream.set_read_timeout(Some(Duration::from_secs(5))))
            .and_then(|()| stream.read_exact(&mut greeting))
            .and_then(|()| stream.set_read_timeout(None));
        let (shown, rank) = greeting.split_at(TOKEN_BYTES);
        let rank = rank.iter().rev().fold(0usize, |sum, &byte| sum << 8 | usize::from(byte));
        let known = (1..ranks).contains(&rank) && streams.iter().all(|(other, _)| *other != rank);
        if heard.is_ok() && shown == token && known {
            streams.push((rank, stream));
        }
    }
    Ok(streams)
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
