//! The data of `forward_backward`: sequences with their targets and the inputs of the loss.

use super::wire::{self, SparseCsr};
use crate::actor::GivenTargets;
use crate::actor::micro_batch::Sequence;
use crate::bad_input;
use crate::policy::sum_loss::{SumLoss, SumLossInput};
use anyhow::{Result, ensure};
use std::collections::BTreeMap;

/// Maximum number of targets of a request, all positions and columns together.
const TARGETS_MAX: usize = 1 << 22;

/// One sequence of a request.
pub struct TrainingDatum {
    pub sequence: Sequence,
    pub targets: GivenTargets,
    /// Targets of each position, if there may be several.
    pub columns: Option<usize>,
    weights: Vec<f32>,
    pub sampled_log_probs: Vec<f32>,
    advantages: Vec<f32>,
    ratio_mask: Vec<f32>,
}

/// A tensor of a datum: its shape, and its values or token ids in rows.
struct Values {
    shape: Vec<usize>,
    values: Vec<f64>,
}

impl TrainingDatum {
    /// Reads a datum for `loss` of a model with `vocabulary` tokens.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when an input is missing, has another shape or is not finite.
    pub fn read(datum: &wire::Datum, loss: SumLoss, vocabulary: usize) -> Result<Self> {
        let mut tokens = vec![];
        for chunk in &datum.model_input {
            let Some(text) = &chunk.encoded_text else {
                return Err(bad_input!("an input has an image or audio; this model reads text alone"));
            };
            let ids = wire::numbers(&text.tokens, i32::from_le_bytes);
            let ids = ids.ok_or_else(|| bad_input!("a chunk of tokens has a broken int32"))?;
            tokens.extend(ids.into_iter().map(|id| id as u32));
        }
        let positions = tokens.len();
        ensure!(positions > 0, bad_input!("an input has no token; send at least one"));
        let names = std::iter::once("target_tokens").chain(loss.inputs().iter().copied());
        let mut inputs = BTreeMap::new();
        let mut columns = None;
        for name in names {
            let Some(tensor) = datum.loss_fn_inputs.get(name) else {
                return Err(bad_input!("loss_fn_inputs has no {name:?}, which this loss reads"));
            };
            let read = Values::read(name, tensor)?;
            match *read.shape {
                [rows] if rows == positions => {}
                [rows, count] if rows == positions && loss == SumLoss::CrossEntropy && count > 0 => {
                    columns = Some(count);
                }
                _ => {
                    return Err(bad_input!(
                        "{name:?} has shape {:?}, but the input has {positions} tokens; each position needs one value{}",
                        read.shape,
                        if loss == SumLoss::CrossEntropy { ", or a row of them" } else { "" }
                    ));
                }
            }
            inputs.insert(name, read);
        }
        let count = positions * columns.unwrap_or(1);
        if inputs.values().any(|input| input.values.len() != count) {
            return Err(bad_input!("\"target_tokens\" and \"weights\" differ in shape"));
        }
        let mut take = |name: &str| inputs.remove(name).map_or(vec![], |input| input.values);
        let targets = take("target_tokens");
        let token = |id: &f64| (*id >= 0.0 && *id < vocabulary as f64).then_some(*id as u32);
        let targets: Option<Vec<u32>> = targets.iter().map(token).collect();
        let targets =
            targets.ok_or_else(|| bad_input!("a target is not a token; ids are below {vocabulary}"))?;
        let mut floats =
            |name: &str| -> Vec<f32> { take(name).into_iter().map(|value| value as f32).collect() };
        let (weights, advantages) = (floats("weights"), floats("advantages"));
        let (sampled_log_probs, ratio_mask) = (floats("logprobs"), floats("sequence_ratio_mask"));
        for (name, values) in
            [("weights", &weights), ("advantages", &advantages), ("logprobs", &sampled_log_probs)]
        {
            if let Some(value) = values.iter().find(|value| !value.is_finite()) {
                return Err(bad_input!("{name:?} has the value {value}; it must be finite"));
            }
        }
        // Sampled tokens have a log-prob other than 0, also where their advantage is 0.
        let has_gradient = |index: usize| {
            [&weights, &advantages, &sampled_log_probs]
                .iter()
                .any(|values| values.get(index).is_some_and(|value| *value != 0.0))
        };
        let with_gradient = (0..count).filter(|index| has_gradient(*index)).count();
        let column_count = columns.unwrap_or(1);
        let positions = (0..count).map(|index| (index / column_count) as u32).collect();
        // The last token of a sequence is only a target. Here it stands for the targets that are given.
        tokens.push(targets.last().copied().unwrap_or_default());
        let mask = vec![false; tokens.len()];
        let sequence = Sequence { tokens, mask, kept_tokens: vec![] };
        let targets = GivenTargets { positions, tokens: targets, with_gradient };
        Ok(Self { sequence, targets, columns, weights, sampled_log_probs, advantages, ratio_mask })
    }

    /// Returns the loss's input for the log-probs of the datum's targets.
    pub fn loss_input<'a>(&'a self, log_probs: &'a [f32]) -> SumLossInput<'a> {
        SumLossInput {
            log_probs,
            weights: &self.weights,
            sampled_log_probs: &self.sampled_log_probs,
            advantages: &self.advantages,
            ratio_mask: &self.ratio_mask,
        }
    }
}

impl Values {
    fn read(name: &str, tensor: &wire::Tensor) -> Result<Self> {
        let shape: Option<Vec<usize>> = tensor.shape.iter().map(|&size| usize::try_from(size).ok()).collect();
        let size = |shape: &[usize]| shape.iter().try_fold(1usize, |a, &b| a.checked_mul(b));
        let wrong = |why: &str| bad_input!("{name:?}: {why}");
        let count = shape.as_deref().and_then(size).filter(|count| *count <= TARGETS_MAX);
        let (Some(shape), Some(count)) = (shape, count) else {
            return Err(wrong(&format!("its shape {:?} has more than {TARGETS_MAX} values", tensor.shape)));
        };
        let numbers = |bytes: &[u8]| -> Option<Vec<f64>> {
            match tensor.dtype {
                wire::F32 => wire::numbers(bytes, |bytes| f64::from(f32::from_le_bytes(bytes))),
                wire::I64 => wire::numbers(bytes, |bytes| i64::from_le_bytes(bytes) as f64),
                wire::I32 => wire::numbers(bytes, |bytes| f64::from(i32::from_le_bytes(bytes))),
                _ => None,
            }
        };
        let broken = || wrong("its values must be float32 or int64, as many as its shape says");
        let values = match (&tensor.dense, &tensor.sparse_csr) {
            (_, Some(sparse)) => {
                let values = numbers(&sparse.values).ok_or_else(broken)?;
                let [rows, columns] = *shape else { return Err(wrong("a sparse tensor must be a matrix")) };
                scatter(sparse, values, (rows, columns))
                    .ok_or_else(|| wrong("its sparse indices are broken"))?
            }
            (dense, None) => numbers(dense.as_deref().unwrap_or_default())
                .filter(|v| v.len() == count)
                .ok_or_else(broken)?,
        };
        // A tensor without a shape is a list.
        let shape = if tensor.shape.is_empty() { vec![values.len()] } else { shape };
        Ok(Self { shape, values })
    }
}

/// Returns the dense values of a sparse matrix; `None` if an index is out of range.
fn scatter(sparse: &SparseCsr, values: Vec<f64>, (rows, columns): (usize, usize)) -> Option<Vec<f64>> {
    let indices = |bytes: &[u8]| -> Option<Vec<usize>> {
        let numbers = wire::numbers(bytes, i64::from_le_bytes)?;
        numbers.into_iter().map(|index| usize::try_from(index).ok()).collect()
    };
    let (starts, column_of) = (indices(&sparse.crow_indices)?, indices(&sparse.col_indices)?);
    let is_whole = starts.len() == rows + 1 && starts.first() == Some(&0) && starts.is_sorted();
    if !is_whole || starts.last() != Some(&values.len()) || column_of.len() != values.len() {
        return None;
    }
    let mut dense = vec![0.0; rows * columns];
    for (row, range) in starts.windows(2).enumerate() {
        for index in range[0]..range[1] {
            let column = column_of[index];
            *dense.get_mut(row * columns + column).filter(|_| column < columns)? = values[index];
        }
    }
    Some(dense)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(dtype: i32, values: &[f64], shape: &[i64]) -> wire::Tensor {
        let dense = match dtype {
            wire::F32 => values.iter().flat_map(|&value| (value as f32).to_le_bytes()).collect(),
            _ => values.iter().flat_map(|&value| (value as i64).to_le_bytes()).collect(),
        };
        wire::Tensor { dense: Some(dense), dtype, shape: shape.to_vec(), ..wire::Tensor::default() }
    }

    fn datum(tokens: &[i32], inputs: &[(&str, wire::Tensor)]) -> wire::Datum {
        let tokens = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        wire::Datum {
            model_input: vec![wire::Chunk { encoded_text: Some(wire::EncodedText { tokens }) }],
            loss_fn_inputs: inputs
                .iter()
                .map(|(name, tensor)| ((*name).to_owned(), tensor.clone()))
                .collect(),
        }
    }

    #[test]
    fn sparse_targets_are_dense_ones_with_zeros() {
        let indices =
            |values: &[i64]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
        let sparse = |dtype, values: Vec<u8>, columns: &[i64]| wire::Tensor {
            sparse_csr: Some(SparseCsr {
                values,
                crow_indices: indices(&[0, 2, 3]),
                col_indices: indices(columns),
            }),
            dtype,
            shape: vec![2, 3],
            ..wire::Tensor::default()
        };
        let weights = [0.5f32, 0.25, 1.0].iter().flat_map(|value| value.to_le_bytes()).collect();
        let inputs = [
            ("target_tokens", sparse(wire::I64, indices(&[7, 8, 9]), &[0, 2, 1])),
            ("weights", sparse(wire::F32, weights, &[0, 2, 1])),
        ];
        let read = TrainingDatum::read(&datum(&[1, 2], &inputs), SumLoss::CrossEntropy, 10).unwrap();
        assert_eq!(read.targets.tokens, [7, 0, 8, 0, 9, 0]);
        assert_eq!(read.targets.positions, [0, 0, 0, 1, 1, 1]);
        assert_eq!((read.weights, read.columns), (vec![0.5, 0.0, 0.25, 0.0, 1.0, 0.0], Some(3)));
        assert_eq!(read.targets.with_gradient, 3);
        let inputs = [
            ("target_tokens", sparse(wire::I64, indices(&[7, 8, 9]), &[0, 3, 1])),
            ("weights", tensor(wire::F32, &[0.0; 6], &[2, 3])),
        ];
        let error = TrainingDatum::read(&datum(&[1, 2], &inputs), SumLoss::CrossEntropy, 10).err().unwrap();
        assert!(error.to_string().contains("indices are broken"), "{error}");
    }

    #[test]
    fn what_does_not_fit_is_refused_with_its_name() {
        let targets = tensor(wire::I64, &[3.0, 4.0], &[2]);
        let ones = |count: i64| tensor(wire::F32, &vec![1.0; count as usize], &[count]);
        let text = |inputs: &[(&str, wire::Tensor)], loss: SumLoss| {
            TrainingDatum::read(&datum(&[1, 2], inputs), loss, 5).err().unwrap().to_string()
        };
        let ce = SumLoss::CrossEntropy;
        assert!(text(&[("target_tokens", targets.clone())], ce).contains("weights"));
        assert!(text(&[("target_tokens", targets.clone()), ("weights", ones(3))], ce).contains("2 tokens"));
        let high = tensor(wire::I64, &[3.0, 5.0], &[2]);
        assert!(text(&[("target_tokens", high), ("weights", ones(2))], ce).contains("below 5"));
        let huge = wire::Tensor { shape: vec![1 << 40, 1 << 40], ..ones(2) };
        assert!(text(&[("target_tokens", targets.clone()), ("weights", huge)], ce).contains("more than"));
        let nan = tensor(wire::F32, &[f64::NAN, 0.0], &[2]);
        assert!(text(&[("target_tokens", targets), ("weights", nan)], ce).contains("finite"));
    }
}
