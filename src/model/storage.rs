//! The storage of a tensor: dense or packed, whole or sharded, in memory or on disk.

use super::config::WeightFormat;
use super::names::{Layout, ParameterSpec, TensorRole};
use crate::dist::serialization::{f32_bytes, f32_values};
use crate::dist::{Mesh, shard_range};
use crate::ops::cpu::{host_values, to_host};
use crate::ops::packed_weights::{BlockType, PackedFormat};
use crate::ops::parameter::Parameter;
use crate::ops::weight::Weight;
use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Device, Tensor, Var};
use std::ops::Range;
use std::sync::Arc;

/// The format of a tensor in the files of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoredFormat {
    /// f32, or another format that is read as f32.
    F32,
    Bf16,
    /// MXFP4 in the layout of released GPT-OSS.
    Mxfp4,
    /// Blocks of a GGUF file.
    Blocks(BlockType),
}

impl From<WeightFormat> for StoredFormat {
    fn from(format: WeightFormat) -> Self {
        match format {
            WeightFormat::F32 => Self::F32,
            WeightFormat::Bf16 => Self::Bf16,
            WeightFormat::Mxfp4 => Self::Mxfp4,
        }
    }
}

/// The weight of a tensor and its placement. Only a variable can be trained. A variable is always dense.
#[derive(Clone)]
pub struct TensorStorage {
    /// `None` if the tensor is on disk. The weight of a shard has flat values or packed bytes.
    weight: Option<Weight>,
    pub is_sharded: bool,
}

impl TensorStorage {
    /// Returns a trainable tensor with the f32 values `values` in working layout.
    ///
    /// # Errors
    /// When the number of values differs from the element count of `spec`.
    pub fn variable(spec: &ParameterSpec, values: Vec<f32>) -> Result<Self> {
        ensure!(values.len() == spec.element_count(), "{}: {} values", spec.name, values.len());
        let variable = Var::from_vec(values, spec.working_shape(), &Device::Cpu)?;
        Ok(Self::from_variable(&variable, false))
    }

    /// Returns a trainable copy of `weight`.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn to_variable(spec: &ParameterSpec, weight: &Weight) -> Result<Self> {
        Self::variable(spec, weight.decode(&spec.working_shape())?.flatten_all()?.to_vec1()?)
    }

    /// Returns this rank's shard of a trainable tensor. `values` are the flat values of the shard.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn from_shard(values: Vec<f32>) -> Result<Self> {
        let count = values.len();
        Ok(Self::from_variable(&Var::from_vec(values, count, &Device::Cpu)?, true))
    }

    fn from_variable(variable: &Var, is_sharded: bool) -> Self {
        Self { weight: Some(Weight::Dense(Parameter::variable(variable.as_tensor()))), is_sharded }
    }

    /// Returns a frozen tensor with the weight `weight`.
    pub fn from_weight(weight: Weight) -> Self {
        Self { weight: Some(weight.without_gradient()), is_sharded: false }
    }

    /// Returns a tensor that stays on disk. It is read each time a layer computes.
    pub fn on_disk() -> Self {
        Self { weight: None, is_sharded: false }
    }

    /// Keeps only the shard of this rank of tensor `index`, which has the spec `spec`. Variables and packed
    /// weights in host memory are sharded. Other tensors stay whole.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn into_shard(self, spec: &ParameterSpec, index: usize, mesh: &Mesh) -> Result<Self> {
        match &self.weight {
            _ if mesh.ranks() == 1 || self.is_sharded => Ok(self),
            Some(Weight::Dense(dense)) if dense.values().is_variable() => {
                let values = to_host(dense.values())?;
                let values = host_values(&values)?;
                Self::from_shard(values[spec.shard_range(index, mesh.rank(), mesh.sharding())].to_vec())
            }
            Some(Weight::Packed(matrix)) if matrix.is_on_host() => {
                let own = shard_range(matrix.size_bytes(), index, mesh.rank(), mesh.ranks());
                let shard = matrix.shard(own)?;
                Ok(Self { weight: Some(Weight::Packed(Arc::new(shard))), is_sharded: true })
            }
            _ => Ok(self),
        }
    }

    /// Returns the weight in memory. It is the whole tensor or a shard.
    ///
    /// # Errors
    /// When the tensor is on disk.
    pub fn weight(&self, spec: &ParameterSpec) -> Result<&Weight> {
        self.weight.as_ref().with_context(|| format!("{} is on disk", spec.name))
    }

    /// Returns the whole weight.
    ///
    /// # Errors
    /// When the tensor is sharded or on disk.
    pub fn whole_weight(&self, spec: &ParameterSpec) -> Result<&Weight> {
        ensure!(!self.is_sharded, "{} is sharded", spec.name);
        self.weight(spec)
    }

    /// Returns whether the tensor is on disk.
    pub fn is_on_disk(&self) -> bool {
        self.weight.is_none()
    }

    /// Returns whether the tensor can be trained.
    pub fn is_variable(&self) -> bool {
        self.weight.as_ref().is_some_and(Weight::is_variable)
    }

    /// Returns the storage of `weight` with the placement of this tensor.
    pub(super) fn with_weight(&self, weight: Weight) -> Self {
        Self { weight: Some(weight), is_sharded: self.is_sharded }
    }

    /// Returns the size of the whole tensor, in bytes, when ranks exchange it. Dense tensors are exchanged as
    /// f32 values, packed tensors as packed bytes.
    pub(super) fn exchange_bytes(&self, spec: &ParameterSpec) -> usize {
        match &self.weight {
            Some(Weight::Packed(matrix)) => matrix.size_bytes(),
            _ => spec.element_count() * size_of::<f32>(),
        }
    }

    /// Returns the range of the [`Self::exchange_bytes`] that `rank` holds. The range is empty if the tensor
    /// is not sharded.
    pub(super) fn shard_range(
        &self,
        spec: &ParameterSpec,
        index: usize,
        rank: usize,
        mesh: &Mesh,
    ) -> Range<usize> {
        match &self.weight {
            _ if !self.is_sharded => 0..0,
            Some(Weight::Packed(matrix)) => shard_range(matrix.size_bytes(), index, rank, mesh.ranks()),
            _ => {
                let values = spec.shard_range(index, rank, mesh.sharding());
                values.start * size_of::<f32>()..values.end * size_of::<f32>()
            }
        }
    }

    /// Appends the bytes of the shard of this rank to `bytes`.
    ///
    /// # Errors
    /// When the tensor is on disk.
    pub(super) fn append_shard(&self, bytes: &mut Vec<u8>) -> Result<()> {
        match &self.weight {
            Some(Weight::Dense(dense)) => {
                bytes.extend_from_slice(f32_bytes(&host_values(&to_host(dense.values())?)?));
            }
            Some(Weight::Packed(matrix)) => bytes.extend_from_slice(matrix.shard_bytes()?),
            None => bail!("a tensor on disk has no shards"),
        }
        Ok(())
    }

    /// Builds the weight of `spec` from exchanged bytes. The result is the whole tensor, or the experts of
    /// this rank.
    ///
    /// # Errors
    /// When the tensor is on disk, or the number of bytes is wrong.
    pub(super) fn assemble(&self, spec: &ParameterSpec, bytes: Vec<u8>) -> Result<Weight> {
        match &self.weight {
            Some(Weight::Dense(dense)) => {
                let values: Vec<f32> = f32_values(&bytes).collect();
                let values = Tensor::from_vec(values, spec.working_shape(), &Device::Cpu)?;
                Ok(Weight::Dense(dense.with_values(&values)))
            }
            Some(Weight::Packed(matrix)) => {
                let experts = spec.matrix_shape().map_or(1, |[experts, ..]| experts);
                Ok(Weight::Packed(Arc::new(matrix.with_bytes(experts, bytes))))
            }
            None => bail!("{} is on disk", spec.name),
        }
    }
}

/// Copies `weight` to `device`. On a GPU, matrices in MXFP4 stay packed, other matrices become bf16, and
/// other tensors f32.
///
/// # Errors
/// When memory runs out.
pub fn copy_to_device(weight: &Weight, device: &Device, spec: &ParameterSpec) -> Result<Weight> {
    let dtype = if spec.is_matrix() { DType::BF16 } else { DType::F32 };
    Ok(weight.to_device(device, dtype, &spec.working_shape())?)
}

impl ParameterSpec {
    /// Returns the packed format of a frozen tensor that is stored in `format`; `None` if the tensor is f32
    /// in memory.
    pub fn packed_format(&self, format: impl Into<StoredFormat>) -> Option<PackedFormat> {
        let is_packable = self.is_matrix() && self.role != TensorRole::AdapterFactor;
        // A matrix with one column is not packed.
        let is_wide = self.working_shape().last().is_some_and(|&columns| columns > 1);
        match format.into() {
            StoredFormat::F32 => None,
            StoredFormat::Mxfp4 if self.is_expert_matrix() => Some(PackedFormat::Mxfp4),
            _ if !(is_packable && is_wide) => None,
            StoredFormat::Blocks(kind) if self.is_lookup_table() => Some(PackedFormat::BlockRows(kind)),
            StoredFormat::Blocks(kind) => Some(PackedFormat::Blocks(kind)),
            _ if self.is_lookup_table() => Some(PackedFormat::Bf16Rows),
            _ => Some(PackedFormat::Bf16),
        }
    }

    /// Returns whether the tensor is an embedding that is not tied to the LM head. Passes look up rows of it,
    /// and no matmul reads it.
    pub fn is_lookup_table(&self) -> bool {
        self.role == TensorRole::Embedding && self.layout == Layout::AsStored
    }

    /// Returns the shape `[E, in, out]` of a matrix; `None` for other tensors. `E` is 1 for a matrix without
    /// experts.
    pub fn matrix_shape(&self) -> Option<[usize; 3]> {
        match *self.working_shape() {
            [input, output] => Some([1, input, output]),
            [experts, input, output] => Some([experts, input, output]),
            _ => None,
        }
    }

    /// Returns the memory, in bytes, of a frozen tensor that is stored in `format`.
    pub fn resident_bytes(&self, format: impl Into<StoredFormat>) -> u64 {
        match (self.packed_format(format), self.matrix_shape()) {
            (Some(format), Some(shape)) => format.bytes(shape) as u64,
            _ => (self.element_count() * size_of::<f32>()) as u64,
        }
    }
}
