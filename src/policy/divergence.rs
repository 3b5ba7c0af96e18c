//! Estimators of the KL divergence from a frozen reference, per sampled token.

use anyhow::Result;

use super::aggregation::Normalizer;
use super::sequences::Sequences;
use crate::settings::choice;

/// Limit of the exponent of k3 (±20). [`K3_MAX`] limits the value of k3. So no single token dominates the
/// gradient.
const K3_EXPONENT_MAX: f64 = 20.0;
const K3_MAX: f64 = 10.0;

choice! {
    /// Estimators of the divergence, with d = log π − log π_ref.
    pub enum KlEstimator {
        /// d.
        K1 = "k1",
        /// |d|.
        Abs = "abs",
        /// ½·d².
        K2 = "k2",
        /// e^−d + d − 1.
        K3 = "k3",
        /// The value of k1 with the gradient of k2.
        K1StraightThrough = "k1+",
        /// The value of abs with the gradient of k2.
        AbsStraightThrough = "abs+",
        /// The value of k3 with the gradient of k2.
        K3StraightThrough = "k3+",
    }
}

/// The estimators of Schulman, "Approximating KL divergence" (2020). k1 is unbiased and can have either sign.
/// The gradient of k2 is the gradient of the KL divergence. k3 is unbiased and never negative.
impl KlEstimator {
    /// Returns whether the gradient is that of k2 instead of the estimator's own gradient (`+` in verl).
    pub fn is_straight_through(self) -> bool {
        matches!(
            self,
            KlEstimator::K1StraightThrough | KlEstimator::AbsStraightThrough | KlEstimator::K3StraightThrough
        )
    }

    /// Returns the estimate for one token, and its derivative with respect to log π.
    ///
    /// The derivative is 1 for k1, sign d (0 at 0) for abs, d for k2, and 1 − e^−d for k3. For k3 it is 0
    /// where one of the two clamps is active.
    pub fn estimate(self, log_prob: f32, reference: f32) -> (f64, f64) {
        let d = f64::from(log_prob) - f64::from(reference);
        let (value, derivative) = match self {
            KlEstimator::K1 | KlEstimator::K1StraightThrough => (d, 1.0),
            KlEstimator::Abs | KlEstimator::AbsStraightThrough => {
                (d.abs(), if d == 0.0 { 0.0 } else { d.signum() })
            }
            KlEstimator::K2 => (0.5 * d * d, d),
            KlEstimator::K3 | KlEstimator::K3StraightThrough => {
                let x = (-d).clamp(-K3_EXPONENT_MAX, K3_EXPONENT_MAX);
                let raw = x.exp() - x - 1.0;
                let clamped = d.abs() > K3_EXPONENT_MAX || raw > K3_MAX;
                (raw.min(K3_MAX), if clamped { 0.0 } else { -x.exp_m1() })
            }
        };
        (value, if self.is_straight_through() { d } else { derivative })
    }
}

/// Computes the divergence of a micro-batch from the reference, aggregated like the policy loss, and
/// ∂loss/∂log π, one value per token; 0 where the mask is false. The terms of all micro-batches add up to
/// the term of the batch. The caller multiplies both by its coefficient.
pub fn kl_loss(
    sequences: &Sequences,
    log_prob: &[f32],
    reference: &[f32],
    estimator: KlEstimator,
    normalizer: &Normalizer,
) -> Result<(f64, Vec<f32>)> {
    sequences.check("log_prob", log_prob)?;
    sequences.check("reference log_prob", reference)?;
    Ok(normalizer.reduce(sequences, |_, t| estimator.estimate(log_prob[t], reference[t])))
}
