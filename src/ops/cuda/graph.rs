//! Launches recorded once and given to the GPU again as one: a CUDA graph.

use super::device::give_back_unused;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::CudaGraph;
use candle_core::cuda_backend::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use candle_core::{Device, Result, bail};

/// Recorded launches. What they read and write lies where it lay at the recording.
pub struct Recorded(CudaGraph);

impl Recorded {
    /// What `work` gives to the device's stream, which it does not do now. `work` may neither wait for the device nor copy from the
    /// host, and keeps nothing that it allocates.
    ///
    /// # Errors
    /// Those of `work`; the driver's, where something cannot be recorded.
    pub fn of(device: &Device, work: impl FnOnce() -> Result<()>) -> Result<Self> {
        let stream = device.as_cuda_device()?.cuda_stream();
        // Waits of this stream for itself, of which a recording may have none that reach out of it.
        let context = stream.context();
        // SAFETY: what is allocated meanwhile is used on this stream alone, and gone when it ends.
        unsafe { context.disable_event_tracking() };
        let begun = stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
        let result = begun.w().and_then(|()| {
            let worked = work();
            let recorded = stream.end_capture(CUgraphInstantiate_flags(0)).w();
            worked.and(recorded)
        });
        // SAFETY: as above.
        unsafe { context.enable_event_tracking() };
        let Some(graph) = result? else { bail!("a recording of launches is empty") };
        // What its launches allocate is not the pool's, which may keep all that there is for tensors to come. The driver keeps it for
        // later recordings.
        if graph.upload().is_err() {
            give_back_unused(device)?;
            graph.upload().w()?;
        }
        Ok(Self(graph))
    }

    /// Gives them to the device.
    ///
    /// # Errors
    /// The driver's.
    pub fn launch(&self) -> Result<()> {
        self.0.launch().w()
    }
}
