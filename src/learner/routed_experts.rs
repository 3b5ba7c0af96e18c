//! Routed experts of each sequence: those stored at sampling, those of a training forward, and those to
//! replay.

use super::forward_backward::PassOutput;
use super::micro_batch::MicroBatch;
use crate::bad_input;
use crate::ops::SequenceRows;
use crate::trajectory::{Group, Trajectory};
use anyhow::Result;
use candle_core::{Device, Tensor};

/// Routed experts of one sequence's input tokens: `[layers]` of `[T × K]`.
pub type RoutedExperts = Vec<Vec<u16>>;

/// Returns the routed experts stored at sampling, one entry a sequence, with `top_k` experts a token and
/// layer.
///
/// # Errors
/// When a trajectory has no experts for a token that the model reads.
pub fn experts_from_sampling(groups: &[&Group], layers: usize, top_k: usize) -> Result<Vec<RoutedExperts>> {
    let of_one = |trajectory: &Trajectory| {
        let fed = trajectory.tokens.len().saturating_sub(1);
        let complete = trajectory.routes.len() >= fed
            && trajectory.routes[..fed].iter().all(|token| token.len() == layers * top_k);
        if !complete {
            return Err(bad_input!(
                "policy.router_replay: sample {} of prompt {} has no experts kept from sampling; sample it again with \
                 rollout.keep_routes = true",
                trajectory.sample,
                trajectory.prompt
            ));
        }
        let layer = |l: usize| {
            trajectory.routes[..fed].iter().flat_map(move |t| t[l * top_k..(l + 1) * top_k].iter().copied())
        };
        Ok((0..layers).map(|l| layer(l).collect()).collect())
    };
    groups.iter().flat_map(|group| &group.trajectories).map(of_one).collect()
}

/// Returns the experts that a forward chose, one entry a sequence.
///
/// # Errors
/// When the tensors of experts cannot be read.
pub fn experts_from_forward(
    micro_batches: &[MicroBatch],
    outputs: &[PassOutput],
) -> Result<Vec<RoutedExperts>> {
    let mut routes = vec![];
    for (batch, output) in micro_batches.iter().zip(outputs) {
        let layers = output.routes.iter().map(experts_of).collect::<Result<Vec<_>>>()?;
        for sequence in 0..batch.sequence_rows.sequences() {
            let path = batch.sequence_rows.row_indices(sequence);
            let part = |(layer, top_k): &(Vec<u16>, usize)| -> Vec<u16> {
                path.iter().flat_map(|row| &layer[row * top_k..(row + 1) * top_k]).copied().collect()
            };
            routes.push(layers.iter().map(part).collect());
        }
    }
    Ok(routes)
}

/// Returns a layer's routed experts u32 `[T, K]` on the host, and `K`.
fn experts_of(routes: &Tensor) -> Result<(Vec<u16>, usize)> {
    let experts = routes.flatten_all()?.to_vec1::<u32>()?.into_iter().map(|e| e as u16);
    Ok((experts.collect(), routes.dim(1)?))
}

/// Returns the share of (input token, layer) pairs with the same set of experts; 1 when there are no pairs.
pub(super) fn agreement(a: &[RoutedExperts], b: &[RoutedExperts], top_k: usize) -> f64 {
    let layers = a.iter().flatten().zip(b.iter().flatten());
    let pairs = layers.flat_map(|(a, b)| a.chunks_exact(top_k).zip(b.chunks_exact(top_k)));
    let (same, all) = pairs.fold((0usize, 0usize), |(same, all), (a, b)| {
        (same + usize::from(a.iter().all(|expert| b.contains(expert))), all + 1)
    });
    if all == 0 { 1.0 } else { same as f64 / all as f64 }
}

/// Returns the length of the common prefix on which two sequences have the same `top_k` experts in all
/// layers.
pub(super) fn common_prefix_length(a: &RoutedExperts, b: &RoutedExperts, top_k: usize) -> usize {
    let layers = a.iter().zip(b).map(|(a, b)| a.iter().zip(b).take_while(|(a, b)| a == b).count());
    layers.min().unwrap_or(0) / top_k.max(1)
}

/// Returns the experts of the packed rows of `sequences`: u32 `[T, K]` for each layer. Shared rows appear
/// once.
///
/// # Errors
/// When memory runs out.
pub(super) fn pack_experts(
    sequences: &[RoutedExperts],
    sequence_rows: &SequenceRows,
    top_k: usize,
) -> Result<Option<Vec<Tensor>>> {
    let Some(first) = sequences.first() else { return Ok(None) };
    let layer = |l: usize| {
        let own =
            |(i, s): (usize, &RoutedExperts)| s[l][sequence_rows.first_own_position(i) * top_k..].to_vec();
        let experts: Vec<u32> = sequences.iter().enumerate().flat_map(own).map(u32::from).collect();
        let tokens = experts.len() / top_k.max(1);
        Ok(Tensor::from_vec(experts, (tokens, top_k), &Device::Cpu)?)
    };
    (0..first.len()).map(layer).collect::<Result<_>>().map(Some)
}
