//! CUDA graphs: launches recorded once and replayed as one.

use super::device::release_unused;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::CudaGraph;
use candle_core::cuda_backend::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use candle_core::{Device, Result, bail};

/// A recorded CUDA graph. It reads and writes the addresses of the recording.
pub struct RecordedGraph(CudaGraph);

impl RecordedGraph {
    /// Records the launches of `work` without running them. `work` must not wait for the device or copy
    /// from the host, and its own allocations must end with it.
    ///
    /// # Errors
    /// Those of `work`, and those of the driver when a call cannot be recorded.
    pub fn record(device: &Device, work: impl FnOnce() -> Result<()>) -> Result<Self> {
        let stream = device.as_cuda_device()?.cuda_stream();
        // A recording may not wait for events outside of it, and event tracking would add such waits.
        let context = stream.context();
        // SAFETY: memory allocated meanwhile is used on this stream only and freed before the recording
        // ends.
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
        // The graph's allocations do not come from the pool, which may hold all free memory. The driver
        // keeps them for later recordings.
        if graph.upload().is_err() {
            release_unused(device)?;
            graph.upload().w()?;
        }
        Ok(Self(graph))
    }

    /// Launches the graph.
    ///
    /// # Errors
    /// When the driver fails.
    pub fn launch(&self) -> Result<()> {
        self.0.launch().w()
    }
}
