//! Decode on a GPU with CUDA graphs: in each step the host launches one captured graph. It does not launch
//! each kernel separately.
//!
//! The forward pass is [`DecoderStack::run_layers`]. Its inputs are in buffers on the GPU, to which a step
//! sends what has changed before the launch. So one captured graph can replay every later step of its shape.
//! The number of rows is padded ([`padded_rows`]), so there are few shapes. The results are bit-identical to
//! those of separate launches without padding. The second step of a shape is captured.

use super::attention::{AttentionInputs, AttentionMode};
use super::cache::{CacheCapacity, CacheLayout, SequenceCache};
use super::config::Config;
use super::decode_rows::{DecodeRows, padded_rows};
use super::decoder_stack::{DecoderStack, keep_nothing};
use super::forward::Rows;
use crate::ops::cuda::{DecodeBatch, DecodeStep, DecodeTable, RecordedGraph, overwrite, upload};
use crate::ops::page_allocator::table_width;
use crate::ops::rope::Rotation;
use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor};
use std::sync::Arc;

/// Maximum number of shapes whose graphs are kept. The shape changes when many sequences start or end, and a
/// few times while they grow.
const BATCHES_MAX: usize = 16;

/// Runs decode steps, and captures one CUDA graph per shape.
pub struct Decoder {
    device: Device,
    capacity: CacheCapacity,
    rows: DecodeRows,
    /// `None` before the first step.
    buffers: Option<Buffers>,
    /// Batches, one per shape, in order of use. The most recent one is last.
    batches: Vec<Batch>,
    /// False after a capture failed.
    can_capture: bool,
    pub counts: DecodeCounts,
}

/// Counts of the steps of a [`Decoder`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DecodeCounts {
    pub steps: u64,
    /// Steps that launched a captured graph.
    pub replays: u64,
    pub graphs: u64,
    /// Bytes that the forward passes sent to the GPU.
    pub sent_bytes: u64,
}

/// The buffers that all batches share. Rows are those of the largest batch.
struct Buffers {
    /// A page table for each pool of the cache.
    tables: Vec<DecodeTable>,
    layout: Arc<CacheLayout>,
    /// The first layer's input, `[T, H]`. Rows of padding are 0.
    x: Tensor,
    /// `[T]`. Those of padding are 0.
    positions: Tensor,
    /// The last layer's output, `[T, H]`.
    hidden: Tensor,
    /// Number of sequences of the last step.
    sequences: usize,
}

/// The arrays and the captured CUDA graph of one batch shape.
struct Batch {
    launches: DecodeBatch,
    graph: Option<RecordedGraph>,
}

impl Decoder {
    /// Returns a decoder for `stack`, whose sequences have caches of `capacity`; `None` if decode cannot be
    /// captured. Capture needs a GPU, and weights that stay in memory.
    pub fn new(stack: &DecoderStack, capacity: CacheCapacity) -> Option<Self> {
        let device = stack.weights.device().clone();
        let can_capture = device.is_cuda() && stack.weights.are_resident();
        can_capture.then(|| Self {
            device,
            capacity,
            rows: DecodeRows::default(),
            buffers: None,
            batches: vec![],
            can_capture,
            counts: DecodeCounts::default(),
        })
    }

    /// Returns the counts of the steps so far.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    /// Returns the bytes of a decoder's buffers on the GPU, without its graphs.
    pub fn device_bytes(config: &Config, capacity: CacheCapacity) -> u64 {
        let pools = CacheLayout::new(config).pools.len();
        let entries = pools * table_width(capacity.tokens) * size_of::<i32>();
        let hidden = 2 * config.hidden_size * size_of::<half::bf16>();
        (padded_rows(capacity.sequences) * (entries + hidden)) as u64
    }

    /// Runs the forward pass of one new token per sequence, as [`DecoderStack::forward_cached`] does.
    /// `tokens[i]` continues the sequence of `caches[i]`. Returns hidden states `[R, H]`, which are valid
    /// until the next step, and the row of each sequence.
    ///
    /// # Errors
    /// Errors of [`DecoderStack::forward_cached`].
    pub fn decode_step(
        &mut self,
        stack: &DecoderStack,
        tokens: &[u32],
        caches: &mut [&mut SequenceCache],
    ) -> Result<(Tensor, Vec<u32>)> {
        let ids = caches.iter().map(|cache| cache.id().context("a cache on host"));
        let order = self.rows.assign(&ids.collect::<Result<Vec<_>>>()?);
        let (sequences, rows) = (order.len(), padded_rows(order.len()));
        let mut positions: Vec<u32> = order.iter().map(|&index| caches[index].len() as u32).collect();
        positions.resize(rows, 0);
        let rotation = stack.model.rotation(positions);
        rotation.check(rows, stack.model.config.head_dim)?;
        let x = stack.weights.embed(&Arc::new(order.iter().map(|&index| tokens[index]).collect()))?;
        if self.buffers.is_none() {
            self.buffers = Some(Buffers::new(stack, self.capacity, caches, &x)?);
        }
        let buffers = self.buffers.as_mut().context("decode: no buffers")?;
        let steps = buffers.steps(stack, caches, &order, rows)?;
        let known = self.batches.iter().position(|batch| batch.launches.has_shape_of(&steps));
        let mut batch = match known {
            Some(index) => self.batches.remove(index),
            None => Batch { launches: DecodeBatch::new(&self.device, &steps)?, graph: None },
        };
        self.counts.sent_bytes += size_of_val(tokens) as u64;
        self.counts.sent_bytes += (buffers.load(&x, &rotation)? + batch.launches.load(&steps)?) as u64;
        if batch.graph.is_none() && known.is_some() && self.can_capture {
            match batch.record(&self.device, buffers, stack, rotation.clone()) {
                Ok(graph) => {
                    batch.graph = Some(graph);
                    self.counts.graphs += 1;
                }
                Err(error) => {
                    self.can_capture = false;
                    note_failure(&error);
                }
            }
        }
        match &batch.graph {
            Some(graph) => {
                graph.launch()?;
                self.counts.replays += 1;
            }
            None => batch.forward(buffers, stack, rotation)?,
        }
        self.counts.steps += 1;
        let hidden = buffers.hidden.narrow(0, 0, rows)?;
        self.batches.push(batch);
        if self.batches.len() > BATCHES_MAX {
            self.batches.remove(0);
        }
        let mut row_of = vec![0; sequences];
        order.into_iter().zip(0..).for_each(|(index, row)| row_of[index] = row);
        Ok((hidden, row_of))
    }
}

/// Says that a capture failed. This and all later steps launch each kernel.
fn note_failure(error: &anyhow::Error) {
    let why = format!("{error:#}");
    // The text of the error may have a backtrace after its first line.
    let why = why.lines().next().unwrap_or_default();
    eprintln!("note: CUDA graph capture of decode failed ({why}); each kernel is launched separately");
}

impl Buffers {
    /// Allocates the buffers for caches like `caches`. `x [T, H]` is the first layer's input of a step.
    fn new(
        stack: &DecoderStack,
        capacity: CacheCapacity,
        caches: &mut [&mut SequenceCache],
        x: &Tensor,
    ) -> Result<Self> {
        let layout = Arc::new(CacheLayout::new(&stack.model.config));
        let rows = padded_rows(capacity.sequences.max(caches.len()));
        let first = caches.first_mut().context("decode: no sequence")?;
        let tables = (0..layout.pools.len()).map(|pool| {
            let pages = first.pages(pool).context("a cache on host")?;
            Ok(DecodeTable::new(pages, rows, capacity.tokens)?)
        });
        let hidden = || Tensor::zeros((rows, x.dim(1)?), x.dtype(), x.device());
        Ok(Self {
            tables: tables.collect::<Result<_>>()?,
            layout,
            x: hidden()?,
            positions: Tensor::zeros(rows, DType::U32, x.device())?,
            hidden: hidden()?,
            sequences: 0,
        })
    }

    /// Appends one position to every cache, and sends what is new in the page tables. `order` has the index
    /// of the cache in each row. Returns the step of each pool.
    fn steps(
        &mut self,
        stack: &DecoderStack,
        caches: &mut [&mut SequenceCache],
        order: &[usize],
        rows: usize,
    ) -> Result<Vec<DecodeStep>> {
        let mut steps = vec![];
        for (pool, (table, (_, layers))) in self.tables.iter_mut().zip(&self.layout.pools).enumerate() {
            let layer = stack.weights.layer(layers[0], None)?;
            let attention = layer.attention().shape(stack.model, layers[0], &stack.forward);
            let mut pages: Vec<_> = caches.iter_mut().map(|cache| cache.pages(pool)).collect();
            let pages = order.iter().map(|&index| pages[index].take().context("a cache on host"));
            steps.push(table.step(attention, &mut pages.collect::<Result<Vec<_>>>()?, rows)?);
        }
        Ok(steps)
    }

    /// Copies the input `x [T, H]` and the positions of a step to the buffers. Returns the bytes that were
    /// sent.
    fn load(&mut self, x: &Tensor, rotation: &Rotation) -> Result<usize> {
        let (before, now) = (self.sequences, x.dim(0)?);
        overwrite(&self.x.narrow(0, 0, now)?, x)?;
        if now < before {
            let padding = self.x.narrow(0, now, before - now)?;
            overwrite(&padding, &padding.zeros_like()?)?;
        }
        self.sequences = now;
        let mut positions = rotation.positions[..now].to_vec();
        positions.resize(before.max(now), 0);
        upload(&self.positions.narrow(0, 0, positions.len())?, &positions)?;
        Ok(size_of_val(&*positions))
    }
}

impl Batch {
    fn forward(&self, buffers: &Buffers, stack: &DecoderStack, rotation: Rotation) -> Result<()> {
        let rows = rotation.positions.len();
        let rotation = rotation.with_device_positions(&buffers.positions.narrow(0, 0, rows)?)?;
        let attention = &mut LoadedAttention { launches: &self.launches, buffers };
        let pass = &mut Rows { rotation, attention, replay: None };
        let hidden = stack.run_layers(buffers.x.narrow(0, 0, rows)?, pass, &mut keep_nothing)?;
        Ok(overwrite(&buffers.hidden.narrow(0, 0, rows)?, &hidden)?)
    }

    fn record(
        &self,
        device: &Device,
        buffers: &Buffers,
        stack: &DecoderStack,
        rotation: Rotation,
    ) -> Result<RecordedGraph> {
        let forward = || self.forward(buffers, stack, rotation).map_err(candle_core::Error::wrap);
        Ok(RecordedGraph::record(device, forward)?)
    }
}

/// Attention over the keys and values of the step that is loaded into the [`DecodeBatch`].
struct LoadedAttention<'a> {
    launches: &'a DecodeBatch,
    buffers: &'a Buffers,
}

impl AttentionMode for LoadedAttention<'_> {
    fn attend(&mut self, layer: usize, inputs: AttentionInputs) -> Result<Tensor> {
        let AttentionInputs { qkv, rotation, sinks, .. } = inputs;
        let Buffers { tables, layout, .. } = self.buffers;
        Ok(self.launches.attend(tables, layout.places[layer], qkv, rotation, sinks.as_ref())?)
    }
}
