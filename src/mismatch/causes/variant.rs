//! The model's computation with a cause applied.

use super::{Cause, WeightEdit};
use crate::actor::micro_batch::MicroBatch;
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

/// The settings of a computation. A cause may change each of them.
pub struct Variant {
    pub config: Config,
    /// Another RoPE table: the angle per position of each pair of dimensions, in radians, and the factor by
    /// which cosine and sine are multiplied.
    pub rope: Option<(Vec<f32>, f64)>,
    pub forward: ForwardOptions,
    pub weight_edits: Vec<WeightEdit>,
    /// Whether the weights are those before the last update.
    pub use_earlier_weights: bool,
    /// Whether the first token of a row is fed twice.
    pub double_start_token: bool,
    pub shift: Option<Shift>,
    pub head: HeadSettings,
}

/// A shift between the targets and the rows from which their log-probs are read.
#[derive(Debug, Clone, Copy)]
pub struct Shift {
    /// Number of rows that is added to the row of each target.
    pub offset: i32,
    /// Whether the target is also replaced by the token that follows the new row.
    pub moves_target: bool,
}

impl Variant {
    /// Returns the unchanged computation, or the computation with `cause` applied.
    pub fn new(config: &Config, cause: Option<&Cause>) -> Self {
        let mut variant = Self {
            config: config.clone(),
            rope: None,
            forward: ForwardOptions::default(),
            weight_edits: vec![],
            use_earlier_weights: false,
            double_start_token: false,
            shift: None,
            head: HeadSettings::default(),
        };
        if let Some(cause) = cause {
            cause.apply(&mut variant);
        }
        variant
    }

    /// Rounds the weights and the activations (residual stream, outputs of norms) to the given numbers of
    /// mantissa bits.
    pub fn set_rounding(&mut self, weight_bits: u32, activation_bits: u32) {
        let rounding = WeightRounding { mxfp4: false, bits: Some(weight_bits) };
        self.weight_edits.push(Arc::new(move |_| Ok(rounding.weight_change())));
        self.forward.mantissa_bits = Some(activation_bits);
    }

    /// Returns the model. Its context has space for one more token, because the first token may be fed twice.
    pub fn model(&self, sequence_tokens_max: usize) -> Model {
        let (config, positions) = (self.config.clone(), sequence_tokens_max + 1);
        match &self.rope {
            None => Model::new(config, positions),
            Some((frequencies, factor)) => Model::with_rope(config, positions, frequencies, *factor),
        }
    }

    /// Returns the policy of `model` with the weights of this variant.
    ///
    /// # Errors
    /// When a tensor is missing, or an edit does not fit.
    pub fn policy<'a>(
        &self,
        model: &'a Model,
        parameters: &Parameters,
        earlier: Option<&Parameters>,
    ) -> Result<PolicyView<'a>> {
        let parameters = match self.use_earlier_weights {
            true => earlier.context("the earlier weights are missing")?,
            false => parameters,
        };
        let weights = if self.weight_edits.is_empty() {
            parameters.frozen_weights(None)?
        } else {
            let changes: Vec<WeightChange> =
                self.weight_edits.iter().map(|edit| edit(parameters)).collect::<Result<_>>()?;
            parameters.on_demand_weights(Arc::new(move |spec, weight| {
                changes.iter().try_fold(weight, |weight, change| change(spec, weight))
            }))?
        };
        Ok(PolicyView { model, weights: Arc::new(weights), forward: self.forward })
    }

    /// Returns `batch` with the changes of this variant. Also returns whether each target has a value: with a
    /// shift, a target at the end of a row has no value.
    pub fn change_batch(&self, batch: &MicroBatch) -> (MicroBatch, Vec<bool>) {
        let mut batch = if self.double_start_token { repeat_first_tokens(batch) } else { batch.clone() };
        match self.shift {
            Some(shift) => {
                let has_value = shift_rows(&mut batch, shift);
                (batch, has_value)
            }
            None => {
                let has_value = vec![true; batch.targets.len()];
                (batch, has_value)
            }
        }
    }
}

/// Repeats the first token of every sequence. Sequences do not share rows here.
fn repeat_first_tokens(batch: &MicroBatch) -> MicroBatch {
    let (mut tokens, mut positions, mut cu_seqlens) = (vec![], vec![], vec![0]);
    let mut rows = Vec::with_capacity(batch.rows.len());
    for i in 0..batch.sequence_rows.sequences() {
        let sequence = batch.sequence_rows.own_rows(i);
        // Number of tokens added so far: one per sequence.
        let added = i as u32 + 1;
        rows.extend(batch.rows.iter().filter(|&&r| sequence.contains(&(r as usize))).map(|r| r + added));
        tokens.extend(batch.tokens.get(sequence.start));
        tokens.extend_from_slice(&batch.tokens[sequence.clone()]);
        positions.extend(0..=sequence.len() as u32);
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

/// Applies `shift` to the batch. Returns whether each target has a value.
fn shift_rows(batch: &mut MicroBatch, shift: Shift) -> Vec<bool> {
    let (mut rows, mut targets) = (batch.rows.to_vec(), batch.targets.to_vec());
    let mut has_value = vec![false; rows.len()];
    for sequence in (0..batch.sequence_rows.sequences()).map(|i| batch.sequence_rows.own_rows(i)) {
        // The last token of a sequence is not an input. It is known only if it is a target.
        let last = batch.rows.iter().position(|&r| r as usize + 1 == sequence.end).map(|i| batch.targets[i]);
        for i in (0..rows.len()).filter(|&i| sequence.contains(&(batch.rows[i] as usize))) {
            let row = i64::from(batch.rows[i]) + i64::from(shift.offset);
            if row < sequence.start as i64 || row >= sequence.end as i64 {
                continue;
            }
            let next = row as usize + 1;
            let next_token = if next < sequence.end { batch.tokens.get(next).copied() } else { last };
            match (shift.moves_target, next_token) {
                (false, _) => rows[i] = row as u32,
                (true, Some(token)) => (rows[i], targets[i]) = (row as u32, token),
                (true, None) => continue,
            }
            has_value[i] = true;
        }
    }
    (batch.rows, batch.targets) = (Arc::new(rows), Arc::new(targets));
    if shift.moves_target {
        // Other tokens were not drawn from the kept tokens of these rows.
        batch.kept_tokens = None;
    }
    has_value
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::actor::micro_batch::Sequence;

    fn batch() -> MicroBatch {
        let sequence = |from: u32| Sequence {
            tokens: (from..from + 4).collect(),
            mask: vec![false, true, true, true],
            kept_tokens: vec![],
        };
        MicroBatch::split(&[sequence(10), sequence(20)], 100).remove(0)
    }

    #[test]
    fn a_doubled_start_moves_rows_and_leaves_targets() {
        let changed = repeat_first_tokens(&batch());
        assert_eq!(*changed.tokens, [10, 10, 11, 12, 20, 20, 21, 22]);
        assert_eq!(changed.positions, [0, 1, 2, 3, 0, 1, 2, 3]);
        assert_eq!(*changed.rows, [1, 2, 3, 5, 6, 7]);
        assert_eq!(changed.targets, batch().targets);
    }

    #[test]
    fn a_shift_reads_the_row_beside_and_has_no_value_past_the_end() {
        let mut changed = batch();
        let shift = Shift { offset: 1, moves_target: true };
        assert_eq!(shift_rows(&mut changed, shift), [true, true, false, true, true, false]);
        assert_eq!((changed.rows[0], changed.targets[0]), (1, 12));
        assert_eq!((changed.rows[1], changed.targets[1]), (2, 13));
        let mut changed = batch();
        let shift = Shift { offset: -1, moves_target: false };
        assert_eq!(shift_rows(&mut changed, shift), [false, true, true, false, true, true]);
        assert_eq!((changed.rows[1], changed.targets[1]), (0, 12));
    }
}
