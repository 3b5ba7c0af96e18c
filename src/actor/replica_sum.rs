//! Sums gradients over the copies of the weights (hybrid sharding), once an update.

use super::gradients::EXCHANGE_BYTES_MAX;
use crate::dist::serialization::{f32_bytes, f32_values};
use crate::dist::{Mesh, replicate, shard_range};
use crate::model::parallel::device_exchange::sum_on_devices;
use crate::ops::cpu::{change, host_values};
use anyhow::Result;
use candle_core::Tensor;
use std::sync::Arc;

/// Returns the bytes of the gradients that are exchanged together, if the shards have `shards` bytes.
pub fn exchanged_bytes_max(shards: impl Iterator<Item = u64>) -> u64 {
    let (total, largest) = shards.fold((0, 0), |(total, largest), bytes| (total + bytes, bytes.max(largest)));
    largest.max(total.min(EXCHANGE_BYTES_MAX))
}

/// Adds the `gradients` of all copies of the weights, in the order of the copies. Afterwards each
/// rank of `replicas` has the sums. Each of them adds a part of every buffer, so all have the same bits.
///
/// # Errors
/// When a rank does not answer within the time limit, or memory runs out.
pub(super) fn sum_replicas<'a>(
    replicas: &Mesh,
    gradients: impl Iterator<Item = Option<&'a Tensor>>,
) -> Result<()> {
    const NAME: &str = "gradients of all copies of the weights";
    let buffers: Vec<(usize, &Tensor)> = gradients.enumerate().filter_map(|(i, b)| Some((i, b?))).collect();
    for group in groups_of_bytes(&buffers, EXCHANGE_BYTES_MAX) {
        match group.first().is_some_and(|(_, buffer)| buffer.device().is_cuda()) {
            true => sum_on_devices(replicas, NAME, group),
            false => sum_on_hosts(replicas, NAME, group),
        }?;
    }
    Ok(())
}

/// Splits `buffers` into consecutive groups of up to `bytes_max` bytes. A larger buffer has its own group.
fn groups_of_bytes<'a, 'b>(
    buffers: &'b [(usize, &'a Tensor)],
    bytes_max: u64,
) -> Vec<&'b [(usize, &'a Tensor)]> {
    let (mut groups, mut start, mut bytes) = (vec![], 0, 0);
    for (place, (_, buffer)) in buffers.iter().enumerate() {
        let size = (buffer.elem_count() * size_of::<f32>()) as u64;
        if place > start && bytes + size > bytes_max {
            groups.push(&buffers[start..place]);
            (start, bytes) = (place, 0);
        }
        bytes += size;
    }
    groups.push(&buffers[start..]);
    groups
}

/// Adds `buffers` in host memory: each rank receives its part of them from all ranks, and returns the sums.
fn sum_on_hosts(replicas: &Mesh, name: &str, buffers: &[(usize, &Tensor)]) -> Result<()> {
    let (rank, ranks) = (replicas.rank(), replicas.ranks());
    let range =
        |(index, buffer): &(usize, &Tensor), rank| shard_range(buffer.elem_count(), *index, rank, ranks);
    let values_of = |rank| -> usize { buffers.iter().map(|buffer| range(buffer, rank).len()).sum() };
    let mut parts = vec![vec![]; ranks];
    for buffer in buffers {
        let values = host_values(buffer.1)?;
        for (rank, part) in parts.iter_mut().enumerate() {
            part.extend_from_slice(f32_bytes(&values[range(buffer, rank)]));
        }
    }
    let parts = parts.into_iter().map(Arc::new).collect();
    let lengths = vec![values_of(rank) * size_of::<f32>(); ranks];
    let mut sum = vec![0f32; values_of(rank)];
    for part in replicas.start(name, &replicas.all_ranks(), parts, &lengths)?.wait()? {
        sum.iter_mut().zip(f32_values(&part)).for_each(|(sum, x)| *sum += x);
    }
    let lengths: Vec<usize> = (0..ranks).map(|rank| values_of(rank) * size_of::<f32>()).collect();
    let own = replicate(f32_bytes(&sum).to_vec(), ranks);
    let sums = replicas.start(name, &replicas.all_ranks(), own, &lengths)?.wait()?;
    let mut sums: Vec<_> = sums.iter().map(|bytes| f32_values(bytes)).collect();
    for buffer in buffers {
        change(buffer.1, |values| {
            for (rank, sums) in sums.iter_mut().enumerate() {
                values[range(buffer, rank)].iter_mut().zip(sums).for_each(|(value, sum)| *value = sum);
            }
        })?;
    }
    Ok(())
}
