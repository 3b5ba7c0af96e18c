//! Decode of one token per sequence with buffers at fixed addresses. Data that changes is copied to the
//! device at the start of a step. So the launches of a step can be captured in a CUDA graph and replayed.

use super::arguments::{Op, tensor};
use super::launch::kernel_set;
use super::paged_attention::{KvPages, KvPool, paged_sequences};
use super::sink_attention::{Inputs, LaunchPlan, LaunchShape, OP as ATTENTION, Outputs, SplitKv};
use crate::ops::page_allocator::{PAGE_POSITIONS, page_table};
use crate::ops::sink_attention::plan::LaunchSequences;
use crate::ops::sink_attention::{Attention, NO_SINK};
use candle_core::cuda_backend::cudarc::driver::CudaSlice;
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Device, Result, Tensor, bail};
use half::bf16;
use std::ops::Range;
use std::sync::Arc;

const OP: Op = Op("decode");

/// The data of one layer in a step.
#[derive(Clone)]
struct DecodeLayer {
    pool: Arc<KvPool>,
    attention: Attention,
    plan: LaunchPlan,
    /// The range of the layer in the arrays of the step.
    arrays: Range<usize>,
    /// The range of the layer's slots in the arrays of the step. A slot is the cache row to which a new key
    /// and value are written.
    slots: Range<usize>,
}

/// A decode step: one new token per sequence, with the data of every layer.
#[derive(Default)]
pub struct DecodeStep {
    layers: Vec<DecodeLayer>,
    arrays: Vec<i32>,
}

impl DecodeStep {
    /// Adds the next layer. Allocates cache space for one new token in each of `sequences`, the caches of the
    /// layer.
    ///
    /// # Errors
    /// When the cache is too small. Nothing is changed then.
    pub fn add_layer(&mut self, attention: Attention, sequences: &mut [&mut KvPages]) -> Result<()> {
        let Some(pool) = sequences.first().map(|sequence| sequence.pool().clone()) else {
            bail!("decode: no sequence")
        };
        let lengths: Vec<usize> = sequences.iter().map(|sequence| sequence.len()).collect();
        let counts = vec![1; lengths.len()];
        let batch = LaunchSequences::for_cached_sequences(&counts, &lengths)?;
        let slots = pool.extend(sequences, &counts)?;
        // The table is wider than needed, so that the shape stays the same while sequences grow.
        let pages = lengths.iter().max().map_or(1, |longest| (longest + 1).div_ceil(PAGE_POSITIONS));
        let (table, pages_max) = page_table(&paged_sequences(sequences), pages.next_power_of_two());
        let kernels = kernel_set(pool.device(), attention.head_dim)?;
        let (plan, arrays) =
            LaunchPlan::new(kernels, &attention, &batch, Some((&table, pages_max)), SplitKv::InSteps)?;
        let mut added = |more: Vec<i32>| {
            let start = self.arrays.len();
            self.arrays.extend(more);
            start..self.arrays.len()
        };
        let (arrays, slots) = (added(arrays), added(slots));
        self.layers.push(DecodeLayer { pool, attention, plan, arrays, slots });
        Ok(())
    }

    fn shapes(&self) -> impl Iterator<Item = (LaunchShape, Attention)> {
        self.layers.iter().map(|layer| (layer.plan.shape, layer.attention))
    }
}

/// Device buffers for steps of one shape, at fixed addresses.
pub struct DecodeBatch {
    device: CudaDevice,
    layers: Vec<DecodeLayer>,
    arrays: CudaSlice<i32>,
    /// Passed as the sinks of layers without sinks, because the kernel always takes sinks.
    no_sinks: CudaSlice<f32>,
}

impl DecodeBatch {
    /// Allocates buffers for steps with the shape of `step`.
    ///
    /// # Errors
    /// When the device has too little memory.
    pub fn new(device: &Device, step: &DecodeStep) -> Result<Self> {
        let device = device.as_cuda_device()?;
        let heads = step.layers.iter().map(|layer| layer.attention.heads).max().unwrap_or(1);
        Ok(Self {
            device: device.clone(),
            layers: step.layers.clone(),
            arrays: device.clone_htod(&step.arrays)?,
            no_sinks: device.clone_htod(&vec![NO_SINK; heads])?,
        })
    }

    /// Returns whether `step` has the shape of the buffers.
    pub fn has_shape_of(&self, step: &DecodeStep) -> bool {
        let own = self.layers.iter().map(|layer| (layer.plan.shape, layer.attention));
        self.layers.len() == step.layers.len() && own.eq(step.shapes())
    }

    /// Copies `step` to the device. [`DecodeBatch::attend`] then uses it.
    ///
    /// # Errors
    /// When `step` has another shape, or the driver fails.
    pub fn load(&mut self, step: &DecodeStep) -> Result<()> {
        if !self.has_shape_of(step) || self.arrays.len() != step.arrays.len() {
            bail!("decode: the step and the buffers have different shapes");
        }
        self.device.memcpy_htod(&step.arrays, &mut self.arrays)
    }

    /// Computes attention of layer `index` for the tokens of the step. `q` is `[T, N, D]`. Appends `kv [T,
    /// 2, M, D]` to the cache. Returns `[T, N·D]`.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn attend(&self, index: usize, q: &Tensor, kv: &Tensor, sinks: &Tensor) -> Result<Tensor> {
        let Some(DecodeLayer { pool, attention, plan, arrays, slots }) = self.layers.get(index) else {
            bail!("decode: no layer {index}")
        };
        let Attention { heads, kv_heads, head_dim, .. } = *attention;
        let tokens = plan.shape.tokens;
        let opened = [q, kv, sinks].map(Tensor::storage_and_layout);
        let q = ATTENTION.gpu_storage("q", &opened[0], DType::BF16, &[tokens, heads, head_dim])?;
        let kv = ATTENTION.gpu_storage("kv", &opened[1], DType::BF16, &[tokens, 2, kv_heads, head_dim])?;
        let sinks = ATTENTION.gpu_storage("sinks", &opened[2], DType::F32, &[heads])?;
        let (q, kv, sinks) =
            (ATTENTION.view(q.0, q.1)?, ATTENTION.view(kv.0, kv.1)?, ATTENTION.view(sinks.0, sinks.1)?);
        let no_sinks = self.no_sinks.slice(..heads);
        let sinks = if attention.sinks { &sinks } else { &no_sinks };
        pool.write(&kv, &self.arrays.slice(slots.clone()))?;
        let mut outputs = plan.outputs(&self.device)?;
        let memory = pool.memory();
        let inputs = Inputs { q: &q, kv: &memory.as_view(), sinks };
        plan.forward(&self.device, &self.arrays.slice(arrays.clone()), &inputs, &mut outputs)?;
        let Outputs { out, .. } = outputs;
        Ok(tensor(out, &self.device, (tokens, heads * head_dim)))
    }
}

/// Overwrites `to` with `from`. Both tensors are bf16.
///
/// # Errors
/// When the shapes differ, or a tensor is not on the GPU.
pub fn overwrite(to: &Tensor, from: &Tensor) -> Result<()> {
    let opened = from.storage_and_layout();
    let (from, _) = OP.open_tensor::<bf16>("the rows", &opened, to.dims())?;
    OP.edit::<bf16, ()>(to, |device, to| device.cuda_stream().memcpy_dtod(&from, to).w())
}

/// Overwrites `to` with `values`.
///
/// # Errors
/// When the lengths differ, or `to` is not on the GPU.
pub fn upload(to: &Tensor, values: &[u32]) -> Result<()> {
    if to.elem_count() != values.len() {
        bail!("decode: {} values for {:?}", values.len(), to.dims());
    }
    OP.edit::<u32, ()>(to, |device, to| device.cuda_stream().memcpy_htod(values, to).w())
}
