//! Attention over a paged key-value cache on the GPU, for chunked prefill and decode. It uses the kernels of
//! the training forward pass.

use super::arguments::tensor;
use super::launch::{Addresses, kernel_params, kernel_set, launch};
use super::sink_attention::{DeviceLaunchPlan, Inputs, OP, Outputs};
use crate::ops::page_allocator::{CopiedRows, PageAllocator, PagedSequence, page_table};
use crate::ops::sink_attention::Attention;
use crate::ops::sink_attention::kernels::{BLOCK_KEYS, Kernel, KernelSet};
use crate::ops::sink_attention::plan::{LaunchSequences, check_attention};
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Result, Tensor, bail};
use half::bf16;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The keys and values of one layer for all sequences, in GPU memory: `[pages · 64, 2, M, D]`.
#[derive(Debug)]
pub struct KvPool {
    device: CudaDevice,
    memory: Mutex<CudaSlice<bf16>>,
    kv_heads: usize,
    head_dim: usize,
    /// Assigns pages to sequences.
    pages: Arc<PageAllocator>,
}

/// The keys and values of one sequence in a pool. Clones share pages. Dropping the last clone frees the
/// pages.
#[derive(Debug, Clone)]
pub struct KvPages {
    pool: Arc<KvPool>,
    sequence: PagedSequence,
}

impl KvPool {
    /// Allocates a pool of `pages` free pages for `kv_heads` heads of `head_dim`.
    ///
    /// # Errors
    /// When the device has too little memory.
    pub fn new(device: &CudaDevice, kv_heads: usize, head_dim: usize, pages: usize) -> Result<Arc<Self>> {
        // At least one page is allocated, because an empty allocation has no address.
        let memory = device.alloc_zeros(pages.max(1) * BLOCK_KEYS * 2 * kv_heads * head_dim)?;
        let (device, memory, pages) = (device.clone(), Mutex::new(memory), PageAllocator::new(pages));
        Ok(Arc::new(Self { device, memory, kv_heads, head_dim, pages }))
    }

    /// Returns an empty sequence.
    pub fn new_sequence(self: &Arc<Self>) -> KvPages {
        KvPages { pool: self.clone(), sequence: PagedSequence::default() }
    }

    pub(super) fn device(&self) -> &CudaDevice {
        &self.device
    }

    /// Returns the number of free pages.
    pub fn free_pages(&self) -> usize {
        self.pages.free_pages()
    }

    /// Appends the rows of `kv [T, 2, M, D]` to the sequences: `counts[i]` rows to `sequences[i]`.
    ///
    /// # Errors
    /// When row counts disagree, or the cache is too small. Nothing is changed then.
    pub fn append(
        &self,
        kv: &CudaView<bf16>,
        sequences: &mut [&mut KvPages],
        counts: &[usize],
    ) -> Result<()> {
        self.check_rows(kv, counts.iter().sum())?;
        let slots = self.extend(sequences, counts)?;
        if slots.is_empty() {
            return Ok(());
        }
        self.write(kv, &self.device.clone_htod(&slots)?.as_view())
    }

    /// Allocates `counts[i]` new rows in `sequences[i]`. Returns the cache row of each new row.
    ///
    /// # Errors
    /// When the cache is too small. Nothing is changed then.
    pub(super) fn extend(&self, sequences: &mut [&mut KvPages], counts: &[usize]) -> Result<Vec<i32>> {
        if sequences.iter().any(|sequence| !std::ptr::eq(&*sequence.pool, self)) {
            bail!("key-value cache: a sequence belongs to another cache");
        }
        let growth = self.pages.extend(&mut paged_sequences(sequences), counts)?;
        let mut memory = self.memory();
        for copy in &growth.copies {
            self.copy(&mut memory, copy)?;
        }
        // Rows fit i32, because they are below the length of the cache.
        Ok(growth.runs.iter().flat_map(|r| r.row..r.row + r.rows).map(|row| row as i32).collect())
    }

    fn check_rows(&self, kv: &CudaView<bf16>, rows: usize) -> Result<()> {
        let width = self.row_elements();
        if kv.len() != rows * width {
            bail!("key-value cache: {} elements for {rows} rows of {width}", kv.len());
        }
        Ok(())
    }

    /// Copies rows of `kv` to the cache rows `slots`, which [`KvPool::extend`] returned.
    ///
    /// # Errors
    /// When the row counts differ.
    pub(super) fn write(&self, kv: &CudaView<bf16>, slots: &CudaView<i32>) -> Result<()> {
        self.check_rows(kv, slots.len())?;
        let (width, tokens) = (self.row_elements(), slots.len());
        let mut memory = self.memory();
        let stream = self.device.cuda_stream();
        let mut at = Addresses::new(&stream);
        let params = KvAppendParams {
            rows: at.read(kv),
            cache: at.write(&mut *memory),
            slots: at.read(slots),
            row_vectors: (width / VECTOR) as i32,
        };
        // SAFETY: all three buffers outlive the launch, `kv` and `slots` have `tokens` rows, and the slots
        // are rows of the cache.
        unsafe { launch(&self.device, &KV_APPEND, &params, tokens) }
    }

    /// Returns the contents of all pages, `[pages · 64, 2, M, D]`.
    ///
    /// # Errors
    /// When the copy fails.
    pub fn values(&self) -> Result<Vec<bf16>> {
        self.device.clone_dtoh(&*self.memory())
    }

    /// Copies rows between two pages. The two ranges never overlap, so the memory can be split between them.
    fn copy(&self, memory: &mut CudaSlice<bf16>, copy: &CopiedRows) -> Result<()> {
        let width = self.row_elements();
        let (from, to, len) = (copy.from * width, copy.to * width, copy.rows * width);
        let (mut below, mut above) = memory.split_at_mut(from.max(to));
        let (source, mut target) = match from < to {
            true => (below.slice(from..from + len), above.slice_mut(..len)),
            false => (above.slice(..len), below.slice_mut(to..to + len)),
        };
        self.device.cuda_stream().memcpy_dtod(&source, &mut target).w()
    }

    fn row_elements(&self) -> usize {
        2 * self.kv_heads * self.head_dim
    }

    pub(super) fn memory(&self) -> MutexGuard<'_, CudaSlice<bf16>> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl KvPages {
    /// Returns the number of cached positions.
    pub fn len(&self) -> usize {
        self.sequence.len()
    }

    pub(super) fn pool(&self) -> &Arc<KvPool> {
        &self.pool
    }

    /// Returns a sequence of this pool with `len` positions of arbitrary contents, for timings.
    ///
    /// # Errors
    /// When there are too few free pages.
    pub fn reserve(&self, len: usize, window: Option<usize>) -> Result<Self> {
        Ok(Self { pool: self.pool.clone(), sequence: self.pool.pages.reserve(len, window)? })
    }

    /// Frees pages whose keys are outside the `window` of every query at or after `position`. Pages that
    /// another sequence shares stay allocated.
    pub fn forget_before(&mut self, position: usize, window: usize) {
        self.sequence.forget_before(position, window);
    }
}

/// Returns an empty sequence of a new pool.
///
/// # Errors
/// Errors of [`KvPool::new`].
pub fn kv_pages(device: &CudaDevice, kv_heads: usize, head_dim: usize, pages: usize) -> Result<KvPages> {
    Ok(KvPool::new(device, kv_heads, head_dim, pages)?.new_sequence())
}

pub(super) fn paged_sequences<'a>(sequences: &'a mut [&mut KvPages]) -> Vec<&'a mut PagedSequence> {
    sequences.iter_mut().map(|sequence| &mut sequence.sequence).collect()
}

kernel_params! {
    /// `KvAppend` of `kernels/kv_append.cuh`.
    struct KvAppendParams {
        rows: u64,
        cache: u64,
        slots: u64,
        row_vectors: i32,
    }
}

const KV_APPEND: Kernel = Kernel { function: "kv_append", file: "kv_append", threads: 128, shared_bytes: 0 };
/// Number of elements in 16 bytes, which a thread copies per step.
const VECTOR: usize = 8;

/// Computes attention of new tokens over cached keys, and appends the keys and values of the tokens to the
/// cache. `counts[i]` rows of bf16 `q [T, N, D]` and `kv [T, 2, M, D]` belong to `sequences[i]`. All
/// sequences must be in one pool. `kernels` must come from [`super::kernel_set`]. Not differentiable. Returns
/// `[T, N·D]` and log-sum-exps `[T, N]`.
///
/// # Errors
/// When shapes disagree, or the cache is too small. Nothing is changed then.
pub fn paged_sink_attention(
    kernels: &'static KernelSet,
    q: &Tensor,
    kv: &Tensor,
    sinks: &Tensor,
    sequences: &mut [&mut KvPages],
    counts: &[usize],
    attention: &Attention,
) -> Result<(Tensor, Tensor)> {
    let Attention { heads, kv_heads, head_dim, .. } = *attention;
    let lengths: Vec<usize> = sequences.iter().map(|s| s.len()).collect();
    let batch = LaunchSequences::for_cached_sequences(counts, &lengths)?;
    let tokens = batch.tokens();
    check_attention(attention)?;
    let device = q.device();
    let opened = [q, kv, sinks].map(Tensor::storage_and_layout);
    let q = OP.gpu_storage("q", &opened[0], DType::BF16, &[tokens, heads, head_dim])?;
    let kv = OP.gpu_storage("kv", &opened[1], DType::BF16, &[tokens, 2, kv_heads, head_dim])?;
    let sinks = OP.gpu_storage("sinks", &opened[2], DType::F32, &[heads])?;
    let (q, kv, sinks) = (OP.view(q.0, q.1)?, OP.view(kv.0, kv.1)?, OP.view(sinks.0, sinks.1)?);
    let Some(pool) = sequences.first().map(|sequence| sequence.pool.clone()).filter(|_| tokens > 0) else {
        let empty = |width, dtype| Tensor::zeros((0, width), dtype, device);
        return Ok((empty(heads * head_dim, DType::BF16)?, empty(heads, DType::F32)?));
    };
    if (kv_heads, head_dim) != (pool.kv_heads, pool.head_dim) {
        let KvPool { kv_heads, head_dim, .. } = *pool;
        bail!("sink_attention: a cache of {kv_heads} key-value heads of {head_dim} for {attention:?}");
    }
    pool.append(&kv, sequences, counts)?;
    let (table, pages_max) = page_table(&paged_sequences(sequences), 0);
    let prepared =
        DeviceLaunchPlan::new(&pool.device, kernels, attention, &batch, Some((&table, pages_max)))?;
    let mut outputs = prepared.outputs()?;
    let memory = pool.memory();
    prepared.forward(&Inputs { q: &q, kv: &memory.as_view(), sinks: &sinks }, &mut outputs)?;
    let Outputs { out, lse } = outputs;
    Ok((tensor(out, &pool.device, (tokens, heads * head_dim)), tensor(lse, &pool.device, (tokens, heads))))
}

/// Computes attention as [`paged_sink_attention`] does, with the kernels of the device. Returns `[T, N·D]`.
///
/// # Errors
/// Errors of [`paged_sink_attention`].
pub(in crate::ops) fn cached_sink_attention(
    q: &Tensor,
    kv: &Tensor,
    sinks: &Tensor,
    sequences: &mut [&mut KvPages],
    counts: &[usize],
    attention: &Attention,
) -> Result<Tensor> {
    let kernels = kernel_set(q.device().as_cuda_device()?, attention.head_dim)?;
    Ok(paged_sink_attention(kernels, q, kv, sinks, sequences, counts, attention)?.0)
}
