//! CUDA graphs: launches are captured once, and replayed by one launch.

use super::device::release_unused;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::CudaGraph;
use candle_core::cuda_backend::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use candle_core::{Device, Result, bail};

/// A captured CUDA graph. A replay uses the memory at the addresses of the capture.
pub struct RecordedGraph(CudaGraph);

impl RecordedGraph {
    /// Captures the launches of `work` without running them. `work` must not wait for the device or copy from
    /// the host, and must free its own allocations. After an error the stream captures no longer.
    ///
    /// # Errors
    /// Errors of `work`, and errors of the driver when a call cannot be captured.
    pub fn record(device: &Device, work: impl FnOnce() -> Result<()>) -> Result<Self> {
        let stream = device.as_cuda_device()?.cuda_stream();
        // A capture must not wait for events outside of it, and event tracking would add such waits.
        let context = stream.context();
        // SAFETY: memory that is allocated during the capture is used only on this stream and freed before
        // the capture ends.
        unsafe { context.disable_event_tracking() };
        let begun = stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
        let result = begun.w().and_then(|()| {
            let worked = work();
            // In a lost capture every call fails, also those that free the memory of `work`. cudarc stores
            // such errors, and would return the first of them before it ends the capture.
            let stored = context.check_err().w();
            let recorded = stream.end_capture(CUgraphInstantiate_flags(0)).w();
            worked.and(stored).and(recorded)
        });
        // SAFETY: as above.
        unsafe { context.enable_event_tracking() };
        let Some(graph) = result? else { bail!("the captured CUDA graph is empty") };
        // The graph's allocations do not come from the memory pool. If the pool holds all free memory, the
        // upload fails, and the pool must release memory first. The driver keeps the graph's allocations for
        // later captures.
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
