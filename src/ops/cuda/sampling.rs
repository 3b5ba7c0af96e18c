//! Sampling from logits on the GPU. Only tokens and log-probabilities are copied to the host, in one copy.

use super::arguments::{Op, output};
use super::launch::{kernel_params, launch};
use super::log_prob::check_vocabulary;
use crate::ops::logits::SampledToken;
use crate::ops::sink_attention::kernels::{Kernel, kernel};
use candle_core::{Result, Tensor, bail};

const OP: Op = Op("sampling");
const THREADS: usize = 1024;
/// Number of thread groups of equal size. Sums are first added within each group.
const GROUPS: usize = 32;
const DRAW: Kernel =
    kernel("sampling_draw", "sampling", THREADS, (THREADS + 2 * GROUPS + 1) * size_of::<f64>());
const LIKELIEST: Kernel = Kernel { function: "sampling_likeliest", ..DRAW };
const LOG_PROBS: Kernel = kernel("sampling_log_probs", "sampling", 128, 0);
/// The value that the kernel writes if the logits of a row do not define a distribution.
const NO_TOKEN: u32 = u32::MAX;

kernel_params! {
    /// `Draws` of `kernels/sampling.cuh`.
    struct DrawParams {
        z: u64,
        log_sum_exp: u64,
        rows: u64,
        uniforms: u64,
        drawn: u64,
        vocabulary: i32,
    }

    /// `LogProbs` of `kernels/sampling.cuh`.
    struct LogProbParams {
        z: u64,
        log_sum_exp: u64,
        rows: u64,
        tokens: u64,
        log_probs: u64,
        count: i64,
        vocabulary: i32,
    }
}

/// Checks that each requested row is below `rows`. Returns the rows in the format of the kernels.
fn checked_rows<A>(requests: &[(usize, A)], rows: usize) -> Result<Vec<u32>> {
    let row = |&(row, _): &(usize, A)| match u32::try_from(row) {
        Ok(id) if row < rows => Ok(id),
        _ => bail!("logits: row {row} of {rows}"),
    };
    requests.iter().map(row).collect()
}

/// Draws one token per element of `draws`, which is a row of `z [R, V]` and a uniform number in [0, 1). If
/// `likeliest` is true, selects the most likely token and ignores the number. `None` means that the logits of
/// the row do not define a distribution.
pub(in crate::ops) fn draw_tokens(
    z: &Tensor,
    log_sum_exp: &Tensor,
    draws: &[(usize, f64)],
    likeliest: bool,
) -> Result<Vec<Option<SampledToken>>> {
    let (rows, vocabulary) = z.dims2()?;
    let requests = checked_rows(draws, rows)?;
    check_vocabulary(OP, vocabulary)?;
    let opened = [z, log_sum_exp].map(Tensor::storage_and_layout);
    let (z, device) = OP.open_tensor::<f32>("the logits", &opened[0], &[rows, vocabulary])?;
    let (sums, _) = OP.open_tensor::<f32>("the log-sum-exps", &opened[1], &[rows])?;
    if draws.is_empty() {
        return Ok(vec![]);
    }
    let uniforms: Vec<f64> = draws.iter().map(|&(_, uniform)| uniform).collect();
    let (requests, uniforms) = (device.clone_htod(&requests)?, device.clone_htod(&uniforms)?);
    let mut drawn = output::<u32>(device, 2 * draws.len())?;
    // SAFETY: all buffers outlive the launch, each block accesses only its row, and every row exists.
    unsafe {
        launch(device, &[(if likeliest { &LIKELIEST } else { &DRAW }, draws.len())], |at| DrawParams {
            z: at.read(&z),
            log_sum_exp: at.read(&sums),
            rows: at.read(&requests),
            uniforms: at.read(&uniforms),
            drawn: at.write(&mut drawn),
            vocabulary: vocabulary as i32,
        })?
    };
    let of_pair = |pair: &[u32]| {
        let token = Some(pair[0]).filter(|&token| token != NO_TOKEN)?;
        Some(SampledToken { token, log_prob: f32::from_bits(pair[1]) })
    };
    Ok(device.clone_dtoh(&drawn)?.chunks_exact(2).map(of_pair).collect())
}

/// Returns `z_t − LSE(z)` of each (row, token).
pub(in crate::ops) fn token_log_probs(
    z: &Tensor,
    log_sum_exp: &Tensor,
    tokens: &[(usize, u32)],
) -> Result<Vec<f32>> {
    let (rows, vocabulary) = z.dims2()?;
    let requests = checked_rows(tokens, rows)?;
    check_vocabulary(OP, vocabulary)?;
    let ids: Vec<u32> = tokens.iter().map(|&(_, token)| token).collect();
    if let Some(id) = ids.iter().find(|&&id| id as usize >= vocabulary) {
        bail!("logits: token {id} in a vocabulary of {vocabulary}");
    }
    let opened = [z, log_sum_exp].map(Tensor::storage_and_layout);
    let (z, device) = OP.open_tensor::<f32>("the logits", &opened[0], &[rows, vocabulary])?;
    let (sums, _) = OP.open_tensor::<f32>("the log-sum-exps", &opened[1], &[rows])?;
    if tokens.is_empty() {
        return Ok(vec![]);
    }
    let (requests, ids) = (device.clone_htod(&requests)?, device.clone_htod(&ids)?);
    let mut log_probs = output::<f32>(device, tokens.len())?;
    // SAFETY: all buffers outlive the launch, and all rows and tokens exist.
    unsafe {
        launch(device, &[(&LOG_PROBS, tokens.len().div_ceil(LOG_PROBS.threads))], |at| LogProbParams {
            z: at.read(&z),
            log_sum_exp: at.read(&sums),
            rows: at.read(&requests),
            tokens: at.read(&ids),
            log_probs: at.write(&mut log_probs),
            count: tokens.len() as i64,
            vocabulary: vocabulary as i32,
        })?
    };
    device.clone_dtoh(&log_probs)
}
