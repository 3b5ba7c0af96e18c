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
//! blocks, because an error of `LSE(z)` would change the divergence of every row in one direction.

use super::buffer::buffer;
use super::cpu::{HostValues, for_each_row_pair, host_values};
use super::head_adapter::HeadAdapter;
use super::log_prob::{BLOCK, RowStats, log_sum_exp};
use super::math::{exp, sum_lanes};
use super::weight::Weight;
use candle_core::{Result, Tensor, bail};
use multiversion::multiversion;

/// The input of a teacher's head for some rows, and the head. Both are constant.
#[derive(Clone)]
pub struct TeacherRows {
    /// Rows after the teacher's final norm, `[R, H]`. The teacher may have its own `H`.
    pub h: Tensor,
    /// The teacher's LM head `[H, V]`. Columns beyond the policy's vocabulary are padding and are left out.
    pub head: Weight,
    /// The adapter of the head, if it has one.
    pub adapter: Option<HeadAdapter>,
}

/// The logits of a teacher for a chunk of rows.
pub(super) struct TeacherLogits<'a> {
    h: HostValues<'a>,
    head: &'a Weight,
    adapter: Option<&'a HeadAdapter>,
    inverse_temperature: f32,
    /// Number of columns of the policy's head, which are compared.
    vocabulary: usize,
    y: Vec<f32>,
    log_sum_exps: Vec<f64>,
}

/// One row of a teacher's logits, divided by the temperature.
#[derive(Clone, Copy)]
pub(super) struct TeacherRow<'a> {
    y: &'a [f32],
    log_sum_exp: f64,
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
            adapter: teacher.adapter.as_ref(),
            inverse_temperature,
            vocabulary,
            y: buffer(rows_max * columns),
            log_sum_exps: vec![0.0; rows_max],
        })
    }

    /// Computes the logits of the rows from `start` on.
    pub fn compute(&mut self, start: usize, rows: usize) -> Result<()> {
        let (k, columns) = self.head.head_shape()?;
        let y = &mut self.y[..rows * columns];
        let h = &self.h[start * k..(start + rows) * k];
        self.head.product(y, h)?;
        self.adapter.map_or(Ok(()), |adapter| adapter.add_to(y, h))?;
        let (vocabulary, inverse_temperature) = (self.vocabulary, self.inverse_temperature);
        for_each_row_pair((y, columns), (&mut self.log_sum_exps[..rows], 1), 4 * columns, |_, y, sum| {
            sum[0] = log_sum_exp(&mut y[..vocabulary], inverse_temperature);
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
    teacher.adapter.as_ref().map_or(Ok(()), |adapter| adapter.check((k, columns)))
}

/// The sums of a row. With the `LSE(z)` of the row's statistics, which is rounded, `w_v = e^{z_v − LSE(z)}`.
#[derive(Clone, Copy)]
struct Sums {
    /// `Σ_v w_v`: 1 but for rounding.
    weight: f64,
    /// `Σ_v w_v (z_v − y_v)`.
    difference: f64,
}

impl Sums {
    /// Returns the mean of `z_v − y_v` under `p = w / Σ w`.
    fn mean_difference(self) -> f64 {
        self.difference / self.weight
    }
}

/// Returns the divergence of a row of `z` from the teacher's row: `Σ_v p_v (z_v − y_v) + LSE(y) − LSE(z)`.
pub(super) fn reverse_kl(z: &[f32], stats: RowStats, teacher: TeacherRow) -> f32 {
    let sums = sums(z, teacher.y, stats.log_sum_exp);
    let log_sum_exp = f64::from(stats.log_sum_exp) + sums.weight.ln();
    (sums.mean_difference() + teacher.log_sum_exp - log_sum_exp) as f32
}

#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
fn sums(z: &[f32], y: &[f32], log_sum_exp: f32) -> Sums {
    let mut sums = Sums { weight: 0.0, difference: 0.0 };
    for (z, y) in z.chunks(BLOCK).zip(y.chunks(BLOCK)) {
        sums.weight += f64::from(sum_lanes([z], |[z]| exp(z - log_sum_exp)));
        sums.difference += f64::from(sum_lanes([z, y], |[z, y]| exp(z - log_sum_exp) * (z - y)));
    }
    sums
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
    let sums = sums(z, teacher.y, stats.log_sum_exp);
    // log p_v − log q_v − KL = z_v − y_v − Σ_u p_u (z_u − y_u)
    let mean = sums.mean_difference() as f32;
    let scale = (f64::from(inverse_temperature) / sums.weight) as f32;
    write_gradient(z, teacher.y, stats, (mean, scale), gradient);
}

#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
fn write_gradient(
    z: &mut [f32],
    y: &[f32],
    stats: RowStats,
    (mean, scale): (f32, f32),
    [d_log_prob, d_entropy, d_kl]: [f32; 3],
) {
    for (z, y) in z.iter_mut().zip(y) {
        let log_p = *z - stats.log_sum_exp;
        let of_policy = d_log_prob + d_entropy * (log_p.max(-1e4) + stats.entropy);
        *z = scale * exp(log_p) * (d_kl * (*z - y - mean) - of_policy);
    }
}
