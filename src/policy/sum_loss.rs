//! Losses that are plain sums over tokens, without mask and normalisation, as a client of the Tinker API asks
//! for them.
//!
//! l is the log-prob of a target, q the log-prob at sampling, A the advantage, r = exp(l − q), and sg stops
//! the gradient:
//!
//! | loss | value | gradient with respect to l |
//! | --- | --- | --- |
//! | `cross_entropy` | −Σ w·l | −w |
//! | `importance_sampling` | −Σ r·A | −r·A |
//! | `ppo` | −Σ min(r·A, clip(r)·A) | −r·A, or 0 where the clipped value is smaller |
//! | `cispo` | −Σ sg(clip(r))·l·A | −clip(r)·A |
//! | `dro` | −Σ (l·A − ½·β·(l − q)²) | −(A − β·(l − q)) |
//! | `gspo` | `ppo` with s = exp(m + l − sg(l)), m the mean of l − q over the tokens of the mask | as `ppo` |
//!
//! Sums are f64 in token order.

use crate::bad_input;
use anyhow::{Result, ensure};
use std::collections::BTreeMap;

/// A loss with its parameters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum SumLoss {
    CrossEntropy,
    ImportanceSampling,
    /// The bounds of the ratio.
    Ppo([f64; 2]),
    /// The bounds of the weight.
    Cispo([f64; 2]),
    /// β.
    Dro(f64),
    /// The bounds of the sequence's ratio.
    Gspo([f64; 2]),
}

/// The tokens of one sequence. Each slice has one value per token, or none if the loss does not read it.
#[derive(Debug, Clone, Copy, Default)]
pub struct SumLossInput<'a> {
    /// l.
    pub log_probs: &'a [f32],
    /// w of `cross_entropy`.
    pub weights: &'a [f32],
    /// q.
    pub sampled_log_probs: &'a [f32],
    /// A.
    pub advantages: &'a [f32],
    /// The tokens of m are those with a value other than 0.
    pub ratio_mask: &'a [f32],
}

const LOW: &str = "clip_low_threshold";
const HIGH: &str = "clip_high_threshold";
const BETA: &str = "beta";

impl SumLoss {
    /// The names of all losses.
    pub const NAMES: [&str; 6] = ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"];

    /// Returns the loss `name` with the parameters `config`; absent ones have their default.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when there is no such loss, or a parameter is unknown or out of range.
    pub fn new(name: &str, config: &BTreeMap<String, f64>) -> Result<Self> {
        let value = |key: &str, default: f64| config.get(key).copied().unwrap_or(default);
        let bounds = |low: f64, high: f64| -> Result<[f64; 2]> {
            let [low, high] = [value(LOW, low), value(HIGH, high)];
            if !(low >= 0.0 && low <= high && high.is_finite()) {
                return Err(bad_input!(
                    "{LOW} is {low} and {HIGH} is {high}: they bound a ratio, so 0 <= low <= high; typical are 0.8 and 1.2"
                ));
            }
            Ok([low, high])
        };
        let (loss, keys): (Self, &[&str]) = match name {
            "cross_entropy" => (Self::CrossEntropy, &[]),
            "importance_sampling" => (Self::ImportanceSampling, &[]),
            "ppo" => (Self::Ppo(bounds(0.8, 1.2)?), &[LOW, HIGH]),
            "cispo" => (Self::Cispo(bounds(0.0, 4.0)?), &[LOW, HIGH]),
            "dro" => (Self::Dro(value(BETA, 0.05)), &[BETA]),
            "gspo" => (Self::Gspo(bounds(0.8, 1.2)?), &[LOW, HIGH]),
            "stable_reinforce" => {
                return Err(bad_input!(
                    "the formula of loss_fn \"stable_reinforce\" is not public; use loss_fn=importance_sampling"
                ));
            }
            _ => {
                return Err(bad_input!(
                    "loss_fn {name:?} is not known; these are: {}",
                    Self::NAMES.join(", ")
                ));
            }
        };
        if let Some(key) = config.keys().find(|key| !keys.contains(&key.as_str())) {
            let known = if keys.is_empty() { "none".to_owned() } else { keys.join(", ") };
            return Err(bad_input!("loss_fn_config has {key:?}, but {name} takes {known}; leave it out"));
        }
        match loss {
            Self::Dro(beta) if !(beta >= 0.0 && beta.is_finite()) => {
                Err(bad_input!("beta is {beta}: it must be 0 or more; a typical value is 0.05"))
            }
            loss => Ok(loss),
        }
    }

    /// Returns the names of the inputs that the loss reads beside the targets.
    pub fn inputs(self) -> &'static [&'static str] {
        match self {
            Self::CrossEntropy => &["weights"],
            Self::Gspo(_) => &["logprobs", "advantages", "sequence_ratio_mask"],
            _ => &["logprobs", "advantages"],
        }
    }

    /// Returns the loss of a sequence, and its gradient with respect to each log-prob.
    ///
    /// # Errors
    /// When a slice that the loss reads has another length than the log-probs; [`crate::error::BadInput`]
    /// when a mask of `gspo` selects no token, and when a gradient is not finite.
    pub fn compute(self, input: &SumLossInput) -> Result<(f64, Vec<f32>)> {
        let SumLossInput { log_probs, weights, sampled_log_probs, advantages, ratio_mask } = *input;
        let read: &[&[f32]] = match self {
            Self::CrossEntropy => &[weights],
            Self::Gspo(_) => &[sampled_log_probs, advantages, ratio_mask],
            _ => &[sampled_log_probs, advantages],
        };
        let count = log_probs.len();
        ensure!(read.iter().all(|slice| slice.len() == count), "a loss of {count} tokens with another input");
        let log_ratio = |token: usize| f64::from(log_probs[token]) - f64::from(sampled_log_probs[token]);
        let sequence_ratio = match self {
            Self::Gspo(_) => {
                let masked = (0..count).filter(|&token| ratio_mask[token] != 0.0);
                let (sum, tokens) =
                    masked.fold((0.0, 0.0), |(sum, n), token| (sum + log_ratio(token), n + 1.0));
                if tokens == 0.0 {
                    return Err(bad_input!(
                        "sequence_ratio_mask selects no token, so gspo has no ratio; set it to 1 on sampled tokens"
                    ));
                }
                f64::exp(sum / tokens)
            }
            _ => 1.0,
        };
        let clipped = |ratio: f64, [low, high]: [f64; 2], advantage: f64| {
            let (free, bounded) = (-advantage * ratio, -advantage * ratio.clamp(low, high));
            if bounded > free { (bounded, 0.0) } else { (free, free) }
        };
        let term = |token: usize| -> (f64, f64) {
            let l = f64::from(log_probs[token]);
            if self == Self::CrossEntropy {
                let weight = f64::from(weights[token]);
                return (-weight * l, -weight);
            }
            let (advantage, log_ratio) = (f64::from(advantages[token]), log_ratio(token));
            match self {
                Self::Ppo(bounds) => clipped(log_ratio.exp(), bounds, advantage),
                Self::Gspo(bounds) => clipped(sequence_ratio, bounds, advantage),
                Self::Cispo([low, high]) => {
                    let gradient = -log_ratio.exp().clamp(low, high) * advantage;
                    (gradient * l, gradient)
                }
                Self::Dro(beta) => {
                    (-(l * advantage - 0.5 * beta * log_ratio * log_ratio), -(advantage - beta * log_ratio))
                }
                _ => {
                    let value = -log_ratio.exp() * advantage;
                    (value, value)
                }
            }
        };
        let mut loss = 0.0;
        let gradient = (0..count).map(|token| {
            let (value, gradient) = term(token);
            loss += value;
            gradient as f32
        });
        let gradient: Vec<f32> = gradient.collect();
        match gradient.iter().position(|slope| !slope.is_finite()) {
            None => Ok((loss, gradient)),
            Some(token) => Err(bad_input!(
                "target {token}: its log-prob is {} here and {} in logprobs, too far apart for a ratio; send what the sampler \
                 gave for the same targets",
                log_probs[token],
                sampled_log_probs.get(token).unwrap_or(&0.0),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_supported_is_refused_with_a_remedy() {
        let config = |pairs: &[(&str, f64)]| {
            pairs.iter().map(|(key, value)| ((*key).to_owned(), *value)).collect::<BTreeMap<_, _>>()
        };
        let text = |name, pairs| SumLoss::new(name, &config(pairs)).unwrap_err().to_string();
        assert!(text("stable_reinforce", &[]).contains("importance_sampling"));
        assert!(text("reinforce", &[]).contains("cross_entropy"));
        assert!(text("ppo", &[("beta", 1.0)]).contains(LOW));
        assert!(text("ppo", &[(LOW, 1.3)]).contains("0 <= low <= high"));
        assert!(text("dro", &[(BETA, f64::NAN)]).contains("0 or more"));
        let ppo = SumLoss::new("ppo", &config(&[(HIGH, 1.5)])).unwrap();
        assert_eq!(ppo, SumLoss::Ppo([0.8, 1.5]));
        let (one, none) = ([-1.0], [0.0]);
        let input = SumLossInput {
            log_probs: &one,
            sampled_log_probs: &one,
            advantages: &one,
            ratio_mask: &none,
            ..SumLossInput::default()
        };
        let error = SumLoss::Gspo([0.8, 1.2]).compute(&input).unwrap_err();
        assert!(error.to_string().contains("sequence_ratio_mask"), "{error}");
        // A ratio of e^200 has no f32.
        let (far, ones) = ([-1.0, -200.0], [1.0, 1.0]);
        let input = SumLossInput {
            log_probs: &[-1.0, 0.0],
            sampled_log_probs: &far,
            advantages: &ones,
            ..SumLossInput::default()
        };
        let error = SumLoss::new("importance_sampling", &config(&[])).unwrap().compute(&input).unwrap_err();
        assert!(
            error.to_string().contains("target 1: its log-prob is 0 here and -200 in logprobs"),
            "{error}"
        );
    }
}
