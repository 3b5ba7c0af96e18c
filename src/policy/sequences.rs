//! Packed per-token values: the bounds of each sequence, and the mask of valid tokens.

use std::ops::Range;

use anyhow::{Result, bail, ensure};

/// A batch (or micro-batch) of sequences, concatenated as training packs them.
///
/// Sequence `s` has the tokens `cu_seqlens[s]..cu_seqlens[s + 1]` of every per-token slice. `mask` is true
/// for valid tokens: the policy sampled them, and no rejection removed them. It is false for prompts, tool
/// output and padding. Values of masked tokens never affect a result, even if they are NaN. The exception is
/// [`Self::sequence_sums`].
///
/// Every sum over tokens is computed in f64 in token order, so a result depends on its inputs alone.
#[derive(Debug, Clone, Copy)]
pub struct Sequences<'a> {
    cu_seqlens: &'a [usize],
    pub mask: &'a [bool],
}

impl<'a> Sequences<'a> {
    /// Checks and wraps the slices.
    ///
    /// # Errors
    /// Unless `cu_seqlens` starts at 0, never decreases, and ends at the length of `mask`.
    pub fn new(cu_seqlens: &'a [usize], mask: &'a [bool]) -> Result<Self> {
        ensure!(cu_seqlens.first() == Some(&0), "cu_seqlens must start at 0");
        ensure!(cu_seqlens.is_sorted(), "cu_seqlens must not decrease");
        ensure!(
            cu_seqlens.last() == Some(&mask.len()),
            "cu_seqlens must end at {}, the length of the mask",
            mask.len()
        );
        Ok(Self { cu_seqlens, mask })
    }

    /// Returns the number of sequences, including empty ones.
    pub fn len(&self) -> usize {
        self.cu_seqlens.len() - 1
    }

    /// Returns the number of tokens, including masked ones. Every per-token slice has this length.
    pub fn tokens(&self) -> usize {
        self.mask.len()
    }

    /// Returns the token range of each sequence, in order.
    pub fn token_ranges(&self) -> impl Iterator<Item = Range<usize>> + use<'a> {
        self.cu_seqlens.windows(2).map(|pair| pair[0]..pair[1])
    }

    /// Returns the indices of the valid tokens within the token range `range`.
    pub fn valid_indices(
        &self,
        range: Range<usize>,
    ) -> impl DoubleEndedIterator<Item = usize> + Clone + use<'a> {
        let mask = self.mask;
        range.filter(move |&token| mask[token])
    }

    /// Returns the indices of all valid tokens.
    pub fn all_valid_indices(&self) -> impl DoubleEndedIterator<Item = usize> + Clone + use<'a> {
        self.valid_indices(0..self.mask.len())
    }

    /// Returns the number of valid tokens.
    pub fn valid_tokens(&self) -> usize {
        self.all_valid_indices().count()
    }

    /// Returns the number of sequences with at least one valid token.
    pub fn valid_sequences(&self) -> usize {
        self.token_ranges().filter(|range| self.mask[range.clone()].contains(&true)).count()
    }

    /// Checks that `values` has one value per token, and that the values of valid tokens are finite.
    /// Otherwise a clip could hide a NaN.
    ///
    /// # Errors
    /// When one of these conditions is false. The message calls the values `name`.
    pub fn check(&self, name: &str, values: &[f32]) -> Result<()> {
        ensure!(
            values.len() == self.tokens(),
            "{name} holds {} values for {} tokens",
            values.len(),
            self.tokens()
        );
        for (sequence, range) in self.token_ranges().enumerate() {
            let start = range.start;
            if let Some(token) = self.valid_indices(range).find(|&token| !values[token].is_finite()) {
                bail!("{name} of token {} of sequence {sequence} is {}", token - start, values[token]);
            }
        }
        Ok(())
    }

    /// Repeats each sequence's value over its valid tokens; masked tokens get 0. `per_sequence` has one value
    /// per sequence.
    pub fn broadcast(&self, per_sequence: &[f32]) -> Result<Vec<f32>> {
        ensure!(
            per_sequence.len() == self.len(),
            "{} values for {} sequences",
            per_sequence.len(),
            self.len()
        );
        let mut per_token = vec![0.0; self.tokens()];
        for (range, &value) in self.token_ranges().zip(per_sequence) {
            for token in self.valid_indices(range) {
                per_token[token] = value;
            }
        }
        Ok(per_token)
    }

    /// Sums `values` over each whole sequence. Masked tokens are included, because the reward of a response
    /// may be on a token that was not sampled.
    pub fn sequence_sums(&self, values: &[f32]) -> Result<Vec<f32>> {
        self.check("token rewards", values)?;
        let sum = |range: Range<usize>| values[range].iter().map(|&v| f64::from(v)).sum::<f64>() as f32;
        Ok(self.token_ranges().map(sum).collect())
    }

    /// Returns the mean over the valid tokens of the batch; 0 without valid tokens.
    pub(super) fn mean(&self, value: impl Fn(usize) -> f64) -> f64 {
        mean(self.all_valid_indices().map(value))
    }

    /// Returns the mean over the valid tokens of each sequence; 0 for a sequence without valid tokens.
    pub(super) fn sequence_means(&self, value: impl Fn(usize) -> f64) -> Vec<f64> {
        self.token_ranges().map(|range| mean(self.valid_indices(range).map(&value))).collect()
    }
}

/// Returns the mean; 0 without values.
pub(super) fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0usize), |(sum, count), v| (sum + v, count + 1));
    if count == 0 { 0.0 } else { sum / count as f64 }
}

/// Returns the standard deviation with n − 1 in the denominator; 0 for fewer than two values.
pub(super) fn sample_std(values: &[f64]) -> f64 {
    if values.len() < 2 {
        return 0.0;
    }
    let centre = mean(values.iter().copied());
    let squares: f64 = values.iter().map(|v| (v - centre).powi(2)).sum();
    (squares / (values.len() - 1) as f64).sqrt()
}
