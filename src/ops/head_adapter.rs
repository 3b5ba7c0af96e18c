//! The low-rank adapter of an LM head: `z += s · (h · A) · B` with `h [R, H]`, `A [H, r]`, `B [r, V]`. The
//! head adds it to each chunk of logits ([`mod@super::log_prob`], [`mod@super::logits`]), so sampling and
//! training have the same bits.
//!
//! Backward pass, with `du = s · dz · Bᵀ`: `dh += du · Aᵀ`, `dA = hᵀ · du`, `dB = (s · h · A)ᵀ · dz`.

use super::buffer::buffer;
use super::cpu::host_values;
use super::parameter::{GradientTarget, Parameter};
use super::product::{GemmThreads, StridedMatrix, backward_product, forward_product, product};
use candle_core::{Result, Tensor, bail};
use std::ops::Range;

/// The factors of a head's adapter, on a CPU.
#[derive(Clone)]
pub struct HeadAdapter {
    /// `[H, r]`.
    pub a: Parameter,
    /// `[r, V]`.
    pub b: Parameter,
    pub scale: f32,
}

/// Rows of a product, and the adapter of the head for them.
pub struct RowAdapter<'a> {
    pub rows: Range<usize>,
    pub adapter: &'a HeadAdapter,
}

impl HeadAdapter {
    /// Checks that the factors fit a head `[H, V]`.
    pub(super) fn check(&self, (hidden, vocabulary): (usize, usize)) -> Result<()> {
        let ((a_in, rank), (b_rank, b_out)) = (self.a.values().dims2()?, self.b.values().dims2()?);
        if a_in != hidden || b_out != vocabulary || rank != b_rank {
            let (a, b) = (self.a.values().dims(), self.b.values().dims());
            bail!("head adapter: a {a:?}, b {b:?} for a head [{hidden}, {vocabulary}]");
        }
        if self.a.values().device().is_cuda() {
            bail!("head adapter: only on a CPU; leave lm_head out of the adapter's targets on a GPU");
        }
        Ok(())
    }

    /// Returns a factor that the graph tracks, if one is trainable.
    pub(super) fn graph_tensor(&self) -> &Tensor {
        let (a, b) = (self.a.values(), self.b.values());
        if b.is_variable() { b } else { a }
    }

    /// Returns the targets of the gradients of `A` and `B`.
    pub(super) fn gradients(&self) -> [Option<GradientTarget>; 2] {
        [self.a.gradient(), self.b.gradient()]
    }

    /// Returns `s · h · A`, `[m, r]`, for rows `h [m, H]`.
    fn down_projection(&self, h: &[f32]) -> Result<Vec<f32>> {
        let (input, rank) = self.a.values().dims2()?;
        let rows = h.len() / input.max(1);
        let mut u = buffer(rows * rank);
        let a = host_values(self.a.values())?;
        forward_product(GemmThreads::Pool, &mut u, h, &a, (rows, input, rank), false);
        u.iter_mut().for_each(|u| *u *= self.scale);
        Ok(u)
    }

    /// Adds `s · (h · A) · B` to logits `z [m, V]` of rows `h [m, H]`.
    pub(super) fn add_to(&self, z: &mut [f32], h: &[f32]) -> Result<()> {
        let (rank, vocabulary) = self.b.values().dims2()?;
        let u = self.down_projection(h)?;
        let rows = u.len() / rank.max(1);
        let b = host_values(self.b.values())?;
        forward_product(GemmThreads::Pool, z, &u, &b, (rows, rank, vocabulary), true);
        Ok(())
    }

    /// Returns `du = s · dz · Bᵀ`, `[m, r]`.
    pub(super) fn up_gradient(&self, dz: &[f32]) -> Result<Vec<f32>> {
        let (rank, vocabulary) = self.b.values().dims2()?;
        let rows = dz.len() / vocabulary.max(1);
        let mut du = buffer(rows * rank);
        let b = host_values(self.b.values())?;
        backward_product(GemmThreads::Pool, &mut du, dz, &b, (rows, vocabulary, rank));
        du.iter_mut().for_each(|du| *du *= self.scale);
        Ok(du)
    }

    /// Adds `du · Aᵀ` to `dh [m, H]`.
    pub(super) fn add_input_gradient(&self, dh: &mut [f32], du: &[f32]) -> Result<()> {
        let (input, rank) = self.a.values().dims2()?;
        let a = host_values(self.a.values())?;
        let (du_rows, a) = (StridedMatrix::row_major(du, rank), StridedMatrix::column_major(&a, rank));
        product(GemmThreads::Pool, dh, du_rows, a, (du.len() / rank.max(1), rank, input), true);
        Ok(())
    }

    /// Adds the gradient of `A` to `da`, from rows `h [m, H]` and `du [m, r]`.
    pub(super) fn add_down_gradient(&self, da: &mut [f32], h: &[f32], du: &[f32]) -> Result<()> {
        let (input, rank) = self.a.values().dims2()?;
        let (h, rows) = (StridedMatrix::column_major(h, input), du.len() / rank.max(1));
        product(GemmThreads::Pool, da, h, StridedMatrix::row_major(du, rank), (input, rows, rank), true);
        Ok(())
    }

    /// Adds the gradient of `B` to `db`, from rows `h [m, H]` and `dz [m, V]`.
    pub(super) fn add_up_gradient(&self, db: &mut [f32], h: &[f32], dz: &[f32]) -> Result<()> {
        let (rank, vocabulary) = self.b.values().dims2()?;
        let u = self.down_projection(h)?;
        let (left, rows) = (StridedMatrix::column_major(&u, rank), u.len() / rank.max(1));
        let dz = StridedMatrix::row_major(dz, vocabulary);
        product(GemmThreads::Pool, db, left, dz, (rank, rows, vocabulary), true);
        Ok(())
    }
}
