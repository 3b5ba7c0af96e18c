//! A step's trajectories as the losses see them: everything that is fixed before the first update.

use super::batch::{Cut, MicroBatch, Sequence};
use super::forward_backward::PassOutput;
use crate::bad_input;
use crate::metrics::Metrics;
use crate::ops::SequenceRows;
use crate::policy::Sequences;
use crate::policy::offpolicy::{agreement_metrics, offpolicy_metrics, probs_diff_metrics};
use crate::random::{Purpose, stream};
use crate::trajectory::{TokenFigures, Trajectory};
use anyhow::Result;
use candle_core::{Device, Tensor};
use rand::seq::SliceRandom;
use std::ops::{Deref, Range};

/// Experts of one sequence's input tokens, `[layers]` of `[T × K]`.
pub type Routes = Vec<Vec<u16>>;

/// What sampling gave: one value a trained token in each column, sequence after sequence.
#[derive(Debug, Clone, Default)]
pub struct Sampled {
    pub sequences: Vec<Sequence>,
    /// Start of each sequence's trained tokens, and their number.
    pub cu_seqlens: Vec<usize>,
    /// Log-probabilities at sampling.
    pub rollout: Vec<f32>,
    /// Experts chosen at sampling, where they were kept: to replay, or to compare training's own with.
    pub kept_routes: Option<Vec<Routes>>,
}

/// The same with what passes before the first update found, where the recipe asks for it.
#[derive(Debug, Clone, Default)]
pub struct Measured {
    pub sampled: Sampled,
    /// Log-probabilities of a training forward.
    pub training: Option<Vec<f32>>,
    /// Those of the frozen reference.
    pub reference: Option<Vec<f32>>,
    /// The critic's.
    pub values: Option<Vec<f32>>,
    /// Experts to replay, one entry a sequence.
    pub replay: Option<Vec<Routes>>,
    /// What was measured on the whole batch.
    pub metrics: Metrics,
}

/// What updates learn from: nothing of it changes between a step's first update and its last.
#[derive(Debug, Clone, Default)]
pub struct Experience {
    pub measured: Measured,
    /// False where a rejection took the token out of the loss.
    pub mask: Vec<bool>,
    pub advantages: Vec<f32>,
    /// What the critic learns.
    pub returns: Option<Vec<f32>>,
    /// Importance weights.
    pub weights: Option<Vec<f32>>,
}

/// A later stage has all of the earlier ones.
impl Deref for Measured {
    type Target = Sampled;

    fn deref(&self) -> &Sampled {
        &self.sampled
    }
}

impl Deref for Experience {
    type Target = Measured;

    fn deref(&self) -> &Measured {
        &self.measured
    }
}

impl Sampled {
    /// The trained tokens of `trajectories`.
    pub(super) fn new(trajectories: &[&Trajectory]) -> Self {
        let mut sampled = Self { cu_seqlens: vec![0], ..Self::default() };
        for trajectory in trajectories {
            let of_tokens = trajectory.mask.iter().zip(&trajectory.logprobs).skip(1).filter(|(m, _)| **m);
            sampled.rollout.extend(of_tokens.map(|(_, &logprob)| logprob));
            sampled.cu_seqlens.push(sampled.rollout.len());
            let (tokens, mask) = (trajectory.tokens.clone(), trajectory.mask.clone());
            sampled.sequences.push(Sequence { tokens, mask });
        }
        sampled
    }
}

impl Experience {
    /// The trained tokens that count.
    ///
    /// # Errors
    /// When the columns disagree.
    pub fn tokens(&self) -> Result<Sequences<'_>> {
        Sequences::new(&self.cu_seqlens, &self.mask)
    }

    /// Advantages and, with the log-probabilities `training` of the forward before the first update, gaps, spread over all
    /// tokens of each sequence.
    pub fn token_figures(&self, training: Option<&[f32]>) -> Vec<TokenFigures> {
        let of_sequence = |(sequence, span): (&Sequence, &[usize])| {
            let spread = |value: &dyn Fn(usize) -> f32| -> Vec<f32> {
                let mut at = span[0]..span[1];
                let token = |(i, &mask): (usize, &bool)| match mask && i > 0 {
                    true => at.next().map_or(0.0, value),
                    false => 0.0,
                };
                sequence.mask.iter().enumerate().map(token).collect()
            };
            TokenFigures {
                advantages: spread(&|t| self.advantages[t]),
                gaps: training.map(|training| spread(&|t| training[t] - self.rollout[t])),
            }
        };
        self.sequences.iter().zip(self.cu_seqlens.windows(2)).map(of_sequence).collect()
    }

    /// The sequences `indices`, in that order, without metrics.
    pub fn select(&self, indices: &[usize]) -> Self {
        let span = |s: usize| self.cu_seqlens[s]..self.cu_seqlens[s + 1];
        let column = |values: &Vec<f32>| -> Vec<f32> {
            indices.iter().flat_map(|&s| values[span(s)].iter().copied()).collect()
        };
        let of_sequences =
            |routes: &Vec<Routes>| -> Vec<Routes> { indices.iter().map(|&s| routes[s].clone()).collect() };
        let mut cu_seqlens = vec![0];
        indices.iter().fold(0, |start, &s| {
            let end = start + span(s).len();
            cu_seqlens.push(end);
            end
        });
        Self {
            measured: Measured {
                sampled: Sampled {
                    sequences: indices.iter().map(|&s| self.sequences[s].clone()).collect(),
                    cu_seqlens,
                    rollout: column(&self.rollout),
                    kept_routes: self.kept_routes.as_ref().map(of_sequences),
                },
                training: self.training.as_ref().map(column),
                reference: self.reference.as_ref().map(column),
                values: self.values.as_ref().map(column),
                replay: self.replay.as_ref().map(of_sequences),
                metrics: Metrics::new(),
            },
            mask: indices.iter().flat_map(|&s| self.mask[span(s)].iter().copied()).collect(),
            advantages: column(&self.advantages),
            returns: self.returns.as_ref().map(column),
            weights: self.weights.as_ref().map(column),
        }
    }

    /// Which sequences each update of epoch `epoch` takes: one update takes all in order, several take even shares of
    /// a shuffle that depends on seed, step and epoch alone.
    pub fn minibatches(&self, count: usize, seed: u64, step: u64, epoch: u64) -> Vec<Vec<usize>> {
        let total = self.sequences.len();
        let count = count.clamp(1, total.max(1));
        let mut order: Vec<usize> = (0..total).collect();
        if count > 1 {
            order.shuffle(&mut stream(seed, Purpose::Shuffle, &[step, epoch]));
        }
        (0..count).map(|i| order[i * total / count..(i + 1) * total / count].to_vec()).collect()
    }
}

impl Measured {
    /// Packed micro-batches, cut as `cut` says, whose sequences share up to `shared_max` positions, with the experts to replay,
    /// `top_k` a token.
    pub(super) fn batches(&self, cut: Cut, shared_max: usize, top_k: usize) -> Result<Vec<MicroBatch>> {
        let Some(routes) = &self.replay else {
            return Ok(MicroBatch::split_sharing(&self.sequences, cut, |_| shared_max));
        };
        let alike = |i: usize| routed_alike(&routes[i - 1], &routes[i], top_k).min(shared_max);
        let mut batches = MicroBatch::split_sharing(&self.sequences, cut, alike);
        for batch in &mut batches {
            batch.replay = own_routes(&routes[batch.sequences.clone()], &batch.sequence_rows, top_k)?;
        }
        Ok(batches)
    }

    /// `rollout_corr/`, `mismatch/` and `training/` figures of the log-probabilities `training` of a training forward, and
    /// of its experts `chosen`, `top_k` a token, where those of sampling are known. Rejected tokens are in them: what is
    /// wrong with those is what is to be seen.
    ///
    /// # Errors
    /// When no token was sampled, or a log-probability is no number.
    pub fn compare(&self, training: &[f32], chosen: &[Routes], top_k: usize) -> Result<Metrics> {
        let all = vec![true; self.rollout.len()];
        let sequences = Sequences::new(&self.cu_seqlens, &all)?;
        let mut metrics = Metrics::new();
        for (name, value) in offpolicy_metrics(&sequences, training, Some(&self.rollout))? {
            metrics.set(format!("rollout_corr/{name}"), value);
        }
        for found in [
            agreement_metrics(&sequences, training, &self.rollout)?,
            probs_diff_metrics(&sequences, training, &self.rollout)?,
        ] {
            found.into_iter().for_each(|(name, value)| metrics.set(name, value));
        }
        if let (Some(sampled), false) = (&self.kept_routes, chosen.is_empty()) {
            metrics.set("mismatch/routing_agreement", routing_agreement(sampled, chosen, top_k));
        }
        Ok(metrics)
    }
}

/// The experts kept at sampling, per sequence; `layers` of them have `top_k` each a token.
///
/// # Errors
/// When a trajectory lacks those of a fed token.
pub(super) fn kept_routes(trajectories: &[&Trajectory], layers: usize, top_k: usize) -> Result<Vec<Routes>> {
    let of_one = |trajectory: &&Trajectory| {
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
    trajectories.iter().map(of_one).collect()
}

/// Share of (fed token, layer) with the same set of experts; 1 of nothing.
fn routing_agreement(a: &[Routes], b: &[Routes], top_k: usize) -> f64 {
    let layers = a.iter().flatten().zip(b.iter().flatten());
    let pairs = layers.flat_map(|(a, b)| a.chunks_exact(top_k).zip(b.chunks_exact(top_k)));
    let (same, all) = pairs.fold((0usize, 0usize), |(same, all), (a, b)| {
        (same + usize::from(a.iter().all(|expert| b.contains(expert))), all + 1)
    });
    if all == 0 { 1.0 } else { same as f64 / all as f64 }
}

/// The experts that a forward chose, per sequence.
pub(super) fn chosen_routes(batches: &[MicroBatch], outputs: &[PassOutput]) -> Result<Vec<Routes>> {
    let mut routes = vec![];
    for (batch, output) in batches.iter().zip(outputs) {
        let layers = output.routes.iter().map(experts_of).collect::<Result<Vec<_>>>()?;
        for sequence in 0..batch.sequence_rows.sequences() {
            let path = batch.sequence_rows.path(sequence);
            let part = |(layer, top_k): &(Vec<u16>, usize)| -> Vec<u16> {
                path.iter().flat_map(|row| &layer[row * top_k..(row + 1) * top_k]).copied().collect()
            };
            routes.push(layers.iter().map(part).collect());
        }
    }
    Ok(routes)
}

/// A layer's routes u32 `[T, K]` on the host, and `K`.
fn experts_of(routes: &Tensor) -> Result<(Vec<u16>, usize)> {
    let experts = routes.flatten_all()?.to_vec1::<u32>()?.into_iter().map(|e| e as u16);
    Ok((experts.collect(), routes.dim(1)?))
}

/// Positions from the first on at which two sequences have the same experts in all layers, `top_k` a token.
fn routed_alike(a: &Routes, b: &Routes, top_k: usize) -> usize {
    let layers = a.iter().zip(b).map(|(a, b)| a.iter().zip(b).take_while(|(a, b)| a == b).count());
    layers.min().unwrap_or(0) / top_k.max(1)
}

/// The experts of the rows of sequences, as `sequence_rows` has them: u32 `[T, K]` a layer.
fn own_routes(
    sequences: &[Routes],
    sequence_rows: &SequenceRows,
    top_k: usize,
) -> Result<Option<Vec<Tensor>>> {
    let Some(first) = sequences.first() else { return Ok(None) };
    let layer = |l: usize| {
        let own = |(i, s): (usize, &Routes)| s[l][sequence_rows.shared(i) * top_k..].to_vec();
        let experts: Vec<u32> = sequences.iter().enumerate().flat_map(own).map(u32::from).collect();
        let tokens = experts.len() / top_k.max(1);
        Ok(Tensor::from_vec(experts, (tokens, top_k), &Device::Cpu)?)
    };
    (0..first.len()).map(layer).collect::<Result<_>>().map(Some)
}

/// Each micro-batch's stretch of the columns.
pub(super) fn spans(batches: &[MicroBatch]) -> Vec<Range<usize>> {
    let mut start = 0;
    batches
        .iter()
        .map(|batch| {
            let span = start..start + batch.targets.len();
            start = span.end;
            span
        })
        .collect()
}

pub(super) fn joined(outputs: &[PassOutput]) -> Vec<f32> {
    outputs.iter().flat_map(|o| o.log_probs.iter().copied()).collect()
}
