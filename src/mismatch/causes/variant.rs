//! A computation with mistakes, and its log-probabilities.

use super::{Cause, WeightEdit};
use crate::learner::micro_batch::MicroBatch;
use crate::mismatch::head::HeadSettings;
use crate::model::config::Config;
use crate::model::forward::{ForwardOptions, Model};
use crate::model::layers_on_demand::WeightChange;
use crate::model::parameters::Parameters;
use crate::model::policy_view::PolicyView;
use crate::model::rounding::WeightRounding;
use crate::ops::SequenceRows;
use anyhow::{Context, Result};
use std::sync::Arc;

/// The settings that a cause may change.
pub struct Variant {
    pub config: Config,
    /// Another RoPE table: radians a position for each pair of dimensions, and the factor on cosine and sine.
    pub rope: Option<(Vec<f32>, f64)>,
    pub forward: ForwardOptions,
    pub weights: Vec<WeightEdit>,
    pub earlier: bool,
    pub double_start: bool,
    /// Offset added to each target's row; true if the target token is shifted too.
    pub shift: Option<(i32, bool)>,
    pub head: HeadSettings,
}

impl Variant {
    /// Returns the correct computation, or the computation with `cause`.
    pub fn new(config: &Config, cause: Option<&Cause>) -> Self {
        let mut variant = Self {
            config: config.clone(),
            rope: None,
            forward: ForwardOptions::default(),
            weights: vec![],
            earlier: false,
            double_start: false,
            shift: None,
            head: HeadSettings::default(),
        };
        if let Some(cause) = cause {
            cause.apply(&mut variant);
        }
        variant
    }

    /// Rounds weights and activations (residual stream and outputs of norms) to these mantissa bits.
    pub fn set_rounding(&mut self, weight_bits: u32, activation_bits: u32) {
        let rounding = WeightRounding { mxfp4: false, bits: Some(weight_bits) };
        self.weights.push(Arc::new(move |_| Ok(rounding.weight_change())));
        self.forward.mantissa_bits = Some(activation_bits);
    }

    /// Returns the model, with context for one token more than asked: the start token may appear twice.
    pub fn model(&self, sequence_tokens_max: usize) -> Model {
        let (config, positions) = (self.config.clone(), sequence_tokens_max + 1);
        match &self.rope {
            None => Model::new(config, positions),
            Some((frequencies, factor)) => Model::with_rope(config, positions, frequencies, *factor),
        }
    }

    /// Returns the policy of `model` with the variant's weights.
    ///
    /// # Errors
    /// When a tensor is missing or an edit does not fit.
    pub fn policy<'a>(
        &self,
        model: &'a Model,
        parameters: &Parameters,
        earlier: Option<&Parameters>,
    ) -> Result<PolicyView<'a>> {
        let parameters = match self.earlier {
            true => earlier.context("no earlier weights were given")?,
            false => parameters,
        };
        let weights = if self.weights.is_empty() {
            parameters.frozen_weights(None)?
        } else {
            let changes: Vec<WeightChange> =
                self.weights.iter().map(|edit| edit(parameters)).collect::<Result<_>>()?;
            parameters.on_demand_weights(Arc::new(move |spec, weight| {
                changes.iter().try_fold(weight, |weight, change| change(spec, weight))
            }))?
        };
        Ok(PolicyView { model, weights: Arc::new(weights), forward: self.forward })
    }

    /// Returns `batch` with the variant's changes, and whether each target has a value: a shift has none at
    /// the end of a row.
    pub fn batch(&self, batch: &MicroBatch) -> (MicroBatch, Vec<bool>) {
        let mut batch = if self.double_start { repeat_first_tokens(batch) } else { batch.clone() };
        match self.shift {
            Some(shift) => {
                let has_value = shift_rows(&mut batch, shift);
                (batch, has_value)
            }
            None => {
                let all = vec![true; batch.targets.len()];
                (batch, all)
            }
        }
    }
}

/// Repeats the first token of every sequence. No rows are shared here.
fn repeat_first_tokens(batch: &MicroBatch) -> MicroBatch {
    let (mut tokens, mut positions, mut cu_seqlens) = (vec![], vec![], vec![0]);
    let mut rows = Vec::with_capacity(batch.rows.len());
    for i in 0..batch.sequence_rows.sequences() {
        let own = batch.sequence_rows.own_rows(i);
        let before = i as u32 + 1;
        rows.extend(batch.rows.iter().filter(|&&r| own.contains(&(r as usize))).map(|r| r + before));
        tokens.extend(batch.tokens.get(own.start));
        tokens.extend_from_slice(&batch.tokens[own.clone()]);
        positions.extend(0..=own.len() as u32);
        cu_seqlens.push(tokens.len());
    }
    MicroBatch {
        tokens: Arc::new(tokens),
        positions,
        sequence_rows: Arc::new(SequenceRows::from_cu_seqlens(&cu_seqlens)),
        rows: Arc::new(rows),
        ..batch.clone()
    }
}

/// Shifts the row of each target by `by`. With `with_target` the target moves along. Returns whether each
/// target has a value.
fn shift_rows(batch: &mut MicroBatch, (by, with_target): (i32, bool)) -> Vec<bool> {
    let (mut rows, mut targets) = (batch.rows.to_vec(), batch.targets.to_vec());
    let mut has_value = vec![false; rows.len()];
    for own in (0..batch.sequence_rows.sequences()).map(|i| batch.sequence_rows.own_rows(i)) {
        // The last token of a sequence is only a target; it is known only where it is one.
        let last = batch.rows.iter().position(|&r| r as usize + 1 == own.end).map(|i| batch.targets[i]);
        for i in (0..rows.len()).filter(|&i| own.contains(&(batch.rows[i] as usize))) {
            let row = i64::from(batch.rows[i]) + i64::from(by);
            if row < own.start as i64 || row >= own.end as i64 {
                continue;
            }
            let next = row as usize + 1;
            let follows = if next < own.end { batch.tokens.get(next).copied() } else { last };
            match (with_target, follows) {
                (false, _) => rows[i] = row as u32,
                (true, Some(token)) => (rows[i], targets[i]) = (row as u32, token),
                (true, None) => continue,
            }
            has_value[i] = true;
        }
    }
    (batch.rows, batch.targets) = (Arc::new(rows), Arc::new(targets));
    has_value
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::learner::micro_batch::Sequence;

    fn batch() -> MicroBatch {
        let sequence =
            |from: u32| Sequence { tokens: (from..from + 4).collect(), mask: vec![false, true, true, true] };
        MicroBatch::split(&[sequence(10), sequence(20)], 100).remove(0)
    }

    #[test]
    fn a_doubled_start_moves_rows_and_leaves_targets() {
        let found = repeat_first_tokens(&batch());
        assert_eq!(*found.tokens, [10, 10, 11, 12, 20, 20, 21, 22]);
        assert_eq!(found.positions, [0, 1, 2, 3, 0, 1, 2, 3]);
        assert_eq!(*found.rows, [1, 2, 3, 5, 6, 7]);
        assert_eq!(found.targets, batch().targets);
    }

    #[test]
    fn a_shift_reads_the_row_beside_and_has_no_value_past_the_end() {
        let mut found = batch();
        assert_eq!(shift_rows(&mut found, (1, true)), [true, true, false, true, true, false]);
        assert_eq!((found.rows[0], found.targets[0]), (1, 12));
        assert_eq!((found.rows[1], found.targets[1]), (2, 13));
        let mut found = batch();
        assert_eq!(shift_rows(&mut found, (-1, false)), [false, true, true, false, true, true]);
        assert_eq!((found.rows[1], found.targets[1]), (0, 12));
    }
}
