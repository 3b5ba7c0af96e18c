//! The entropy of the policy's next-token distribution from logits, as the published vectors have it. The
//! product takes it from its ops.

use anyhow::{Result, ensure};
use rloss::policy::{Normalizer, Sequences};

/// A micro-batch's share of the mean entropy. Shares add up.
#[derive(Debug, Clone, PartialEq)]
pub struct Entropy {
    /// Aggregated like a loss: subtract it with its coefficient for a bonus.
    pub entropy: f64,
    /// H of every token in nats, masked tokens included.
    pub token_entropy: Vec<f32>,
    /// ∂entropy/∂logits, `[tokens × vocabulary]`; 0 where the mask is false.
    pub grad_logits: Vec<f32>,
}

/// H = log Σ eˣ − Σ p·x of each token's logits x with p = softmax(x), aggregated over valid tokens.
///
/// `logits` is `[tokens × vocabulary]`. With log p_i = x_i − log Σ eˣ, differentiating gives
/// ∂H/∂x_i = −p_i·(log p_i + H).
pub fn entropy(
    sequences: &Sequences,
    logits: &[f32],
    vocabulary: usize,
    normalizer: &Normalizer,
) -> Result<Entropy> {
    ensure!(
        vocabulary > 0 && logits.len() == sequences.tokens() * vocabulary,
        "{} logits for {} tokens of a vocabulary of {vocabulary}",
        logits.len(),
        sequences.tokens()
    );
    let rows: Vec<&[f32]> = logits.chunks_exact(vocabulary).collect();
    let entropies: Vec<f64> = rows.iter().map(|row| token_entropy(row)).collect();
    let (total, weights) = normalizer.reduce(sequences, |_, t| (entropies[t], 1.0));
    let mut grad_logits = vec![0.0; logits.len()];
    for t in sequences.all_valid_indices() {
        let log_sum = log_sum_exp(rows[t]);
        let gradient = &mut grad_logits[t * vocabulary..(t + 1) * vocabulary];
        for (g, &x) in gradient.iter_mut().zip(rows[t]) {
            let log_p = f64::from(x) - log_sum;
            // A logit of −∞ has probability 0 and moves nothing; 0 · ∞ would be NaN.
            let slope = if log_p.is_finite() { -log_p.exp() * (log_p + entropies[t]) } else { 0.0 };
            *g = (f64::from(weights[t]) * slope) as f32;
        }
    }
    Ok(Entropy { entropy: total, token_entropy: entropies.iter().map(|&h| h as f32).collect(), grad_logits })
}

fn token_entropy(logits: &[f32]) -> f64 {
    let log_sum = log_sum_exp(logits);
    let term = |&x: &f32| {
        let log_p = f64::from(x) - log_sum;
        if log_p.is_finite() { -log_p.exp() * log_p } else { 0.0 }
    };
    logits.iter().map(term).sum()
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = logits.iter().fold(f64::NEG_INFINITY, |max, &x| max.max(f64::from(x)));
    max + logits.iter().map(|&x| (f64::from(x) - max).exp()).sum::<f64>().ln()
}
