//! The trainable tensors of a model: their names and shapes in a Hugging Face folder, and their shapes in
//! memory.
//!
//! Shape letters: V vocabulary, H hidden, Q query heads × head_dim, K key-value heads × head_dim,
//! E experts, I intermediate.

use super::config::{Config, WeightFormat};
use super::weights::VALUE_HEAD;
use crate::dist::{Sharding, expert_range, shard_range};
use safetensors::Dtype;
use std::ops::Range;

/// The name of the embedding.
pub(super) const EMBEDDING: &str = "model.embed_tokens.weight";

/// The layout of a tensor in memory, relative to its layout in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    AsStored,
    /// Stored as [out, in]; in memory [in, out], contiguous. A matmul reads rows of this layout. A tied
    /// embedding, which is also the LM head, has this layout.
    Transposed,
    /// Stored as one tensor [out, in] per expert; in memory [E, in, out], contiguous.
    PerExpert,
}

/// The role of a tensor. It determines the initialisation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TensorRole {
    /// The embedding. With tied embeddings it is also the LM head.
    Embedding,
    /// A matrix that reads the residual stream: q, k, v, gate_up.
    InputProjection,
    /// The matrix of a router's logits.
    Router,
    /// A matrix that writes to the residual stream: o, down.
    OutputProjection,
    Head,
    Bias,
    /// The weight of a norm, and the number of rows per token that it is applied to: 1, or the heads.
    Norm(usize),
    Sinks,
    /// A factor of the adapter of a matrix. It is always f32.
    AdapterFactor,
}

/// One trainable tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParameterSpec {
    /// The Hugging Face name, such as `model.layers.0.self_attn.q_proj.weight`.
    pub name: String,
    /// The layer that the tensor belongs to; `None` for embedding, final norm and LM head.
    pub layer: Option<usize>,
    pub role: TensorRole,
    /// The shape in an unquantised Hugging Face folder. With [`Layout::PerExpert`] it is the shape in memory.
    pub stored_shape: Vec<usize>,
    pub layout: Layout,
}

/// One tensor of a safetensors file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredTensor {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
}

impl StoredTensor {
    /// Returns the size on disk, in bytes.
    pub fn bytes(&self) -> u64 {
        self.shape.iter().product::<usize>() as u64 * (self.dtype.bitsize() / 8) as u64
    }
}

impl ParameterSpec {
    /// Returns the shape in memory.
    pub fn working_shape(&self) -> Vec<usize> {
        match (self.layout, self.stored_shape.as_slice()) {
            (Layout::Transposed, &[out, input]) => vec![input, out],
            _ => self.stored_shape.clone(),
        }
    }

    pub fn element_count(&self) -> usize {
        self.stored_shape.iter().product()
    }

    /// Returns the length of the axis that a matmul sums over; 1 for vectors.
    pub fn fan_in(&self) -> usize {
        let shape = self.working_shape();
        if self.role == TensorRole::Bias || shape.len() < 2 { 1 } else { shape[shape.len() - 2] }
    }

    /// Returns whether the tensor is a matrix or an embedding. All other tensors are vectors.
    pub fn is_matrix(&self) -> bool {
        !matches!(self.role, TensorRole::Bias | TensorRole::Norm(_) | TensorRole::Sinks)
    }

    /// Returns whether ops on a CPU round the tensor to bf16 wherever they use it, if products are in bf16.
    /// That is every matrix, except those of router logits and of a critic's values.
    pub fn is_rounded_in_use(&self) -> bool {
        let is_matrix = matches!(
            self.role,
            TensorRole::Embedding
                | TensorRole::InputProjection
                | TensorRole::OutputProjection
                | TensorRole::Head
        );
        is_matrix && self.name != VALUE_HEAD
    }

    /// Returns whether the tensor is an expert matrix, which MXFP4 quantises. Apart from adapters, only
    /// expert matrices have three dimensions.
    pub fn is_expert_matrix(&self) -> bool {
        self.stored_shape.len() == 3 && self.role != TensorRole::AdapterFactor
    }

    /// Returns whether the tensor is a matrix or bias of the experts, `[E, ..]`.
    pub fn is_expert_parameter(&self) -> bool {
        self.role != TensorRole::AdapterFactor && self.has_expert_axis()
    }

    /// Returns whether the tensor has one entry per expert. Such tensors are expert parameters
    /// ([`Self::is_expert_parameter`]) and the factors of their adapters.
    pub fn has_expert_axis(&self) -> bool {
        self.name.contains(".mlp.experts.")
    }

    /// Returns the range of values of this tensor, which has the index `index`, that `rank` holds.
    pub fn shard_range(&self, index: usize, rank: usize, sharding: Sharding) -> Range<usize> {
        let count = self.element_count();
        if !self.is_sharded_by_expert(sharding) {
            return shard_range(count, index, rank, sharding.ranks);
        }
        let experts = self.stored_shape.first().copied().unwrap_or(1).max(1);
        let (own, width) = (expert_range(experts, rank, sharding.ranks), count / experts);
        own.start * width..own.end * width
    }

    /// Returns whether each rank holds whole experts of this tensor.
    pub fn is_sharded_by_expert(&self, sharding: Sharding) -> bool {
        sharding.by_expert && self.is_expert_parameter()
    }

    /// Returns the spec of this tensor with `count` experts.
    pub fn with_expert_count(&self, count: usize) -> Self {
        let mut spec = self.clone();
        if let Some(experts) = spec.stored_shape.first_mut() {
            *experts = count;
        }
        spec
    }

    /// Returns the stored tensors of this parameter in `format`: usually one, two in MXFP4, or one per expert
    /// with [`Layout::PerExpert`].
    ///
    /// MXFP4 stores an expert matrix [E, in, out] as blocks [E, out, in/32, 16] and scales [E, out, in/32].
    /// `in` must be a multiple of 32.
    pub fn stored_tensors(&self, format: WeightFormat) -> Vec<StoredTensor> {
        let stored = |suffix: &str, dtype, shape: Vec<usize>| StoredTensor {
            name: format!("{}{suffix}", self.name),
            dtype,
            shape,
        };
        let float = if format == WeightFormat::F32 { Dtype::F32 } else { Dtype::BF16 };
        match (format, self.stored_shape.as_slice()) {
            (_, &[experts, input, output]) if self.layout == Layout::PerExpert => (0..experts)
                .map(|expert| StoredTensor {
                    name: self.name_of_expert(expert),
                    dtype: float,
                    shape: vec![output, input],
                })
                .collect(),
            (WeightFormat::Mxfp4, &[experts, input, output]) => {
                let blocks = input / crate::ops::mxfp4::BLOCK;
                vec![
                    stored("_blocks", Dtype::U8, vec![experts, output, blocks, crate::ops::mxfp4::BLOCK / 2]),
                    stored("_scales", Dtype::U8, vec![experts, output, blocks]),
                ]
            }
            _ => vec![stored("", float, self.stored_shape.clone())],
        }
    }

    /// Returns the stored name of the matrix of one expert, with [`Layout::PerExpert`].
    pub fn name_of_expert(&self, expert: usize) -> String {
        self.name.replacen(".experts.", &format!(".experts.{expert}."), 1)
    }
}

/// Collects the specs of the tensors of one layer, in file order.
pub(super) struct LayerSpecs {
    layer: usize,
    specs: Vec<ParameterSpec>,
}

impl LayerSpecs {
    pub(super) fn new(layer: usize) -> Self {
        Self { layer, specs: Vec::new() }
    }

    /// Adds the tensor `name` of the layer. A matrix with two dimensions is transposed in memory. Expert
    /// matrices whose name ends with `.weight` are stored as one tensor per expert.
    pub(super) fn push(&mut self, name: &str, role: TensorRole, stored_shape: &[usize]) {
        let layout = match (stored_shape.len(), name.ends_with(".weight")) {
            (2, true) => Layout::Transposed,
            (3, true) => Layout::PerExpert,
            _ => Layout::AsStored,
        };
        self.specs.push(ParameterSpec {
            name: format!("model.layers.{}.{name}", self.layer),
            layer: Some(self.layer),
            role,
            stored_shape: stored_shape.to_vec(),
            layout,
        });
    }

    pub(super) fn into_vec(self) -> Vec<ParameterSpec> {
        self.specs
    }
}

/// Returns the number of trainable parameters of `config`.
pub fn parameter_count(config: &Config) -> u128 {
    let count = |specs: &[ParameterSpec]| specs.iter().map(|s| s.element_count() as u128).sum::<u128>();
    let outside = parameter_specs(&Config { num_hidden_layers: 0, ..config.clone() });
    count(&outside) + config.num_hidden_layers as u128 * count(&(config.family.layer_specs)(config, 0))
}

/// Returns the number of values per token that the norms of one layer return.
pub fn layer_norm_width(config: &Config) -> usize {
    let rows = |spec: &ParameterSpec| if let TensorRole::Norm(rows) = spec.role { rows } else { 0 };
    (config.family.layer_specs)(config, 0).iter().map(|spec| rows(spec) * spec.element_count()).sum()
}

/// Returns the specs of all trainable tensors of `config`. Files, optimizer state and seeds use this order:
/// embedding, layers (attention, then experts or MLP), final norm, and the LM head unless it is tied.
pub fn parameter_specs(config: &Config) -> Vec<ParameterSpec> {
    let mut specs = stack_specs(config);
    if !config.tie_word_embeddings {
        let shape = [config.vocab_size, config.hidden_size];
        specs.push(whole("lm_head.weight", TensorRole::Head, &shape, Layout::Transposed));
    }
    specs
}

/// Returns the specs of the tensors of a critic. A value head, which returns one value per token, replaces
/// the LM head. The names are those of token classification in Hugging Face transformers.
pub fn value_model_specs(config: &Config) -> Vec<ParameterSpec> {
    let mut specs = stack_specs(config);
    specs.push(whole(VALUE_HEAD, TensorRole::Head, &[1, config.hidden_size], Layout::Transposed));
    specs.push(whole("score.bias", TensorRole::Bias, &[1], Layout::AsStored));
    specs
}

/// Returns the specs of embedding, layers and final norm.
fn stack_specs(config: &Config) -> Vec<ParameterSpec> {
    let (h, v) = (config.hidden_size, config.vocab_size);
    let layout = if config.tie_word_embeddings { Layout::Transposed } else { Layout::AsStored };
    let mut specs = vec![whole(EMBEDDING, TensorRole::Embedding, &[v, h], layout)];
    for layer in 0..config.num_hidden_layers {
        specs.extend((config.family.layer_specs)(config, layer));
    }
    specs.push(whole("model.norm.weight", TensorRole::Norm(1), &[h], Layout::AsStored));
    specs
}

/// Returns the spec of a tensor outside the layers.
fn whole(name: &str, role: TensorRole, shape: &[usize], layout: Layout) -> ParameterSpec {
    ParameterSpec { name: name.into(), layer: None, role, stored_shape: shape.to_vec(), layout }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_by_expert_have_whole_experts_in_rank_order() {
        for (experts, ranks) in [(4, 1), (4, 3), (5, 3), (3, 4), (32, 8)] {
            let spec = ParameterSpec {
                name: "model.layers.0.mlp.experts.down_proj".to_owned(),
                layer: Some(0),
                role: TensorRole::OutputProjection,
                stored_shape: vec![experts, 7, 9],
                layout: Layout::AsStored,
            };
            let by_expert = Sharding { ranks, by_expert: true };
            let shards: Vec<_> = (0..ranks).map(|rank| spec.shard_range(5, rank, by_expert)).collect();
            assert_eq!((shards[0].start, shards[ranks - 1].end), (0, spec.element_count()));
            assert!(shards.windows(2).all(|two| two[0].end == two[1].start));
            for (rank, shard) in shards.iter().enumerate() {
                let own = expert_range(experts, rank, ranks);
                assert_eq!(*shard, own.start * 63..own.end * 63);
            }
            // Other tensors, and a run that gathers experts, have equal ranges.
            let bias =
                ParameterSpec { name: "model.layers.0.self_attn.q_proj.bias".to_owned(), ..spec.clone() };
            let equal = shard_range(spec.element_count(), 5, 0, ranks);
            assert_eq!(bias.shard_range(5, 0, by_expert), equal);
            assert_eq!(spec.shard_range(5, 0, Sharding { by_expert: false, ..by_expert }), equal);
        }
    }
}
