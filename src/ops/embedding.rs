//! `y_t = W[id_t]` for `W [V, H]`. Backward: rows of `dW` are sums over their tokens in token order.

use super::cpu::{buffer, edit, host_values, values};
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
        let weight = values(weight, layout)?;
        let mut out = Vec::with_capacity(self.ids.len() * width);
        for &id in self.ids.iter() {
            out.extend_from_slice(&weight[id as usize * width..(id as usize + 1) * width]);
        }
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
        // Only rows that occur are touched: each is summed over its tokens in their order, then added.
        let mut order: Vec<usize> = (0..self.ids.len()).collect();
        order.sort_by_key(|&t| (self.ids[t], t));
        table.add(|dw| {
            edit(dw, |dw| {
                let mut sum = buffer(width);
                for tokens in order.chunk_by(|&a, &b| self.ids[a] == self.ids[b]) {
                    sum.fill(0.0);
                    for &t in tokens {
                        let g = &grad[t * width..(t + 1) * width];
                        sum.iter_mut().zip(g).for_each(|(s, &g)| *s += g);
                    }
                    let id = self.ids[tokens[0]] as usize;
                    let row = &mut dw[id * width..(id + 1) * width];
                    row.iter_mut().zip(&sum).for_each(|(w, &s)| *w += s);
                }
                Ok(())
            })
        })?;
        Ok(None)
    }
}
