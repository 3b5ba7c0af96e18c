//! Runs the small kernels of `kernels/primitive_checks.cu`, each of which shows what some machine instructions do.

use super::launch::{Addresses, kernel_params, launch};
use crate::ops::sink_attention::kernels::Kernel;
use candle_core::cuda_backend::CudaDevice;
use candle_core::{Result, bail};

kernel_params! {
    /// `CheckBuffers` of the kernels.
    struct CheckBuffers {
        input: u64,
        output: u64,
        input_words: i32,
        output_words: i32,
    }
}

/// Bytes of shared memory of every check.
const SHARED_BYTES: usize = 48 << 10;

/// Runs the check `function` with `blocks` blocks of `threads` on `input`, and returns the `output_words` that it wrote;
/// words that it did not write are `0xffffffff`. Waits for it.
///
/// # Errors
/// When there is no such check; the driver's.
pub fn run_primitive_check(
    device: &CudaDevice,
    function: &'static str,
    (blocks, threads): (usize, usize),
    input: &[u32],
    output_words: usize,
) -> Result<Vec<u32>> {
    if !function.starts_with("check_") || input.is_empty() || output_words == 0 {
        bail!("{function} on {} words is no check", input.len());
    }
    let kernel = Kernel { function, file: "primitive_checks", threads, shared_bytes: SHARED_BYTES };
    let stream = device.cuda_stream();
    let read = device.clone_htod(input)?;
    let mut written = device.clone_htod(&vec![u32::MAX; output_words])?;
    let mut at = Addresses::new(&stream);
    let buffers = CheckBuffers {
        input: at.read(&read),
        output: at.write(&mut written),
        input_words: input.len() as i32,
        output_words: output_words as i32,
    };
    // SAFETY: both buffers live past the launch, and every check keeps to the numbers of words it is given.
    unsafe { launch(device, &kernel, &buffers, blocks)? };
    drop(at);
    device.clone_dtoh(&written)
}
