//! Statistics of rows of logits on the GPU, in f32, and the gradient of the logits, in bf16 as products
//! require.

use super::arguments::{Op, VECTOR};
use super::launch::{kernel_params, launch};
use crate::ops::sink_attention::kernels::{Kernel, kernel};
use candle_core::cuda_backend::CudaDevice;
use candle_core::cuda_backend::cudarc::driver::{CudaView, CudaViewMut};
use candle_core::{Result, bail};
use half::bf16;

const OP: Op = Op("log_prob");
/// Computes the statistics of a row. Shared memory has three numbers per warp.
const STATS: Kernel = kernel("log_prob_row_stats", "log_prob", 1024, 3 * 1024 / 32 * size_of::<f32>());
const GRADIENT: Kernel = kernel("log_prob_gradient", "log_prob", 256, 0);
/// Maximum length of a row, because indices are i32.
const VOCABULARY_MAX: usize = 1 << 30;

/// Checks that rows are not too long for the kernels.
pub(super) fn check_vocabulary(op: Op, vocabulary: usize) -> Result<()> {
    if vocabulary > VOCABULARY_MAX {
        bail!(
            "{}: the vocabulary has {vocabulary} tokens, but GPU kernels support at most {VOCABULARY_MAX}",
            op.0
        );
    }
    Ok(())
}

kernel_params! {
    /// `RowStats` of `kernels/log_prob.cuh`.
    struct StatsParams {
        z: u64,
        targets: u64,
        log_sum_exp: u64,
        entropy: u64,
        log_prob: u64,
        vocabulary: i32,
        inverse_temperature: f32,
    }

    /// `LogitsGradient` of `kernels/log_prob.cuh`.
    struct GradientParams {
        z: u64,
        targets: u64,
        log_sum_exp: u64,
        entropy: u64,
        d_log_prob: u64,
        d_entropy: u64,
        dz: u64,
        vocabulary: i32,
        inverse_temperature: f32,
    }
}

/// Returns the vocabulary size, `values / rows`. Checks that every length in `of_rows` equals `rows`.
fn vocabulary(values: usize, rows: usize, of_rows: &[usize]) -> Result<usize> {
    if values == 0 {
        return Ok(0);
    }
    let Some(vocabulary) = values.checked_div(rows).filter(|v| v * rows == values) else {
        bail!("{}: {values} logits are not a whole number of {rows} rows; give whole rows", OP.0);
    };
    if let Some(other) = of_rows.iter().find(|&&len| len != rows) {
        bail!("{}: {other} numbers for {rows} rows; give one number per row", OP.0);
    }
    check_vocabulary(OP, vocabulary)?;
    Ok(vocabulary)
}

/// Divides the logits `z [R, V]` by the temperature, in place, and computes the statistics of each row as
/// [`crate::ops::log_prob::row_stats`] does. Writes log-sum-exps and entropies, `[R]` each. If target ids are
/// given, also writes their log-probabilities. The log-probability of a target outside the vocabulary is NaN.
///
/// # Errors
/// When lengths disagree, or the driver fails.
pub fn row_stats(
    device: &CudaDevice,
    z: &mut CudaViewMut<f32>,
    inverse_temperature: f32,
    [log_sum_exp, entropy]: [&mut CudaViewMut<f32>; 2],
    targets: Option<(&CudaView<u32>, &mut CudaViewMut<f32>)>,
) -> Result<()> {
    let rows = log_sum_exp.len();
    let mut lengths = vec![entropy.len()];
    lengths.extend(targets.iter().flat_map(|(ids, log_prob)| [ids.len(), log_prob.len()]));
    let vocabulary = vocabulary(z.len(), rows, &lengths)?;
    if vocabulary == 0 {
        return Ok(());
    }
    // SAFETY: all buffers outlive the launch, each block accesses only its row, and the lengths of rows were
    // checked.
    unsafe {
        launch(device, &[(&STATS, rows)], |at| {
            let (targets, log_prob) =
                if let Some((ids, log_prob)) = targets { (at.read(ids), at.write(log_prob)) } else { (0, 0) };
            StatsParams {
                z: at.write(z),
                targets,
                log_sum_exp: at.write(log_sum_exp),
                entropy: at.write(entropy),
                log_prob,
                vocabulary: vocabulary as i32,
                inverse_temperature,
            }
        })
    }
}

/// Computes the gradient `[R, V]` of the logits before their division by the temperature. Inputs are the
/// logits `z` after this division and, per row, the log-sum-exp, the entropy, the gradient of the
/// log-probability of the target, and the gradient of the entropy.
///
/// # Errors
/// When lengths disagree, or the driver fails.
pub fn logits_gradient(
    device: &CudaDevice,
    z: &CudaView<f32>,
    targets: &CudaView<u32>,
    [log_sum_exp, entropy, d_log_prob, d_entropy]: [&CudaView<f32>; 4],
    inverse_temperature: f32,
    dz: &mut CudaViewMut<bf16>,
) -> Result<()> {
    let rows = targets.len();
    let lengths = [log_sum_exp, entropy, d_log_prob, d_entropy].map(|of_rows| of_rows.len());
    let vocabulary = vocabulary(z.len(), rows, &lengths)?;
    if dz.len() != z.len() {
        bail!("{}: {} logits, but {} values for their gradient; give equal numbers", OP.0, z.len(), dz.len());
    }
    let blocks = rows * vocabulary.div_ceil(GRADIENT.threads * VECTOR);
    // SAFETY: all buffers outlive the launch, each block accesses only its row, and the lengths of rows were
    // checked.
    unsafe {
        launch(device, &[(&GRADIENT, blocks)], |at| GradientParams {
            z: at.read(z),
            targets: at.read(targets),
            log_sum_exp: at.read(log_sum_exp),
            entropy: at.read(entropy),
            d_log_prob: at.read(d_log_prob),
            d_entropy: at.read(d_entropy),
            dz: at.write(dz),
            vocabulary: vocabulary as i32,
            inverse_temperature,
        })
    }
}
