//! Storage of a packed matrix: whole on the host, as a shard on the host, or on a device.

use super::{PackedFormat, PackedMatrix};
use candle_core::{Device, Result, Tensor, bail};
use std::ops::Range;
use std::sync::Arc;

/// The bytes of a packed matrix, and where they are stored.
#[derive(Clone)]
pub(super) enum PackedStorage {
    Host(Arc<Vec<u8>>),
    /// This process's shard of a matrix that is sharded over several processes.
    Shard(Arc<Vec<u8>>),
    /// A u8 tensor on a device.
    Device(Tensor),
}

impl PackedMatrix {
    /// Copies the matrix to `device`.
    ///
    /// # Errors
    /// When the matrix is bf16, because a GPU multiplies bf16 as a dense tensor. When the matrix is a shard.
    /// Errors of the device.
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        if self.format != PackedFormat::Mxfp4 && !device.is_cpu() {
            bail!(
                "packed matrix {:?}: bf16 is not packed on a GPU; use a dense bf16 tensor there",
                self.shape()
            );
        }
        let bytes = match (&self.bytes, device) {
            (PackedStorage::Host(bytes), Device::Cpu) => PackedStorage::Host(bytes.clone()),
            (PackedStorage::Host(bytes), _) => {
                PackedStorage::Device(Tensor::from_slice(&bytes[..], bytes.len(), device)?)
            }
            (PackedStorage::Device(bytes), Device::Cpu) => PackedStorage::Host(Arc::new(bytes.to_vec1()?)),
            (PackedStorage::Device(bytes), _) => PackedStorage::Device(bytes.to_device(device)?),
            (PackedStorage::Shard(_), _) => {
                bail!("packed matrix {:?}: gather the shards first", self.shape())
            }
        };
        Ok(Self { bytes, ..*self })
    }

    /// Returns the matrix with `f` applied to its bytes on a device.
    ///
    /// # Errors
    /// Errors of `f`. When the matrix is not on a device.
    pub fn with_device_tensor(&self, f: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<Self> {
        match &self.bytes {
            PackedStorage::Device(bytes) => Ok(Self { bytes: PackedStorage::Device(f(bytes)?), ..*self }),
            PackedStorage::Host(_) | PackedStorage::Shard(_) => {
                bail!("packed matrix {:?} is not on the GPU; call to_device first", self.shape())
            }
        }
    }

    /// Returns whether the host has the whole matrix.
    pub fn is_on_host(&self) -> bool {
        matches!(self.bytes, PackedStorage::Host(_))
    }

    /// Returns the bytes of the matrix in the packed format.
    ///
    /// # Errors
    /// When the matrix is on a device or is a shard.
    pub fn bytes(&self) -> Result<&[u8]> {
        match &self.bytes {
            PackedStorage::Host(bytes) => Ok(bytes),
            PackedStorage::Shard(_) => bail!("packed matrix {:?}: gather the shards first", self.shape()),
            PackedStorage::Device(_) => bail!(
                "packed matrix {:?} is on a GPU, which can only multiply by it; call to_device(&Device::Cpu) first",
                self.shape()
            ),
        }
    }

    /// Returns the matrix as a shard: this process keeps only the bytes `own`.
    ///
    /// # Errors
    /// Errors of [`Self::bytes`].
    pub fn shard(&self, own: Range<usize>) -> Result<Self> {
        Ok(Self { bytes: PackedStorage::Shard(Arc::new(self.bytes()?[own].to_vec())), ..*self })
    }

    /// Returns the bytes of this process's shard.
    ///
    /// # Errors
    /// When the matrix is not sharded.
    pub fn shard_bytes(&self) -> Result<&[u8]> {
        match &self.bytes {
            PackedStorage::Shard(bytes) => Ok(bytes),
            PackedStorage::Host(_) | PackedStorage::Device(_) => {
                bail!("packed matrix {:?} is not sharded", self.shape())
            }
        }
    }

    /// Returns a matrix with the shape and the format of this one, but with `experts` experts, whose bytes
    /// are `bytes`.
    pub fn with_bytes(&self, experts: usize, bytes: Vec<u8>) -> Self {
        Self { experts, bytes: PackedStorage::Host(Arc::new(bytes)), ..*self }
    }

    /// Returns the u8 tensor on the device.
    ///
    /// # Errors
    /// When the matrix is not on a device.
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
