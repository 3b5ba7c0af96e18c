//! `y_t = W[id_t]` for `W [V, H]`. Backward: rows of `dW` are sums over their tokens in token order.
//!
//! An embedding that is the head too lies as the head reads it, `[H, V]`; its columns are then what rows are here.

use super::cpu::{buffer, edit, gathered_rows, host_values, values};
use super::parameter::{Gradient, Parameter};
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};
use std::sync::Arc;

/// Rows `ids` of `weight`, `[T, H]`.
///
/// # Errors
/// When an id is not below `V`.
pub fn embedding(weight: &Parameter, ids: &Arc<Vec<u32>>) -> Result<Tensor> {
    let vocabulary = weight.values().dim(0)?;
    if let Some(id) = ids.iter().find(|&&id| id as usize >= vocabulary) {
        bail!("embedding: token {id} in a vocabulary of {vocabulary}");
    }
    weight.values().apply_op1(Rows { ids: ids.clone(), table: weight.gradient() })
}

/// Columns `ids` of `weight [H, V]`, as rows: `[T, H]`.
///
/// # Errors
/// When an id is not below `V`.
pub fn tied_embedding(weight: &Parameter, ids: &Arc<Vec<u32>>) -> Result<Tensor> {
    let vocabulary = weight.values().dim(1)?;
    if let Some(id) = ids.iter().find(|&&id| id as usize >= vocabulary) {
        bail!("tied_embedding: token {id} in a vocabulary of {vocabulary}");
    }
    weight.values().apply_op1(Columns { ids: ids.clone(), table: weight.gradient() })
}

/// Rows `rows` of `x [T, H]`, such as those that predict a trained token. Differentiable.
///
/// # Errors
/// When a row does not exist.
pub fn select_rows(x: &Tensor, rows: &Arc<Vec<u32>>) -> Result<Tensor> {
    let count = x.dim(0)?;
    if let Some(row) = rows.iter().find(|&&row| row as usize >= count) {
        bail!("select_rows: row {row} of {count}");
    }
    x.contiguous()?.apply_op1(Rows { ids: rows.clone(), table: None })
}

struct Rows {
    ids: Arc<Vec<u32>>,
    /// Where the gradient of a table that is a parameter goes.
    table: Option<Gradient>,
}

impl CustomOp1 for Rows {
    fn name(&self) -> &'static str {
        "rows"
    }

    fn cpu_fwd(&self, weight: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let width = layout.shape().dims2()?.1;
        let out = gathered_rows(values(weight, layout)?, &self.ids, width);
        Ok((CpuStorage::F32(out), Shape::from((self.ids.len(), width))))
    }

    fn bwd(&self, weight: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let width = weight.dim(1)?;
        let grad = grad.contiguous()?;
        let grad = host_values(&grad)?;
        let Some(table) = &self.table else {
            let mut dw = buffer(weight.elem_count());
            for (&id, g) in self.ids.iter().zip(grad.chunks_exact(width)) {
                let row = &mut dw[id as usize * width..(id as usize + 1) * width];
                row.iter_mut().zip(g).for_each(|(w, &g)| *w += g);
            }
            return Ok(Some(Tensor::from_vec(dw, weight.shape(), weight.device())?));
        };
        table.add(|dw| {
            edit(dw, |dw| {
                each_sum(&self.ids, &grad, width, |id, sum| {
                    let row = &mut dw[id * width..(id + 1) * width];
                    row.iter_mut().zip(sum).for_each(|(w, &s)| *w += s);
                });
                Ok(())
            })
        })?;
        Ok(None)
    }
}

/// The rows of `grad` summed by id: only ids that occur, in ascending order, each over its tokens in their order.
fn each_sum(ids: &[u32], grad: &[f32], width: usize, mut add: impl FnMut(usize, &[f32])) {
    let mut order: Vec<usize> = (0..ids.len()).collect();
    order.sort_by_key(|&t| (ids[t], t));
    let mut sum = buffer(width);
    for tokens in order.chunk_by(|&a, &b| ids[a] == ids[b]) {
        sum.fill(0.0);
        for &t in tokens {
            let g = &grad[t * width..(t + 1) * width];
            sum.iter_mut().zip(g).for_each(|(s, &g)| *s += g);
        }
        add(ids[tokens[0]] as usize, &sum);
    }
}

struct Columns {
    ids: Arc<Vec<u32>>,
    table: Option<Gradient>,
}

impl CustomOp1 for Columns {
    fn name(&self) -> &'static str {
        "columns"
    }

    fn cpu_fwd(&self, weight: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (width, vocabulary) = layout.shape().dims2()?;
        let weight = values(weight, layout)?;
        let mut out = Vec::with_capacity(self.ids.len() * width);
        for &id in self.ids.iter() {
            out.extend((0..width).map(|h| weight[h * vocabulary + id as usize]));
        }
        Ok((CpuStorage::F32(out), Shape::from((self.ids.len(), width))))
    }

    fn bwd(&self, weight: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let Some(table) = &self.table else { return Ok(None) };
        let (width, vocabulary) = weight.dims2()?;
        let grad = grad.contiguous()?;
        let grad = host_values(&grad)?;
        table.add(|dw| {
            edit(dw, |dw| {
                each_sum(&self.ids, &grad, width, |id, sum| {
                    sum.iter().enumerate().for_each(|(h, &s)| dw[h * vocabulary + id] += s);
                });
                Ok(())
            })
        })?;
        Ok(None)
    }
}
