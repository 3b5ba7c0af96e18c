//! `y = x · W + b` with `x [T, in]`, `W [in, out]` contiguous, `b [out]`.
//!
//! Backward: `dx = dy · Wᵀ`, `dW = xᵀ · dy`, `db = Σ_t dy_t` in token order.

use super::cpu::{buffer, host_values, values};
use super::product::{Matrix, forward_product, product};
use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor, bail};

/// The linear layer, differentiable in all three; untracked arguments get no gradient computed.
///
/// # Errors
/// When shapes disagree.
pub fn linear(x: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
    let ((_, k), (rows, n)) = (x.dims2()?, weight.dims2()?);
    if k != rows || bias.dims() != [n] {
        bail!("linear: x {:?}, weight {:?}, bias {:?}", x.dims(), weight.dims(), bias.dims());
    }
    x.contiguous()?.apply_op3(weight, bias, Linear)
}

struct Linear;

impl CustomOp3 for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        w: &CpuStorage,
        w_layout: &Layout,
        b: &CpuStorage,
        b_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (m, k) = x_layout.shape().dims2()?;
        let (_, n) = w_layout.shape().dims2()?;
        let mut out = repeat_row(values(b, b_layout)?, m);
        forward_product(&mut out, values(x, x_layout)?, values(w, w_layout)?, (m, k, n), true);
        Ok((CpuStorage::F32(out), Shape::from((m, n))))
    }

    fn bwd(
        &self,
        x: &Tensor,
        w: &Tensor,
        b: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let ((m, k), (_, n)) = (x.dims2()?, w.dims2()?);
        let grad = grad.contiguous()?;
        let dy = host_values(&grad)?;
        let dx = if x.track_op() {
            let mut dx = buffer(m * k);
            product(&mut dx, Matrix::rows(&dy, n), Matrix::transposed(&host_values(w)?, n), (m, n, k), false);
            Some(Tensor::from_vec(dx, (m, k), x.device())?)
        } else {
            None
        };
        let dw = if w.track_op() {
            let mut dw = buffer(k * n);
            product(&mut dw, Matrix::transposed(&host_values(x)?, k), Matrix::rows(&dy, n), (k, m, n), false);
            Some(Tensor::from_vec(dw, (k, n), w.device())?)
        } else {
            None
        };
        let db = if b.track_op() { Some(Tensor::from_vec(sum_rows(&dy, n), n, b.device())?) } else { None };
        Ok((dx, dw, db))
    }
}

/// `rows` copies of `row`: the start value that a bias gives a product.
pub(super) fn repeat_row(row: &[f32], rows: usize) -> Vec<f32> {
    let mut out = Vec::with_capacity(row.len() * rows);
    for _ in 0..rows {
        out.extend_from_slice(row);
    }
    out
}

/// Column sums in row order.
pub(super) fn sum_rows(values: &[f32], width: usize) -> Vec<f32> {
    let mut sums = buffer(width);
    for row in values.chunks_exact(width.max(1)) {
        for (sum, &x) in sums.iter_mut().zip(row) {
            *sum += x;
        }
    }
    sums
}
