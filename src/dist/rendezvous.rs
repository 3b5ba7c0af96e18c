//! NCCL's rendezvous: rank 0 sends NCCL's id to the other ranks over TCP. A token of the job protects the
//! connections.

use super::launch::RankAddress;
use super::tcp::{CONNECT_TIMEOUT, accept, join};
use crate::error::BadInput;
use anyhow::{Context, Result};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener};

/// Runs `make` on rank 0 and returns its result on every rank.
///
/// # Errors
/// [`BadInput`] when the port is in use; other errors when a rank does not connect.
pub(super) fn broadcast_from_rank_zero<const BYTES: usize>(
    address: &RankAddress,
    make: impl FnOnce() -> Result<[u8; BYTES]>,
) -> Result<[u8; BYTES]> {
    if address.rank == 0 {
        let local = ["localhost", "127.0.0.1", "::1"].contains(&address.host.as_str());
        let interface = if local { Ipv4Addr::LOCALHOST } else { Ipv4Addr::UNSPECIFIED };
        let listener = TcpListener::bind((interface, address.port)).map_err(|error| {
            BadInput(format!(
                "port {} for the ranks cannot be opened ({error}); set RLOSS_PORT to a free port on all ranks",
                address.port
            ))
        })?;
        let made = make()?;
        for (rank, mut stream) in accept(&listener, &address.token, address.ranks)? {
            stream.write_all(&made).with_context(|| format!("sending NCCL's id to rank {rank}"))?;
        }
        return Ok(made);
    }
    let mut stream = join(&address.host, address.port, &address.token, address.rank, CONNECT_TIMEOUT)?;
    stream.set_read_timeout(Some(CONNECT_TIMEOUT)).context("waiting for rank 0")?;
    let mut made = [0; BYTES];
    stream.read_exact(&mut made).with_context(|| {
        format!(
            "rank 0 at {}, port {}, does not answer rank {}: another job may listen there (set RLOSS_PORT to another port on all ranks), or the ranks have different keys (set RLOSS_JOB_TOKEN to one secret on all ranks)",
            address.host, address.port, address.rank
        )
    })?;
    Ok(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(rank: usize, port: u16, token: u8) -> RankAddress {
        RankAddress {
            rank,
            ranks: 3,
            local_rank: rank,
            host: "127.0.0.1".to_owned(),
            port,
            token: [token; 16],
        }
    }

    #[test]
    fn every_rank_gets_what_the_first_made_and_another_job_does_not() {
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let never = || -> Result<[u8; 4]> { panic!("only rank 0 makes it") };
        let rank_zero = std::thread::spawn(move || {
            broadcast_from_rank_zero(&address(0, free, 7), || Ok([1, 2, 3, 4])).unwrap()
        });
        let refused = format!("{:#}", broadcast_from_rank_zero(&address(1, free, 8), never).unwrap_err());
        assert!(refused.contains("another job may listen there"), "{refused}");
        for rank in [1, 2].map(|rank| {
            std::thread::spawn(move || broadcast_from_rank_zero(&address(rank, free, 7), never).unwrap())
        }) {
            assert_eq!(rank.join().unwrap(), [1, 2, 3, 4]);
        }
        assert_eq!(rank_zero.join().unwrap(), [1, 2, 3, 4]);
    }

    #[test]
    fn a_taken_port_is_refused_with_its_remedy() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let refused = broadcast_from_rank_zero(&address(0, port, 7), || Ok([0; 4])).unwrap_err();
        assert!(refused.is::<BadInput>() && refused.to_string().contains("RLOSS_PORT"), "{refused:#}");
    }
}
