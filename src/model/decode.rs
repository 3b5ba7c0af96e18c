//! Decode on a GPU with CUDA graphs: the host launches one recorded graph a step instead of every kernel.
//!
//! The forward pass is [`DecoderStack::run_layers`]. Inputs that change from step to step are copied to
//! the GPU first. So a recording serves every later step of its shape, with the same bits. A shape is
//! recorded on its second step.

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

/// Most recordings kept at a time. The shape changes when sequences start or end, and sometimes as they
/// grow.
const BATCHES_MAX: usize = 4;

/// Runs decode steps and records them by shape.
pub struct Decoder {
    device: Device,
    /// The most recently used is last.
    batches: Vec<Batch>,
    /// False after a recording failed.
    can_record: bool,
    replayed: u64,
}

/// Buffers and the recorded CUDA graph of one batch shape.
struct Batch {
    launches: DecodeBatch,
    /// The first layer's input, `[T, H]`.
    x: Tensor,
    /// `[T]`.
    positions: Tensor,
    /// The last layer's output, `[T, H]`.
    hidden: Tensor,
    recorded: Option<RecordedGraph>,
}

impl Decoder {
    /// Returns a decoder for `stack`, if its decode can be recorded: on a GPU, with weights that stay in
    /// memory.
    pub fn new(stack: &DecoderStack) -> Option<Self> {
        let device = stack.weights.device().clone();
        let can = device.is_cuda() && stack.weights.are_resident();
        can.then_some(Self { device, batches: vec![], can_record: true, replayed: 0 })
    }

    /// Returns the number of steps that replayed a recording.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub fn replay_count(&self) -> u64 {
        self.replayed
    }

    /// Does [`DecoderStack::forward_cached`] of one token for each of `caches`. Returns hidden states `[T,
    /// H]`, which are valid until the next step.
    ///
    /// # Errors
    /// As [`DecoderStack::forward_cached`].
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
        if batch.recorded.is_none() && !is_new && self.can_record {
            match batch.record(&self.device, stack, rotation.clone()) {
                Ok(recorded) => batch.recorded = Some(recorded),
                Err(error) => {
                    self.can_record = false;
                    let why = format!("{error:#}");
                    // The error may end in a backtrace.
                    let why = why.lines().next().unwrap_or_default();
                    eprintln!("note: decode is not recorded, every kernel is launched: {why}");
                }
            }
        }
        match &batch.recorded {
            Some(recorded) => {
                recorded.launch()?;
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

/// Appends one position to every layer of `caches`, and returns the arguments of attention.
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
            // The table of this step has these pages already, and no other step runs before its launches.
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
            recorded: None,
        })
    }

    fn forward(&self, stack: &DecoderStack, rotation: Rotation) -> Result<()> {
        let attend = &mut LoadedAttention(&self.launches);
        let rows = &mut Rows { rotation, attend, replay: None };
        Ok(overwrite(&self.hidden, &stack.run_layers(self.x.clone(), rows, &mut keep_nothing)?)?)
    }

    fn record(&self, device: &Device, stack: &DecoderStack, rotation: Rotation) -> Result<RecordedGraph> {
        let forward = || self.forward(stack, rotation).map_err(candle_core::Error::wrap);
        Ok(RecordedGraph::record(device, forward)?)
    }
}

/// Attention over the keys of the step loaded into `DecodeBatch`.
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
