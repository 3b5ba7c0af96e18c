//! Routed experts of each sequence: those stored at sampling, those of a training forward pass, and those to
//! replay.

use super::forward_backward::PassOutput;
use super::micro_batch::MicroBatch;
use crate::bad_input;
use crate::ops::SequenceRows;
use crate::trajectory::{Group, Trajectory};
use anyhow::Result;
use candle_core::{Device, Tensor};

/// Routed experts of the input tokens of one sequence: `[T × K]` for each layer.
pub type RoutedExperts = Vec<Vec<u16>>;

/// Returns the routed experts stored at sampling, one entry per sequence. `top_k` is the number of experts
/// per token and layer.
///
/// # Errors
/// When a trajectory has no experts for an input token of the model.
pub fn experts_from_sampling(groups: &[&Group], layers: usize, top_k: usize) -> Result<Vec<RoutedExperts>> {
    let sequence_experts = |trajectory: &Trajectory| {
        let inputs = trajectory.tokens.len().saturating_sub(1);
        let is_complete = trajectory.routed_experts.len() >= inputs
            && trajectory.routed_experts[..inputs].iter().all(|token| token.len() == layers * top_k);
        if !is_complete {
            return Err(bad_input!(
                "policy.router_replay: sample {} of prompt {} has no routed experts of sampling; sample it again with \
                 rollout.keep_routes = true",
                trajectory.sample,
                trajectory.prompt
            ));
        }
        let layer = |l: usize| {
            let tokens = trajectory.routed_experts[..inputs].iter();
            tokens.flat_map(move |token| token[l * top_k..(l + 1) * top_k].iter().copied())
        };
        Ok((0..layers).map(|l| layer(l).collect()).collect())
    };
    groups.iter().flat_map(|group| &group.trajectories).map(sequence_experts).collect()
}

/// Returns the routed experts of a forward pass, one entry per sequence.
///
/// # Errors
/// When the tensors of experts cannot be read.
pub fn experts_from_forward<C>(
    micro_batches: &[MicroBatch],
    outputs: &[PassOutput<C>],
) -> Result<Vec<RoutedExperts>> {
    let mut routed_experts = vec![];
    for (batch, output) in micro_batches.iter().zip(outputs) {
        let layers = output.routed_experts.iter().map(layer_to_host).collect::<Result<Vec<_>>>()?;
        for sequence in 0..batch.sequence_rows.sequences() {
            let path = batch.sequence_rows.row_indices(sequence);
            let select_rows = |(layer, top_k): &(Vec<u16>, usize)| -> Vec<u16> {
                path.iter().flat_map(|row| &layer[row * top_k..(row + 1) * top_k]).copied().collect()
            };
            routed_experts.push(layers.iter().map(select_rows).collect());
        }
    }
    Ok(routed_experts)
}

/// Copies the routed experts of a layer, u32 `[T, K]`, to the host. Also returns `K`.
fn layer_to_host(layer: &Tensor) -> Result<(Vec<u16>, usize)> {
    let experts = layer.flatten_all()?.to_vec1::<u32>()?.into_iter().map(|e| e as u16);
    Ok((experts.collect(), layer.dim(1)?))
}

/// Compares the routed experts `a` and `b`. Returns the fraction of (input token, layer) pairs that have the
/// same set of experts; 1 if there are no pairs.
pub fn agreement(a: &[RoutedExperts], b: &[RoutedExperts], top_k: usize) -> f64 {
    let layers = a.iter().flatten().zip(b.iter().flatten());
    let pairs = layers.flat_map(|(a, b)| a.chunks_exact(top_k).zip(b.chunks_exact(top_k)));
    let (same, all) = pairs.fold((0usize, 0usize), |(same, all), (a, b)| {
        (same + usize::from(a.iter().all(|expert| b.contains(expert))), all + 1)
    });
    if all == 0 { 1.0 } else { same as f64 / all as f64 }
}

/// Returns the number of leading tokens for which two sequences have the same `top_k` experts in all layers.
pub(super) fn common_prefix_length(a: &RoutedExperts, b: &RoutedExperts, top_k: usize) -> usize {
    let layers = a.iter().zip(b).map(|(a, b)| a.iter().zip(b).take_while(|(a, b)| a == b).count());
    layers.min().unwrap_or(0) / top_k.max(1)
}

/// Returns the experts of the packed rows of `sequences`, u32 `[T, K]` for each layer. A shared row appears
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
        let unshared = |(i, sequence): (usize, &RoutedExperts)| {
            sequence[l][sequence_rows.first_own_position(i) * top_k..].to_vec()
        };
        let experts: Vec<u32> = sequences.iter().enumerate().flat_map(unshared).map(u32::from).collect();
        let tokens = experts.len() / top_k.max(1);
        Ok(Tensor::from_vec(experts, (tokens, top_k), &Device::Cpu)?)
    };
    (0..first.len()).map(layer).collect::<Result<_>>().map(Some)
}
