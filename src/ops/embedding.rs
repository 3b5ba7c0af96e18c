//! Token embedding: `y_t = W[id_t]` for `W [V, H]`.
//!
//! Backward pass: each row of `dW` is the sum of the gradients of its tokens, in token order.
//!
//! A tied embedding has the layout of the LM head, `[H, V]`, so its columns are looked up instead of rows.
//!
//! On a GPU values are bf16, and `H` is a multiple of 8. If products by `W` are in bf16 on a CPU, the values
//! are rounded to bf16.

use super::buffer::{buffer, zeros};
use super::cpu::{change, gather_rows, host_values};
use super::cuda::{add_columns, add_rows, sum_rows, take_columns, take_rows};
use super::graph::{apply, contiguous};
use super::operation::{DeviceArgument, HostArgument, Operation};
use super::parameter::{GradientTarget, Parameter};
use super::product::Precision;
use candle_core::{CpuStorage, CudaStorage, Result, Shape, Tensor, bail};
use half::bf16;
use std::sync::Arc;

/// Returns rows `ids` of `weight`, `[T, H]`.
///
/// # Errors
/// When an id is not below `V`.
pub fn embedding(weight: &Parameter, ids: &Arc<Vec<u32>>) -> Result<Tensor> {
    let vocabulary = weight.values().dim(0)?;
    if let Some(id) = ids.iter().find(|&&id| id as usize >= vocabulary) {
        bail!("embedding: token {id} in a vocabulary of {vocabulary}");
    }
    apply([weight.values()], Rows { ids: ids.clone(), table: weight.gradient(), rounds: rounds(weight) })
}

/// Returns columns `ids` of `weight [H, V]` as rows, `[T, H]`.
///
/// # Errors
/// When an id is not below `V`.
pub fn tied_embedding(weight: &Parameter, ids: &Arc<Vec<u32>>) -> Result<Tensor> {
    let vocabulary = weight.values().dim(1)?;
    if let Some(id) = ids.iter().find(|&&id| id as usize >= vocabulary) {
        bail!("tied_embedding: token {id} in a vocabulary of {vocabulary}");
    }
    apply([weight.values()], Columns { ids: ids.clone(), table: weight.gradient(), rounds: rounds(weight) })
}

/// Returns rows `rows` of `x [T, H]`, for example the rows that predict a trained token. Differentiable.
///
/// # Errors
/// When a row does not exist.
pub fn select_rows(x: &Tensor, rows: &Arc<Vec<u32>>) -> Result<Tensor> {
    let count = x.dim(0)?;
    if let Some(row) = rows.iter().find(|&&row| row as usize >= count) {
        bail!("select_rows: row {row} of {count}");
    }
    apply([&contiguous(x)?], Rows { ids: rows.clone(), table: None, rounds: false })
}

/// Returns whether a lookup in `weight` rounds to bf16, as the products by `weight` do.
fn rounds(weight: &Parameter) -> bool {
    weight.precision() == Precision::Bf16Dot
}

fn round_to_bf16(values: &mut [f32]) {
    values.iter_mut().for_each(|value| *value = bf16::from_f32(*value).to_f32());
}

struct Rows {
    ids: Arc<Vec<u32>>,
    /// The target of the gradient, if the table is a trainable parameter.
    table: Option<GradientTarget>,
    /// Whether a CPU rounds the values to bf16.
    rounds: bool,
}

impl Operation<1> for Rows {
    const NAME: &'static str = "rows";

    fn cpu(&self, [weight]: [HostArgument; 1]) -> Result<(CpuStorage, Shape)> {
        let width = weight.shape().dims2()?.1;
        let mut out = gather_rows(weight.values()?, &self.ids, width);
        if self.rounds {
            round_to_bf16(&mut out);
        }
        Ok((CpuStorage::F32(out), Shape::from((self.ids.len(), width))))
    }

    fn cuda(&self, [weight]: [DeviceArgument; 1]) -> Result<(CudaStorage, Shape)> {
        take_rows(weight, &self.ids)
    }

    fn backward(&self, [weight]: [&Tensor; 1], _: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; 1]> {
        let (rows, width) = weight.dims2()?;
        if weight.device().is_cuda() {
            let by_id = TokensById::new(&self.ids);
            let Some(table) = &self.table else { return Ok([Some(sum_rows(grad, &by_id, rows)?)]) };
            table.add(|dw| add_rows(dw, grad, &by_id))?;
            return Ok([None]);
        }
        let grad = host_values(grad)?;
        let Some(table) = &self.table else {
            let mut dw = zeros(weight.elem_count());
            for (&id, g) in self.ids.iter().zip(grad.chunks_exact(width)) {
                let row = &mut dw[id as usize * width..(id as usize + 1) * width];
                row.iter_mut().zip(g).for_each(|(w, &g)| *w += g);
            }
            return Ok([Some(Tensor::from_vec(dw, weight.shape(), weight.device())?)]);
        };
        table.add(|dw| {
            change(dw, |dw| {
                each_sum(&self.ids, &grad, width, |id, sum| {
                    let row = &mut dw[id * width..(id + 1) * width];
                    row.iter_mut().zip(sum).for_each(|(w, &s)| *w += s);
                })
            })
        })?;
        Ok([None])
    }
}

/// Token indices grouped by id.
pub(super) struct TokensById {
    /// The distinct ids, ascending.
    pub ids: Vec<u32>,
    /// For each id, the index in `order` of its first token. The last entry is the length of `order`.
    pub starts: Vec<u32>,
    /// Token indices sorted by id, then by position.
    pub order: Vec<u32>,
}

impl TokensById {
    pub(super) fn new(token_ids: &[u32]) -> Self {
        let mut order: Vec<u32> = (0..token_ids.len() as u32).collect();
        let id = |token: u32| token_ids[token as usize];
        order.sort_by_key(|&token| (id(token), token));
        let (mut ids, mut starts) = (vec![], vec![0]);
        for tokens in order.chunk_by(|&a, &b| id(a) == id(b)) {
            ids.push(id(tokens[0]));
            starts.push(starts[starts.len() - 1] + tokens.len() as u32);
        }
        Self { ids, starts, order }
    }
}

/// Sums the rows of `grad` by id, in token order. Calls `add(id, sum)` for the ids that occur, in ascending
/// order.
fn each_sum(ids: &[u32], grad: &[f32], width: usize, mut add: impl FnMut(usize, &[f32])) {
    let TokensById { ids, starts, order } = TokensById::new(ids);
    let mut sum = buffer(width);
    for (id, span) in ids.into_iter().zip(starts.windows(2)) {
        sum.fill(0.0);
        for &t in &order[span[0] as usize..span[1] as usize] {
            let g = &grad[t as usize * width..(t as usize + 1) * width];
            sum.iter_mut().zip(g).for_each(|(s, &g)| *s += g);
        }
        add(id as usize, &sum);
    }
}

struct Columns {
    ids: Arc<Vec<u32>>,
    table: Option<GradientTarget>,
    rounds: bool,
}

impl Operation<1> for Columns {
    const NAME: &'static str = "columns";

    fn cpu(&self, [weight]: [HostArgument; 1]) -> Result<(CpuStorage, Shape)> {
        let (width, vocabulary) = weight.shape().dims2()?;
        let weight = weight.values()?;
        let mut out = Vec::with_capacity(self.ids.len() * width);
        for &id in self.ids.iter() {
            out.extend((0..width).map(|h| weight[h * vocabulary + id as usize]));
        }
        if self.rounds {
            round_to_bf16(&mut out);
        }
        Ok((CpuStorage::F32(out), Shape::from((self.ids.len(), width))))
    }

    fn cuda(&self, [weight]: [DeviceArgument; 1]) -> Result<(CudaStorage, Shape)> {
        take_columns(weight, &self.ids)
    }

    fn backward(&self, [weight]: [&Tensor; 1], _: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; 1]> {
        let Some(table) = &self.table else { return Ok([None]) };
        let (width, vocabulary) = weight.dims2()?;
        if weight.device().is_cuda() {
            let by_id = TokensById::new(&self.ids);
            table.add(|dw| add_columns(dw, grad, &by_id))?;
            return Ok([None]);
        }
        let grad = host_values(grad)?;
        table.add(|dw| {
            change(dw, |dw| {
                each_sum(&self.ids, &grad, width, |id, sum| {
                    sum.iter().enumerate().for_each(|(h, &s)| dw[h * vocabulary + id] += s);
                })
            })
        })?;
        Ok([None])
    }
}
