//! Policy losses: their values, their gradients with respect to the log-probs, and their metrics.
//!
//! Notation: T is the log-prob of a sampled token under the trained policy, and O is its old log-prob. A is
//! the advantage. w is the importance weight of the rollout correction (1 without a correction), and m is the
//! mask.
//!
//! Every loss except GMPO's is a weighted sum of per-token terms l(T). So `∂loss/∂T_t = weight_t · w_t ·
//! l'(T_t)`, where weight_t is the weight in [`Normalizer::reduce`]. The documentation of each loss derives l
//! and l'.

mod covariance;
mod dppo;
mod entry;

pub use cispo::CispoClip;
pub use clip_cov::{ClipCov, ClipCovSettings};
pub use covariance::SelectionInput;
pub use dppo::{BinaryDivergence, DppoBounds};
pub use entry::{LossEntry, LossFunction, TokenWeights};
pub use geo_mean::GeoMean;
pub use gspo::Gspo;
pub use kl_cov::KlCovSettings;
pub use ppo::PpoClip;
pub use reinforce::Reinforce;
pub use sapo::SapoSettings;
pub use vespo::VespoSettings;

use anyhow::{Context, Result, ensure};

use super::PolicySettings;
use super::aggregation::Normalizer;
use super::sequences::Sequences;
use crate::bad_input;
use crate::settings::registry;

registry! {
    /// Policy losses, in the order of the recipe reference. To add a loss, add a file to this folder and a
    /// line to this list.
    pub struct Loss(LossEntry) default ppo;
    mod ppo;
    mod gspo;
    mod cispo;
    mod reinforce;
    mod geo_mean;
    mod dppo_tv;
    mod dppo_kl;
    mod sapo;
    mod vespo;
    mod clip_cov;
    mod kl_cov;
}

/// The inputs of a policy loss. Each slice has one value per token.
#[derive(Debug, Clone, Copy)]
pub struct LossInput<'a> {
    pub sequences: Sequences<'a>,
    /// T: log-probs under the trained policy.
    pub log_prob: &'a [f32],
    /// O: old log-probs. They are constants.
    pub old_log_prob: &'a [f32],
    /// A: advantages. [`Sequences::broadcast`] repeats the advantage of a response over its tokens.
    pub advantages: &'a [f32],
    /// w: weights of [`crate::policy::correction`]. `None` means 1 everywhere.
    pub weights: Option<&'a [f32]>,
    /// Whether [`LossFunction::select_tokens`] selected the token. Losses that select no tokens ignore it.
    pub selected: Option<&'a [bool]>,
}

impl LossInput<'_> {
    /// Checks that every slice has one value per token, and that values are finite where the mask is true.
    ///
    /// # Errors
    /// When one of these conditions is false.
    pub fn check(&self) -> Result<()> {
        self.sequences.check("log_prob", self.log_prob)?;
        self.sequences.check("old_log_prob", self.old_log_prob)?;
        self.sequences.check("advantages", self.advantages)?;
        self.weights.map_or(Ok(()), |w| self.sequences.check("weights", w))
    }

    /// Returns the log ratio T − O of a token.
    fn log_ratio(&self, token: usize) -> f64 {
        f64::from(self.log_prob[token]) - f64::from(self.old_log_prob[token])
    }

    fn advantage(&self, token: usize) -> f64 {
        f64::from(self.advantages[token])
    }

    fn weight(&self, token: usize) -> f64 {
        self.weights.map_or(1.0, |w| f64::from(w[token]))
    }

    /// Returns the selection of a loss that selects tokens.
    fn selection(&self) -> Result<&[bool]> {
        let selected = self.selected.context("the loss selects tokens, but no selection was made")?;
        let (flags, tokens) = (selected.len(), self.sequences.tokens());
        ensure!(flags == tokens, "the selection holds {flags} flags for {tokens} tokens");
        Ok(selected)
    }
}

/// The loss of one micro-batch. Over the micro-batches of a batch, `loss` adds up, and so do the sums and the
/// token counts of `metrics`.
#[derive(Debug, Clone, PartialEq)]
pub struct PolicyLoss {
    pub loss: f64,
    /// ∂loss/∂T, one value per token; 0 where the mask is false.
    pub grad_log_prob: Vec<f32>,
    pub metrics: Vec<TokenMean>,
}

/// A metric that is a mean over valid tokens. It is stored as sum and count, so that micro-batches can be
/// added.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenMean {
    /// Name of the metric in verl, such as `actor/pg_clipfrac`.
    pub name: &'static str,
    pub sum: f64,
    /// Number of valid tokens.
    pub tokens: f64,
}

impl TokenMean {
    /// Returns the mean; 0 without valid tokens.
    pub fn value(&self) -> f64 {
        if self.tokens == 0.0 { 0.0 } else { self.sum / self.tokens }
    }
}

/// The clip range of the ratio: [1 − low, 1 + high].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClipRange {
    pub low: f64,
    pub high: f64,
}

impl ClipRange {
    /// Reads the clip range from the recipe.
    ///
    /// # Errors
    /// The errors of [`Self::new`].
    fn from_settings(settings: &PolicySettings) -> Result<Self> {
        Self::new(settings.clip_low, settings.clip_high)
    }

    /// Checks the range.
    ///
    /// # Errors
    /// [`BadInput`](crate::error::BadInput) unless both values are strictly between 0 and 1.
    pub fn new(low: f64, high: f64) -> Result<Self> {
        for (name, epsilon) in [("low", low), ("high", high)] {
            if !(epsilon > 0.0 && epsilon < 1.0) {
                return Err(bad_input!("clip {name} is {epsilon}: it must lie strictly between 0 and 1"));
            }
        }
        Ok(Self { low, high })
    }

    fn clip(&self, ratio: f64) -> f64 {
        ratio.clamp(1.0 - self.low, 1.0 + self.high)
    }
}

/// One token's contribution to a loss.
#[derive(Default)]
struct Term {
    /// l, before the importance weight.
    loss: f64,
    /// dl/dT.
    derivative: f64,
    /// Negative log ratio, for `actor/ppo_kl`.
    kl: f64,
    clipped: bool,
    clipped_lower: bool,
}

/// Computes the loss to which each token contributes `term(sequence, token)`. Importance weights are applied
/// after the clips.
fn token_loss(
    input: &LossInput,
    normalizer: &Normalizer,
    mut term: impl FnMut(usize, usize) -> Term,
) -> PolicyLoss {
    let mut counts = ClipCounts::default();
    let (loss, grad_log_prob) = normalizer.reduce(&input.sequences, |sequence, token| {
        let term = term(sequence, token);
        counts.add(&term);
        let weight = input.weight(token);
        (weight * term.loss, weight * term.derivative)
    });
    PolicyLoss { loss, grad_log_prob, metrics: counts.metrics() }
}

/// Sums for the metrics that every clipped loss reports.
#[derive(Default)]
struct ClipCounts {
    tokens: f64,
    kl: f64,
    clipped: f64,
    clipped_lower: f64,
}

impl ClipCounts {
    fn add(&mut self, term: &Term) {
        self.tokens += 1.0;
        self.kl += term.kl;
        self.clipped += f64::from(term.clipped);
        self.clipped_lower += f64::from(term.clipped_lower);
    }

    fn metrics(&self) -> Vec<TokenMean> {
        let mean = |name, sum| TokenMean { name, sum, tokens: self.tokens };
        vec![
            mean("actor/pg_clipfrac", self.clipped),
            mean("actor/pg_clipfrac_lower", self.clipped_lower),
            mean("actor/ppo_kl", self.kl),
        ]
    }
}
