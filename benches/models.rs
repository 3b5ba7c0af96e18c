//! Random models and sequences for the benchmarks.

use rand::Rng;
use rloss::actor::micro_batch::Sequence;
use rloss::model::config::{Config, LayerType, Rope};
use rloss::model::families::Family;
use rloss::model::forward::Model;
use rloss::model::init::{InitSettings, init};
use rloss::model::parameters::{Backend, Parameters};
use rloss::model::storage::TensorStorage;
use rloss::random::{Purpose, stream};
use rloss::settings::Choice;

/// Sizes that the benchmarks vary.
#[derive(Clone, Copy)]
pub struct Shape {
    pub hidden: usize,
    pub layers: usize,
    pub heads: usize,
    /// 0 for the dense family, with a tied head.
    pub experts: usize,
    pub vocabulary: usize,
}

/// The quickstart's sizes.
pub const TINY: Shape = Shape { hidden: 64, layers: 4, heads: 4, experts: 4, vocabulary: 272 };
/// The "small" model of the documentation.
#[allow(dead_code)]
pub const SMALL: Shape = Shape { hidden: 512, layers: 8, heads: 8, experts: 16, vocabulary: 4096 };

/// Returns the architecture of this shape.
pub fn config(shape: Shape) -> Config {
    let dense = shape.experts == 0;
    Config {
        family: Family::from_name(if dense { "qwen2" } else { "gpt_oss" }).expect("a family"),
        vocab_size: shape.vocabulary,
        hidden_size: shape.hidden,
        num_hidden_layers: shape.layers,
        num_attention_heads: shape.heads,
        num_key_value_heads: shape.heads / 2,
        head_dim: if shape.hidden < 512 { 16 } else { 64 },
        intermediate_size: if dense { 4 * shape.hidden } else { shape.hidden },
        num_local_experts: shape.experts,
        num_experts_per_tok: shape.experts.min(2),
        sliding_window: if shape.hidden < 512 { 16 } else { 128 },
        layer_types: if dense {
            vec![LayerType::Full; shape.layers]
        } else {
            LayerType::alternate(shape.layers)
        },
        rope: Rope { theta: 10_000.0, yarn: None },
        rms_norm_eps: 1e-5,
        swiglu_limit: 7.0,
        tie_word_embeddings: dense,
        max_position_embeddings: 4096,
        bos_token_id: None,
        eos_token_ids: vec![6],
        pad_token_id: None,
    }
}

/// Returns a model of this shape with random weights.
#[allow(dead_code)]
pub fn model(shape: Shape) -> (Model, Parameters) {
    random(config(shape), &Backend::default())
}

/// Returns a model of this architecture with random weights, all trainable.
pub fn random(config: Config, backend: &Backend) -> (Model, Parameters) {
    let settings = InitSettings { embedding_std: 0.5, head_scale: 0.5, sink: 4.0 };
    let tensors = init(&config, &settings, 0).expect("initialisation");
    let tensors = tensors.into_iter().map(|(spec, values)| {
        let stored = TensorStorage::variable(&spec, values)?;
        Ok((spec, stored))
    });
    let mut parameters = Parameters::load(&config, backend, tensors).expect("parameters");
    parameters.set_trainable(&vec![true; parameters.len()]).expect("gradients");
    (Model::new(config, 4096), parameters)
}

/// Returns `count` random sequences of `length` tokens; all tokens but the first are trained on.
#[allow(dead_code)]
pub fn sequences(vocabulary: usize, count: usize, length: usize) -> Vec<Sequence> {
    let mut rng = stream(0, Purpose::Problem, &[]);
    (0..count)
        .map(|_| Sequence {
            tokens: (0..length).map(|_| rng.random_range(0..vocabulary as u32)).collect(),
            mask: (0..length).map(|i| i > 0).collect(),
            kept_tokens: vec![],
        })
        .collect()
}
