//! Draws of the next tokens of several sequences, and scores of tokens.

use super::request::TokenScores;
use super::work::Sequence;
use crate::ops::logits::{Logits, SampledToken, SamplingParameters};
use crate::ops::token_set::TokenSet;
use anyhow::Result;
use rand::Rng;

/// Draws the next token of each entry of `sequences`: a row of `logits`, the sequence, and the caller's flag.
/// Also returns the tokens that each one was drawn from, if its request keeps them. A forced token replaces
/// the drawn token.
pub(super) fn draw_tokens(
    logits: &Logits,
    sampling: &SamplingParameters,
    sequences: &mut [(usize, Box<Sequence>, bool)],
) -> Result<(Vec<SampledToken>, Vec<Option<TokenSet>>)> {
    // A forced token also uses up a random number, so later tokens do not depend on how many are forced.
    let draws: Vec<(usize, f64)> =
        sequences.iter_mut().map(|(row, sequence, _)| (*row, sequence.random.random())).collect();
    let keeps: Vec<bool> =
        sequences.iter().map(|(_, sequence, _)| sequence.reading.options.keep_token_sets).collect();
    let (mut drawn, mut kept) = match keeps.contains(&true) {
        true => logits.draw_with_kept(sampling, &draws)?.into_iter().unzip(),
        false => (logits.draw(sampling, &draws)?, vec![None; draws.len()]),
    };
    kept.iter_mut().zip(keeps).filter(|(_, keeps)| !keeps).for_each(|(kept, _)| *kept = None);
    force(logits, sampling, sequences, &mut drawn)?;
    Ok((drawn, kept))
}

/// Replaces the drawn token of each sequence that has a forced token at this position.
fn force(
    logits: &Logits,
    sampling: &SamplingParameters,
    sequences: &[(usize, Box<Sequence>, bool)],
    drawn: &mut [SampledToken],
) -> Result<()> {
    let (mut indices, mut tokens) = (vec![], vec![]);
    for (index, ((row, sequence, _), drawn)) in sequences.iter().zip(&*drawn).enumerate() {
        if let Some(token) = sequence.next_forced()
            && token != drawn.token
        {
            indices.push(index);
            tokens.push((*row, token));
        }
    }
    let log_probs = logits.log_probs(sampling, &tokens)?;
    for ((index, (_, token)), log_prob) in indices.into_iter().zip(tokens).zip(log_probs) {
        drawn[index] = SampledToken { token, log_prob };
    }
    Ok(())
}

/// Returns one entry for each (row, id) of `tokens`: the log-prob of the token, and the likeliest tokens of
/// the row. `rows` has the same rows in the same order, each with the number of likeliest tokens.
pub(super) fn scores(
    logits: &Logits,
    tokens: &[(usize, u32)],
    rows: &[(usize, usize)],
) -> Result<Vec<TokenScores>> {
    let log_probs = logits.log_probs(&SamplingParameters::with_temperature(1.0), tokens)?;
    let top = logits.likeliest(rows)?;
    Ok(log_probs.into_iter().zip(top).map(|(log_prob, top)| TokenScores { log_prob, top }).collect())
}
