//! Forward and backward passes of a client's data.

use super::datums::TrainingDatum;
use super::state::sequence_digest;
use super::wire::{
    ArrayRecord, BatchedTensor, F32, ForwardBackwardOutput, ForwardBackwardRequest, f32_bytes,
};
use crate::actor::{Actor, BatchPart, Columns, PassInput, PassSettings, PolicyColumns};
use crate::bad_input;
use crate::metrics::Progress;
use crate::model::forward::ForwardOptions;
use crate::policy::sum_loss::SumLoss;
use anyhow::{Context, Result, ensure};
use prost::Message;
use std::collections::BTreeMap;

/// A request for a pass, read and checked.
pub struct PassTask {
    loss: SumLoss,
    pub forward_only: bool,
    data: Vec<TrainingDatum>,
}

/// The result of a pass.
pub struct PassResult {
    pub output: Vec<u8>,
    pub loss: f64,
    pub tokens: usize,
    /// The largest difference between a sample's log-prob and the one here, over the tokens that the current
    /// weights are known to have sampled.
    pub mismatch: f64,
    pub known: usize,
    pub unknown: usize,
}

impl PassTask {
    /// Reads a request for a model with `vocabulary` tokens and sequences of up to `tokens_max`.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] that names the datum.
    pub fn read(request: ForwardBackwardRequest, vocabulary: usize, tokens_max: usize) -> Result<Self> {
        let mut config = request.loss_fn_config;
        for (key, value) in request.loss_fn_config_v2 {
            let number = value.number.ok_or_else(|| bad_input!("loss_fn_config: {key:?} is not a number"))?;
            config.insert(key, number);
        }
        let loss = SumLoss::new(&request.loss_fn, &config)?;
        ensure!(!request.data.is_empty(), bad_input!("the request has no data; send at least one datum"));
        let mut data = Vec::with_capacity(request.data.len());
        for (index, datum) in request.data.iter().enumerate() {
            let datum =
                TrainingDatum::read(datum, loss, vocabulary).map_err(|e| bad_input!("datum {index}: {e}"))?;
            let tokens = datum.sequence.tokens.len() - 1;
            if tokens > tokens_max {
                return Err(bad_input!(
                    "datum {index}: {tokens} tokens exceed this server's maximum of {tokens_max}"
                ));
            }
            data.push(datum);
        }
        Ok(Self { loss, forward_only: request.forward_only, data })
    }

    /// Returns the number of bytes of the result.
    pub fn result_bytes(&self) -> usize {
        self.data.iter().map(|datum| 64 + 5 * datum.targets.tokens.len()).sum()
    }

    /// Runs the pass. `has_sampled` tells whether the current weights sampled a sequence.
    ///
    /// # Errors
    /// Errors of [`Actor::forward_backward`].
    pub fn run(&self, actor: &mut Actor, has_sampled: &dyn Fn(&[u8; 16]) -> bool) -> Result<PassResult> {
        let targets: Vec<_> = self.data.iter().map(|datum| datum.targets.clone()).collect();
        let input = PassInput {
            sequences: self.data.iter().map(|datum| &datum.sequence).collect(),
            shares_prefixes: true,
            targets: Some(&targets),
            ..PassInput::default()
        };
        let settings = PassSettings::new(1.0, ForwardOptions::default());
        let progress = |_| Progress::hidden();
        let loss_of = |part: &BatchPart, columns: &PolicyColumns| {
            let (mut loss, mut gradient) = (0.0, columns.zeros());
            for (index, bounds) in part.sequences.clone().zip(part.cu_targets.windows(2)) {
                let own = bounds[0]..bounds[1];
                let input = self.data[index].loss_input(&columns.log_probs[own.clone()]);
                let computed = self.loss.compute(&input);
                let (value, slope) = computed.with_context(|| format!("datum {index}"))?;
                loss += value;
                gradient.log_probs[own].copy_from_slice(&slope);
            }
            Ok((gradient, loss))
        };
        let (forward, loss) = match self.forward_only {
            false => {
                let (forward, losses) = actor.forward_backward(&input, settings, &loss_of, &progress)?;
                (forward, losses.into_iter().sum::<f64>())
            }
            true => {
                let forward = actor.forward::<PolicyColumns>(&input, settings, &progress)?;
                let mut cu_targets = vec![0];
                for datum in &self.data {
                    cu_targets.push(cu_targets.last().unwrap_or(&0) + datum.targets.tokens.len());
                }
                let all = 0..cu_targets.last().copied().unwrap_or(0);
                let part = BatchPart { sequences: 0..self.data.len(), targets: all, cu_targets };
                let (_, loss) = loss_of(&part, &forward.columns)?;
                (forward, loss)
            }
        };
        let log_probs = &forward.columns.log_probs;
        let mut result = PassResult {
            output: vec![],
            loss,
            tokens: self.data.iter().map(|datum| datum.sequence.tokens.len() - 1).sum(),
            mismatch: 0.0,
            known: 0,
            unknown: 0,
        };
        let (mut start, mut outputs) = (0, Vec::with_capacity(self.data.len()));
        for datum in &self.data {
            let own = &log_probs[start..start + datum.targets.tokens.len()];
            start += own.len();
            let sampled = &datum.sampled_log_probs;
            if !sampled.is_empty() {
                let is_known = has_sampled(&sequence_digest(&datum.sequence.tokens));
                for (own, sampled) in own.iter().zip(sampled).filter(|(_, sampled)| **sampled != 0.0) {
                    match is_known {
                        true => {
                            result.known += 1;
                            let difference = (f64::from(*own) - f64::from(*sampled)).abs();
                            result.mismatch = result.mismatch.max(difference);
                        }
                        false => result.unknown += 1,
                    }
                }
            }
            outputs.push((datum.columns, own));
        }
        result.output = encode(&outputs, &result);
        Ok(result)
    }
}

/// Encodes log-probs, one array for each datum. Consecutive datums with equally long rows are one record.
fn encode(outputs: &[(Option<usize>, &[f32])], result: &PassResult) -> Vec<u8> {
    let record = |group: &[(Option<usize>, &[f32])]| {
        let mut offsets = vec![0i64];
        for (_, values) in group {
            offsets.push(offsets.last().unwrap_or(&0) + 4 * values.len() as i64);
        }
        let tensor = BatchedTensor {
            data: f32_bytes(group.iter().flat_map(|(_, values)| values.iter().copied())),
            offsets: offsets.into_iter().flat_map(i64::to_le_bytes).collect(),
            dtype: F32,
            trailing_shape: group[0].0.into_iter().map(|columns| columns as i64).collect(),
        };
        ArrayRecord {
            type_tag: String::new(),
            fields: BTreeMap::from([("logprobs".to_owned(), tensor)]),
            num_datums: group.len() as i64,
        }
    };
    let records = outputs.chunk_by(|a, b| a.0 == b.0).map(record).collect();
    let mut metrics = BTreeMap::from([("loss:sum".to_owned(), result.loss)]);
    if result.known + result.unknown > 0 {
        metrics.insert("mismatch:max".to_owned(), result.mismatch);
        metrics.insert("mismatch_tokens:sum".to_owned(), result.known as f64);
        metrics.insert("mismatch_unknown_tokens:sum".to_owned(), result.unknown as f64);
    }
    let loss_fn_output_type = "ArrayRecord".to_owned();
    ForwardBackwardOutput { loss_fn_output_type, loss_fn_outputs: records, metrics }.encode_to_vec()
}
