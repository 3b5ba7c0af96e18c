//! Notices at once that another process is gone. A process that is killed says nothing, and MPI would wait for it; but the
//! system closes its sockets. So every rank holds a connection to the leader, on which nothing is said but the end.

use super::Mesh;
use super::meeting::{TOKEN_BYTES, Token, accept, join};
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Said on a connection before it is closed in order.
const END: u8 = 1;
/// Said by the leader before it ends because of another rank, whose number follows in 8 bytes.
const GONE: u8 = 2;

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
    fn watch(&self, other: usize, mut stream: TcpStream) {
        let (mut word, mut number) = ([0], [0; 8]);
        let heard = stream.read_exact(&mut word).is_ok();
        if (heard && word[0] == END) || self.ended.load(Ordering::Relaxed) {
            return;
        }
        let told = heard && word[0] == GONE && stream.read_exact(&mut number).is_ok();
        let gone = if told { u64::from_le_bytes(number) as usize } else { other };
        let mut words = vec![GONE];
        words.extend((gone as u64).to_le_bytes());
        self.say(&words);
        let line = format!(
            "error: rank {}: rank {gone} on {} is gone, so this one stops; the last checkpoint is whole, go on with --resume\n",
            self.rank,
            self.hosts.get(gone).map_or("?", String::as_str)
        );
        // In one piece: other ranks write to the same place.
        let _ = std::io::stderr().write_all(line.as_bytes());
        std::process::exit(i32::from(crate::error::EXIT_FAILED));
    }
}

fn fresh_token() -> Result<Token> {
    let mut token = [0; TOKEN_BYTES];
    let mut source = std::fs::File::open("/dev/urandom").context("a token for the ranks")?;
    source.read_exact(&mut token).context("a token for the ranks")?;
    Ok(token)
}
