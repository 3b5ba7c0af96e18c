//! Decode of one token per sequence with buffers at fixed addresses, so that the launches of a step can be
//! captured in a CUDA graph and replayed.
//!
//! The buffers stay on the device from step to step. A step sends only the entries that have changed.

use super::arguments::{Op, tensor};
use super::launch::kernel_set;
use super::paged_attention::{KvPages, KvPool, scatter_rows};
use super::rope::rope_append;
use super::sink_attention::{Inputs, LaunchArrays, LaunchPlan, Outputs, SplitKv};
use crate::ops::page_allocator::{PAGE_POSITIONS, PagedSequence, TABLE_VECTOR, table_width};
use crate::ops::rope::Rotation;
use crate::ops::sink_attention::plan::LaunchSequences;
use crate::ops::sink_attention::{Attention, NO_SINK};
use candle_core::cuda_backend::cudarc::driver::CudaSlice;
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{Device, Result, Tensor, bail};
use half::bf16;
use std::ops::Range;
use std::sync::Arc;

const OP: Op = Op("decode");

/// The page table of a batch on the device: the pages of the sequence in each row.
///
/// It is for all steps, whatever their number of rows. Rows without a sequence have the padding: a sequence
/// of one position, in a page that no other sequence has.
pub struct DecodeTable {
    pool: Arc<KvPool>,
    padding: KvPages,
    /// Entries per row.
    width: usize,
    /// The entries on the device, `[rows, width]`. Entries that no kernel reads may be those of earlier
    /// steps.
    sent: Vec<i32>,
    memory: CudaSlice<i32>,
    /// Per row: the id of its sequence, and the number of pages whose entries are sent.
    rows: Vec<(u64, usize)>,
}

/// A decode step in one pool: one new token per row.
pub struct DecodeStep {
    attention: Attention,
    plan: LaunchPlan,
    arrays: Vec<i32>,
    /// The cache row to which the new key and value of each row are written.
    slots: Vec<i32>,
    sent_bytes: usize,
}

impl DecodeTable {
    /// Allocates a table for `rows` sequences of up to `tokens` positions, in the pool of `sequence`.
    ///
    /// # Errors
    /// When the device has too little memory, or the pool has no free page for the padding.
    pub fn new(sequence: &KvPages, rows: usize, tokens: usize) -> Result<Self> {
        let pool = sequence.pool.clone();
        let mut padding = pool.new_sequence();
        pool.extend(&mut [&mut padding], &[1])?;
        let width = table_width(tokens);
        let memory = pool.device.alloc_zeros(rows * width)?;
        Ok(Self { pool, padding, width, sent: vec![0; rows * width], memory, rows: vec![(0, 0); rows] })
    }

    /// Allocates one new position in each of `sequences`, and sends the table's new entries. `sequences[i]`
    /// is in row i, and the rows up to `rows` have the padding. Frees the pages that later steps do not see.
    ///
    /// # Errors
    /// When the cache or the table is too small. Nothing is changed then.
    pub fn step(
        &mut self,
        attention: Attention,
        sequences: &mut [&mut KvPages],
        rows: usize,
    ) -> Result<DecodeStep> {
        if sequences.len() > rows || rows > self.rows.len() || rows == 0 {
            let (sequences, all) = (sequences.len(), self.rows.len());
            bail!("decode: {sequences} sequences for {rows} of {all} rows");
        }
        let lengths = sequences.iter().map(|sequence| sequence.len()).chain(std::iter::repeat(0));
        let batch =
            LaunchSequences::for_cached_sequences(&vec![1; rows], &lengths.take(rows).collect::<Vec<_>>())?;
        let kernels = kernel_set(&self.pool.device, attention.head_dim)?;
        let table = Some((rows * self.width, self.width));
        let (plan, arrays) = LaunchPlan::new(kernels, &attention, &batch, table, SplitKv::Decode)?;
        let mut slots = self.pool.extend(sequences, &vec![1; sequences.len()])?;
        slots.resize(rows, self.padding.sequence.page(0).unwrap_or(0) * PAGE_POSITIONS as i32);
        let sent_bytes = self.send(sequences, rows)?;
        if let Some(window) = attention.window {
            // The pages that are freed here stay intact for this step: the table names them, and no other
            // step can reuse them before the launches of this step.
            sequences.iter_mut().for_each(|pages| pages.forget_before(pages.len(), window));
        }
        Ok(DecodeStep { attention, plan, arrays, slots, sent_bytes })
    }

    /// Sends the vectors of the table that have new entries. Returns their bytes.
    fn send(&mut self, sequences: &[&mut KvPages], rows: usize) -> Result<usize> {
        let (mut values, mut places) = (vec![], vec![]);
        for row in 0..rows {
            let sequence = sequences.get(row).map_or(&self.padding, |sequence| &**sequence);
            let (id, pages) = (sequence.id(), &sequence.sequence);
            let (known, count) = self.rows[row];
            // Of a known sequence only the last page can have been replaced by another.
            let first = if known == id { count.saturating_sub(1) } else { 0 };
            self.rows[row] = (id, pages.page_count());
            let own = &mut self.sent[row * self.width..(row + 1) * self.width];
            for vector in changed_vectors(own, pages, first) {
                values.extend(&own[vector * TABLE_VECTOR..(vector + 1) * TABLE_VECTOR]);
                places.push(((row * self.width) / TABLE_VECTOR + vector) as i32);
            }
        }
        if places.is_empty() {
            return Ok(0);
        }
        let split = values.len();
        values.extend(places);
        let device = &self.pool.device;
        let sent = device.clone_htod(&values)?;
        let (vectors, places) = (sent.slice(..split), sent.slice(split..));
        // SAFETY: there is one place per vector, and each place is that of a vector of the table.
        unsafe { scatter_rows(device, &vectors, &mut self.memory, &places, 1)? };
        Ok(size_of_val(&*values))
    }
}

/// Writes the pages of `sequence` from number `first` on into its row of the table. Returns the vectors of
/// the row that have changed, in order.
fn changed_vectors(row: &mut [i32], sequence: &PagedSequence, first: usize) -> Vec<usize> {
    let mut changed = vec![];
    for (page, entry) in row.iter_mut().enumerate().take(sequence.page_count()).skip(first) {
        // No kernel reads the entry of a freed page.
        if let Some(index) = sequence.page(page).filter(|index| index != entry) {
            *entry = index;
            if changed.last() != Some(&(page / TABLE_VECTOR)) {
                changed.push(page / TABLE_VECTOR);
            }
        }
    }
    changed
}

/// Numbers on the device, and what was sent of them.
struct SentArray {
    sent: Vec<i32>,
    memory: CudaSlice<i32>,
}

impl SentArray {
    fn zeros(device: &CudaDevice, len: usize) -> Result<Self> {
        Ok(Self { sent: vec![0; len], memory: device.alloc_zeros(len)? })
    }

    /// Sends the range of `values` that differs from what was sent. Returns its bytes.
    fn send(&mut self, device: &CudaDevice, values: &[i32]) -> Result<usize> {
        let range = changed_range(&self.sent, values);
        let values = &values[range.clone()];
        if !values.is_empty() {
            self.sent[range.clone()].copy_from_slice(values);
            device.cuda_stream().memcpy_htod(values, &mut self.memory.slice_mut(range)).w()?;
        }
        Ok(size_of_val(values))
    }
}

/// Returns the smallest range that has all differences of two slices of the same length.
fn changed_range<T: PartialEq>(old: &[T], new: &[T]) -> Range<usize> {
    let differs = |(old, new): (&T, &T)| old != new;
    let pairs = || old.iter().zip(new);
    let start = pairs().position(differs).unwrap_or(0);
    start..pairs().rposition(differs).map_or(start, |last| last + 1)
}

/// The data of one pool in a batch.
struct PoolArrays {
    attention: Attention,
    plan: LaunchPlan,
    arrays: SentArray,
    slots: SentArray,
}

/// Device buffers for steps of one shape, at fixed addresses. There is a [`DecodeTable`] for each pool.
pub struct DecodeBatch {
    device: CudaDevice,
    pools: Vec<PoolArrays>,
    /// Passed as the sinks of layers without sinks, because the kernel always takes sinks.
    no_sinks: CudaSlice<f32>,
}

impl DecodeBatch {
    /// Allocates buffers for steps with the shape of `steps`, one step per pool.
    ///
    /// # Errors
    /// When the device has too little memory.
    pub fn new(device: &Device, steps: &[DecodeStep]) -> Result<Self> {
        let device = device.as_cuda_device()?;
        let heads = steps.iter().map(|step| step.attention.heads).max().unwrap_or(1);
        let pools = steps.iter().map(|step| {
            Ok(PoolArrays {
                attention: step.attention,
                plan: step.plan,
                arrays: SentArray::zeros(device, step.arrays.len())?,
                slots: SentArray::zeros(device, step.slots.len())?,
            })
        });
        let (pools, no_sinks) = (pools.collect::<Result<_>>()?, device.clone_htod(&vec![NO_SINK; heads])?);
        Ok(Self { device: device.clone(), pools, no_sinks })
    }

    /// Returns whether `steps` have the shape of the buffers.
    pub fn has_shape_of(&self, steps: &[DecodeStep]) -> bool {
        let own = self.pools.iter().map(|pool| (pool.plan.shape, pool.attention));
        own.eq(steps.iter().map(|step| (step.plan.shape, step.attention)))
    }

    /// Sends what is new in `steps` to the device. [`DecodeBatch::attend`] then uses it. Returns the bytes
    /// that the steps have sent, with those of the tables.
    ///
    /// # Errors
    /// When `steps` have another shape, or the driver fails.
    pub fn load(&mut self, steps: &[DecodeStep]) -> Result<usize> {
        if !self.has_shape_of(steps) {
            bail!("decode: the step and the buffers have different shapes");
        }
        let mut bytes = 0;
        for (pool, step) in self.pools.iter_mut().zip(steps) {
            bytes += step.sent_bytes;
            bytes += pool.arrays.send(&self.device, &step.arrays)?;
            bytes += pool.slots.send(&self.device, &step.slots)?;
        }
        Ok(bytes)
    }

    /// Computes attention in layer `layer` of pool `pool` for the tokens of the step. `tables` has the table
    /// of each pool. Queries `[T, N·D]` and keys `[T, M·D]` are rotated by `rotation`. Keys and values `[T,
    /// M·D]` are appended to the cache. `sinks [N]` are needed if attention has sinks. Returns `[T, N·D]`.
    ///
    /// # Errors
    /// When shapes disagree, or there is no such layer.
    pub fn attend(
        &self,
        tables: &[DecodeTable],
        (pool, layer): (usize, usize),
        qkv: [&Tensor; 3],
        rotation: &Rotation,
        sinks: Option<&Tensor>,
    ) -> Result<Tensor> {
        let (Some(PoolArrays { attention, plan, arrays, slots }), Some(table)) =
            (self.pools.get(pool), tables.get(pool))
        else {
            bail!("decode: no pool {pool}")
        };
        let Attention { heads, kv_heads, head_dim, .. } = *attention;
        let tokens = plan.shape.tokens;
        for (x, heads) in qkv.into_iter().zip([heads, kv_heads, kv_heads]) {
            if x.dims() != [tokens, heads * head_dim] {
                bail!("decode: {:?} for {tokens} rows of {heads} heads of {head_dim}", x.dims());
            }
        }
        let opened = sinks.filter(|_| attention.sinks).map(Tensor::storage_and_layout);
        let sinks = match &opened {
            Some(opened) => OP.open_tensor::<f32>("the sinks", opened, &[heads])?.0,
            None if attention.sinks => bail!("decode: attention with sinks without sinks"),
            None => self.no_sinks.slice(..heads),
        };
        let mut memory = table.pool.memory(layer)?;
        // SAFETY: the slots are rows of the cache. All rows of padding have the same input.
        let q = unsafe { rope_append(qkv, rotation, &mut memory, &slots.memory.as_view())? };
        let mut outputs = plan.outputs(&self.device)?;
        let inputs = Inputs { q: &q.as_view(), kv: &memory.as_view(), sinks: &sinks };
        let arrays = LaunchArrays { plan: &arrays.memory, page_table: Some(&table.memory) };
        plan.forward(&self.device, &arrays, &inputs, &mut outputs)?;
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
