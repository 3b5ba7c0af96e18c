//! The LM head: the log-probability of each target token and the entropy of its distribution, in chunks of
//! rows.
//!
//! With `z = (h · W) / τ`: `log p_t = z_t − LSE(z)` and `H = LSE(z) − Σ_j p_j z_j`. Forward and backward
//! passes have one chunk of logits in memory at a time, never the whole matrix `[T, V]`. Backward pass: `dz_j
//! = dL·(1[j = t] − p_j) − dH·p_j (log p_j + H)`, then `dh = dz · Wᵀ / τ` and `dW = hᵀ · dz / τ`. `dL` and
//! `dH` are the gradients with respect to `log p_t` and `H`.
//!
//! A row may have a set of kept tokens, which its target was drawn from. Log-probability and entropy are then
//! those of the distribution over that set, and gradients of other logits are 0 ([`mod@super::truncation`]).
//!
//! With a teacher, the head also returns the reverse KL divergence from the teacher's distribution
//! ([`mod@super::reverse_kl`]). Two chunks of logits are then in memory. The other outputs keep their bits.
//!
//! On a GPU `h` and `W` are bf16, and logits and results are f32.
//!
//! The sampler computes log-probabilities from the same product and the same [`RowStats`]
//! ([`mod@super::logits`]), so sampling and training have the same bits.

use super::buffer::buffer;
use super::cpu::{edit, for_each_row, for_each_row_pair, host_values};
use super::cuda::{head_backward, head_forward};
use super::graph::{apply, contiguous, is_tracked};
use super::head_adapter::HeadAdapter;
use super::math::{LANES, add_lanes, exp, scale_and_max};
use super::operation::{DeviceArgument, HostArgument, Operation, first_input_gradient};
use super::parameter::GradientTarget;
use super::product::{StridedMatrix, product};
use super::reverse_kl::{TeacherLogits, TeacherRows, backward_row_with_teacher, check_teacher, reverse_kl};
use super::token_set::KeptTokens;
use super::truncation::KeptRow;
use super::weight::Weight;
use candle_core::{CpuStorage, CudaStorage, Result, Shape, Tensor, bail};
use multiversion::multiversion;
use std::sync::Arc;

/// Maximum number of logits of a chunk: 64 MiB.
const CHUNK_VALUES_MAX: usize = 1 << 24;

/// Log-sum-exp and entropy of a row of logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RowStats {
    /// `log Σ_j e^{z_j}`.
    pub log_sum_exp: f32,
    /// Entropy in nats.
    pub entropy: f32,
}

/// Multiplies a row of logits by the inverse temperature, in place, and returns its statistics. The row then
/// holds `z`.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
pub fn row_stats(row: &mut [f32], inverse_temperature: f32) -> RowStats {
    let max_logit = scale_and_max(row, inverse_temperature);
    sum_up(row, max_logit, |_| ())
}

/// Number of logits per block. With the sum of each block, a draw has to search only one block.
pub(super) const BLOCK: usize = 1024;

/// Computes [`row_stats`] and, for each block, the cumulative sum `Σ e^{z_j − max_logit}` up to the end of
/// the block. Also returns `max_logit`.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
pub(super) fn row_stats_and_blocks(
    row: &mut [f32],
    inverse_temperature: f32,
    ends: &mut [f64],
) -> (RowStats, f32) {
    let max_logit = scale_and_max(row, inverse_temperature);
    let (mut sum, mut ends) = (0f64, ends.iter_mut());
    let stats = sum_up(row, max_logit, |block_sums| {
        sum += block_sums.iter().map(|&x| f64::from(x)).sum::<f64>();
        ends.next().into_iter().for_each(|end| *end = sum);
    });
    (stats, max_logit)
}

/// Multiplies a row of logits by the inverse temperature, in place, and returns its log-sum-exp. Sums over
/// blocks are f64, so the result is more exact than that of [`row_stats`].
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
pub(super) fn log_sum_exp(row: &mut [f32], inverse_temperature: f32) -> f64 {
    let max_logit = scale_and_max(row, inverse_temperature);
    let mut sum = 0f64;
    sum_up(row, max_logit, |block_sums| sum += block_sums.iter().map(|&x| f64::from(x)).sum::<f64>());
    f64::from(max_logit) + sum.ln()
}

/// Returns the statistics of a row of `z`. Calls `each_block` once per block, with the sum of `e^{z_j −
/// max_logit}` in each lane.
#[inline(always)]
fn sum_up(row: &[f32], max_logit: f32, mut each_block: impl FnMut([f32; LANES])) -> RowStats {
    let (mut sums, mut moments) = ([0f32; LANES], [0f32; LANES]);
    for block in row.chunks(BLOCK) {
        let mut block_sums = [0f32; LANES];
        let mut add = |l: usize, z: f32| {
            let shifted = z - max_logit;
            let e = exp(shifted);
            sums[l] += e;
            moments[l] += e * shifted.max(-1e4);
            block_sums[l] += e;
        };
        let chunks = block.chunks_exact(LANES);
        let rest = chunks.remainder();
        chunks.for_each(|chunk| (0..LANES).for_each(|l| add(l, chunk[l])));
        rest.iter().enumerate().for_each(|(l, &z)| add(l, z));
        each_block(block_sums);
    }
    let (sum, moment) = (add_lanes(sums), add_lanes(moments));
    let log_sum = sum.ln();
    RowStats { log_sum_exp: max_logit + log_sum, entropy: log_sum - moment / sum }
}

/// Returns `[2, R]`: the log-probabilities of `targets` under `softmax(h · W / τ)` in the first row, and the
/// entropies of the distributions in the second row. If `kept` has a set for a row, its distribution has only
/// the tokens of that set; this works only on the CPU.
///
/// # Errors
/// When shapes disagree, a target is not in its set, or a token is not below `V`.
pub fn log_prob_and_entropy(
    h: &Tensor,
    weight: &Weight,
    targets: &Arc<Vec<u32>>,
    kept: Option<&KeptTokens>,
    temperature: f64,
) -> Result<Tensor> {
    let targets = HeadTargets { tokens: targets, kept, skips_zero_gradients: false };
    adapted_log_prob_and_entropy(h, (weight, None), targets, temperature)
}

/// The targets of a head.
#[derive(Clone, Copy)]
pub struct HeadTargets<'a> {
    /// The target of each row, `[R]`.
    pub tokens: &'a Arc<Vec<u32>>,
    /// The tokens that each target was drawn from.
    pub kept: Option<&'a KeptTokens>,
    /// Whether the backward pass leaves out rows whose gradient is 0. The gradients then have the bits of a
    /// head without these rows. Has no effect on a GPU and beside a teacher.
    pub skips_zero_gradients: bool,
}

/// Works like [`log_prob_and_entropy`], with the adapter of the head, if there is one.
///
/// # Errors
/// Errors of [`log_prob_and_entropy`]. When there is an adapter on a GPU.
pub fn adapted_log_prob_and_entropy(
    h: &Tensor,
    (weight, adapter): (&Weight, Option<&HeadAdapter>),
    targets: HeadTargets,
    temperature: f64,
) -> Result<Tensor> {
    let HeadTargets { tokens, kept, skips_zero_gradients } = targets;
    let vocabulary = check_shapes(h, weight, tokens)?;
    if let Some(kept) = kept {
        check_kept(kept, tokens, vocabulary)?;
    }
    let (kept, adapter) = (kept.cloned(), adapter.cloned());
    // With an adapter, a run and a client that gives all targets have the same bits.
    let skips_zero_gradients = skips_zero_gradients || adapter.is_some();
    apply_head(h, Head { kept, adapter, skips_zero_gradients, ..Head::new(weight, tokens, temperature) })
}

/// Returns `[3, R]`: the rows of [`log_prob_and_entropy`], with the same bits, and the divergence of each
/// distribution from the one of `teacher`. Works only on the CPU.
///
/// # Errors
/// When shapes disagree, or the teacher has fewer columns than the head.
pub fn log_prob_entropy_and_kl(
    h: &Tensor,
    (weight, adapter): (&Weight, Option<&HeadAdapter>),
    targets: &Arc<Vec<u32>>,
    teacher: &TeacherRows,
    temperature: f64,
) -> Result<Tensor> {
    let vocabulary = check_shapes(h, weight, targets)?;
    check_teacher(teacher, targets.len(), vocabulary)?;
    let teacher = TeacherRows { h: contiguous(&teacher.h)?, ..teacher.clone() };
    let (teacher, adapter) = (Some(teacher), adapter.cloned());
    apply_head(h, Head { teacher, adapter, ..Head::new(weight, targets, temperature) })
}

/// Checks the inputs of the head. Returns the size of the vocabulary.
fn check_shapes(h: &Tensor, weight: &Weight, targets: &[u32]) -> Result<usize> {
    let ((rows, k), (w_k, vocabulary)) = (h.dims2()?, weight.head_shape()?);
    if k != w_k || targets.len() != rows || targets.iter().any(|&t| t as usize >= vocabulary) {
        bail!("log_prob: h {:?}, weight [{w_k}, {vocabulary}], {} targets", h.dims(), targets.len());
    }
    Ok(vocabulary)
}

fn apply_head(h: &Tensor, mut head: Head) -> Result<Tensor> {
    let (weight, adapter) = (head.weight.clone(), head.adapter.clone());
    let (tracked, gradient) = weight.graph_tensor().unzip();
    head.gradient = gradient.flatten();
    let mut tracked = tracked;
    if let Some(adapter) = &adapter {
        adapter.check(weight.head_shape()?)?;
        // A trainable factor is an input of the op, so the graph records the op even if no earlier layer is
        // trainable. The base of an adapter is frozen.
        tracked = Some(adapter.graph_tensor());
    }
    let h = contiguous(h)?;
    if let Some(weight) = tracked { apply([&h, weight], head) } else { apply([&h], head) }
}

/// Returns `1/τ` with the rounding that both the sampler and the head use.
pub fn inverse_temperature(temperature: f64) -> f32 {
    (1.0 / temperature) as f32
}

/// Checks that there is one entry per target, that each set contains its target, and that all tokens are
/// below `vocabulary`.
fn check_kept(kept: &KeptTokens, targets: &[u32], vocabulary: usize) -> Result<()> {
    if kept.len() != targets.len() {
        bail!("log_prob: {} sets of kept tokens for {} targets", kept.len(), targets.len());
    }
    for (set, target) in kept.iter().zip(targets) {
        let Some(ids) = set.as_ref().map(|set| set.ids()) else { continue };
        if ids.binary_search(target).is_err() || ids.iter().any(|&id| id as usize >= vocabulary) {
            bail!("log_prob: the {} kept tokens do not fit the target {target} of {vocabulary}", ids.len());
        }
    }
    Ok(())
}

struct Head {
    targets: Arc<Vec<u32>>,
    /// The kept tokens of each row.
    kept: Option<KeptTokens>,
    /// The teacher, if the divergence from it is an output.
    teacher: Option<TeacherRows>,
    inverse_temperature: f32,
    weight: Weight,
    /// Receives the gradient of the weight, if the weight is trainable.
    gradient: Option<GradientTarget>,
    adapter: Option<HeadAdapter>,
    /// Whether the backward pass leaves out rows whose gradient is 0.
    skips_zero_gradients: bool,
}

/// Returns the number of rows per chunk of logits.
pub(super) fn chunk_rows(vocabulary: usize) -> usize {
    (CHUNK_VALUES_MAX / vocabulary.max(1)).max(8)
}

/// Replaces a row of `z` by `dz / τ`.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
pub(super) fn backward_row(
    z: &mut [f32],
    stats: RowStats,
    d_log_prob: f32,
    d_entropy: f32,
    inverse_temperature: f32,
) {
    for z in z.iter_mut() {
        let log_p = *z - stats.log_sum_exp;
        let p = exp(log_p);
        *z = -inverse_temperature * p * (d_log_prob + d_entropy * (log_p.max(-1e4) + stats.entropy));
    }
}

impl Head {
    fn new(weight: &Weight, targets: &Arc<Vec<u32>>, temperature: f64) -> Self {
        Self {
            targets: targets.clone(),
            kept: None,
            teacher: None,
            inverse_temperature: inverse_temperature(temperature),
            weight: weight.clone(),
            gradient: None,
            adapter: None,
            skips_zero_gradients: false,
        }
    }

    /// Computes the logits `z [m, V]` of rows `h [m, H]`, before the temperature.
    fn product(&self, z: &mut [f32], h: &[f32]) -> Result<()> {
        self.weight.product(z, h)?;
        self.adapter.as_ref().map_or(Ok(()), |adapter| adapter.add_to(z, h))
    }

    /// Computes `dh [m, H]` from `dz [m, V]`.
    fn input_gradient(&self, dh: &mut [f32], dz: &[f32]) -> Result<()> {
        self.weight.input_gradient(dh, dz)?;
        let Some(adapter) = &self.adapter else { return Ok(()) };
        adapter.add_input_gradient(dh, &adapter.up_gradient(dz)?)
    }

    /// Returns the buffers for the teacher's logits, for chunks of up to `rows_max` rows.
    fn teacher_logits(&self, rows_max: usize, vocabulary: usize) -> Result<Option<TeacherLogits<'_>>> {
        let logits = |teacher| TeacherLogits::new(teacher, (rows_max, vocabulary), self.inverse_temperature);
        self.teacher.as_ref().map(logits).transpose()
    }

    /// Returns the distribution over the kept tokens of `row`, from its logits; `None` if all are kept.
    fn kept_row(&self, row: usize, logits: &[f32]) -> Option<KeptRow> {
        let set = self.kept.as_ref()?[row].as_ref()?;
        Some(KeptRow::new(set.ids(), logits, self.inverse_temperature))
    }

    fn forward(&self, h: &[f32]) -> Result<(CpuStorage, Shape)> {
        let (k, n) = self.weight.head_shape()?;
        let rows = h.len() / k;
        let columns = if self.teacher.is_some() { 3 } else { 2 };
        let mut values = buffer(columns * rows);
        let chunk = chunk_rows(n);
        let mut z = buffer(chunk.min(rows) * n);
        let mut teacher = self.teacher_logits(chunk.min(rows), n)?;
        for start in (0..rows).step_by(chunk) {
            let m = chunk.min(rows - start);
            let z = &mut z[..m * n];
            self.product(z, &h[start * k..(start + m) * k])?;
            teacher.as_mut().map_or(Ok(()), |teacher| teacher.compute(start, m))?;
            let values = &mut values[columns * start..columns * (start + m)];
            for_each_row_pair((z, n), (values, columns), 4 * n, |row, z, values| {
                if let Some(kept) = self.kept_row(start + row, z) {
                    (values[0], values[1]) = (kept.log_prob(self.targets[start + row]), kept.entropy());
                    return;
                }
                let stats = row_stats(z, self.inverse_temperature);
                values[0] = z[self.targets[start + row] as usize] - stats.log_sum_exp;
                values[1] = stats.entropy;
                if let Some(teacher) = &teacher {
                    values[2] = reverse_kl(z, stats, teacher.row(row));
                }
            });
        }
        let mut out = buffer(columns * rows);
        for (row, values) in values.chunks_exact(columns).enumerate() {
            values.iter().enumerate().for_each(|(column, &value)| out[column * rows + row] = value);
        }
        Ok((CpuStorage::F32(out), Shape::from((columns, rows))))
    }

    /// Adds the gradients of the weight and of the adapter if they are trainable. Returns `dh` if an earlier
    /// layer is trainable.
    fn hidden_gradient(&self, h: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        if h.device().is_cuda() {
            let (tensors, gradient) = ([h, self.weight.device_tensor()?, grad], self.gradient.as_ref());
            return head_backward(tensors, &self.targets, self.inverse_temperature, gradient, is_tracked(h));
        }
        let (rows, k) = h.dims2()?;
        let (hs, g) = (host_values(h)?, host_values(grad)?);
        let is_used = |row: &usize| (0..g.len() / rows.max(1)).any(|column| g[column * rows + row] != 0.0);
        let used: Vec<usize> = match self.skips_zero_gradients && self.teacher.is_none() {
            true => (0..rows).filter(is_used).collect(),
            false => vec![],
        };
        let mut dh = is_tracked(h).then(|| buffer(rows * k));
        if used.is_empty() || used.len() == rows {
            self.add_gradients(&hs, &g, dh.as_deref_mut())?;
        } else {
            // The rows that have a gradient, as a head of their own.
            let pick =
                |of: &[f32], start: usize| -> Vec<f32> { used.iter().map(|row| of[start + row]).collect() };
            let kept = self.kept.as_ref().map(|kept| used.iter().map(|&row| kept[row].clone()).collect());
            let part = Self {
                targets: Arc::new(used.iter().map(|&row| self.targets[row]).collect()),
                kept: kept.map(Arc::new),
                teacher: None,
                weight: self.weight.clone(),
                gradient: self.gradient.clone(),
                adapter: self.adapter.clone(),
                ..*self
            };
            let hs: Vec<f32> = used.iter().flat_map(|&row| &hs[row * k..(row + 1) * k]).copied().collect();
            let g = [pick(&g, 0), pick(&g, rows)].concat();
            let mut own = dh.is_some().then(|| buffer(used.len() * k));
            part.add_gradients(&hs, &g, own.as_deref_mut())?;
            if let (Some(dh), Some(own)) = (&mut dh, own) {
                dh.fill(0.0);
                for (own, row) in own.chunks_exact(k).zip(used) {
                    dh[row * k..(row + 1) * k].copy_from_slice(own);
                }
            }
        }
        dh.map(|dh| Tensor::from_vec(dh, (rows, k), h.device())).transpose()
    }

    /// Adds the gradients of the weight and of the adapter, for rows `hs [R, H]` and the gradient `g` of the
    /// outputs. Writes the gradient of `hs` to `dh`.
    fn add_gradients(&self, hs: &[f32], g: &[f32], mut dh: Option<&mut [f32]>) -> Result<()> {
        let (k, n) = self.weight.head_shape()?;
        let rows = hs.len() / k;
        let chunk = chunk_rows(n);
        let mut z = buffer(chunk.min(rows) * n);
        let mut teacher = self.teacher_logits(chunk.min(rows), n)?;
        // Replaces the logits `z` of the rows from `start` on by their gradient, and computes the gradient of
        // `h` for these rows.
        let mut through = |z: &mut [f32], start: usize| {
            let m = z.len() / n;
            if m == 0 {
                return Ok(());
            }
            self.product(z, &hs[start * k..(start + m) * k])?;
            teacher.as_mut().map_or(Ok(()), |teacher| teacher.compute(start, m))?;
            for_each_row(z, n, 8 * n, |row, z| {
                let (d_log_prob, d_entropy) = (g[start + row], g[rows + start + row]);
                if let Some(kept) = self.kept_row(start + row, z) {
                    let target = self.targets[start + row];
                    kept.write_gradient(z, target, (d_log_prob, d_entropy), self.inverse_temperature);
                    return;
                }
                let stats = row_stats(z, self.inverse_temperature);
                match &teacher {
                    None => backward_row(z, stats, d_log_prob, d_entropy, self.inverse_temperature),
                    Some(teacher) => {
                        let gradient = [d_log_prob, d_entropy, g[2 * rows + start + row]];
                        let teacher = teacher.row(row);
                        backward_row_with_teacher(z, stats, teacher, gradient, self.inverse_temperature);
                    }
                }
                z[self.targets[start + row] as usize] += d_log_prob * self.inverse_temperature;
            });
            let Some(dh) = &mut dh else { return Ok(()) };
            self.input_gradient(&mut dh[start * k..(start + m) * k], z)
        };
        let rows_from = |start: usize| chunk.min(rows - start);
        // The first chunk is computed before gradients are locked.
        through(&mut z[..rows_from(0) * n], 0)?;
        let starts = || (0..rows).step_by(chunk);
        let mut each_chunk = |add: AddChunk<'_>| {
            for start in starts() {
                let m = rows_from(start);
                if start > 0 {
                    through(&mut z[..m * n], start)?;
                }
                add(&z[..m * n], &hs[start * k..(start + m) * k])?;
            }
            Ok(())
        };
        if let Some(weight) = &self.gradient {
            return weight.add(|dw| {
                edit(dw, |dw| {
                    each_chunk(&mut |z, h| {
                        let h = StridedMatrix::column_major(h, k);
                        let (dz, m) = (StridedMatrix::row_major(z, n), z.len() / n);
                        product(self.weight.gemm_config(), dw, h, dz, (k, m, n), true);
                        Ok(())
                    })
                })
            });
        }
        let Some(adapter) = &self.adapter else { return each_chunk(&mut |_, _| Ok(())) };
        match adapter.gradients() {
            [None, None] => each_chunk(&mut |_, _| Ok(())),
            [a, b] => with_gradient(a, &mut |mut da| {
                with_gradient(b.clone(), &mut |mut db| {
                    each_chunk(&mut |z, h| {
                        if let Some(da) = &mut da {
                            adapter.add_down_gradient(da, h, &adapter.up_gradient(z)?)?;
                        }
                        db.as_mut().map_or(Ok(()), |db| adapter.add_up_gradient(db, h, z))
                    })
                })
            }),
        }
    }
}

/// Adds the gradients of a chunk, from `dz` and `h` of its rows.
type AddChunk<'a> = &'a mut dyn FnMut(&[f32], &[f32]) -> Result<()>;

/// Calls `f` with the locked buffer of a gradient; with `None` if there is no gradient.
fn with_gradient(
    gradient: Option<GradientTarget>,
    f: &mut dyn FnMut(Option<&mut [f32]>) -> Result<()>,
) -> Result<()> {
    match gradient {
        None => f(None),
        Some(gradient) => gradient.add(|buffer| edit(buffer, |values| f(Some(values)))),
    }
}

/// Inputs: `h`, and the weight if it may be trainable. Outputs: `[2, R]`, or `[3, R]` with a teacher.
impl<const N: usize> Operation<N> for Head {
    const NAME: &'static str = "log_prob_and_entropy";

    fn cpu(&self, inputs: [HostArgument; N]) -> Result<(CpuStorage, Shape)> {
        self.forward(inputs[0].values()?)
    }

    fn cuda(&self, inputs: [DeviceArgument; N]) -> Result<(CudaStorage, Shape)> {
        if self.kept.is_some() || self.teacher.is_some() || self.adapter.is_some() {
            bail!("log_prob: kept tokens, teachers and adapters of the head are supported only on the CPU");
        }
        head_forward(inputs[0], self.weight.device_tensor()?, &self.targets, self.inverse_temperature)
    }

    fn backward(&self, inputs: [&Tensor; N], _: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; N]> {
        self.hidden_gradient(inputs[0], grad).map(first_input_gradient)
    }
}
