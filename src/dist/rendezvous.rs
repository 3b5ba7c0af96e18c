//! How ranks that no MPI connects get NCCL's id: from rank 0, over TCP, by a token of the job.

use super::launch::Place;
use super::meeting::{CONNECT_LIMIT, accept, join};
use crate::error::BadInput;
use anyhow::{Context, Result};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener};

/// What the leader `make`s, on every rank.
///
/// # Errors
/// [`BadInput`] when the port is taken; any other error when ranks do not meet.
pub(super) fn share<const BYTES: usize>(
    place: &Place,
    make: impl FnOnce() -> Result<[u8; BYTES]>,
) -> Result<[u8; BYTES]> {
    if place.rank == 0 {
        let alone = ["localhost", "127.0.0.1", "::1"].contains(&place.host.as_str());
        let listened = if alone { Ipv4Addr::LOCALHOST } else { Ipv4Addr::UNSPECIFIED };
        let listener = TcpListener::bind((listened, place.port)).map_err(|error| {
            BadInput(format!(
                "port {}, where the ranks meet, cannot be listened on ({error}); name a free one in RLOSS_PORT on all of them",
                place.port
            ))
        })?;
        let made = make()?;
        for (rank, mut stream) in accept(&listener, &place.token, place.ranks)? {
            stream.write_all(&made).with_context(|| format!("telling rank {rank} NCCL's id"))?;
        }
        return Ok(made);
    }
    let mut stream = join(&place.host, place.port, &place.token, place.rank, CONNECT_LIMIT)?;
    stream.set_read_timeout(Some(CONNECT_LIMIT)).context("waiting for rank 0")?;
    let mut made = [0; BYTES];
    stream.read_exact(&mut made).with_context(|| {
        format!(
            "rank 0 at {}, port {}, says nothing to rank {}: another job may listen there (name another port in RLOSS_PORT on all ranks), or the ranks have different keys (set RLOSS_JOB_TOKEN to one secret on all)",
            place.host, place.port, place.rank
        )
    })?;
    Ok(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(rank: usize, port: u16, token: u8) -> Place {
        Place { rank, ranks: 3, local_rank: rank, host: "127.0.0.1".to_owned(), port, token: [token; 16] }
    }

    #[test]
    fn every_rank_gets_what_the_first_made_and_another_job_does_not() {
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let never = || -> Result<[u8; 4]> { panic!("the leader makes it") };
        let leader = std::thread::spawn(move || share(&place(0, free, 7), || Ok([1, 2, 3, 4])).unwrap());
        let refused = format!("{:#}", share(&place(1, free, 8), never).unwrap_err());
        assert!(refused.contains("another job may listen there"), "{refused}");
        for rank in
            [1, 2].map(|rank| std::thread::spawn(move || share(&place(rank, free, 7), never).unwrap()))
        {
            assert_eq!(rank.join().unwrap(), [1, 2, 3, 4]);
        }
        assert_eq!(leader.join().unwrap(), [1, 2, 3, 4]);
    }

    #[test]
    fn a_taken_port_is_refused_with_its_remedy() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let refused = share(&place(0, port, 7), || Ok([0; 4])).unwrap_err();
        assert!(refused.is::<BadInput>() && refused.to_string().contains("RLOSS_PORT"), "{refused:#}");
    }
}
