//! The proof that rollout and training are one forward, link by link.
//!
//! | link | says |
//! | --- | --- |
//! | `batch_invariance` | a row alone on one thread = the row in any packing, in any order, on several threads |
//! | `prefill_equals_training` | a prompt read into the cache = the training forward |
//! | `decode_equals_prefill` | a token at a time with the cache = the prompt in one piece |
//! | `rollout_equals_training` | what was stored at sampling = the training forward: hence, and measured |
//!
//! The first three cover every token that follows another; the last one those that were sampled.

use crate::learner::batch_runner::BatchRunner;
use crate::learner::forward_backward::{Pass, PassOutput, PassSettings};
use crate::learner::micro_batch::{MicroBatch, Sequence};
use crate::metrics::{Console, Progress};
use crate::model::forward::ForwardOptions;
use crate::model::policy_view::PolicyView;
use crate::ops::threads::Threads;
use crate::trajectory::Trajectory;
use anyhow::Result;

/// Sequences decoded together.
const DECODE_SEQUENCES: usize = 64;

/// The result of one link.
#[derive(Debug, Clone, PartialEq)]
pub struct Link {
    pub name: &'static str,
    /// Log-probabilities compared.
    pub tokens: usize,
    /// Those that are the same bits on both sides.
    pub bit_equal: usize,
    /// Largest difference; infinite where one side is no number.
    pub logprob_abs_diff_max: f64,
}

impl Link {
    fn new(name: &'static str) -> Self {
        Self { name, tokens: 0, bit_equal: 0, logprob_abs_diff_max: 0.0 }
    }

    fn add(&mut self, a: &[f32], b: &[f32]) {
        // A length that differs must not pass for agreement.
        self.tokens += a.len().max(b.len());
        for (a, b) in a.iter().zip(b) {
            self.bit_equal += usize::from(a.to_bits() == b.to_bits());
            let gap = (f64::from(*a) - f64::from(*b)).abs();
            self.logprob_abs_diff_max =
                self.logprob_abs_diff_max.max(if gap.is_nan() { f64::INFINITY } else { gap });
        }
    }

    /// Share of tokens with the same bits; 1 of nothing.
    pub fn bit_equal_fraction(&self) -> f64 {
        if self.tokens == 0 { 1.0 } else { self.bit_equal as f64 / self.tokens as f64 }
    }

    /// True when every bit agrees.
    pub fn holds(&self) -> bool {
        self.bit_equal == self.tokens && self.logprob_abs_diff_max == 0.0
    }
}

/// Both sides of the proof.
#[derive(Clone, Copy)]
pub struct Proof<'a> {
    pub runner: BatchRunner<'a>,
    /// The policy that samples.
    pub rollout: &'a PolicyView<'a>,
    /// The ablations of the training forward.
    pub training: ForwardOptions,
    pub temperature: f64,
    pub micro_batch_tokens: usize,
    /// Where progress is shown, in tokens.
    pub console: &'a Console,
}

impl Proof<'_> {
    /// All links over `trajectories`, in order.
    ///
    /// # Errors
    /// When a forward fails.
    pub fn links(&self, trajectories: &[&Trajectory]) -> Result<[Link; 4]> {
        let every = |t: &&Trajectory| Sequence {
            tokens: t.tokens.clone(),
            mask: (0..t.tokens.len()).map(|i| i > 0).collect(),
        };
        let sequences: Vec<Sequence> = trajectories.iter().map(every).collect();
        // By all processes of the run, where there are several: they then stand for one of the packings.
        let training = self.spread(&sequences)?;

        let mut invariance = Link::new("batch_invariance");
        let alone = self.training("each alone", &sequences, 1, &Threads::new(1)?)?;
        let reversed: Vec<Sequence> = sequences.iter().rev().cloned().collect();
        let tokens_max = self.micro_batch_tokens / 2 + 7;
        let mut packed = self.training("packed otherwise", &reversed, tokens_max, &Threads::new(3)?)?;
        packed.reverse();
        for (alone, others) in alone.iter().zip(training.iter().zip(&packed)) {
            invariance.add(alone, others.0);
            invariance.add(alone, others.1);
        }

        let tokens: Vec<&[u32]> = trajectories.iter().map(|t| &t.tokens[..]).collect();
        let (mut prefill_link, mut decode_link) =
            (Link::new("prefill_equals_training"), Link::new("decode_equals_prefill"));
        let threads = self.runner.threads;
        let stage = self.stage("prefill", &sequences);
        let mut prefill = Vec::with_capacity(tokens.len());
        for tokens in &tokens {
            prefill.extend(threads.wide(|| self.rollout.prefill(&[tokens], self.temperature))?);
            advance(&stage, inputs(tokens));
        }
        stage.finish();
        prefill.iter().zip(&training).for_each(|(a, b)| prefill_link.add(a, b));
        let stage = self.stage("token by token", &sequences);
        for (chunk, prefill) in tokens.chunks(DECODE_SEQUENCES).zip(prefill.chunks(DECODE_SEQUENCES)) {
            let fed = |count| advance(&stage, count);
            let decode = threads.wide(|| self.rollout.decode(chunk, self.temperature, &fed))?;
            decode.iter().zip(prefill).for_each(|(a, b)| decode_link.add(a, b));
        }
        stage.finish();

        let mut rollout = Link::new("rollout_equals_training");
        for (t, training) in trajectories.iter().zip(&training) {
            let sampled: Vec<usize> = (1..t.tokens.len()).filter(|&i| t.mask[i]).collect();
            let stored: Vec<f32> = sampled.iter().map(|&i| t.logprobs[i]).collect();
            let computed: Vec<f32> = sampled.iter().map(|&i| training[i - 1]).collect();
            rollout.add(&stored, &computed);
        }
        Ok([invariance, prefill_link, decode_link, rollout])
    }

    /// The training forward of `sequences` as training makes it: log-probabilities a sequence.
    fn spread(&self, sequences: &[Sequence]) -> Result<Vec<Vec<f32>>> {
        let batches = MicroBatch::split(sequences, self.micro_batch_tokens);
        let stage = self.stage("training", sequences);
        let passed = |batch: &MicroBatch| advance(&stage, batch.sequence_rows.positions_count());
        let outputs = self.runner.forward_observed(&batches, self.settings(), &passed)?;
        stage.finish();
        let of = |(batch, output): (&MicroBatch, &PassOutput)| -> Vec<Vec<f32>> {
            batch.cu_targets.windows(2).map(|w| output.log_probs()[w[0]..w[1]].to_vec()).collect()
        };
        Ok(batches.iter().zip(&outputs).flat_map(of).collect())
    }

    fn settings(&self) -> PassSettings {
        PassSettings {
            recompute_layers: true,
            temperature: self.temperature,
            load_balance: 0.0,
            forward: self.training,
        }
    }

    /// The training forward of `sequences` in this process, packed up to `tokens_max` and shown as `name`:
    /// log-probabilities a sequence.
    fn training(
        &self,
        name: &str,
        sequences: &[Sequence],
        tokens_max: usize,
        threads: &Threads,
    ) -> Result<Vec<Vec<f32>>> {
        let BatchRunner { model, parameters, .. } = self.runner;
        let weights = &parameters.frozen(None)?;
        let settings = self.settings();
        let stage = self.stage(name, sequences);
        let mut log_probs = Vec::with_capacity(sequences.len());
        for batch in &MicroBatch::split(sequences, tokens_max) {
            let pass = Pass { model, weights, batch, settings };
            let [found, _] = threads.wide(|| pass.forward())?.head;
            log_probs.extend(batch.cu_targets.windows(2).map(|w| found[w[0]..w[1]].to_vec()));
            advance(&stage, batch.sequence_rows.positions_count());
        }
        stage.finish();
        Ok(log_probs)
    }

    /// A stage that feeds every sequence but for its last token.
    fn stage(&self, name: &str, sequences: &[Sequence]) -> Progress {
        let all: usize = sequences.iter().map(|sequence| inputs(&sequence.tokens)).sum();
        self.console.work(name, all as u64, 0)
    }
}

/// Tokens that are fed so that all after the first have a log-probability.
fn inputs(tokens: &[u32]) -> usize {
    tokens.len().saturating_sub(1)
}

/// `tokens` more are fed.
fn advance(stage: &Progress, tokens: usize) {
    stage.advance(tokens as u64, tokens as u64, &[]);
}
