//! Attention over a key-value cache in pages on the GPU: prefill in chunks and decode, by the forward that trains.

use super::launch::{Addresses, launch};
use super::sink_attention::{DeviceLse, Inputs, Outputs, Prepared, on_gpu, tensor, view};
use crate::ops::pages::{PagedSequence, Pages, page_table};
use crate::ops::sink_attention::Attention;
use crate::ops::sink_attention::kernels::{BLOCK_KEYS, HEAD_DIM, Kernel, KernelSet};
use crate::ops::sink_attention::plan::{LaunchSequences, check_attention};
use candle_core::cuda_backend::CudaDevice;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView, DeviceRepr};
use candle_core::{DType, Result, Tensor, bail};
use half::bf16;

/// Keys and values of one layer: `[pages · 64, 2, M, 64]`.
pub struct PagedKv {
    device: CudaDevice,
    memory: CudaSlice<bf16>,
    kv_heads: usize,
    /// Whose page is whose.
    pub pages: Pages,
}

impl PagedKv {
    /// `pages` free pages for `kv_heads` heads.
    ///
    /// # Errors
    /// When the device's memory does not suffice.
    pub fn new(device: &CudaDevice, kv_heads: usize, pages: usize) -> Result<Self> {
        // Never less than a page: an empty allocation has no address.
        let memory = device.alloc_zeros(pages.max(1) * BLOCK_KEYS * 2 * kv_heads * HEAD_DIM)?;
        Ok(Self { device: device.clone(), memory, kv_heads, pages: Pages::new(pages) })
    }

    /// Makes room in `sequences` and copies the new rows of `kv` `[T, 2, M, 64]` there, `counts[i]` to `sequences[i]`.
    ///
    /// # Errors
    /// When the numbers of rows disagree, or the cache is too small: then nothing has changed.
    pub fn append(
        &mut self,
        kv: &CudaView<bf16>,
        sequences: &mut [&mut PagedSequence],
        counts: &[usize],
    ) -> Result<()> {
        let width = 2 * self.kv_heads * HEAD_DIM;
        let tokens: usize = counts.iter().sum();
        if kv.len() != tokens * width {
            bail!("key-value cache: {} elements for {tokens} rows of {width}", kv.len());
        }
        let runs = self.pages.extend(sequences, counts)?;
        if tokens == 0 {
            return Ok(());
        }
        // Below the cache's length: `pages` counts no more of them than there is memory for.
        let places: Vec<i32> =
            runs.iter().flat_map(|r| r.row..r.row + r.rows).map(|row| row as i32).collect();
        let places = self.device.clone_htod(&places)?;
        let stream = self.device.cuda_stream();
        let mut at = Addresses::new(&stream);
        let params = KvAppendParams {
            rows: at.read(kv),
            cache: at.write(&mut self.memory),
            places: at.read(&places),
            row_vectors: (width / VECTOR) as i32,
        };
        // SAFETY: all three live past the launch, `kv` and `places` have `tokens` rows, and every place is in the cache.
        unsafe { launch(&self.device, &KV_APPEND, &params, tokens) }
    }

    /// All pages, `[pages · 64, 2, M, 64]`.
    pub fn memory(&self) -> &CudaSlice<bf16> {
        &self.memory
    }
}

/// `KvAppend` of `kernels/kv_append.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
struct KvAppendParams {
    rows: u64,
    cache: u64,
    places: u64,
    row_vectors: i32,
}

// SAFETY: plain numbers, laid out as the kernel's struct.
unsafe impl DeviceRepr for KvAppendParams {}

const KV_APPEND: Kernel = Kernel { function: "kv_append", file: "kv_append", threads: 128, shared_bytes: 0 };
/// Elements of 16 bytes, what a thread moves at a time.
const VECTOR: usize = 8;

/// Attention of new tokens over cached keys, which they extend: `counts[i]` rows of `q [T, N, 64]` and `kv [T, 2, M, 64]`,
/// both bf16, belong to `sequences[i]`. `kernels` are those of [`super::kernel_set`]. Not differentiable. Returns
/// `[T, N·64]` and the log-sum-exps `[T, N]`.
///
/// # Errors
/// When shapes disagree, or `cache` is too small for the new tokens: then nothing has changed.
#[allow(clippy::too_many_arguments)]
pub fn sink_attention_paged(
    kernels: &'static KernelSet,
    q: &Tensor,
    kv: &Tensor,
    sinks: &Tensor,
    cache: &mut PagedKv,
    sequences: &mut [&mut PagedSequence],
    counts: &[usize],
    attention: &Attention,
) -> Result<(Tensor, Tensor)> {
    let Attention { heads, kv_heads, .. } = *attention;
    let lengths: Vec<usize> = sequences.iter().map(|s| s.len()).collect();
    let batch = LaunchSequences::cached(counts, &lengths)?;
    let tokens = batch.tokens();
    check_attention(attention)?;
    if kv_heads != cache.kv_heads {
        bail!("sink_attention: a cache of {} key-value heads for {attention:?}", cache.kv_heads);
    }
    let device = q.device();
    let opened = [q, kv, sinks].map(Tensor::storage_and_layout);
    let q = on_gpu("q", &opened[0], DType::BF16, &[tokens, heads, HEAD_DIM])?;
    let kv = on_gpu("kv", &opened[1], DType::BF16, &[tokens, 2, kv_heads, HEAD_DIM])?;
    let sinks = on_gpu("sinks", &opened[2], DType::F32, &[heads])?;
    let (q, kv, sinks) = (view(q.0, q.1)?, view(kv.0, kv.1)?, view(sinks.0, sinks.1)?);
    cache.append(&kv, sequences, counts)?;
    if tokens == 0 {
        let empty = |width, dtype| Tensor::zeros((0, width), dtype, device);
        return Ok((empty(heads * HEAD_DIM, DType::BF16)?, empty(heads, DType::F32)?));
    }
    let (table, pages_max) = page_table(sequences);
    let prepared = Prepared::new(&cache.device, kernels, attention, &batch, Some((&table, pages_max)))?;
    let mut outputs = prepared.outputs()?;
    let pool = cache.memory.as_view();
    prepared.forward(&Inputs { q: &q, kv: &pool, sinks: &sinks }, &mut outputs)?;
    let Outputs { out, lse }: Outputs = outputs;
    let lse: DeviceLse = lse;
    Ok((tensor(out, &cache.device, (tokens, heads * HEAD_DIM)), tensor(lse, &cache.device, (tokens, heads))))
}
