//! Detects that another process is dead or stopped.
//!
//! A killed process sends nothing, and MPI would wait for it. But the system closes the sockets of a killed
//! process. So every rank keeps a connection to rank 0, and detects when it is closed. Both sides send a
//! heartbeat every few seconds. If no heartbeat arrives, the process is stopped or its machine is
//! unreachable.

use super::Mesh;
use super::tcp::{Token, accept, join};
use crate::user_key::random_bytes;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Sent on a connection before an orderly end.
const ORDERLY_END: u8 = 1;
/// Sent by rank 0 before it ends because another rank is lost. The number of the lost rank follows in 8
/// bytes.
const RANK_LOST: u8 = 2;

/// The heartbeat, sent every [`HEARTBEAT_INTERVAL`].
const HEARTBEAT: u8 = 3;
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(10);
/// Timeout of one read from a connection. A rank counts as stopped if nothing arrives within two timeouts.
/// One timeout is not enough, because this process may itself have been suspended.
const READ_TIMEOUT: Duration = Duration::from_secs(60);

/// The address where rank 0 listens, and the token of its ranks.
#[derive(Clone, Default, Serialize, Deserialize)]
struct Address {
    host: String,
    port: u16,
    token: Token,
}

/// This process's monitor. It has a connection to rank 0; on rank 0, it has a connection to every other rank.
pub(super) struct LivenessMonitor(Arc<MonitorState>);

/// The state that the monitor's threads share.
struct MonitorState {
    rank: usize,
    hosts: Vec<String>,
    streams: Vec<TcpStream>,
    stopped: AtomicBool,
}

impl LivenessMonitor {
    /// Connects every rank of `mesh` to rank 0 and starts the monitor. `hosts` holds the host of each rank.
    ///
    /// # Errors
    /// When a rank cannot listen or connect.
    pub fn start(mesh: &Mesh, hosts: &[String]) -> Result<Self> {
        let host = hosts.get(mesh.rank()).cloned().context("this rank's host")?;
        let streams = match mesh.is_rank_zero() {
            true => {
                let local = hosts.iter().all(|other| *other == host);
                let interface = if local { Ipv4Addr::LOCALHOST } else { Ipv4Addr::UNSPECIFIED };
                let listener = TcpListener::bind((interface, 0)).context("listening for the other ranks")?;
                let port = listener.local_addr().context("the port for the other ranks")?.port();
                let address =
                    Address { host, port, token: random_bytes().context("random bytes for a token")? };
                mesh.broadcast("the address of rank 0", &address)?;
                accept(&listener, &address.token, mesh.ranks())?
            }
            false => {
                let address: Address = mesh.broadcast("the address of rank 0", &Address::default())?;
                let host = if address.host == host { "127.0.0.1" } else { &address.host };
                vec![(0, join(host, address.port, &address.token, mesh.rank(), Duration::ZERO)?)]
            }
        };
        let kept = streams.iter().map(|(_, stream)| stream.try_clone());
        let shared = Arc::new(MonitorState {
            rank: mesh.rank(),
            hosts: hosts.to_vec(),
            streams: kept
                .collect::<std::io::Result<_>>()
                .context("cloning a connection of the liveness monitor")?,
            stopped: AtomicBool::new(false),
        });
        for (other, stream) in streams {
            let shared = shared.clone();
            let wait = move || shared.wait_for_end(other, stream);
            std::thread::Builder::new().name("ranks".into()).spawn(wait).context("starting a thread")?;
        }
        let beat_shared = shared.clone();
        let beat = move || {
            while !beat_shared.stopped.load(Ordering::Relaxed) {
                beat_shared.send_all(&[HEARTBEAT]);
                std::thread::sleep(HEARTBEAT_INTERVAL);
            }
        };
        std::thread::Builder::new().name("ranks".into()).spawn(beat).context("starting a thread")?;
        Ok(Self(shared))
    }

    /// Stops the monitor. From now on, other ranks may end.
    pub fn stop(&self) {
        self.0.stopped.store(true, Ordering::Relaxed);
        self.0.send_all(&[ORDERLY_END]);
    }
}

impl MonitorState {
    fn send_all(&self, message: &[u8]) {
        for mut stream in &self.streams {
            // A lost rank needs no message.
            let _ = stream.write_all(message);
        }
    }

    /// Waits for the end of `other`. If the end is not orderly, this process exits at once, because its work
    /// cannot continue.
    fn wait_for_end(&self, other: usize, stream: TcpStream) {
        let end = connection_end(stream, READ_TIMEOUT);
        if end == ConnectionEnd::Orderly || self.stopped.load(Ordering::Relaxed) {
            return;
        }
        let (lost_rank, reason) = match end {
            ConnectionEnd::OtherRank(lost_rank) => (lost_rank, "is lost"),
            ConnectionEnd::Silent => {
                (other, "has sent nothing for two minutes, so it is stopped or unreachable")
            }
            ConnectionEnd::Orderly | ConnectionEnd::Closed => (other, "is lost"),
        };
        let mut message = vec![RANK_LOST];
        message.extend((lost_rank as u64).to_le_bytes());
        self.send_all(&message);
        let line = format!(
            "error: rank {}: rank {lost_rank} on {} {reason}, so this rank stops; continue from the last checkpoint with --resume\n",
            self.rank,
            self.hosts.get(lost_rank).map_or("?", String::as_str)
        );
        // A single write, because other ranks write to the same terminal.
        let _ = std::io::stderr().write_all(line.as_bytes());
        std::process::exit(i32::from(crate::error::EXIT_FAILED));
    }
}

/// How a connection ended.
#[derive(Debug, PartialEq, Eq)]
enum ConnectionEnd {
    /// The rank announced its end.
    Orderly,
    /// Another rank is lost.
    OtherRank(usize),
    Closed,
    /// The connection is open, but nothing arrived for twice the timeout.
    Silent,
}

fn connection_end(mut stream: TcpStream, silence: Duration) -> ConnectionEnd {
    // If the timeout cannot be set, the time limit of exchanges still detects a stopped rank.
    let _ = stream.set_read_timeout(Some(silence));
    let (mut kind, mut number, mut silences) = ([0], [0; 8], 0);
    loop {
        match stream.read(&mut kind) {
            Ok(1) if kind[0] == HEARTBEAT => silences = 0,
            Ok(1) if kind[0] == ORDERLY_END => return ConnectionEnd::Orderly,
            Ok(1) if kind[0] == RANK_LOST && stream.read_exact(&mut number).is_ok() => {
                return ConnectionEnd::OtherRank(u64::from_le_bytes(number) as usize);
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                silences += 1;
                if silences == 2 {
                    return ConnectionEnd::Silent;
                }
            }
            _ => return ConnectionEnd::Closed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn send_beats(mut stream: TcpStream, last: &[u8]) -> Option<TcpStream> {
        for _ in 0..10 {
            stream.write_all(&[HEARTBEAT]).unwrap();
            std::thread::sleep(Duration::from_millis(40));
        }
        stream.write_all(last).unwrap();
        Some(stream)
    }

    /// Regression test: without heartbeats, only the time limit of an exchange (1,800 s by default) detected
    /// a stopped rank.
    #[test]
    fn a_rank_that_says_nothing_is_told_from_one_that_is_there_and_one_that_is_gone() {
        let silence = Duration::from_millis(100);
        let of = |work: fn(TcpStream) -> Option<TcpStream>| {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let there = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let rank = std::thread::spawn(move || work(there));
            let end = connection_end(listener.accept().unwrap().0, silence);
            drop(rank.join());
            end
        };
        assert_eq!(of(|stream| send_beats(stream, &[ORDERLY_END])), ConnectionEnd::Orderly);
        assert_eq!(
            of(|stream| send_beats(stream, &[RANK_LOST, 5, 0, 0, 0, 0, 0, 0, 0])),
            ConnectionEnd::OtherRank(5)
        );
        assert_eq!(of(|stream| send_beats(stream, &[]).and(None)), ConnectionEnd::Closed);
        assert_eq!(of(Some), ConnectionEnd::Silent);
    }
}
