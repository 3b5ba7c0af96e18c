//! Attention over a paged key-value cache on the GPU, for chunked prefill and decode. It uses the kernels of
//! the training forward pass.

use super::arguments::{VECTOR, tensor};
use super::launch::{kernel_params, kernel_set, launch};
use super::sink_attention::{DeviceLaunchPlan, Inputs, OP, Outputs};
use crate::ops::page_allocator::{CopiedRows, PageAllocator, PagedSequence, page_table};
use crate::ops::sink_attention::Attention;
use crate::ops::sink_attention::kernels::{BLOCK_KEYS, Kernel, KernelSet, kernel};
use crate::ops::sink_attention::plan::LaunchSequences;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{Result, Tensor, bail};
use half::bf16;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The keys and values of layers whose sequences have the same pages, in GPU memory.
#[derive(Debug)]
pub struct KvPool {
    pub(super) device: CudaDevice,
    /// Per layer: `[pages · 64, 2, M, D]`.
    layers: Vec<Mutex<CudaSlice<bf16>>>,
    kv_heads: usize,
    head_dim: usize,
    /// Assigns pages to sequences.
    pages: Arc<PageAllocator>,
    /// The id of the last sequence.
    last_id: AtomicU64,
}

/// The keys and values of one sequence in a pool. Clones share pages. Dropping the last clone frees the
/// pages.
#[derive(Debug)]
pub struct KvPages {
    pub(super) pool: Arc<KvPool>,
    pub(super) sequence: PagedSequence,
    /// From 1 on. No other sequence of the pool has or had it.
    id: u64,
}

impl Clone for KvPages {
    fn clone(&self) -> Self {
        self.pool.with_id(self.sequence.clone())
    }
}

impl KvPool {
    /// Allocates a pool of one layer, with `pages` free pages for `kv_heads` heads of `head_dim`.
    ///
    /// # Errors
    /// When the device has too little memory.
    pub fn new(device: &CudaDevice, kv_heads: usize, head_dim: usize, pages: usize) -> Result<Arc<Self>> {
        Self::with_layers(device, 1, kv_heads, head_dim, pages)
    }

    /// Allocates a pool of `layers` layers, as [`KvPool::new`] does for one.
    ///
    /// # Errors
    /// When the device has too little memory.
    pub fn with_layers(
        device: &CudaDevice,
        layers: usize,
        kv_heads: usize,
        head_dim: usize,
        pages: usize,
    ) -> Result<Arc<Self>> {
        // At least one page is allocated, because an empty allocation has no address.
        let elements = pages.max(1) * BLOCK_KEYS * 2 * kv_heads * head_dim;
        let layers = (0..layers).map(|_| Ok(Mutex::new(device.alloc_zeros(elements)?)));
        let (layers, device, pages) =
            (layers.collect::<Result<_>>()?, device.clone(), PageAllocator::new(pages));
        Ok(Arc::new(Self { device, layers, kv_heads, head_dim, pages, last_id: AtomicU64::new(0) }))
    }

    /// Returns an empty sequence.
    pub fn new_sequence(self: &Arc<Self>) -> KvPages {
        self.with_id(PagedSequence::default())
    }

    fn with_id(self: &Arc<Self>, sequence: PagedSequence) -> KvPages {
        KvPages { pool: self.clone(), sequence, id: self.last_id.fetch_add(1, Ordering::Relaxed) + 1 }
    }

    /// Returns the number of free pages.
    pub fn free_pages(&self) -> usize {
        self.pages.free_pages()
    }

    /// Appends the rows of `kv [T, 2, M, D]` to the sequences of a pool of one layer: `counts[i]` rows to
    /// `sequences[i]`.
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
        if slots.is_empty() { Ok(()) } else { self.write(0, kv, &self.device.clone_htod(&slots)?.as_view()) }
    }

    /// Allocates `counts[i]` new rows in `sequences[i]`, for all layers. Returns the cache row of each new
    /// row.
    ///
    /// # Errors
    /// When the cache is too small. Nothing is changed then.
    pub(super) fn extend(&self, sequences: &mut [&mut KvPages], counts: &[usize]) -> Result<Vec<i32>> {
        if sequences.iter().any(|sequence| !std::ptr::eq(&*sequence.pool, self)) {
            bail!("key-value cache: a sequence belongs to another cache");
        }
        let growth = self.pages.extend(&mut paged_sequences(sequences), counts)?;
        for layer in 0..if growth.copies.is_empty() { 0 } else { self.layers.len() } {
            let mut memory = self.memory(layer)?;
            growth.copies.iter().try_for_each(|copy| self.copy(&mut memory, copy))?;
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

    /// Copies rows of `kv` to the cache rows `slots` of a layer, which [`KvPool::extend`] returned.
    ///
    /// # Errors
    /// When the row counts differ, or there is no such layer.
    pub(super) fn write(&self, layer: usize, kv: &CudaView<bf16>, slots: &CudaView<i32>) -> Result<()> {
        self.check_rows(kv, slots.len())?;
        // SAFETY: `kv` has as many rows as there are slots, and the slots are rows of the cache.
        unsafe {
            scatter_rows(&self.device, kv, &mut *self.memory(layer)?, slots, self.row_elements() / VECTOR)
        }
    }

    /// Returns the contents of all pages of the first layer, `[pages · 64, 2, M, D]`.
    ///
    /// # Errors
    /// When the copy fails.
    pub fn values(&self) -> Result<Vec<bf16>> {
        self.device.clone_dtoh(&*self.memory(0)?)
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

    /// Returns the keys and values of a layer.
    ///
    /// # Errors
    /// When there is no such layer.
    pub(super) fn memory(&self, layer: usize) -> Result<MutexGuard<'_, CudaSlice<bf16>>> {
        match self.layers.get(layer) {
            Some(memory) => Ok(memory.lock().unwrap_or_else(PoisonError::into_inner)),
            None => bail!("key-value cache: no layer {layer} of {}", self.layers.len()),
        }
    }
}

impl KvPages {
    /// Returns the number of cached positions.
    pub fn len(&self) -> usize {
        self.sequence.len()
    }

    /// Returns the id, which no other sequence of the pool has or had.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Returns a sequence of this pool with `len` positions of arbitrary contents, for timings.
    ///
    /// # Errors
    /// When there are too few free pages.
    pub fn reserve(&self, len: usize, window: Option<usize>) -> Result<Self> {
        Ok(self.pool.with_id(self.pool.pages.reserve(len, window)?))
    }

    /// Frees pages whose keys are outside the `window` of every query at or after `position`. Pages that
    /// another sequence shares stay allocated.
    pub fn forget_before(&mut self, position: usize, window: usize) {
        self.sequence.forget_before(position, window);
    }
}

/// Returns an empty sequence of a new pool of `layers` layers.
///
/// # Errors
/// Errors of [`KvPool::new`].
pub fn kv_pages(
    device: &CudaDevice,
    layers: usize,
    kv_heads: usize,
    head_dim: usize,
    pages: usize,
) -> Result<KvPages> {
    Ok(KvPool::with_layers(device, layers, kv_heads, head_dim, pages)?.new_sequence())
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

/// Copies rows to places: keys and values to a cache, and entries to a page table.
const KV_APPEND: Kernel = kernel("kv_append", "kv_append", 128, 0);

/// Copies row i of `rows` to row `places[i]` of `to`. A row has `row_vectors` times 16 bytes.
///
/// # Safety
/// `rows` must have one row per place, and every place must be a row of `to`.
pub(super) unsafe fn scatter_rows<T>(
    device: &CudaDevice,
    rows: &CudaView<T>,
    to: &mut CudaSlice<T>,
    places: &CudaView<i32>,
    row_vectors: usize,
) -> Result<()> {
    // SAFETY: the buffers outlive the launch, and the caller guarantees the rows.
    unsafe {
        launch(device, &[(&KV_APPEND, places.len())], |at| KvAppendParams {
            rows: at.read(rows),
            cache: at.write(to),
            slots: at.read(places),
            row_vectors: row_vectors as i32,
        })
    }
}

/// A pass of new tokens over the cached sequences of a pool, for all layers of the pool.
pub struct PagedPass {
    pool: Arc<KvPool>,
    attention: Attention,
    tokens: usize,
    /// The cache row of each new row.
    slots: CudaSlice<i32>,
    plan: DeviceLaunchPlan,
}

impl PagedPass {
    /// Allocates `counts[i]` new positions in `sequences[i]`. All sequences must be in one pool. Frees the
    /// pages that later passes do not see.
    ///
    /// # Errors
    /// When there is no new position, or the cache is too small. Nothing is changed then.
    pub fn new(sequences: &mut [&mut KvPages], counts: &[usize], attention: &Attention) -> Result<Self> {
        let Some(first) = sequences.first() else { bail!("sink_attention: a pass without sequences") };
        let kernels = kernel_set(&first.pool.device, attention.head_dim)?;
        let pass = Self::with_kernels(kernels, sequences, counts, attention)?;
        if let Some(window) = attention.window {
            // The pages that are freed here stay intact for this pass: no other pass can reuse them before
            // the launches of this pass.
            sequences.iter_mut().for_each(|pages| pages.forget_before(pages.len(), window));
        }
        Ok(pass)
    }

    /// Works like [`Self::new`] with `kernels`, which must come from [`kernel_set`], and frees no pages.
    ///
    /// # Errors
    /// As for [`Self::new`].
    pub fn with_kernels(
        kernels: &'static KernelSet,
        sequences: &mut [&mut KvPages],
        counts: &[usize],
        attention: &Attention,
    ) -> Result<Self> {
        let Some(pool) = sequences.first().map(|sequence| sequence.pool.clone()) else {
            bail!("sink_attention: a pass without sequences")
        };
        let Attention { kv_heads, head_dim, .. } = *attention;
        if (kv_heads, head_dim) != (pool.kv_heads, pool.head_dim) {
            let KvPool { kv_heads, head_dim, .. } = *pool;
            bail!("sink_attention: a cache of {kv_heads} key-value heads of {head_dim} for {attention:?}");
        }
        let lengths: Vec<usize> = sequences.iter().map(|s| s.len()).collect();
        let batch = LaunchSequences::for_cached_sequences(counts, &lengths)?;
        let slots = pool.extend(sequences, counts)?;
        let (table, pages_max) = page_table(&paged_sequences(sequences), 0);
        let pages = Some((&table[..], pages_max));
        let plan = DeviceLaunchPlan::new(&pool.device, kernels, attention, &batch, pages)?;
        let (attention, slots) = (*attention, pool.device.clone_htod(&slots)?);
        Ok(Self { pool, attention, tokens: batch.tokens(), slots, plan })
    }

    /// Computes attention in layer `layer` of the pool for `q [T, N, D]`, and appends `kv [T, 2, M, D]` to
    /// the cache. Returns `[T, N·D]` and log-sum-exps `[T, N]`. Not differentiable.
    ///
    /// # Errors
    /// When shapes disagree, or there is no such layer.
    pub fn attend(&self, layer: usize, q: &Tensor, kv: &Tensor, sinks: &Tensor) -> Result<(Tensor, Tensor)> {
        let opened = [q, kv, sinks].map(Tensor::storage_and_layout);
        let (tokens, Attention { heads, kv_heads, head_dim, .. }) = (self.tokens, self.attention);
        let (q, _) = OP.open_tensor("q", &opened[0], &[tokens, heads, head_dim])?;
        let (kv, _) = OP.open_tensor("kv", &opened[1], &[tokens, 2, kv_heads, head_dim])?;
        let (sinks, _) = OP.open_tensor("sinks", &opened[2], &[heads])?;
        self.pool.write(layer, &kv, &self.slots.as_view())?;
        let mut outputs = self.plan.outputs()?;
        let memory = self.pool.memory(layer)?;
        self.plan.forward(&Inputs { q: &q, kv: &memory.as_view(), sinks: &sinks }, &mut outputs)?;
        let (Outputs { out, lse }, device) = (outputs, &self.pool.device);
        Ok((tensor(out, device, (tokens, heads * head_dim)), tensor(lse, device, (tokens, heads))))
    }
}
