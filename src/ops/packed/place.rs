//! Where a packed matrix lies: on the host, as a shard of it, or on a device.

use super::{PackedForm, PackedMatrix};
use candle_core::{Device, Result, Tensor, bail};
use std::ops::Range;

/// Where its bytes are.
pub(super) enum Bytes {
    Host(Vec<u8>),
    /// Those that this process holds of a matrix which several hold together.
    Shard(Vec<u8>),
    /// u8.
    Device(Tensor),
}

impl PackedMatrix {
    /// The same on `device`.
    ///
    /// # Errors
    /// When it is in bf16, which a GPU multiplies by as a plain tensor, or a shard; the device's.
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        if self.form != PackedForm::Mxfp4 && !device.is_cpu() {
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
            (Bytes::Shard(_), _) => bail!("packed matrix {:?}: a shard is gathered first", self.shape()),
        };
        Ok(Self { bytes, ..*self })
    }

    /// Whether all of it lies on the host.
    pub fn is_on_host(&self) -> bool {
        matches!(self.bytes, Bytes::Host(_))
    }

    /// As it lies in memory.
    ///
    /// # Errors
    /// When that is a device's, or only a shard is here.
    pub fn bytes(&self) -> Result<&[u8]> {
        match &self.bytes {
            Bytes::Host(bytes) => Ok(bytes),
            Bytes::Shard(_) => bail!("packed matrix {:?}: a shard is gathered first", self.shape()),
            Bytes::Device(_) => bail!(
                "packed matrix {:?} lies on a GPU, where it is multiplied by alone; call to_device(&Device::Cpu) first",
                self.shape()
            ),
        }
    }

    /// The matrix of which this process keeps the bytes `own` alone.
    ///
    /// # Errors
    /// As [`Self::bytes`].
    pub fn shard(&self, own: Range<usize>) -> Result<Self> {
        Ok(Self { bytes: Bytes::Shard(self.bytes()?[own].to_vec()), ..*self })
    }

    /// What this process holds of it.
    ///
    /// # Errors
    /// When it is not sharded.
    pub fn shard_bytes(&self) -> Result<&[u8]> {
        match &self.bytes {
            Bytes::Shard(bytes) => Ok(bytes),
            Bytes::Host(_) | Bytes::Device(_) => bail!("packed matrix {:?} is not sharded", self.shape()),
        }
    }

    /// `experts` experts of this shape and form, whose bytes these are.
    pub fn with_bytes(&self, experts: usize, bytes: Vec<u8>) -> Self {
        Self::of_bytes(self.form, [experts, self.input, self.output], bytes)
    }

    /// As it lies on a device, u8.
    ///
    /// # Errors
    /// When it does not.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub(in super::super) fn on_device(&self) -> Result<&Tensor> {
        match &self.bytes {
            Bytes::Device(bytes) => Ok(bytes),
            Bytes::Host(_) | Bytes::Shard(_) => {
                bail!("packed matrix {:?} is not on the GPU; call to_device first", self.shape())
            }
        }
    }
}
