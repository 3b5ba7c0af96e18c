//! The reverse KL divergence of a row's distribution from a teacher's, over the whole vocabulary.
//!
//! With the policy's `p = softmax(z)` and the teacher's `q = softmax(y)`, both at one temperature:
//!
//! ```text
//! KL       = Σ_v p_v (log p_v − log q_v)
//! ∂KL/∂z_v = p_v (log p_v − log q_v − KL)
//! ```
//!
//! `q` is constant. The head computes the logits `y` of the teacher for the same chunk of rows as `z`
//! ([`mod@super::log_prob`]), so no whole matrix of logits exists. Sums are f32 within blocks and f64 over
//! blocks.

use super::buffer::buffer;
use super::cpu::{HostValues, for_each_row_pair, host_values};
use super::log_prob::{BLOCK, RowStats, row_stats};
use super::math::{exp, sum_lanes};
use super::weight::Weight;
use candle_core::{Result, Tensor, bail};
use multiversion::multiversion;

/// The smallest log-probability in a divergence. A smaller one could give `0 · ∞`.
const LOG_PROB_MIN: f32 = -1e4;

/// The input of a teacher's head for some rows, and the head. Both are constant.
#[derive(Clone)]
pub struct TeacherRows {
    /// Rows after the teacher's final norm, `[R, H]`. The teacher may have its own `H`.
    pub h: Tensor,
    /// The teacher's LM head `[H, V]`. Columns beyond the policy's vocabulary are padding and are left out.
    pub head: Weight,
}

/// The logits of a teacher for a chunk of rows.
pub(super) struct TeacherLogits<'a> {
    h: HostValues<'a>,
    head: &'a Weight,
    inverse_temperature: f32,
    /// Number of columns of the policy's head, which are compared.
    vocabulary: usize,
    y: Vec<f32>,
    log_sum_exps: Vec<f32>,
}

/// One row of a teacher's logits, divided by the temperature.
#[derive(Clone, Copy)]
pub(super) struct TeacherRow<'a> {
    y: &'a [f32],
    log_sum_exp: f32,
}

impl<'a> TeacherLogits<'a> {
    /// Prepares chunks of up to `rows_max` rows.
    pub fn new(
        teacher: &'a TeacherRows,
        (rows_max, vocabulary): (usize, usize),
        inverse_temperature: f32,
    ) -> Result<Self> {
        let (_, columns) = teacher.head.head_shape()?;
        Ok(Self {
            h: host_values(&teacher.h)?,
            head: &teacher.head,
            inverse_temperature,
            vocabulary,
            y: buffer(rows_max * columns),
            log_sum_exps: buffer(rows_max),
        })
    }

    /// Computes the logits of the rows from `start` on.
    pub fn compute(&mut self, start: usize, rows: usize) -> Result<()> {
        let (k, columns) = self.head.head_shape()?;
        let y = &mut self.y[..rows * columns];
        self.head.product(y, &self.h[start * k..(start + rows) * k])?;
        let (vocabulary, inverse_temperature) = (self.vocabulary, self.inverse_temperature);
        let log_sum_exps = &mut self.log_sum_exps[..rows];
        for_each_row_pair((y, columns), (log_sum_exps, 1), 4 * columns, |_, y, log_sum_exp| {
            log_sum_exp[0] = row_stats(&mut y[..vocabulary], inverse_temperature).log_sum_exp;
        });
        Ok(())
    }

    /// Returns a row of the chunk.
    pub fn row(&self, row: usize) -> TeacherRow<'_> {
        let columns = self.y.len() / self.log_sum_exps.len();
        let y = &self.y[row * columns..row * columns + self.vocabulary];
        TeacherRow { y, log_sum_exp: self.log_sum_exps[row] }
    }
}

/// Checks that the teacher has one row per target and at least `vocabulary` columns.
pub(super) fn check_teacher(teacher: &TeacherRows, rows: usize, vocabulary: usize) -> Result<()> {
    let ((teacher_rows, k), (w_k, columns)) = (teacher.h.dims2()?, teacher.head.head_shape()?);
    if teacher_rows != rows || k != w_k || columns < vocabulary {
        bail!(
            "reverse_kl: the teacher's h {:?} and head [{w_k}, {columns}] do not fit {rows} rows of {vocabulary} logits",
            teacher.h.dims()
        );
    }
    Ok(())
}

/// Returns the divergence of a row of `z` from the teacher's row.
pub(super) fn reverse_kl(z: &[f32], stats: RowStats, teacher: TeacherRow) -> f32 {
    divergence(z, teacher.y, [stats.log_sum_exp, teacher.log_sum_exp])
}

#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
fn divergence(z: &[f32], y: &[f32], log_sum_exps: [f32; 2]) -> f32 {
    let mut sum = 0f64;
    for (z, y) in z.chunks(BLOCK).zip(y.chunks(BLOCK)) {
        sum += f64::from(sum_lanes([z, y], |[z, y]| {
            let log_p = z - log_sum_exps[0];
            exp(log_p) * (log_p.max(LOG_PROB_MIN) - (y - log_sum_exps[1]).max(LOG_PROB_MIN))
        }));
    }
    sum as f32
}

/// Replaces a row of `z` by `dz / τ`. `gradient` has the gradients of the target's log-probability, which
/// [`super::log_prob`] completes at the target, of the entropy, and of the divergence.
pub(super) fn backward_row_with_teacher(
    z: &mut [f32],
    stats: RowStats,
    teacher: TeacherRow,
    gradient: [f32; 3],
    inverse_temperature: f32,
) {
    let kl = reverse_kl(z, stats, teacher);
    write_gradient(z, teacher.y, stats, (teacher.log_sum_exp, kl), gradient, inverse_temperature);
}

#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
fn write_gradient(
    z: &mut [f32],
    y: &[f32],
    stats: RowStats,
    (y_log_sum_exp, kl): (f32, f32),
    [d_log_prob, d_entropy, d_kl]: [f32; 3],
    inverse_temperature: f32,
) {
    for (z, y) in z.iter_mut().zip(y) {
        let raw = *z - stats.log_sum_exp;
        let (p, log_p) = (exp(raw), raw.max(LOG_PROB_MIN));
        let log_ratio = log_p - (y - y_log_sum_exp).max(LOG_PROB_MIN);
        let of_policy = d_log_prob + d_entropy * (log_p + stats.entropy);
        *z = inverse_temperature * p * (d_kl * (log_ratio - kl) - of_policy);
    }
}
