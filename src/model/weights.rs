//! The weights of a whole model, as a forward pass asks for them: layers are in this process's memory, or made one at a time.

use super::config::Config;
use super::layer::Layer;
use super::matrix::{Matrix, Tensors};
use super::names::EMBEDDING;
use crate::dist::Mesh;
use crate::ops::Parameter;
use crate::ops::graph::reshape;
use crate::ops::logits::{Logits, Sampling};
use anyhow::{Context, Result, bail};
use candle_core::{Device, Tensor};
use std::sync::Arc;

/// The name of the value head's matrix; a model with a tensor of this name is a critic.
pub(super) const VALUE_HEAD: &str = "score.weight";

/// Where a pass takes its layers from.
pub trait Layers: Send + Sync {
    /// Layer `index`; the pass asks for layer `next` afterwards.
    ///
    /// # Errors
    /// When it cannot be read, or a rank does not come in time.
    fn layer(&self, index: usize, next: Option<usize>) -> Result<Arc<dyn Layer>>;

    /// Whether every layer's tensors lie where they lie from pass to pass.
    fn are_resident(&self) -> bool {
        false
    }

    /// The ranks that must make every pass together, one at a time.
    fn mesh(&self) -> Option<&Arc<Mesh>> {
        None
    }
}

/// Layers in memory, which may share their experts with other ranks.
struct ResidentLayers {
    layers: Vec<Arc<dyn Layer>>,
    mesh: Option<Arc<Mesh>>,
}

impl Layers for ResidentLayers {
    fn layer(&self, index: usize, _: Option<usize>) -> Result<Arc<dyn Layer>> {
        self.layers.get(index).cloned().with_context(|| format!("no layer {index}"))
    }

    fn are_resident(&self) -> bool {
        self.mesh.is_none()
    }

    fn mesh(&self) -> Option<&Arc<Mesh>> {
        self.mesh.as_ref()
    }
}

/// A model's weights.
#[derive(Clone)]
pub struct Weights {
    /// `[V, H]`, or `[H, V]` where it is the head too.
    embedding: Matrix,
    is_tied: bool,
    layers: Arc<dyn Layers>,
    /// `[H]`.
    final_norm: Parameter,
    /// `[H, V]`: scores of the next token; of a critic `[H, 1]` and `[1]`: one value a token.
    head: Matrix,
    is_critic: bool,
    bytes: u64,
    /// Whether gradients reach layers that are trained.
    has_gradients: bool,
}

impl Weights {
    /// The weights of `config` among `tensors`, `bytes` in all, with a value head in place of the language model's for a critic.
    /// Without `layers` they are made of `tensors` too.
    ///
    /// # Errors
    /// When a tensor is missing or of the wrong kind.
    pub(super) fn new(
        config: &Config,
        is_critic: bool,
        bytes: u64,
        layers: Option<Arc<dyn Layers>>,
        tensors: Tensors,
    ) -> Result<Self> {
        let layers = match layers {
            Some(layers) => layers,
            None => {
                let layer = |index| (config.family.layer)(&tensors.layer(index));
                let layers = (0..config.num_hidden_layers).map(layer).collect::<Result<_>>()?;
                Arc::new(ResidentLayers { layers, mesh: tensors.ranks.map(|ranks| ranks.mesh().clone()) })
            }
        };
        let embedding = tensors.matrix(EMBEDDING, None)?;
        let is_tied = config.tie_word_embeddings;
        let head = match (is_critic, is_tied) {
            (true, _) => tensors.matrix(VALUE_HEAD, Some("score.bias"))?,
            (false, true) => embedding.clone(),
            (false, false) => tensors.matrix("lm_head.weight", None)?,
        };
        let final_norm = tensors.vector("model.norm.weight")?;
        Ok(Self { embedding, is_tied, layers, final_norm, head, is_critic, bytes, has_gradients: true })
    }

    /// Returns the weights without gradients, for the first forward of a pass that recomputes its layers.
    pub fn without_gradient(&self) -> Self {
        Self {
            embedding: self.embedding.without_gradient(),
            layers: self.layers.clone(),
            final_norm: self.final_norm.without_gradient(),
            head: self.head.without_gradient(),
            has_gradients: false,
            ..*self
        }
    }

    /// The first layer's input for tokens `ids`, `[T, H]`.
    ///
    /// # Errors
    /// When an id is not below `V`.
    pub fn embed(&self, ids: &Arc<Vec<u32>>) -> Result<Tensor> {
        if self.is_tied { self.embedding.columns(ids) } else { self.embedding.rows(ids) }
    }

    /// Layer `index`; the pass asks for layer `next` afterwards, so that it can be on its way meanwhile.
    ///
    /// # Errors
    /// When it cannot be read, or a rank does not come in time.
    pub fn layer(&self, index: usize, next: Option<usize>) -> Result<Arc<dyn Layer>> {
        let layer = self.layers.layer(index, next)?;
        Ok(if self.has_gradients { layer } else { layer.without_gradient() })
    }

    /// The norm before the head, `[H]`.
    pub fn final_norm(&self) -> &Parameter {
        &self.final_norm
    }

    /// The head's output for `normed [R, H]`: log-probabilities and entropies of `targets` at `temperature`, `[2, R]`; a
    /// critic's values, `[1, R]`.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn head(&self, normed: &Tensor, targets: &Arc<Vec<u32>>, temperature: f64) -> Result<Tensor> {
        match self.is_critic {
            false => self.head.log_prob_and_entropy(normed, targets, temperature),
            true => Ok(reshape(&self.head.matmul_f32(normed)?, (1, targets.len()))?),
        }
    }

    /// The logits of `normed [R, H]`, as a sampler reads them.
    ///
    /// # Errors
    /// When the model has no head over a vocabulary.
    pub fn logits(&self, normed: &Tensor, sampling: &Sampling) -> Result<Logits> {
        if self.is_critic {
            bail!("a critic has no head over the vocabulary");
        }
        self.head.logits(normed, sampling)
    }

    /// Bytes that a forward pass reads: work is shared out by them.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Where the model computes.
    pub fn device(&self) -> &Device {
        self.final_norm.values().device()
    }

    /// Whether every tensor lies where it lies from pass to pass.
    pub fn are_resident(&self) -> bool {
        self.layers.are_resident()
    }

    /// The ranks that must make every pass together, one at a time: where layers are gathered from them, or rows travel to them.
    pub fn mesh(&self) -> Option<&Arc<Mesh>> {
        self.layers.mesh()
    }
}
