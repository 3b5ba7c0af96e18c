//! Small random models for tests.

use rand::Rng;
use rloss::model::config::{Config, LayerType, Rope, Yarn};
use rloss::model::forward::Model;
use rloss::model::init::{InitSettings, init};
use rloss::model::weights::Parameters;
use rloss::random::{Purpose, stream};
use rloss::train::batch::Sequence;

/// The quickstart's architecture, with YaRN when asked for.
pub fn config(yarn: bool) -> Config {
    let yarn = yarn.then_some(Yarn {
        factor: 4.0,
        original_max_position_embeddings: 64,
        beta_fast: 32.0,
        beta_slow: 1.0,
        truncate: false,
    });
    Config {
        vocab_size: 272,
        hidden_size: 64,
        num_hidden_layers: 4,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 16,
        intermediate_size: 64,
        num_local_experts: 4,
        num_experts_per_tok: 2,
        sliding_window: 16,
        layer_types: LayerType::alternating(4),
        rope: Rope { theta: 10_000.0, yarn },
        rms_norm_eps: 1e-5,
        swiglu_limit: 7.0,
        max_position_embeddings: 160,
        bos_token_id: None,
        eos_token_ids: vec![6],
        pad_token_id: Some(0),
    }
}

/// A model with random weights. Biases and norms are moved off their start values so that every term counts.
pub fn model(config: Config, seed: u64) -> (Model, Parameters) {
    let settings = InitSettings { embedding_std: 0.5, head_scale: 0.5, sink: 1.0 };
    let tensors = init(&config, &settings, seed).unwrap();
    let mut rng = stream(seed, Purpose::Initialisation, &[u64::MAX]);
    let tensors = tensors
        .into_iter()
        .map(|(spec, tensor)| {
            let shape = tensor.shape().clone();
            let mut values = tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            values.iter_mut().for_each(|v| *v += rng.random_range(-0.1f32..0.1));
            (spec, candle_core::Tensor::from_vec(values, shape, &candle_core::Device::Cpu).unwrap())
        })
        .collect();
    let parameters = Parameters::new(&config, tensors).unwrap();
    let context = config.max_position_embeddings;
    (Model::new(config, context), parameters)
}

/// Random sequences of the given lengths; about half of the tokens are trained on.
pub fn sequences(vocabulary: usize, lengths: &[usize], seed: u64) -> Vec<Sequence> {
    let mut rng = stream(seed, Purpose::Problem, &[]);
    lengths
        .iter()
        .map(|&n| Sequence {
            tokens: (0..n).map(|_| rng.random_range(0..vocabulary as u32)).collect(),
            mask: (0..n).map(|i| i > 0 && rng.random_bool(0.5)).collect(),
        })
        .collect()
}
