//! A weight of an op: dense values, which may be trainable, or values packed as on disk.

use super::cpu::{host_values, to_host};
use super::embedding::{embedding, tied_embedding};
use super::experts::{Dispatch, grouped_linear};
use super::linear::{linear, linear_f32};
use super::packed_weights::{
    BlockType, PackedFormat, PackedMatrix, packed_columns, packed_grouped_linear, packed_linear, packed_rows,
};
use super::parameter::{GradientTarget, Parameter};
use super::product::{GemmConfig, GemmThreads, Precision, backward_product, forward_product_by_copy};
use candle_core::{DType, Device, Result, Tensor, bail};
use std::ops::Range;
use std::sync::Arc;

/// A matrix `[in, out]`, expert matrices `[E, in, out]`, an embedding table `[V, H]`, or a dense vector.
#[derive(Clone)]
pub enum Weight {
    Dense(Parameter),
    Packed(Arc<PackedMatrix>),
}

impl Weight {
    /// Returns a weight of dense values that receive no gradient.
    pub fn dense(values: &Tensor) -> Self {
        Weight::Dense(Parameter::constant(values))
    }

    /// Sets the precision of matrix products by a dense weight or by blocks on a CPU. Other packed weights
    /// are unchanged.
    pub fn with_precision(self, precision: Precision) -> Self {
        match self {
            Weight::Dense(parameter) => Weight::Dense(parameter.with_precision(precision)),
            Weight::Packed(matrix) => Weight::Packed(matrix.with_precision(precision)),
        }
    }

    /// Returns the weight with [`Parameter::with_bf16_copies`].
    pub fn with_bf16_copies(self) -> Self {
        match self {
            Weight::Dense(parameter) => Weight::Dense(parameter.with_bf16_copies()),
            packed @ Weight::Packed(_) => packed,
        }
    }

    /// Returns the type of blocks of a GGUF file of which the weight consists, if any.
    pub fn block_type(&self) -> Option<BlockType> {
        if let Weight::Packed(matrix) = self { matrix.format().block_type() } else { None }
    }

    /// Returns blocks as packed bf16, rounded to nearest. Other weights are unchanged.
    ///
    /// # Errors
    /// When the weight is on a device.
    pub fn blocks_to_bf16(self) -> Result<Self> {
        Ok(match self {
            Weight::Packed(matrix) if matrix.format().block_type().is_some() => {
                Weight::Packed(Arc::new(matrix.to_bf16()?))
            }
            weight => weight,
        })
    }

    /// Returns the weight without a gradient.
    pub fn without_gradient(&self) -> Self {
        match self {
            Weight::Dense(parameter) => Weight::Dense(parameter.without_gradient()),
            Weight::Packed(matrix) => Weight::Packed(matrix.clone()),
        }
    }

    /// Returns the weight with `f` applied to its tensor on a device, without a gradient.
    ///
    /// # Errors
    /// Errors of `f`. When the weight is packed on the host.
    pub fn with_device_tensor(&self, f: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(match self {
            Weight::Dense(parameter) => Weight::Dense(parameter.with_values(&f(parameter.values())?)),
            Weight::Packed(matrix) => Weight::Packed(Arc::new(matrix.with_device_tensor(f)?)),
        })
    }

    /// Returns whether the values are a variable, which training may change.
    pub fn is_variable(&self) -> bool {
        matches!(self, Weight::Dense(parameter) if parameter.values().is_variable())
    }

    /// Returns the size in memory, in bytes. For a shard of a packed weight, returns the size of the whole
    /// weight.
    pub fn bytes(&self) -> u64 {
        match self {
            Weight::Dense(parameter) => {
                let values = parameter.values();
                (values.elem_count() * values.dtype().size_in_bytes()) as u64
            }
            Weight::Packed(matrix) => matrix.size_bytes() as u64,
        }
    }

    /// Returns only the experts in the range `experts`. The weight must have an expert dimension.
    ///
    /// # Errors
    /// When the weight is packed and on a device.
    pub fn experts(&self, experts: Range<usize>) -> Result<Self> {
        Ok(match self {
            Weight::Dense(parameter) => {
                let values = parameter.values().narrow(0, experts.start, experts.len())?;
                Weight::Dense(parameter.with_values(&values))
            }
            Weight::Packed(matrix) => Weight::Packed(Arc::new(matrix.experts(experts)?)),
        })
    }

    /// Returns the f32 values on the host, in the shape `shape`.
    ///
    /// # Errors
    /// When the weight is a shard, or memory runs out.
    pub fn decode(&self, shape: &[usize]) -> Result<Tensor> {
        match self {
            Weight::Dense(parameter) => to_host(parameter.values()),
            Weight::Packed(matrix) if matrix.is_on_host() => {
                Tensor::from_vec(matrix.decode()?, shape, &Device::Cpu)
            }
            Weight::Packed(matrix) => {
                Tensor::from_vec(matrix.to_device(&Device::Cpu)?.decode()?, shape, &Device::Cpu)
            }
        }
    }

    /// Copies the weight, which has the shape `shape`, to `device`. On a GPU MXFP4 stays packed, and other
    /// weights become dense tensors of type `dtype`.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn to_device(&self, device: &Device, dtype: DType, shape: &[usize]) -> Result<Self> {
        Ok(match self {
            Weight::Dense(parameter) if parameter.values().device().same_device(device) => self.clone(),
            _ if device.is_cpu() => self.clone(),
            Weight::Packed(matrix) if matrix.format() == PackedFormat::Mxfp4 => {
                Weight::Packed(Arc::new(matrix.to_device(device)?))
            }
            _ => Weight::dense(&self.decode(shape)?.to_dtype(dtype)?.to_device(device)?),
        })
    }

    /// Computes `x · W + bias`: `x [T, in]` → `[T, out]`.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn matmul(&self, x: &Tensor, bias: Option<&Parameter>) -> Result<Tensor> {
        match self {
            Weight::Dense(weight) => linear(x, weight, bias),
            Weight::Packed(weight) => packed_linear(x, weight, bias),
        }
    }

    /// Computes `x · W + bias` as [`Self::matmul`] does, but in f32 for any precision of the weight. On a GPU
    /// the output is f32 too.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn matmul_f32(&self, x: &Tensor, bias: Option<&Parameter>) -> Result<Tensor> {
        match self {
            Weight::Dense(weight) => linear_f32(x, weight, bias),
            Weight::Packed(weight) => packed_linear(x, &weight.with_precision(Precision::F32), bias),
        }
    }

    /// Returns the matrix, if it is dense.
    pub fn as_dense(&self) -> Option<&Parameter> {
        if let Weight::Dense(parameter) = self { Some(parameter) } else { None }
    }

    /// Multiplies each row by the matrix of its expert: `x [T·K, in]`, sorted by `plan`, optional `bias [E,
    /// out]` → `[T·K, out]`.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn grouped_matmul(&self, x: &Tensor, bias: Option<&Parameter>, plan: &Dispatch) -> Result<Tensor> {
        match self {
            Weight::Dense(weight) => grouped_linear(x, weight, bias, plan),
            Weight::Packed(weight) => packed_grouped_linear(x, weight, bias, plan),
        }
    }

    /// Returns rows `ids` of an embedding table `[V, H]`, `[T, H]`.
    ///
    /// # Errors
    /// When an id is not below `V`.
    pub fn rows(&self, ids: &Arc<Vec<u32>>) -> Result<Tensor> {
        match self {
            Weight::Dense(table) => embedding(table, ids),
            Weight::Packed(table) => packed_rows(table, ids),
        }
    }

    /// Returns columns `ids` of a matrix `[H, V]` as rows, `[T, H]`.
    ///
    /// # Errors
    /// When an id is not below `V`.
    pub fn columns(&self, ids: &Arc<Vec<u32>>) -> Result<Tensor> {
        match self {
            Weight::Dense(matrix) => tied_embedding(matrix, ids),
            Weight::Packed(matrix) => packed_columns(matrix, ids),
        }
    }

    /// Returns the shape `(H, V)` of an LM head.
    ///
    /// # Errors
    /// When the weight is not a matrix.
    pub(super) fn head_shape(&self) -> Result<(usize, usize)> {
        match self {
            Weight::Dense(weight) => weight.values().dims2(),
            Weight::Packed(weight) => match weight.shape() {
                [1, input, output] => Ok((input, output)),
                shape => bail!("an LM head must be a matrix, but has shape {shape:?}"),
            },
        }
    }

    /// Returns the threads and the precision of products by this weight on a CPU.
    pub(super) fn gemm_config(&self) -> GemmConfig {
        GemmThreads::Pool.with_precision(match self {
            Weight::Dense(weight) => weight.precision(),
            Weight::Packed(weight) => weight.precision(),
        })
    }

    /// Computes `out = h · W` for rows `h [m, H]`.
    ///
    /// # Errors
    /// When the values cannot be read.
    pub(super) fn product(&self, out: &mut [f32], h: &[f32]) -> Result<()> {
        let (k, n) = self.head_shape()?;
        match self {
            Weight::Dense(weight) => {
                let values = host_values(weight.values())?;
                let w = (&values[..], weight.bf16_copies(), 0);
                forward_product_by_copy(self.gemm_config(), out, h, w, (h.len() / k, k, n), false);
            }
            Weight::Packed(weight) => weight.forward(0, out, h, false)?,
        }
        Ok(())
    }

    /// Computes `dh = dz · Wᵀ` for rows `dz [m, V]`.
    ///
    /// # Errors
    /// When the values cannot be read.
    pub(super) fn input_gradient(&self, dh: &mut [f32], dz: &[f32]) -> Result<()> {
        let (k, n) = self.head_shape()?;
        match self {
            Weight::Dense(weight) => {
                let w = host_values(weight.values())?;
                backward_product(self.gemm_config(), dh, dz, &w, (dz.len() / n, n, k));
            }
            Weight::Packed(weight) => weight.input_gradient(0, dh, dz)?,
        }
        Ok(())
    }

    /// Returns the matrix in GPU memory.
    ///
    /// # Errors
    /// When the weight is packed.
    pub(super) fn device_tensor(&self) -> Result<&Tensor> {
        match self {
            Weight::Dense(weight) => Ok(weight.values()),
            Weight::Packed(_) => bail!("a packed LM head is not supported on a GPU; use dense weights"),
        }
    }

    /// Returns the dense values, which the graph tracks, and the target of their gradient; `None` for a
    /// packed weight.
    pub(super) fn graph_tensor(&self) -> Option<(&Tensor, Option<GradientTarget>)> {
        if let Weight::Dense(weight) = self { Some((weight.values(), weight.gradient())) } else { None }
    }
}
