//! `y_t = W[id_t]` for `W [V, H]`. Backward: rows of `dW` are sums over their tokens in token order.

use super::cpu::{buffer, host_values, values};
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};
use std::sync::Arc;

/// Rows `ids` of `weight`, `[T, H]`.
///
/// # Errors
/// When an id is not below `V`.
pub fn embedding(weight: &Tensor, ids: &Arc<Vec<u32>>) -> Result<Tensor> {
    let (vocabulary, _) = weight.dims2()?;
    if let Some(id) = ids.iter().find(|&&id| id as usize >= vocabulary) {
        bail!("embedding: token {id} in a vocabulary of {vocabulary}");
    }
    weight.apply_op1(Embedding { ids: ids.clone() })
}

/// Rows `rows` of `x [T, H]`, such as those that predict a trained token. Differentiable.
///
/// # Errors
/// When a row does not exist.
pub fn select_rows(x: &Tensor, rows: &Arc<Vec<u32>>) -> Result<Tensor> {
    embedding(&x.contiguous()?, rows)
}

struct Embedding {
    ids: Arc<Vec<u32>>,
}

impl CustomOp1 for Embedding {
    fn name(&self) -> &'static str {
        "embedding"
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
        let mut dw = buffer(weight.elem_count());
        for (&id, g) in self.ids.iter().zip(host_values(&grad)?.chunks_exact(width)) {
            let row = &mut dw[id as usize * width..(id as usize + 1) * width];
            for (w, &g) in row.iter_mut().zip(g) {
                *w += g;
            }
        }
        Ok(Some(Tensor::from_vec(dw, weight.shape(), weight.device())?))
    }
}
