//! Times of work on a GPU, and the values that it works on.

use anyhow::{Result, ensure};
use candle_core::cuda_backend::cudarc::driver::sys::CUevent_flags;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use half::bf16;
use rand::Rng;
use rloss::random::{Purpose, stream};
use std::sync::Arc;

const WARM_UPS: usize = 3;
/// Number of measurements. Their median is printed.
pub const MEASUREMENTS: usize = 21;
/// Number of consecutive passes per measurement. Several passes hide the host's time.
const PASSES: usize = 5;

/// A timer of work on the stream of a device.
struct Timer {
    stream: Arc<CudaStream>,
    start: CudaEvent,
}

impl Timer {
    /// Starts the timer after all work that was launched before.
    fn start(device: &CudaDevice) -> Result<Self> {
        let stream = device.cuda_stream();
        let start = stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).w()?;
        Ok(Self { stream, start })
    }

    /// Waits for the work launched since the start. Returns its time in milliseconds.
    fn milliseconds(self) -> Result<f32> {
        let end = self.stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).w()?;
        let milliseconds = self.start.elapsed_ms(&end).w()?;
        ensure!(end.is_complete(), "a timer did not wait for the work that it times");
        ensure!(milliseconds > 0.0 && milliseconds.is_finite(), "a time of {milliseconds} ms");
        Ok(milliseconds)
    }
}

/// Returns the median time of `pass`, in milliseconds.
///
/// # Errors
/// When the pass or the driver fails.
pub fn median_milliseconds(gpu: &CudaDevice, pass: &mut dyn FnMut() -> Result<()>) -> Result<f32> {
    for _ in 0..WARM_UPS {
        pass()?;
    }
    let mut times = vec![];
    for _ in 0..MEASUREMENTS {
        let timer = Timer::start(gpu)?;
        for _ in 0..PASSES {
            pass()?;
        }
        times.push(timer.milliseconds()? / PASSES as f32);
    }
    times.sort_by(f32::total_cmp);
    Ok(times[MEASUREMENTS / 2])
}

/// Returns `count` values of a normal distribution. About a million values are drawn, then repeated. Zeros
/// are not used, because kernels run faster on zeros than on real data.
pub fn random_values(count: usize, seed: u64) -> Vec<bf16> {
    let mut rng = stream(seed, Purpose::Evaluation, &[]);
    let mut normal = || {
        let (u, v): (f64, f64) = (rng.random(), rng.random());
        (-2.0 * (1.0 - u).ln()).sqrt() * (std::f64::consts::TAU * v).cos()
    };
    let values: Vec<bf16> = (0..count.min(1 << 20)).map(|_| bf16::from_f64(normal())).collect();
    values.into_iter().cycle().take(count).collect()
}
