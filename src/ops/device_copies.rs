//! Host values that kernels read: copied once to each device that needs them.

use candle_core::{Device, Result, Tensor};
use std::fmt;
use std::sync::{Mutex, PoisonError};

/// One copy per device.
#[derive(Default)]
pub struct DeviceCopies(Mutex<Vec<Tensor>>);

impl DeviceCopies {
    /// Returns the copy on `device`; the first call makes it with `make`.
    ///
    /// # Errors
    /// Those of `make`.
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

// Printing a tensor would print its values, and wait for them.
impl fmt::Debug for DeviceCopies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Uploaded")
    }
}
