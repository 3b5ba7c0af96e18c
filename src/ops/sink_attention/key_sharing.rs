//! Key-value heads that several GPUs share.

use crate::ops::operation::DeviceArgument;
use candle_core::{CudaStorage, Result};

/// The GPUs that share a key-value head. Each has some of its query heads, in the order of the GPUs.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub trait KeySharing: Send + Sync {
    /// Returns the index of this GPU, and the number of GPUs.
    fn place(&self) -> (usize, usize);

    /// Returns, for each of `values`, the values of all these GPUs, one after the other. All GPUs call it
    /// with the same numbers of values.
    ///
    /// # Errors
    /// When memory runs out, or an exchange has failed.
    fn gather(&self, values: &[DeviceArgument]) -> Result<Vec<CudaStorage>>;
}
