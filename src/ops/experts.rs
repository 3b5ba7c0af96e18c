//! The experts, memory-lean: tokens sorted by expert, one product an expert on its own rows.
//!
//! Nothing repeats hidden states by the number of experts: `T·K` rows exist, whatever `E`. Outputs are
//! added in slot order, not in arrival order, so a token's sum does not depend on the batch.

use super::cpu::{buffer, host_values, values};
use super::linear::sum_rows;
use super::product::{Matrix, forward_product, product};
use candle_core::{CpuStorage, CustomOp1, CustomOp2, CustomOp3, Layout, Result, Shape, Tensor, bail};
use std::sync::Arc;

/// Where every (token, slot) goes once rows are sorted by expert.
#[derive(Debug, Clone)]
pub struct Dispatch {
    tokens: usize,
    top_k: usize,
    /// Sorted row of each (token, slot), `[T][K]`.
    row_of: Vec<u32>,
    /// Token of each sorted row, `[T·K]`.
    token_of: Vec<u32>,
    /// First sorted row of each expert, and `T·K` at the end, `[E + 1]`.
    offsets: Vec<usize>,
}

impl Dispatch {
    /// Sorts `routes [T][K]` by expert, tokens in order within one.
    pub fn new(routes: &[u16], top_k: usize, experts: usize) -> Self {
        let mut offsets = vec![0usize; experts + 1];
        for &e in routes {
            offsets[e as usize + 1] += 1;
        }
        for e in 0..experts {
            offsets[e + 1] += offsets[e];
        }
        let mut next = offsets.clone();
        let mut token_of = vec![0u32; routes.len()];
        let row_of = routes
            .iter()
            .enumerate()
            .map(|(i, &e)| {
                let row = next[e as usize];
                next[e as usize] += 1;
                token_of[row] = (i / top_k) as u32;
                row as u32
            })
            .collect();
        Self { tokens: routes.len() / top_k.max(1), top_k, row_of, token_of, offsets }
    }

    /// Rows of each expert, `[E]`.
    pub fn counts(&self) -> Vec<usize> {
        self.offsets.windows(2).map(|w| w[1] - w[0]).collect()
    }
}

/// Rows of `x [T, H]` in expert order, `[T·K, H]`. Backward: a token's gradient is the sum over its slots in order.
///
/// # Errors
/// When `x` has another number of tokens.
pub fn dispatch(x: &Tensor, plan: &Arc<Dispatch>) -> Result<Tensor> {
    if x.dim(0)? != plan.tokens {
        bail!("dispatch: x {:?} for {} tokens", x.dims(), plan.tokens);
    }
    x.contiguous()?.apply_op1(DispatchRows { plan: plan.clone() })
}

struct DispatchRows {
    plan: Arc<Dispatch>,
}

impl CustomOp1 for DispatchRows {
    fn name(&self) -> &'static str {
        "dispatch"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let width = layout.shape().dims2()?.1;
        let x = values(x, layout)?;
        let rows = &self.plan.token_of;
        let mut out = Vec::with_capacity(rows.len() * width);
        for &t in rows {
            out.extend_from_slice(&x[t as usize * width..(t as usize + 1) * width]);
        }
        Ok((CpuStorage::F32(out), Shape::from((rows.len(), width))))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let (tokens, width) = x.dims2()?;
        let grad = grad.contiguous()?;
        let g = host_values(&grad)?;
        let mut dx = buffer(tokens * width);
        for (dx, rows) in dx.chunks_exact_mut(width).zip(self.plan.row_of.chunks_exact(self.plan.top_k)) {
            for &row in rows {
                let g = &g[row as usize * width..(row as usize + 1) * width];
                dx.iter_mut().zip(g).for_each(|(d, &g)| *d += g);
            }
        }
        Ok(Some(Tensor::from_vec(dx, (tokens, width), x.device())?))
    }
}

/// `y_r = x_r · W[e(r)] + b[e(r)]`: `x [T·K, in]`, `weight [E, in, out]`, `bias [E, out]` → `[T·K, out]`.
///
/// # Errors
/// When shapes disagree.
pub fn grouped_linear(x: &Tensor, weight: &Tensor, bias: &Tensor, plan: &Arc<Dispatch>) -> Result<Tensor> {
    let ((rows, k), (experts, w_k, n)) = (x.dims2()?, weight.dims3()?);
    if rows != plan.token_of.len()
        || k != w_k
        || bias.dims() != [experts, n]
        || experts + 1 != plan.offsets.len()
    {
        bail!("grouped_linear: x {:?}, weight {:?}, bias {:?}", x.dims(), weight.dims(), bias.dims());
    }
    x.contiguous()?.apply_op3(weight, bias, GroupedLinear { plan: plan.clone() })
}

struct GroupedLinear {
    plan: Arc<Dispatch>,
}

impl CustomOp3 for GroupedLinear {
    fn name(&self) -> &'static str {
        "grouped_linear"
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
        let (rows, k) = x_layout.shape().dims2()?;
        let (_, _, n) = w_layout.shape().dims3()?;
        let (x, w, b) = (values(x, x_layout)?, values(w, w_layout)?, values(b, b_layout)?);
        let mut out = Vec::with_capacity(rows * n);
        for (e, at) in self.plan.offsets.windows(2).enumerate() {
            for _ in at[0]..at[1] {
                out.extend_from_slice(&b[e * n..(e + 1) * n]);
            }
        }
        for (e, at) in self.plan.offsets.windows(2).enumerate() {
            let (start, end) = (at[0], at[1]);
            let weight = &w[e * k * n..(e + 1) * k * n];
            forward_product(
                &mut out[start * n..end * n],
                &x[start * k..end * k],
                weight,
                (end - start, k, n),
                true,
            );
        }
        Ok((CpuStorage::F32(out), Shape::from((rows, n))))
    }

    fn bwd(
        &self,
        x: &Tensor,
        w: &Tensor,
        b: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let ((rows, k), (experts, _, n)) = (x.dims2()?, w.dims3()?);
        let grad = grad.contiguous()?;
        let (xs, ws, dy) = (host_values(x)?, host_values(w)?, host_values(&grad)?);
        let mut dx = buffer(rows * k);
        let mut dw = w.track_op().then(|| buffer(experts * k * n));
        let mut db = b.track_op().then(|| buffer(experts * n));
        for (e, at) in self.plan.offsets.windows(2).enumerate() {
            let (start, end) = (at[0], at[1]);
            if start == end {
                continue;
            }
            let m = end - start;
            let (x, dy) = (&xs[start * k..end * k], &dy[start * n..end * n]);
            let weight = &ws[e * k * n..(e + 1) * k * n];
            let dx = &mut dx[start * k..end * k];
            product(dx, Matrix::rows(dy, n), Matrix::transposed(weight, n), (m, n, k), false);
            if let Some(dw) = &mut dw {
                let dw = &mut dw[e * k * n..(e + 1) * k * n];
                product(dw, Matrix::transposed(x, k), Matrix::rows(dy, n), (k, m, n), false);
            }
            if let Some(db) = &mut db {
                db[e * n..(e + 1) * n].copy_from_slice(&sum_rows(dy, n));
            }
        }
        let device = x.device();
        Ok((
            Some(Tensor::from_vec(dx, (rows, k), device)?),
            dw.map(|dw| Tensor::from_vec(dw, w.shape(), device)).transpose()?,
            db.map(|db| Tensor::from_vec(db, b.shape(), device)).transpose()?,
        ))
    }
}

/// `y_t = Σ_k w_tk · x_{row(t, k)}`: `x [T·K, H]`, `weights [T, K]` → `[T, H]`, added in slot order.
///
/// # Errors
/// When shapes disagree.
pub fn combine(x: &Tensor, weights: &Tensor, plan: &Arc<Dispatch>) -> Result<Tensor> {
    if x.dim(0)? != plan.row_of.len() || weights.dims() != [plan.tokens, plan.top_k] {
        bail!("combine: x {:?}, weights {:?}", x.dims(), weights.dims());
    }
    x.contiguous()?.apply_op2(&weights.contiguous()?, Combine { plan: plan.clone() })
}

struct Combine {
    plan: Arc<Dispatch>,
}

impl CustomOp2 for Combine {
    fn name(&self) -> &'static str {
        "combine"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        w: &CpuStorage,
        w_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let width = x_layout.shape().dims2()?.1;
        let (x, w) = (values(x, x_layout)?, values(w, w_layout)?);
        let (tokens, top_k) = (self.plan.tokens, self.plan.top_k);
        let mut out = buffer(tokens * width);
        for (t, out) in out.chunks_exact_mut(width).enumerate() {
            let slots = t * top_k..(t + 1) * top_k;
            for (&row, &weight) in self.plan.row_of[slots.clone()].iter().zip(&w[slots]) {
                let row = row as usize;
                let x = &x[row * width..(row + 1) * width];
                out.iter_mut().zip(x).for_each(|(o, &x)| *o += weight * x);
            }
        }
        Ok((CpuStorage::F32(out), Shape::from((tokens, width))))
    }

    fn bwd(
        &self,
        x: &Tensor,
        w: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (rows, width) = x.dims2()?;
        let top_k = self.plan.top_k;
        let grad = grad.contiguous()?;
        let (xs, ws, g) = (host_values(x)?, host_values(w)?, host_values(&grad)?);
        let (mut dx, mut dw) = (buffer(rows * width), buffer(rows));
        for (slot, &row) in self.plan.row_of.iter().enumerate() {
            let (row, t) = (row as usize, slot / top_k);
            let (g, at) = (&g[t * width..(t + 1) * width], row * width..(row + 1) * width);
            let x = &xs[at.clone()];
            dw[slot] = super::math::sum_lanes(width, |i| g[i] * x[i]);
            dx[at].iter_mut().zip(g).for_each(|(d, &g)| *d = ws[slot] * g);
        }
        let device = x.device();
        Ok((
            Some(Tensor::from_vec(dx, (rows, width), device)?),
            Some(Tensor::from_vec(dw, w.shape(), device)?),
        ))
    }
}
