//! Opening a GPU.

use candle_core::{Device, Result};

/// The GPU `ordinal`, with a stream of its own: tensors may be made, used and dropped on any OS thread.
///
/// `Device::new_cuda` would give every OS thread its own stream, with no order between them: a tensor used on a second
/// thread could be read before it was written.
///
/// # Errors
/// The driver's.
pub fn open(ordinal: usize) -> Result<Device> {
    Device::new_cuda_with_stream(ordinal)
}
