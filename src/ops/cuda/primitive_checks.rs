//! Runs the small kernels in `kernels/primitive_checks.cu`, which test single machine instructions.

use super::launch::{kernel_params, launch};
use crate::ops::sink_attention::kernels::Kernel;
use candle_core::cuda_backend::CudaDevice;
use candle_core::{Result, bail};

kernel_params! {
    /// `CheckBuffers` of `kernels/primitive_checks.cu`.
    struct CheckBuffers {
        input: u64,
        output: u64,
        input_words: i32,
        output_words: i32,
    }
}

/// Shared memory of every check, in bytes.
const SHARED_BYTES: usize = 48 << 10;

/// Runs the check `function` on `input`, with `blocks` blocks of `threads` threads, and waits for it. Returns
/// `output_words` words. Words that the check did not write are `0xffffffff`.
///
/// # Errors
/// When the check does not exist, or the driver fails.
pub fn run_primitive_check(
    device: &CudaDevice,
    function: &'static str,
    (blocks, threads): (usize, usize),
    input: &[u32],
    output_words: usize,
) -> Result<Vec<u32>> {
    if !function.starts_with("check_") || input.is_empty() || output_words == 0 {
        bail!("{function} on {} words is not a check", input.len());
    }
    let kernel = Kernel { function, file: "primitive_checks", threads, shared_bytes: SHARED_BYTES };
    let read = device.clone_htod(input)?;
    let mut written = device.clone_htod(&vec![u32::MAX; output_words])?;
    // SAFETY: both buffers outlive the launch, and every check accesses only the given numbers of words.
    unsafe {
        launch(device, &[(&kernel, blocks)], |at| CheckBuffers {
            input: at.read(&read),
            output: at.write(&mut written),
            input_words: input.len() as i32,
            output_words: output_words as i32,
        })?
    };
    device.clone_dtoh(&written)
}
