//! Proves, in four checks, that rollout and training compute the same forward pass.
//!
//! | check | equality |
//! | --- | --- |
//! | `batch_invariance` | a row alone on one thread = the same row in any packing and order, on several threads |
//! | `prefill_equals_training` | prefill into the cache = the training forward pass |
//! | `decode_equals_prefill` | decode, one token at a time with the cache = prefill of the whole sequence |
//! | `rollout_equals_training` | log-probs stored at sampling = the training forward pass; this follows from the other checks, and is measured too |
//!
//! The first three checks compare every token except the first of each sequence. The last check compares the
//! sampled tokens. Under truncated sampling its training pass renormalises over the kept tokens; the other
//! checks compare the whole distributions.

use crate::actor::forward_backward::{Pass, PassOutput};
use crate::actor::micro_batch::{MicroBatch, Sequence};
use crate::actor::{Actor, PassInput, PassSettings, PolicyColumns};
use crate::metrics::{Console, Progress};
use crate::model::forward::ForwardOptions;
use crate::model::policy_view::PolicyView;
use crate::ops::threads::Threads;
use crate::trajectory::Trajectory;
use anyhow::Result;

/// Number of sequences that are decoded together.
const DECODE_SEQUENCES: usize = 64;

/// The result of one check.
#[derive(Debug, Clone, PartialEq)]
pub struct EqualityCheck {
    pub name: &'static str,
    /// Number of log-probabilities compared.
    pub tokens: usize,
    /// Number of tokens with the same bits on both sides.
    pub bit_equal: usize,
    /// Largest difference, in nats; infinite if one side is NaN.
    pub logprob_abs_diff_max: f64,
}

impl EqualityCheck {
    fn new(name: &'static str) -> Self {
        Self { name, tokens: 0, bit_equal: 0, logprob_abs_diff_max: 0.0 }
    }

    fn add(&mut self, a: &[f32], b: &[f32]) {
        // If the lengths differ, each missing value counts as a difference.
        self.tokens += a.len().max(b.len());
        for (a, b) in a.iter().zip(b) {
            self.bit_equal += usize::from(a.to_bits() == b.to_bits());
            let difference = (f64::from(*a) - f64::from(*b)).abs();
            self.logprob_abs_diff_max =
                self.logprob_abs_diff_max.max(if difference.is_nan() { f64::INFINITY } else { difference });
        }
    }

    /// Returns the fraction of tokens with the same bits; 1 if there are no tokens.
    pub fn bit_equal_fraction(&self) -> f64 {
        if self.tokens == 0 { 1.0 } else { self.bit_equal as f64 / self.tokens as f64 }
    }

    /// Returns whether all bits are equal.
    pub fn is_bit_equal(&self) -> bool {
        self.bit_equal == self.tokens && self.logprob_abs_diff_max == 0.0
    }
}

/// The two computations whose bits are compared, and their settings.
#[derive(Clone, Copy)]
pub struct EqualityChecks<'a> {
    /// The policy of the training forward pass.
    pub actor: &'a Actor,
    /// The sampling policy.
    pub rollout: &'a PolicyView<'a>,
    /// The ablations of the training forward pass.
    pub training: ForwardOptions,
    pub temperature: f64,
    /// Shows progress, in tokens.
    pub console: &'a Console,
}

impl EqualityChecks<'_> {
    /// Runs all checks over `trajectories`. Returns the results in the order of the table above.
    ///
    /// # Errors
    /// When a forward pass fails.
    pub fn run_checks(&self, trajectories: &[&Trajectory]) -> Result<[EqualityCheck; 4]> {
        let all_targets = |t: &&Trajectory| Sequence {
            mask: (0..t.tokens.len()).map(|i| i > 0).collect(),
            ..Sequence::from(*t)
        };
        let untruncated = |t| Sequence { kept_tokens: vec![], ..all_targets(t) };
        let sequences: Vec<Sequence> = trajectories.iter().map(untruncated).collect();
        // All processes compute `training` together. The batch-invariance check uses it as one of the
        // packings.
        let training = self.distributed_log_probs(&sequences)?;

        let mut invariance = EqualityCheck::new("batch_invariance");
        let alone = self.local_log_probs("each alone", &sequences, 1, &Threads::new(1)?)?;
        let reversed: Vec<Sequence> = sequences.iter().rev().cloned().collect();
        let tokens_max = self.actor.execution.micro_batch_tokens / 2 + 7;
        let mut repacked =
            self.local_log_probs("packed otherwise", &reversed, tokens_max, &Threads::new(3)?)?;
        repacked.reverse();
        for ((alone, training), repacked) in alone.iter().zip(&training).zip(&repacked) {
            invariance.add(alone, training);
            invariance.add(alone, repacked);
        }

        let tokens: Vec<&[u32]> = trajectories.iter().map(|t| &t.tokens[..]).collect();
        let (mut prefill_link, mut decode_link) =
            (EqualityCheck::new("prefill_equals_training"), EqualityCheck::new("decode_equals_prefill"));
        let threads = &self.actor.execution.threads;
        let stage = self.start_stage("prefill", &sequences);
        let mut prefill = Vec::with_capacity(tokens.len());
        for tokens in &tokens {
            prefill.extend(threads.run_on_all(|| self.rollout.prefill(&[tokens], self.temperature))?);
            stage.advance_tokens(input_count(tokens) as f64);
        }
        stage.finish();
        prefill.iter().zip(&training).for_each(|(a, b)| prefill_link.add(a, b));
        let stage = self.start_stage("token by token", &sequences);
        for (chunk, prefill) in tokens.chunks(DECODE_SEQUENCES).zip(prefill.chunks(DECODE_SEQUENCES)) {
            let advance = |count: usize| stage.advance_tokens(count as f64);
            let decode = threads.run_on_all(|| self.rollout.decode(chunk, self.temperature, &advance))?;
            decode.iter().zip(prefill).for_each(|(a, b)| decode_link.add(a, b));
        }
        stage.finish();

        let mut rollout = EqualityCheck::new("rollout_equals_training");
        let is_truncated = trajectories.iter().any(|t| !t.kept_tokens.is_empty());
        let training = match is_truncated {
            true => self.distributed_log_probs(&trajectories.iter().map(all_targets).collect::<Vec<_>>())?,
            false => training,
        };
        for (t, training) in trajectories.iter().zip(&training) {
            let sampled: Vec<usize> = (1..t.tokens.len()).filter(|&i| t.mask[i]).collect();
            let stored: Vec<f32> = sampled.iter().map(|&i| t.log_probs[i]).collect();
            let computed: Vec<f32> = sampled.iter().map(|&i| training[i - 1]).collect();
            rollout.add(&stored, &computed);
        }
        Ok([invariance, prefill_link, decode_link, rollout])
    }

    /// Runs the training forward pass on all processes together. Returns the log-probabilities of each
    /// sequence.
    fn distributed_log_probs(&self, sequences: &[Sequence]) -> Result<Vec<Vec<f32>>> {
        let input = PassInput { sequences: sequences.iter().collect(), ..PassInput::default() };
        let progress = |_| self.start_stage("training", sequences);
        let forward = self.actor.forward::<PolicyColumns>(&input, self.settings(), &progress)?;
        let mut log_probs = forward.columns.log_probs.into_iter();
        let targets = |sequence: &Sequence| sequence.mask.iter().skip(1).filter(|mask| **mask).count();
        Ok(sequences.iter().map(|sequence| log_probs.by_ref().take(targets(sequence)).collect()).collect())
    }

    fn settings(&self) -> PassSettings {
        PassSettings::new(self.temperature, self.training)
    }

    /// Runs the training forward pass in this process alone. Micro-batches have up to `tokens_max` tokens.
    /// `stage` is the name on the progress display. Returns the log-probabilities of each sequence.
    fn local_log_probs(
        &self,
        stage: &str,
        sequences: &[Sequence],
        tokens_max: usize,
        threads: &Threads,
    ) -> Result<Vec<Vec<f32>>> {
        let Actor { model, parameters, .. } = self.actor;
        let weights = &parameters.frozen_weights(None)?;
        let settings = self.settings();
        let stage = self.start_stage(stage, sequences);
        let mut log_probs = Vec::with_capacity(sequences.len());
        for batch in &MicroBatch::split(sequences, tokens_max) {
            let pass = Pass { model, weights, batch, settings, recompute_layers: true, teacher: None };
            let tokens_per_layer =
                batch.sequence_rows.positions_count() as f64 / model.config.num_hidden_layers as f64;
            let on_layer = || stage.advance_tokens(tokens_per_layer);
            let output: PassOutput = threads.run_on_all(|| pass.forward(&on_layer))?;
            let batch_log_probs = output.columns.log_probs;
            log_probs.extend(batch.cu_targets.windows(2).map(|w| batch_log_probs[w[0]..w[1]].to_vec()));
        }
        stage.finish();
        Ok(log_probs)
    }

    /// Starts a stage of the progress display, which counts all input tokens of `sequences`.
    fn start_stage(&self, name: &str, sequences: &[Sequence]) -> Progress {
        let tokens: usize = sequences.iter().map(|sequence| input_count(&sequence.tokens)).sum();
        self.console.start_token_stage(name, tokens as u64)
    }
}

/// Returns the number of input tokens, which are all tokens but the last.
fn input_count(tokens: &[u32]) -> usize {
    tokens.len().saturating_sub(1)
}
