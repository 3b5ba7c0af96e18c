//! Decode on a GPU with CUDA graphs: in each step the host launches one captured graph. It does not launch
//! each kernel separately.
//!
//! The forward pass is [`DecoderStack::run_layers`]. Inputs that change from step to step are copied to
//! buffers on the GPU before the launch. So one captured graph can replay every later step of its shape. The
//! results are bit-identical to those of separate launches. The second step of a shape is captured.

use super::attention::AttentionMode;
use super::cache::SequenceCache;
use super::decoder_stack::{DecoderStack, keep_nothing};
use super::forward::Rows;
use crate::ops::cuda::{DecodeBatch, DecodeStep, RecordedGraph, overwrite, upload};
use crate::ops::rope::Rotation;
use crate::ops::sink_attention::Attention;
use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor};
use std::sync::Arc;

/// Maximum number of shapes whose graphs are kept. The shape changes when sequences start or end, and
/// sometimes when they grow.
const BATCHES_MAX: usize = 4;

/// Runs decode steps, and captures one CUDA graph per shape.
pub struct Decoder {
    device: Device,
    /// Batches, one per shape, in order of use. The most recent one is last.
    batches: Vec<Batch>,
    /// False after a capture failed.
    can_capture: bool,
    replayed: u64,
}

/// Buffers and the captured CUDA graph of one batch shape.
struct Batch {
    launches: DecodeBatch,
    /// The first layer's input, `[T, H]`.
    x: Tensor,
    /// `[T]`.
    positions: Tensor,
    /// The last layer's output, `[T, H]`.
    hidden: Tensor,
    graph: Option<RecordedGraph>,
}

impl Decoder {
    /// Returns a decoder for `stack`; `None` if decode cannot be captured. Capture needs a GPU, and weights
    /// that stay in memory.
    pub fn new(stack: &DecoderStack) -> Option<Self> {
        let device = stack.weights.device().clone();
        let can_capture = device.is_cuda() && stack.weights.are_resident();
        can_capture.then_some(Self { device, batches: vec![], can_capture, replayed: 0 })
    }

    /// Returns the number of steps that replayed a captured graph.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub fn replay_count(&self) -> u64 {
        self.replayed
    }

    /// Runs the forward pass of one new token per sequence, as [`DecoderStack::forward_cached`] does.
    /// `tokens[i]` continues the sequence of `caches[i]`. Returns hidden states `[T, H]`, which are valid
    /// until the next step.
    ///
    /// # Errors
    /// Errors of [`DecoderStack::forward_cached`].
    pub fn decode_step(
        &mut self,
        stack: &DecoderStack,
        tokens: Vec<u32>,
        caches: &mut [&mut SequenceCache],
    ) -> Result<Tensor> {
        let rotation = stack.model.rotation(caches.iter().map(|cache| cache.len() as u32).collect());
        rotation.check(tokens.len(), stack.model.config.head_dim)?;
        let x = stack.embed(&Arc::new(tokens))?;
        let step = step(stack, caches)?;
        let known = self.batches.iter().position(|batch| batch.launches.has_shape_of(&step));
        let is_new = known.is_none();
        let mut batch = match known {
            Some(index) => self.batches.remove(index),
            None => Batch::new(&self.device, &step, &x)?,
        };
        batch.launches.load(&step)?;
        overwrite(&batch.x, &x)?;
        upload(&batch.positions, &rotation.positions)?;
        let rotation = rotation.with_device_positions(&batch.positions)?;
        if batch.graph.is_none() && !is_new && self.can_capture {
            match batch.record(&self.device, stack, rotation.clone()) {
                Ok(graph) => batch.graph = Some(graph),
                Err(error) => {
                    self.can_capture = false;
                    let why = format!("{error:#}");
                    // The text of the error may have a backtrace after its first line.
                    let why = why.lines().next().unwrap_or_default();
                    eprintln!(
                        "note: CUDA graph capture of decode failed ({why}); each kernel is launched separately"
                    );
                }
            }
        }
        match &batch.graph {
            Some(graph) => {
                graph.launch()?;
                self.replayed += 1;
            }
            None => batch.forward(stack, rotation)?,
        }
        let hidden = batch.hidden.clone();
        self.batches.push(batch);
        if self.batches.len() > BATCHES_MAX {
            self.batches.remove(0);
        }
        Ok(hidden)
    }
}

/// Appends one position to every layer of each cache. Returns the arguments of attention for this step.
fn step(stack: &DecoderStack, caches: &mut [&mut SequenceCache]) -> Result<DecodeStep> {
    let mut step = DecodeStep::default();
    for index in 0..stack.model.config.num_hidden_layers {
        let layer = stack.weights.layer(index, None)?;
        let attention = layer.attention().shape(stack.model, index, &stack.forward);
        let layers = caches.iter_mut().map(|cache| cache.layer(index));
        let mut pages =
            layers.map(|layer| layer.pages_mut().context("a cache on host")).collect::<Result<Vec<_>>>()?;
        step.add_layer(attention, &mut pages)?;
        if let Some(window) = attention.window {
            // The pages that are freed here stay intact for this step: its page table already names them, and
            // no other step can reuse them before the launches of this step.
            pages.iter_mut().for_each(|pages| pages.forget_before(pages.len(), window));
        }
    }
    Ok(step)
}

impl Batch {
    fn new(device: &Device, step: &DecodeStep, x: &Tensor) -> Result<Self> {
        Ok(Self {
            launches: DecodeBatch::new(device, step)?,
            x: x.zeros_like()?,
            positions: Tensor::zeros(x.dim(0)?, DType::U32, device)?,
            hidden: x.zeros_like()?,
            graph: None,
        })
    }

    fn forward(&self, stack: &DecoderStack, rotation: Rotation) -> Result<()> {
        let attention = &mut LoadedAttention(&self.launches);
        let rows = &mut Rows { rotation, attention, replay: None };
        Ok(overwrite(&self.hidden, &stack.run_layers(self.x.clone(), rows, &mut keep_nothing)?)?)
    }

    fn record(&self, device: &Device, stack: &DecoderStack, rotation: Rotation) -> Result<RecordedGraph> {
        let forward = || self.forward(stack, rotation).map_err(candle_core::Error::wrap);
        Ok(RecordedGraph::record(device, forward)?)
    }
}

/// Attention over the keys and values of the step that is loaded into the [`DecodeBatch`].
struct LoadedAttention<'a>(&'a DecodeBatch);

impl AttentionMode for LoadedAttention<'_> {
    fn attend(
        &mut self,
        layer: usize,
        q: &Tensor,
        kv: &Tensor,
        sinks: &Tensor,
        _: Attention,
    ) -> Result<Tensor> {
        Ok(self.0.attend(layer, q, kv, sinks)?)
    }
}
