//! The router's auxiliary loss by its definition. The product's is an op.

use anyhow::{Result, ensure};

/// The load-balancing loss of one layer, and its gradient with respect to the mean probabilities.
#[derive(Debug, Clone, PartialEq)]
pub struct LoadBalance {
    /// E·Σ_e f_e·P_e: k when the load is even, up to E when one expert takes it all.
    pub loss: f64,
    /// ∂loss/∂P_e = E·f_e. The fractions f are counts, so no gradient flows through them.
    pub grad_mean_probability: Vec<f32>,
}

/// Switch Transformer's loss (Fedus et al. 2021, eq. 4), for k experts a token as in Hugging Face's GPT-OSS.
///
/// `counts[e]` is the number of `tokens` that chose expert e (so the counts add up to k·tokens), and
/// `mean_probability[e]` the mean over those tokens of the router's softmax for e. f_e =
/// `counts[e]`/`tokens`.
pub fn load_balance(counts: &[usize], mean_probability: &[f32], tokens: usize) -> Result<LoadBalance> {
    ensure!(
        counts.len() == mean_probability.len(),
        "{} counts for {} experts",
        counts.len(),
        mean_probability.len()
    );
    ensure!(tokens > 0, "a load needs at least one token");
    let experts = counts.len() as f64;
    let slopes: Vec<f64> = counts.iter().map(|&count| experts * count as f64 / tokens as f64).collect();
    let loss = slopes.iter().zip(mean_probability).map(|(slope, &p)| slope * f64::from(p)).sum();
    Ok(LoadBalance { loss, grad_mean_probability: slopes.iter().map(|&slope| slope as f32).collect() })
}
