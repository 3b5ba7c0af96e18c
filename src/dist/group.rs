//! A group of ranks that exchange with each other as if they were all ranks.

use super::{
    Communicator, DeviceExchange, DeviceGather, DevicePart, Exchange, PendingDeviceExchange, PendingMessages,
};
use anyhow::{Context, Result};
use std::sync::Arc;
use std::time::Duration;

/// Some ranks of a communicator. Rank i of the group is `members[i]` of the communicator.
pub(super) struct Group {
    whole: Arc<dyn Communicator>,
    members: Vec<usize>,
    /// The place of this process in `members`.
    rank: usize,
}

impl Group {
    /// Groups `members`, which include this process.
    ///
    /// # Errors
    /// When this process is no member.
    pub fn new(whole: &Arc<dyn Communicator>, members: Vec<usize>) -> Result<Self> {
        let rank = members.iter().position(|&member| member == whole.rank());
        Ok(Self { whole: whole.clone(), rank: rank.context("this rank is not in the group")?, members })
    }

    /// Returns the same exchange between ranks of the whole communicator. NCCL gathers from all ranks of a
    /// communicator, so the parts of a gather are sent and received one by one.
    fn with_global_ranks(&self, exchange: DeviceExchange) -> DeviceExchange {
        let DeviceExchange { name, gathers, send, receive, ready } = exchange;
        let others = || self.members.iter().copied().enumerate().filter(|(place, _)| *place != self.rank);
        let part = |&DeviceGather { address, part_bytes }: &DeviceGather, place: usize, rank: usize| {
            DevicePart { rank, address: address + (place * part_bytes) as u64, bytes: part_bytes }
        };
        let gathers: Vec<_> = gathers.into_iter().filter(|gather| gather.part_bytes > 0).collect();
        let sent = gathers.iter().flat_map(|g| others().map(|(_, rank)| part(g, self.rank, rank)));
        let received = gathers.iter().flat_map(|g| others().map(|(place, rank)| part(g, place, rank)));
        let renumbered = |parts: Vec<DevicePart>| {
            parts.into_iter().map(|part| DevicePart { rank: self.members[part.rank], ..part })
        };
        DeviceExchange {
            name,
            gathers: vec![],
            send: sent.chain(renumbered(send)).collect(),
            receive: received.chain(renumbered(receive)).collect(),
            ready,
        }
    }
}

impl Communicator for Group {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.members.len()
    }

    fn start(&self, exchange: Exchange) -> Result<PendingMessages> {
        let Exchange { name, send, receive } = exchange;
        self.whole.start(Exchange {
            name,
            send: send.into_iter().map(|(rank, part)| (self.members[rank], part)).collect(),
            receive: receive.into_iter().map(|(rank, bytes)| (self.members[rank], bytes)).collect(),
        })
    }

    fn exchanges_on_devices(&self) -> bool {
        self.whole.exchanges_on_devices()
    }

    fn start_on_device(&self, exchange: DeviceExchange) -> Result<PendingDeviceExchange> {
        self.whole.start_on_device(self.with_global_ranks(exchange))
    }

    fn device_failure(&self) -> Option<String> {
        self.whole.device_failure()
    }

    fn set_timeout(&self, limit: Duration) {
        self.whole.set_timeout(limit);
    }

    /// Does nothing: the other ranks may still need the connection.
    fn disconnect(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dist::Mesh;

    #[test]
    fn a_group_gathers_from_its_members_alone() {
        let whole = Mesh::stub(5, 6);
        let group = Group::new(&whole, vec![1, 3, 5]).unwrap();
        assert_eq!((group.rank(), group.ranks()), (2, 3));
        let part = |rank, address, bytes| DevicePart { rank, address, bytes };
        let exchange = DeviceExchange {
            name: "x".to_owned(),
            gathers: vec![DeviceGather { address: 1000, part_bytes: 10 }],
            send: vec![part(0, 7, 1)],
            receive: vec![part(1, 8, 2)],
            ready: Arc::new(()),
        };
        let exchange = group.with_global_ranks(exchange);
        assert!(exchange.gathers.is_empty());
        let facts = |parts: &[DevicePart]| -> Vec<_> {
            parts.iter().map(|part| (part.rank, part.address, part.bytes)).collect()
        };
        // This rank's part is the third. It is sent to both others.
        assert_eq!(facts(&exchange.send), [(1, 1020, 10), (3, 1020, 10), (1, 7, 1)]);
        assert_eq!(facts(&exchange.receive), [(1, 1000, 10), (3, 1010, 10), (3, 8, 2)]);
        assert!(Group::new(&whole, vec![0, 1]).is_err());
    }
}
