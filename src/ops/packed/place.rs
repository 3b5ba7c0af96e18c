//! Where a packed matrix lies: on the host, or on a device.

use super::{PackedForm, PackedMatrix};
use candle_core::{Device, Result, Tensor, bail};

/// Where its bytes are.
pub(super) enum Bytes {
    Host(Vec<u8>),
    /// u8.
    Device(Tensor),
}

impl PackedMatrix {
    /// The same on `device`.
    ///
    /// # Errors
    /// When it is in bf16, which a GPU multiplies by as a plain tensor; the device's.
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        if self.form == PackedForm::Bf16 && !device.is_cpu() {
            bail!(
                "packed matrix {:?}: bf16 is not packed on a GPU; make a bf16 tensor of it there",
                self.shape()
            );
        }
        let bytes = match (&self.bytes, device) {
            (Bytes::Host(bytes), Device::Cpu) => Bytes::Host(bytes.clone()),
            (Bytes::Host(bytes), _) => Bytes::Device(Tensor::from_slice(bytes, bytes.len(), device)?),
            (Bytes::Device(bytes), Device::Cpu) => Bytes::Host(bytes.to_vec1()?),
            (Bytes::Device(bytes), _) => Bytes::Device(bytes.to_device(device)?),
        };
        Ok(Self { bytes, ..*self })
    }

    /// As it lies in memory.
    ///
    /// # Errors
    /// When that is a device's.
    pub fn bytes(&self) -> Result<&[u8]> {
        match &self.bytes {
            Bytes::Host(bytes) => Ok(bytes),
            Bytes::Device(_) => bail!(
                "packed matrix {:?} lies on a GPU, where it is multiplied by alone; call to_device(&Device::Cpu) first",
                self.shape()
            ),
        }
    }

    /// As it lies on a device, u8.
    ///
    /// # Errors
    /// When it does not.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub(in super::super) fn on_device(&self) -> Result<&Tensor> {
        match &self.bytes {
            Bytes::Device(bytes) => Ok(bytes),
            Bytes::Host(_) => {
                bail!("packed matrix {:?} is not on the GPU; call to_device first", self.shape())
            }
        }
    }
}
