//! The weights of a model for a forward pass. All layers are in memory, or layers are built one at a time.

use super::adapter::HEAD;
use super::config::Config;
use super::layer::Layer;
use super::matrix::{Adapter, LowRankFactors, Matrix, ModelTensors};
use super::names::EMBEDDING;
use super::parallel::expert_exchange::PassRows;
use super::parallel::expert_parallel::ExpertParallel;
use crate::dist::Mesh;
use crate::ops::Parameter;
use crate::ops::graph::reshape;
use crate::ops::log_prob::HeadTargets;
use crate::ops::logits::{Logits, SamplingParameters};
use crate::ops::product::Precision;
use crate::ops::reverse_kl::TeacherRows;
use crate::ops::weight::Weight;
use anyhow::{Context, Result, bail, ensure};
use candle_core::{Device, Tensor};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// The name of the matrix of the value head. A model with this tensor is a critic.
pub(super) const VALUE_HEAD: &str = "score.weight";

/// The source of the layers of a pass.
pub trait LayerSource: Send + Sync {
    /// Returns layer `index`. `next` is the layer that the pass needs afterwards.
    ///
    /// # Errors
    /// When the layer cannot be read, or a rank does not respond in time.
    fn layer(&self, index: usize, next: Option<usize>) -> Result<Arc<dyn Layer>>;

    /// Returns whether the tensors of all layers have the same addresses in every pass.
    fn are_resident(&self) -> bool {
        false
    }

    /// Returns the ranks that must run every pass together, one pass at a time; `None` if ranks are
    /// independent.
    fn mesh(&self) -> Option<&Arc<Mesh>> {
        None
    }

    /// Returns the placement of experts on ranks, if a pass begins with the numbers of rows of all ranks.
    /// Passes of training do not: they have the placement in each layer.
    fn expert_parallel(&self) -> Option<&Arc<ExpertParallel>> {
        None
    }
}

/// Layers in memory. With expert parallelism each rank holds some of the experts.
struct ResidentLayers {
    layers: Vec<Arc<dyn Layer>>,
    expert_parallel: Option<Arc<ExpertParallel>>,
}

impl LayerSource for ResidentLayers {
    fn layer(&self, index: usize, _: Option<usize>) -> Result<Arc<dyn Layer>> {
        self.layers.get(index).cloned().with_context(|| format!("no layer {index}"))
    }

    fn are_resident(&self) -> bool {
        self.expert_parallel.is_none()
    }

    fn mesh(&self) -> Option<&Arc<Mesh>> {
        self.expert_parallel.as_ref().map(|parallel| parallel.mesh())
    }

    fn expert_parallel(&self) -> Option<&Arc<ExpertParallel>> {
        self.expert_parallel.as_ref()
    }
}

/// The tensors of weights in memory: those of the base by name, and the adapters beside them. Weights of one
/// base are combined from them.
pub(super) struct NamedTensors {
    base: HashMap<String, Weight>,
    adapters: HashMap<String, Adapter>,
    /// The place of each tensor of the base, in file order.
    places: Vec<Place>,
}

/// The place of a tensor's values in memory, and the precision of its products.
#[derive(PartialEq)]
struct Place {
    storage: usize,
    offset: usize,
    precision: Precision,
}

impl Place {
    fn of(weight: &Weight) -> Self {
        match weight {
            Weight::Dense(dense) => {
                let (storage, layout) = dense.values().storage_and_layout();
                let (storage, offset) = (std::ptr::from_ref(&*storage).addr(), layout.start_offset());
                Self { storage, offset, precision: dense.precision() }
            }
            Weight::Packed(matrix) => {
                Self { storage: Arc::as_ptr(matrix).addr(), offset: 0, precision: Precision::default() }
            }
        }
    }
}

impl NamedTensors {
    /// Returns the tensors `base`, in file order, with `adapters`.
    pub fn new(base: Vec<(String, Weight)>, adapters: HashMap<String, Adapter>) -> Self {
        let places = base.iter().map(|(_, weight)| Place::of(weight)).collect();
        Self { base: base.into_iter().collect(), adapters, places }
    }

    fn find(&self, name: &str) -> Result<Weight> {
        self.base.get(name).cloned().with_context(|| format!("no tensor {name}"))
    }
}

/// The weights of a model.
#[derive(Clone)]
pub struct Weights {
    /// `[V, H]`, or `[H, V]` if it is also the LM head.
    embedding: Matrix,
    is_tied: bool,
    layers: Arc<dyn LayerSource>,
    /// `[H]`.
    pub final_norm: Parameter,
    /// The LM head `[H, V]`. In a critic the value head `[H, 1]` with bias `[1]`, which returns one value per
    /// token.
    pub head: Matrix,
    is_critic: bool,
    pub bytes: u64,
    /// Whether trained layers get gradients.
    has_gradients: bool,
    /// The tensors, if all are in memory and none has a gradient.
    tensors: Option<Arc<NamedTensors>>,
}

impl Weights {
    /// Builds the weights of `config` from `tensors`, which have `bytes` bytes in total. A critic has a value
    /// head instead of the LM head. If `layers` is `None`, the layers are built from `tensors` too.
    ///
    /// # Errors
    /// When a tensor is missing, or packed instead of dense.
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
                Arc::new(ResidentLayers { layers, expert_parallel: tensors.expert_parallel.cloned() })
            }
        };
        let embedding = tensors.matrix(EMBEDDING, None)?;
        let is_tied = config.tie_word_embeddings;
        let head = match (is_critic, is_tied) {
            (true, _) => tensors.matrix(VALUE_HEAD, Some("score.bias"))?,
            // The adapter acts on the head's use of the shared matrix alone.
            (false, true) => embedding.with_adapter(tensors.adapters.get(HEAD).cloned()),
            (false, false) => tensors.matrix(HEAD, None)?,
        };
        let final_norm = tensors.vector("model.norm.weight")?;
        Ok(Self {
            embedding,
            is_tied,
            layers,
            final_norm,
            head,
            is_critic,
            bytes,
            has_gradients: true,
            tensors: None,
        })
    }

    /// Builds weights without gradients from `tensors`, and keeps these for [`Self::by_tokens`].
    ///
    /// # Errors
    /// Errors of [`Self::new`].
    pub(super) fn in_memory(
        config: &Config,
        is_critic: bool,
        bytes: u64,
        tensors: NamedTensors,
    ) -> Result<Self> {
        let find = |name: &str| tensors.find(name);
        let of = ModelTensors { find: &find, adapters: &tensors.adapters, expert_parallel: None };
        let weights = Self::new(config, is_critic, bytes, None, of)?;
        Ok(Self { tensors: Some(Arc::new(tensors)), ..weights })
    }

    /// Returns whether both have the same tensors in memory and differ by adapters alone. Their models have
    /// the same config.
    pub fn shares_base(&self, other: &Self) -> bool {
        match (&self.tensors, &other.tensors) {
            (Some(own), Some(other)) => Arc::ptr_eq(own, other) || own.places == other.places,
            _ => false,
        }
    }

    /// Returns the weights of one pass whose tokens belong to several weights with one base: the first tokens
    /// to the first of `parts`, which has weights and a number of tokens. Products with the base are over all
    /// tokens; each adapter acts on its own. Only on a CPU.
    ///
    /// # Errors
    /// When there is no part, or its tensors are not in memory.
    pub fn by_tokens(config: &Config, parts: &[(&Self, usize)]) -> Result<Self> {
        let (first, mut token) = (parts.first().context("a pass without weights")?.0, 0);
        let mut adapters: HashMap<&str, Vec<(Range<usize>, LowRankFactors)>> = HashMap::new();
        for (weights, tokens) in parts {
            let own = token..token + tokens;
            token = own.end;
            for (name, adapter) in &weights.named_tensors()?.adapters {
                let Adapter::Whole(factors) = adapter else { bail!("{name} has the adapters of one pass") };
                adapters.entry(name).or_default().push((own.clone(), factors.clone()));
            }
        }
        let by_tokens = |(name, parts): (&str, Vec<_>)| (name.to_owned(), Adapter::ByTokens(parts.into()));
        let (base, adapters) = (first.named_tensors()?, &adapters.into_iter().map(by_tokens).collect());
        let tensors = ModelTensors { find: &|name| base.find(name), adapters, expert_parallel: None };
        Self::new(config, first.is_critic, first.bytes, None, tensors)
    }

    fn named_tensors(&self) -> Result<&NamedTensors> {
        self.tensors.as_deref().context("weights that are not in memory")
    }

    /// Returns the weights without gradients. Activation checkpointing uses them in the first forward pass,
    /// before it recomputes layers.
    pub fn without_gradient(&self) -> Self {
        Self {
            embedding: self.embedding.without_gradient(),
            layers: self.layers.clone(),
            final_norm: self.final_norm.without_gradient(),
            head: self.head.without_gradient(),
            has_gradients: false,
            tensors: self.tensors.clone(),
            ..*self
        }
    }

    /// Returns the embeddings of tokens `ids`, the input `[T, H]` of the first layer.
    ///
    /// # Errors
    /// When an id is not below `V`.
    pub fn embed(&self, ids: &Arc<Vec<u32>>) -> Result<Tensor> {
        let table = self.embedding.plain_weight()?;
        // The columns of a tied head `[H, V]`, or the rows of an embedding `[V, H]`.
        Ok(if self.is_tied { table.columns(ids)? } else { table.rows(ids)? })
    }

    /// Returns layer `index`. `next` is the layer that the pass needs afterwards. Layer `next` may be
    /// gathered while the caller uses layer `index`.
    ///
    /// # Errors
    /// When the layer cannot be read, or a rank does not respond in time.
    pub fn layer(&self, index: usize, next: Option<usize>) -> Result<Arc<dyn Layer>> {
        let layer = self.layers.layer(index, next)?;
        Ok(if self.has_gradients { layer } else { layer.without_gradient() })
    }

    /// Returns the output of the head for `normed [R, H]`. For an LM head these are the log-probabilities of
    /// `targets` and the entropies, `[2, R]`, at `temperature`; a row with a set of kept tokens has the
    /// distribution over that set. For a critic they are values, `[1, R]`.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn head(&self, normed: &Tensor, targets: HeadTargets, temperature: f64) -> Result<Tensor> {
        match self.is_critic {
            false => self.head.log_prob_and_entropy(normed, targets, temperature),
            true => Ok(reshape(&self.head.matmul_f32(normed)?, (1, targets.tokens.len()))?),
        }
    }

    /// Returns the head and its input `normed [R, H]`, for a policy that is compared with this model.
    ///
    /// # Errors
    /// When the model has no LM head.
    pub fn teacher_rows(&self, normed: Tensor) -> Result<TeacherRows> {
        let (head, adapter) = self.head.as_head()?;
        Ok(TeacherRows { h: normed, head: head.clone(), adapter })
    }

    /// Returns the logits of `normed [R, H]`, for a sampler.
    ///
    /// # Errors
    /// When the model is a critic, which has no LM head.
    pub fn logits(&self, normed: &Tensor, sampling: &SamplingParameters) -> Result<Logits> {
        Self::logits_by_rows(&[(self, normed.dim(0)?)], normed, sampling)
    }

    /// Returns the logits of rows `normed [R, H]` that belong to several weights with one base: the first
    /// rows to the first of `parts`, which has weights and a number of rows.
    ///
    /// # Errors
    /// When there is no part, or a model is a critic, which has no LM head.
    pub fn logits_by_rows(
        parts: &[(&Self, usize)],
        normed: &Tensor,
        sampling: &SamplingParameters,
    ) -> Result<Logits> {
        ensure!(!parts.iter().any(|(weights, _)| weights.is_critic), "a critic has no LM head");
        let heads: Vec<(&Matrix, usize)> =
            parts.iter().map(|(weights, rows)| (&weights.head, *rows)).collect();
        let (head, _) = heads.first().context("logits of no weights")?;
        head.logits(normed, &heads, sampling)
    }

    /// Returns the device of the model.
    pub fn device(&self) -> &Device {
        self.final_norm.values().device()
    }

    /// Returns whether every tensor has the same address in every pass.
    pub fn are_resident(&self) -> bool {
        self.layers.are_resident()
    }

    /// Starts a pass with `rows` rows of this rank and `top_k` experts a row. If GPUs exchange rows of
    /// experts, every rank must call this method, and gets the numbers of rows.
    ///
    /// # Errors
    /// When a rank does not respond in time.
    pub(super) fn start_pass(&self, rows: usize, top_k: usize) -> Result<Option<PassRows>> {
        match self.layers.expert_parallel() {
            Some(parallel) if self.device().is_cuda() => {
                parallel.start_pass(rows, top_k, self.device()).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Returns the ranks that must run every pass together, one pass at a time, because they gather layers or
    /// exchange rows of experts. Returns `None` if ranks are independent.
    pub fn mesh(&self) -> Option<&Arc<Mesh>> {
        self.layers.mesh()
    }
}
