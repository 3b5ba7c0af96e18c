//! NCCL's rendezvous: over TCP, the ranks compare their versions of NCCL, and rank 0 sends NCCL's id to the
//! others. A token of the job protects the connections.

use super::launch::RankAddress;
use super::tcp::{CONNECT_TIMEOUT, accept, join};
use crate::error::{BadInput, ErrorOnOtherRank};
use anyhow::{Context, Result};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener};

/// Runs `make` on rank 0 and returns its result on every rank. `version` is this rank's version of NCCL, as
/// `ncclGetVersion` gives it.
///
/// # Errors
/// [`BadInput`] when the port is in use, or a rank has another version: rank 0 has the message, the others
/// have [`ErrorOnOtherRank`]. Other errors when a rank does not connect.
pub(super) fn broadcast_from_rank_zero<const BYTES: usize>(
    address: &RankAddress,
    version: u32,
    make: impl FnOnce() -> Result<[u8; BYTES]>,
) -> Result<[u8; BYTES]> {
    if address.rank == 0 { serve(address, version, make) } else { ask(address, version) }
}

/// Receives the version of each other rank. Then sends whether all are equal, and the result of `make`.
fn serve<const BYTES: usize>(
    address: &RankAddress,
    version: u32,
    make: impl FnOnce() -> Result<[u8; BYTES]>,
) -> Result<[u8; BYTES]> {
    let local = ["localhost", "127.0.0.1", "::1"].contains(&address.host.as_str());
    let interface = if local { Ipv4Addr::LOCALHOST } else { Ipv4Addr::UNSPECIFIED };
    let listener = TcpListener::bind((interface, address.port)).map_err(|error| {
        BadInput(format!(
            "port {} for the ranks cannot be opened ({error}); set RLOSS_PORT to a free port on all ranks",
            address.port
        ))
    })?;
    let made = make()?;
    let mut streams = accept(&listener, &address.token, address.ranks)?;
    let mut other = None;
    for (rank, stream) in &mut streams {
        let mut theirs = [0; 4];
        stream.set_read_timeout(Some(CONNECT_TIMEOUT))?;
        stream
            .read_exact(&mut theirs)
            .with_context(|| format!("rank {rank} does not send NCCL's version"))?;
        let theirs = u32::from_le_bytes(theirs);
        if theirs != version {
            other = Some((*rank, theirs));
        }
    }
    for (rank, stream) in &mut streams {
        let message = [&[u8::from(other.is_none())], &made[..]].concat();
        stream.write_all(&message).with_context(|| format!("sending NCCL's id to rank {rank}"))?;
    }
    match other {
        None => Ok(made),
        Some((rank, theirs)) => Err(BadInput(format!(
            "rank 0 has NCCL {}, rank {rank} has {}; install one version on every machine",
            version_text(version),
            version_text(theirs)
        ))
        .into()),
    }
}

/// Sends this rank's version to rank 0. Returns what rank 0 made.
fn ask<const BYTES: usize>(address: &RankAddress, version: u32) -> Result<[u8; BYTES]> {
    let mut stream = join(&address.host, address.port, &address.token, address.rank, CONNECT_TIMEOUT)?;
    stream.set_read_timeout(Some(CONNECT_TIMEOUT)).context("waiting for rank 0")?;
    let (mut is_equal, mut made) = ([0], [0; BYTES]);
    let mut exchange = || {
        stream.write_all(&version.to_le_bytes())?;
        stream.read_exact(&mut is_equal)?;
        stream.read_exact(&mut made)
    };
    exchange().with_context(|| {
        format!(
            "rank 0 at {}, port {}, does not answer rank {}: another job may listen there (set RLOSS_PORT to another port on all ranks), or the ranks have different keys (set RLOSS_JOB_TOKEN to one secret on all ranks)",
            address.host, address.port, address.rank
        )
    })?;
    if let [0] = is_equal { Err(ErrorOnOtherRank { is_bad_input: true }.into()) } else { Ok(made) }
}

/// Returns the text of a version as `ncclGetVersion` gives it.
pub(super) fn version_text(version: u32) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
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
            broadcast_from_rank_zero(&address(0, free, 7), 22_403, || Ok([1, 2, 3, 4])).unwrap()
        });
        let refused =
            format!("{:#}", broadcast_from_rank_zero(&address(1, free, 8), 22_403, never).unwrap_err());
        assert!(refused.contains("another job may listen there"), "{refused}");
        for rank in [1, 2].map(|rank| {
            std::thread::spawn(move || {
                broadcast_from_rank_zero(&address(rank, free, 7), 22_403, never).unwrap()
            })
        }) {
            assert_eq!(rank.join().unwrap(), [1, 2, 3, 4]);
        }
        assert_eq!(rank_zero.join().unwrap(), [1, 2, 3, 4]);
    }

    #[test]
    fn a_taken_port_is_refused_with_its_remedy() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let refused = broadcast_from_rank_zero(&address(0, port, 7), 22_403, || Ok([0; 4])).unwrap_err();
        assert!(refused.is::<BadInput>() && refused.to_string().contains("RLOSS_PORT"), "{refused:#}");
    }

    #[test]
    fn another_version_of_nccl_is_refused_by_every_rank() {
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let errors = [22_403, 22_403, 22_105].into_iter().enumerate().map(|(rank, version)| {
            std::thread::spawn(move || {
                broadcast_from_rank_zero(&address(rank, free, 7), version, || Ok([0; 4])).unwrap_err()
            })
        });
        let errors: Vec<_> =
            errors.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect();
        assert!(errors[0].is::<BadInput>());
        assert_eq!(
            errors[0].to_string(),
            "rank 0 has NCCL 2.24.3, rank 2 has 2.21.5; install one version on every machine"
        );
        assert!(errors[1..].iter().all(|error| error.is::<ErrorOnOtherRank>()), "{errors:?}");
    }
}
