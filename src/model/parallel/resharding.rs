//! Resharding: each rank has one range of a tensor and gets another.

use super::sharded_layers::GatherPart;
use crate::dist::Mesh;
use anyhow::Result;
use std::ops::Range;
use std::sync::Arc;

/// Reshards `part`, so that rank r gets the bytes of the range `range_of(r)`. Returns the bytes of this rank.
pub(crate) fn reshard(
    mesh: &Mesh,
    part: &GatherPart,
    range_of: impl Fn(usize) -> Range<usize>,
) -> Result<Vec<u8>> {
    let mut own = vec![];
    part.stored.append_shard(&mut own)?;
    let shard_of = |rank: usize| part.stored.shard_range(&part.spec, part.index, rank, mesh);
    let name = format!("experts of {}", part.spec.name);
    let ranges = ExchangedRanges::new(mesh, shard_of, range_of);
    let parts = ranges.sent.into_iter().map(|range| Arc::new(own[range].to_vec())).collect();
    Ok(mesh.start(&name, &mesh.all_ranks(), parts, &ranges.lengths)?.wait()?.concat())
}

/// The parts of an exchange after which each rank has a range of a tensor.
pub(crate) struct ExchangedRanges {
    /// The part of this rank's shard that each rank gets.
    pub sent: Vec<Range<usize>>,
    /// The length of the part that each rank sends to this one.
    pub lengths: Vec<usize>,
}

impl ExchangedRanges {
    /// Rank r has the range `shard_of(r)`, and gets the range `range_of(r)`.
    pub fn new(
        mesh: &Mesh,
        shard_of: impl Fn(usize) -> Range<usize>,
        range_of: impl Fn(usize) -> Range<usize>,
    ) -> Self {
        let common = |a: &Range<usize>, b: &Range<usize>| {
            let start = a.start.max(b.start);
            start..a.end.min(b.end).max(start)
        };
        let (own_shard, own_range) = (shard_of(mesh.rank()), range_of(mesh.rank()));
        let part_for = |to: usize| match common(&own_shard, &range_of(to)) {
            sent if sent.is_empty() => 0..0,
            sent => sent.start - own_shard.start..sent.end - own_shard.start,
        };
        let ranks = mesh.ranks();
        let sent = (0..ranks).map(part_for).collect();
        let lengths = (0..ranks).map(|from| common(&shard_of(from), &own_range).len()).collect();
        Self { sent, lengths }
    }
}
