//! Small random models for tests.

use crate::cli::bad_input;
use candle_core::{Device, Tensor};
use rand::Rng;
use rloss::actor::batch_runner::BatchRunner;
use rloss::actor::forward_backward::{Pass, PassSettings};
use rloss::actor::gradients::{self, GradientSum};
use rloss::actor::micro_batch::{MicroBatch, Sequence};
use rloss::actor::{Actor, Execution};
use rloss::checkpoint::load::ModelFolder;
use rloss::checkpoint::save::{CompanionFiles, SHARD_BYTES_MAX, save};
use rloss::dist::RolloutWeightPlacement;
use rloss::model::cache::CacheCapacity;
use rloss::model::config::{Config, LayerType, Rope, WeightFormat};
use rloss::model::families::Family;
use rloss::model::forward::{ForwardOptions, Model};
use rloss::model::init::{InitSettings, init};
use rloss::model::names::{ParameterSpec, parameter_specs};
use rloss::model::parameters::{Backend, Parameters};
use rloss::model::settings::Yarn;
use rloss::model::storage::TensorStorage;
use rloss::ops::cpu::edit;
use rloss::ops::threads::Threads;
use rloss::random::{Purpose, stream};
use rloss::trajectory::{Outcome, Trajectory};
use serde_json::Value;
use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use tempfile::TempDir;

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
        family: Family::default(),
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
        layer_types: LayerType::alternate(4),
        rope: Rope { theta: 10_000.0, yarn },
        rms_norm_eps: 1e-5,
        swiglu_limit: 7.0,
        tie_word_embeddings: false,
        max_position_embeddings: 160,
        bos_token_id: None,
        eos_token_ids: vec![6],
        pad_token_id: Some(0),
    }
}

/// Parameters of `config` from f32 values in working layout, on the host and of one process.
pub fn parameters(
    config: &Config,
    values: impl IntoIterator<Item = anyhow::Result<(ParameterSpec, Vec<f32>)>>,
) -> anyhow::Result<Parameters> {
    let tensors = values.into_iter().map(|found| {
        let (spec, values) = found?;
        let stored = TensorStorage::variable(&spec, values)?;
        Ok((spec, stored))
    });
    Parameters::load(config, &Backend::default(), tensors)
}

/// A model with random weights. Biases and norms are moved off their start values so that every term counts.
pub fn model(config: Config, seed: u64) -> (Model, Parameters) {
    let settings = InitSettings { embedding_std: 0.5, head_scale: 0.5, sink: 1.0 };
    let tensors = init(&config, &settings, seed).unwrap();
    let mut rng = stream(seed, Purpose::Initialisation, &[u64::MAX]);
    let moved = tensors.into_iter().map(|(spec, mut values)| {
        values.iter_mut().for_each(|v| *v += rng.random_range(-0.1f32..0.1));
        Ok((spec, values))
    });
    let mut parameters = parameters(&config, moved).unwrap();
    parameters.set_trainable(&vec![true; parameters.len()]).unwrap();
    let context = config.max_position_embeddings;
    (Model::new(config, context), parameters)
}

/// An actor with `parameters` on `threads` threads. Its micro-batches have up to `micro_batch_tokens` tokens.
pub fn actor(
    model: impl Into<Arc<Model>>,
    parameters: Parameters,
    threads: usize,
    micro_batch_tokens: usize,
    recompute_layers: bool,
) -> Actor {
    let execution = Execution {
        threads: Threads::new(threads).unwrap(),
        recompute_layers,
        micro_batch_tokens,
        cache_capacity: CacheCapacity::default(),
        prefix_tokens_max: 0,
        rollout_weights: RolloutWeightPlacement::Auto,
    };
    Actor::new(model.into(), parameters, Arc::new(execution))
}

/// An actor that shares all weights with `actor`, which has no adapter. All of its tensors are trained, and
/// its gradients are 0. Its micro-batches have up to `micro_batch_tokens` tokens.
pub fn trained(actor: &Actor, micro_batch_tokens: usize) -> Actor {
    let Execution { threads, recompute_layers, .. } = &*actor.execution;
    let mut parameters = actor.parameters.without_adapter();
    parameters.set_trainable(&vec![true; parameters.len()]).unwrap();
    self::actor(actor.model.clone(), parameters, threads.count(), micro_batch_tokens, *recompute_layers)
}

/// Settings of a pass without ablations, which keeps the routed experts.
pub fn pass_settings(temperature: f64, load_balance_coefficient: f64) -> PassSettings {
    let forward = ForwardOptions::default();
    PassSettings { temperature, load_balance_coefficient, keeps_routed_experts: true, forward }
}

/// A finished trajectory of `sequence` in step 1 without turns, whose log-probs are 0 and whose reward is 0.
pub fn trajectory(sequence: &Sequence) -> Trajectory {
    Trajectory {
        step: 1,
        prompt: 0,
        sample: 0,
        part: 0,
        policy_version: None,
        policy_versions: vec![],
        problem_id: String::new(),
        tokens: sequence.tokens.clone(),
        prompt_tokens: 1,
        mask: sequence.mask.clone(),
        log_probs: vec![0.0; sequence.tokens.len()],
        kept_tokens: vec![],
        routed_experts: vec![],
        turns: vec![],
        outcome: Outcome::Finished,
        reward: 0.0,
        success: false,
        rewards: Default::default(),
        failed_rewards: vec![],
        dropped: false,
        tool_s: 0.0,
    }
}

/// Runs given micro-batches of `actor`.
pub fn runner(actor: &Actor) -> BatchRunner<'_> {
    let Execution { threads, recompute_layers, .. } = &*actor.execution;
    let (model, parameters) = (&actor.model, &actor.parameters);
    BatchRunner { threads, model, parameters, recompute_layers: *recompute_layers }
}

/// Every parameter of `config` from `folder`, decoded.
pub fn load(
    folder: &std::path::Path,
    config: &Config,
) -> anyhow::Result<impl Iterator<Item = anyhow::Result<(ParameterSpec, Vec<f32>)>>> {
    let files = ModelFolder::open(folder, config)?;
    Ok(parameter_specs(config).into_iter().map(move |spec| {
        let values = files.read_values(&spec)?;
        Ok((spec, values))
    }))
}

/// A folder with the model of `parameters`, saved in `format`.
pub fn saved(config: &Config, parameters: &Parameters, format: WeightFormat) -> TempDir {
    let folder = TempDir::new().unwrap();
    let tensor = |spec: &ParameterSpec| Ok(named(parameters, &spec.name).clone());
    save(folder.path(), config, format, &CompanionFiles::default(), SHARD_BYTES_MAX, tensor).unwrap();
    folder
}

/// Expects that saving a model of `config` in MXFP4 is refused, before any tensor is asked for.
pub fn assert_mxfp4_is_refused(config: &Config) {
    let (fresh, companions) = (TempDir::new().unwrap(), CompanionFiles::default());
    let never = |_: &ParameterSpec| panic!("nothing is asked for");
    let saved = save(fresh.path(), config, WeightFormat::Mxfp4, &companions, SHARD_BYTES_MAX, never);
    bad_input(saved, &["MXFP4", "bf16"]);
}

/// The tensor named `name`.
pub fn named<'a>(parameters: &'a Parameters, name: &str) -> &'a Tensor {
    parameters.values(parameters.index_of(name).unwrap()).unwrap()
}

/// A tensor's values.
pub fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// Gives tensor `index` other values.
pub fn set(parameters: &Parameters, index: usize, values: &[f32]) {
    edit(parameters.values(index).unwrap(), |w| {
        w.copy_from_slice(values);
        Ok(())
    })
    .unwrap();
}

/// A copy of every gradient, `None` where a tensor does not learn.
#[derive(Debug, Clone, PartialEq)]
pub struct Gradients {
    pub values: Vec<Option<Vec<f32>>>,
}

impl Gradients {
    pub fn of(parameters: &Parameters) -> Self {
        Self { values: parameters.gradients().map(|gradient| gradient.map(values)).collect() }
    }
}

/// What came back from something that left gradients, and a copy of them.
pub struct Learned<T> {
    pub output: T,
    pub gradients: Gradients,
}

impl<T> std::ops::Deref for Learned<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.output
    }
}

/// One pass over `parameters`, and the gradients it left. Earlier gradients are cleared.
pub fn learned<T>(
    parameters: &Parameters,
    (model, batch, settings, recompute_layers): (&Model, &MicroBatch, PassSettings, bool),
    run: impl FnOnce(&Pass) -> anyhow::Result<T>,
) -> Learned<T> {
    gradients::clear(parameters).unwrap();
    let sum = GradientSum::new(parameters);
    let weights = &parameters.pass_weights(Some(&sum.pass_sink(0, None))).unwrap();
    let output = run(&Pass { model, weights, batch, settings, recompute_layers, teacher: None }).unwrap();
    Learned { output, gradients: Gradients::of(parameters) }
}

/// Random sequences of the given lengths; about half of the tokens are trained on.
pub fn sequences(vocabulary: usize, lengths: &[usize], seed: u64) -> Vec<Sequence> {
    let mut rng = stream(seed, Purpose::Problem, &[]);
    lengths
        .iter()
        .map(|&n| Sequence {
            tokens: (0..n).map(|_| rng.random_range(0..vocabulary as u32)).collect(),
            mask: (0..n).map(|i| i > 0 && rng.random_bool(0.5)).collect(),
            kept_tokens: vec![],
        })
        .collect()
}

/// The tensors of a safetensors file. Its library cannot parse a header here: see serde_json in Cargo.toml.
pub fn load_safetensors(file: impl AsRef<Path>) -> HashMap<String, Tensor> {
    let bytes = fs::read(file).unwrap();
    let start = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Map<String, Value> = serde_json::from_slice(&bytes[8..start]).unwrap();
    let tensors = header.into_iter().filter(|(name, _)| name != "__metadata__");
    let numbers = |list: &Value| -> Vec<usize> {
        list.as_array().unwrap().iter().map(|number| number.as_u64().unwrap() as usize).collect()
    };
    tensors
        .map(|(name, info)| {
            let dtype: safetensors::Dtype = serde_json::from_value(info["dtype"].clone()).unwrap();
            let [from, to] = numbers(&info["data_offsets"]).try_into().unwrap();
            let (shape, data) = (numbers(&info["shape"]), &bytes[start + from..start + to]);
            let tensor = Tensor::from_raw_buffer(data, dtype.try_into().unwrap(), &shape, &Device::Cpu);
            (name, tensor.unwrap())
        })
        .collect()
}
