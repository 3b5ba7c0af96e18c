//! Copies of host values on devices. The values are copied once to each device whose kernels read them.

use candle_core::{Device, Result, Tensor};
use std::fmt;
use std::sync::{Mutex, PoisonError};

/// The copies of one set of values, one per device.
#[derive(Default)]
pub struct DeviceCopies(Mutex<Vec<Tensor>>);

impl DeviceCopies {
    /// Returns the copy on `device`. The first call for a device makes the copy with `make`.
    ///
    /// # Errors
    /// Errors of `make`.
    pub fn get_or_copy(&self, device: &Device, make: impl FnOnce() -> Result<Tensor>) -> Result<Tensor> {
        let mut copies = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(copy) = copies.iter().find(|copy| copy.device().same_device(device)) {
            return Ok(copy.clone());
        }
        let copy = make()?;
        copies.push(copy.clone());
        Ok(copy)
    }
}

// The values are not printed, because printing a tensor on a GPU waits for the GPU.
impl fmt::Debug for DeviceCopies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DeviceCopies")
    }
}
