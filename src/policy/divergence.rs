//! Estimators of the divergence from a frozen reference, per sampled token.

use anyhow::Result;

use super::aggregation::Normalizer;
use super::sequences::Sequences;
use crate::bad_input;

/// The exponent of k3 is clamped to ±20, and its result to ±10: one wild token must not own the gradient.
const K3_EXPONENT_MAX: f64 = 20.0;
const K3_MAX: f64 = 10.0;

/// With d = log π − log π_ref of the sampled token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Estimator {
    /// d: unbiased, of either sign.
    K1,
    /// |d|.
    Abs,
    /// ½·d²: its gradient is that of the divergence itself.
    K2,
    /// e^−d + d − 1: unbiased and never negative.
    K3,
}

/// An estimator, and which gradient it carries.
///
/// Source: Schulman, "Approximating KL divergence" (2020).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Divergence {
    pub estimator: Estimator,
    /// Whether the value comes with k2's gradient instead of its own (verl's `+`).
    pub straight_through: bool,
}

impl Divergence {
    /// From `k1`, `abs`, `k2` or `k3` (verl's `kl`, `mse` and `low_var_kl` too), with `+` behind for the
    /// straight-through gradient. Refused otherwise.
    pub fn parse(name: &str) -> Result<Self> {
        let (base, straight_through) = match name.strip_suffix('+') {
            Some(base) => (base, true),
            None => (name, false),
        };
        let estimator = match base {
            "k1" | "kl" => Estimator::K1,
            "abs" => Estimator::Abs,
            "k2" | "mse" => Estimator::K2,
            "k3" | "low_var_kl" => Estimator::K3,
            _ => {
                return Err(bad_input!(
                    "unknown divergence `{name}`: use k1, abs, k2 or k3, with + behind for k2's gradient"
                ));
            }
        };
        Ok(Self { estimator, straight_through })
    }

    /// The estimate for one token, and its derivative with respect to log π.
    ///
    /// Derivatives: k1 → 1; abs → sign d (0 at 0); k2 → d; k3 → 1 − e^−d, and 0 where either clamp binds.
    pub fn at(&self, log_prob: f32, reference: f32) -> (f64, f64) {
        let d = f64::from(log_prob) - f64::from(reference);
        let (value, slope) = match self.estimator {
            Estimator::K1 => (d, 1.0),
            Estimator::Abs => (d.abs(), if d == 0.0 { 0.0 } else { d.signum() }),
            Estimator::K2 => (0.5 * d * d, d),
            Estimator::K3 => {
                let x = (-d).clamp(-K3_EXPONENT_MAX, K3_EXPONENT_MAX);
                let raw = x.exp() - x - 1.0;
                let clamped = d.abs() > K3_EXPONENT_MAX || raw > K3_MAX;
                (raw.min(K3_MAX), if clamped { 0.0 } else { -x.exp_m1() })
            }
        };
        (value, if self.straight_through { d } else { slope })
    }
}

/// A micro-batch's share of the divergence term, before its coefficient. Shares add up.
#[derive(Debug, Clone, PartialEq)]
pub struct KlLoss {
    pub loss: f64,
    /// ∂loss/∂log π, one a token; 0 where the mask is false.
    pub grad_log_prob: Vec<f32>,
}

/// The divergence from the reference, aggregated like the policy loss: add it with its coefficient.
pub fn kl_loss(
    sequences: &Sequences,
    log_prob: &[f32],
    reference: &[f32],
    divergence: Divergence,
    normalizer: &Normalizer,
) -> Result<KlLoss> {
    sequences.check("log_prob", log_prob)?;
    sequences.check("reference log_prob", reference)?;
    let (loss, grad_log_prob) = normalizer.reduce(sequences, |_, t| divergence.at(log_prob[t], reference[t]));
    Ok(KlLoss { loss, grad_log_prob })
}
