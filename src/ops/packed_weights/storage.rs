//! Storage of a packed matrix: on the host, as a shard on the host, or on a device.

use super::{PackedFormat, PackedMatrix};
use candle_core::{Device, Result, Tensor, bail};
use std::ops::Range;

/// The storage of its bytes.
pub(super) enum PackedStorage {
    Host(Vec<u8>),
    /// This process's shard of a matrix that several processes hold together.
    Shard(Vec<u8>),
    /// u8, on a device.
    Device(Tensor),
}

impl PackedMatrix {
    /// Copies the matrix to `device`.
    ///
    /// # Errors
    /// When it is bf16, which a GPU multiplies as a plain tensor; when it is a shard; those of the device.
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        if self.format != PackedFormat::Mxfp4 && !device.is_cpu() {
            bail!(
                "packed matrix {:?}: bf16 is not packed on a GPU; make a bf16 tensor of it there",
                self.shape()
            );
        }
        let bytes = match (&self.bytes, device) {
            (PackedStorage::Host(bytes), Device::Cpu) => PackedStorage::Host(bytes.clone()),
            (PackedStorage::Host(bytes), _) => {
                PackedStorage::Device(Tensor::from_slice(bytes, bytes.len(), device)?)
            }
            (PackedStorage::Device(bytes), Device::Cpu) => PackedStorage::Host(bytes.to_vec1()?),
            (PackedStorage::Device(bytes), _) => PackedStorage::Device(bytes.to_device(device)?),
            (PackedStorage::Shard(_), _) => {
                bail!("packed matrix {:?}: a shard is gathered first", self.shape())
            }
        };
        Ok(Self { bytes, ..*self })
    }

    /// Returns true when the host holds all of it.
    pub fn is_on_host(&self) -> bool {
        matches!(self.bytes, PackedStorage::Host(_))
    }

    /// Returns its bytes in their format in memory.
    ///
    /// # Errors
    /// When it is on a device, or only a shard is here.
    pub fn bytes(&self) -> Result<&[u8]> {
        match &self.bytes {
            PackedStorage::Host(bytes) => Ok(bytes),
            PackedStorage::Shard(_) => bail!("packed matrix {:?}: a shard is gathered first", self.shape()),
            PackedStorage::Device(_) => bail!(
                "packed matrix {:?} is on a GPU, which can only multiply by it; call to_device(&Device::Cpu) first",
                self.shape()
            ),
        }
    }

    /// Returns the matrix of which this process keeps only the bytes `own`.
    ///
    /// # Errors
    /// As [`Self::bytes`].
    pub fn shard(&self, own: Range<usize>) -> Result<Self> {
        Ok(Self { bytes: PackedStorage::Shard(self.bytes()?[own].to_vec()), ..*self })
    }

    /// Returns this process's shard.
    ///
    /// # Errors
    /// When it is not sharded.
    pub fn shard_bytes(&self) -> Result<&[u8]> {
        match &self.bytes {
            PackedStorage::Shard(bytes) => Ok(bytes),
            PackedStorage::Host(_) | PackedStorage::Device(_) => {
                bail!("packed matrix {:?} is not sharded", self.shape())
            }
        }
    }

    /// Rebuilds `experts` experts of this shape and format from their bytes.
    pub fn with_bytes(&self, experts: usize, bytes: Vec<u8>) -> Self {
        Self::from_bytes(self.format, [experts, self.input, self.output], bytes)
    }

    /// Returns the device tensor, u8.
    ///
    /// # Errors
    /// When it is not on a device.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub(in super::super) fn device_tensor(&self) -> Result<&Tensor> {
        match &self.bytes {
            PackedStorage::Device(bytes) => Ok(bytes),
            PackedStorage::Host(_) | PackedStorage::Shard(_) => {
                bail!("packed matrix {:?} is not on the GPU; call to_device first", self.shape())
            }
        }
    }
}
