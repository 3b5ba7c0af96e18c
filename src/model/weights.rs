//! The weights of a whole model for a forward pass. Layers are in memory or built one at a time.

use super::config::Config;
use super::layer::Layer;
use super::matrix::{Matrix, ModelTensors};
use super::names::EMBEDDING;
use crate::dist::Mesh;
use crate::ops::Parameter;
use crate::ops::graph::reshape;
use crate::ops::logits::{Logits, SamplingParameters};
use anyhow::{Context, Result, bail};
use candle_core::{Device, Tensor};
use std::sync::Arc;

/// The name of the value head's matrix. A model with this tensor is a critic.
pub(super) const VALUE_HEAD: &str = "score.weight";

/// The source of a pass's layers.
pub trait LayerSource: Send + Sync {
    /// Returns layer `index`; `next` is the layer that the pass needs afterwards.
    ///
    /// # Errors
    /// When the layer cannot be read, or a rank does not respond in time.
    fn layer(&self, index: usize, next: Option<usize>) -> Result<Arc<dyn Layer>>;

    /// Whether every layer's tensors keep their addresses from pass to pass.
    fn are_resident(&self) -> bool {
        false
    }

    /// Returns the ranks that must make every pass together, one pass at a time; `None` if each is
    /// independent.
    fn mesh(&self) -> Option<&Arc<Mesh>> {
        None
    }
}

/// Layers in memory. With expert parallelism each rank holds some experts.
struct ResidentLayers {
    layers: Vec<Arc<dyn Layer>>,
    mesh: Option<Arc<Mesh>>,
}

impl LayerSource for ResidentLayers {
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

/// The weights of a model.
#[derive(Clone)]
pub struct Weights {
    /// `[V, H]`; `[H, V]` when it is also the LM head.
    embedding: Matrix,
    is_tied: bool,
    layers: Arc<dyn LayerSource>,
    /// `[H]`.
    final_norm: Parameter,
    /// `[H, V]` for logits. A critic has `[H, 1]` with bias `[1]`, for one value a token.
    head: Matrix,
    is_critic: bool,
    bytes: u64,
    /// Whether trained layers get gradients.
    has_gradients: bool,
}

impl Weights {
    /// Builds the weights of `config` from `tensors`, `bytes` in all. A critic has a value head instead of
    /// the LM head. Without `layers`, the layers are built from `tensors` too.
    ///
    /// # Errors
    /// When a tensor is missing or of the wrong kind.
    pub(super) fn new(
        config: &Config,
        is_critic: bool,
        bytes: u64,
        layers: Option<Arc<dyn LayerSource>>,
        tensors: ModelTensors,
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

    /// Returns the first layer's input for tokens `ids`, `[T, H]`.
    ///
    /// # Errors
    /// When an id is not below `V`.
    pub fn embed(&self, ids: &Arc<Vec<u32>>) -> Result<Tensor> {
        if self.is_tied { self.embedding.lookup_columns(ids) } else { self.embedding.lookup_rows(ids) }
    }

    /// Returns layer `index`; `next` is the layer that the pass needs afterwards, which may be gathered
    /// meanwhile.
    ///
    /// # Errors
    /// When the layer cannot be read, or a rank does not respond in time.
    pub fn layer(&self, index: usize, next: Option<usize>) -> Result<Arc<dyn Layer>> {
        let layer = self.layers.layer(index, next)?;
        Ok(if self.has_gradients { layer } else { layer.without_gradient() })
    }

    /// Returns the norm before the head, `[H]`.
    pub fn final_norm(&self) -> &Parameter {
        &self.final_norm
    }

    /// Returns the head's output for `normed [R, H]`: log-probabilities and entropies of `targets` at
    /// `temperature`, `[2, R]`. A critic returns values, `[1, R]`.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn head(&self, normed: &Tensor, targets: &Arc<Vec<u32>>, temperature: f64) -> Result<Tensor> {
        match self.is_critic {
            false => self.head.log_prob_and_entropy(normed, targets, temperature),
            true => Ok(reshape(&self.head.matmul_f32(normed)?, (1, targets.len()))?),
        }
    }

    /// Returns the logits of `normed [R, H]`, for a sampler.
    ///
    /// # Errors
    /// When the model is a critic, which has no LM head.
    pub fn logits(&self, normed: &Tensor, sampling: &SamplingParameters) -> Result<Logits> {
        if self.is_critic {
            bail!("a critic has no LM head");
        }
        self.head.logits(normed, sampling)
    }

    /// Returns the bytes that a forward pass reads; used to balance work.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the device of the model.
    pub fn device(&self) -> &Device {
        self.final_norm.values().device()
    }

    /// Whether every tensor keeps its address from pass to pass.
    pub fn are_resident(&self) -> bool {
        self.layers.are_resident()
    }

    /// Returns the ranks that must make every pass together, one pass at a time. They gather layers or
    /// exchange rows of experts.
    pub fn mesh(&self) -> Option<&Arc<Mesh>> {
        self.layers.mesh()
    }
}
