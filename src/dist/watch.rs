//! Notices that another process is gone or stopped. A process that is killed says nothing, and MPI would wait
//! for it; but the system closes its sockets. So every rank holds a connection to rank 0. On it both sides
//! say every few seconds that they are there, which a process that is stopped, or whose machine cannot be
//! reached, does not.

use super::Mesh;
use super::meeting::{TOKEN_BYTES, Token, accept, join};
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Said on a connection before it is closed in order.
const END: u8 = 1;
/// Said by the leader before it ends because of another rank, whose number follows in 8 bytes.
const GONE: u8 = 2;

/// Said every [`BEAT`].
const ALIVE: u8 = 3;
const BEAT: Duration = Duration::from_secs(10);
/// A rank that has said nothing for that long is stopped. Twice in a row, for this process may have been
/// stopped itself.
const SILENCE: Duration = Duration::from_secs(60);

/// Where the leader listens, and the secret that its ranks show it.
#[derive(Clone, Default, Serialize, Deserialize)]
struct Address {
    host: String,
    port: u16,
    token: Token,
}

/// This process's side: one connection for a rank, one a rank for the leader.
pub(super) struct Watch(Arc<Shared>);

/// What its threads see too.
struct Shared {
    rank: usize,
    hosts: Vec<String>,
    streams: Vec<TcpStream>,
    ended: AtomicBool,
}

impl Watch {
    /// Connects every rank of `mesh` to the leader, and watches from then on.
    /// `hosts` is where each runs.
    pub fn begin(mesh: &Mesh, hosts: &[String]) -> Result<Self> {
        let host = hosts.get(mesh.rank()).cloned().context("this rank's host")?;
        let streams = match mesh.is_leader() {
            true => {
                let alone = hosts.iter().all(|other| *other == host);
                let place = if alone { Ipv4Addr::LOCALHOST } else { Ipv4Addr::UNSPECIFIED };
                let listener = TcpListener::bind((place, 0)).context("listening for the other ranks")?;
                let port = listener.local_addr().context("the port for the other ranks")?.port();
                let address = Address { host, port, token: fresh_token()? };
                mesh.leaders("the leader's address", &address)?;
                accept(&listener, &address.token, mesh.ranks())?
            }
            false => {
                let address: Address = mesh.leaders("the leader's address", &Address::default())?;
                let place = if address.host == host { "127.0.0.1" } else { &address.host };
                vec![(0, join(place, address.port, &address.token, mesh.rank(), Duration::ZERO)?)]
            }
        };
        let kept = streams.iter().map(|(_, stream)| stream.try_clone());
        let shared = Arc::new(Shared {
            rank: mesh.rank(),
            hosts: hosts.to_vec(),
            streams: kept.collect::<std::io::Result<_>>().context("watching the other ranks")?,
            ended: AtomicBool::new(false),
        });
        for (other, stream) in streams {
            let shared = shared.clone();
            let watch = move || shared.watch(other, stream);
            std::thread::Builder::new().name("ranks".into()).spawn(watch).context("starting a thread")?;
        }
        let beating = shared.clone();
        let beat = move || {
            while !beating.ended.load(Ordering::Relaxed) {
                beating.say(&[ALIVE]);
                std::thread::sleep(BEAT);
            }
        };
        std::thread::Builder::new().name("ranks".into()).spawn(beat).context("starting a thread")?;
        Ok(Self(shared))
    }

    /// From here on the others may go.
    pub fn end(&self) {
        self.0.ended.store(true, Ordering::Relaxed);
        self.0.say(&[END]);
    }
}

impl Shared {
    fn say(&self, words: &[u8]) {
        for mut stream in &self.streams {
            // One that is gone needs no word.
            let _ = stream.write_all(words);
        }
    }

    /// Waits for `other`'s end. Where it comes without a word this process ends too, at once: what it works on cannot go on.
    fn watch(&self, other: usize, stream: TcpStream) {
        let end = heard(stream, SILENCE);
        if end == End::Said || self.ended.load(Ordering::Relaxed) {
            return;
        }
        let (gone, what) = match end {
            End::Told(gone) => (gone, "is gone"),
            End::Silent => (other, "has said nothing for two minutes, so it is stopped or cannot be reached"),
            End::Said | End::Closed => (other, "is gone"),
        };
        let mut words = vec![GONE];
        words.extend((gone as u64).to_le_bytes());
        self.say(&words);
        let line = format!(
            "error: rank {}: rank {gone} on {} {what}, so this one stops; the last checkpoint is whole, go on with --resume\n",
            self.rank,
            self.hosts.get(gone).map_or("?", String::as_str)
        );
        // In one piece: other ranks write to the same place.
        let _ = std::io::stderr().write_all(line.as_bytes());
        std::process::exit(i32::from(crate::error::EXIT_FAILED));
    }
}

/// How a connection ended.
#[derive(Debug, PartialEq, Eq)]
enum End {
    /// In order.
    Said,
    /// Because of another rank.
    Told(usize),
    Closed,
    /// It is open, and nothing came for twice the time allowed.
    Silent,
}

fn heard(mut stream: TcpStream, silence: Duration) -> End {
    // Without a bound a stopped rank is noticed as one that exchanges nothing.
    let _ = stream.set_read_timeout(Some(silence));
    let (mut word, mut number, mut silences) = ([0], [0; 8], 0);
    loop {
        match stream.read(&mut word) {
            Ok(1) if word[0] == ALIVE => silences = 0,
            Ok(1) if word[0] == END => return End::Said,
            Ok(1) if word[0] == GONE && stream.read_exact(&mut number).is_ok() => {
                return End::Told(u64::from_le_bytes(number) as usize);
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                silences += 1;
                if silences == 2 {
                    return End::Silent;
                }
            }
            _ => return End::Closed,
        }
    }
}

fn fresh_token() -> Result<Token> {
    let mut token = [0; TOKEN_BYTES];
    let mut source = std::fs::File::open("/dev/urandom").context("a token for the ranks")?;
    source.read_exact(&mut token).context("a token for the ranks")?;
    Ok(token)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn beaten(mut stream: TcpStream, last: &[u8]) -> Option<TcpStream> {
        for _ in 0..10 {
            stream.write_all(&[ALIVE]).unwrap();
            std::thread::sleep(Duration::from_millis(40));
        }
        stream.write_all(last).unwrap();
        Some(stream)
    }

    /// A rank that was stopped was waited for until an exchange took too long: 1,800 s, unless told
    /// otherwise.
    #[test]
    fn a_rank_that_says_nothing_is_told_from_one_that_is_there_and_one_that_is_gone() {
        let silence = Duration::from_millis(100);
        let of = |work: fn(TcpStream) -> Option<TcpStream>| {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let there = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let rank = std::thread::spawn(move || work(there));
            let end = heard(listener.accept().unwrap().0, silence);
            drop(rank.join());
            end
        };
        assert_eq!(of(|stream| beaten(stream, &[END])), End::Said);
        assert_eq!(of(|stream| beaten(stream, &[GONE, 5, 0, 0, 0, 0, 0, 0, 0])), End::Told(5));
        assert_eq!(of(|stream| beaten(stream, &[]).and(None)), End::Closed);
        assert_eq!(of(Some), End::Silent);
    }
}
