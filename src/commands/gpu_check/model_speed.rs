//! Tokens per second of whole models of gpt-oss-20b's shape, with random weights.
//!
//! Decode, prefill and training of an adapter run all layers, with experts packed in MXFP4 as released. Full
//! training fits only one and two layers. Their difference is the time of a layer, and the time of all layers
//! is extrapolated.

use crate::learner::OptimizerSettings;
use crate::learner::batch_runner::BatchRunner;
use crate::learner::forward_backward::PassSettings;
use crate::learner::micro_batch::{MicroBatch, Sequence};
use crate::learner::optimizer::Optimizer;
use crate::model::adapter::{Lora, Owner, default_targets};
use crate::model::cache::{CacheCapacity, CacheFactory, SequenceCache};
use crate::model::config::{Config, LayerType, Rope, WeightFormat};
use crate::model::decode::Decoder;
use crate::model::decoder_stack::keep_nothing;
use crate::model::families::Family;
use crate::model::forward::{ForwardOptions, Model};
use crate::model::init::{InitSettings, init};
use crate::model::names::{ParameterSpec, parameter_specs};
use crate::model::parameters::{Backend, Parameters};
use crate::model::policy_view::PolicyView;
use crate::model::settings::Yarn;
use crate::model::storage::{TensorStorage, copy_to_device};
use crate::ops::cuda::{device_memory, free_memory, reset_memory_peaks};
use crate::ops::logits::{SamplingParameters, logits_rows_max};
use crate::ops::packed_weights::{PANEL_COLUMNS, PackedFormat, PackedMatrix};
use crate::ops::threads::Threads;
use crate::ops::weight::Weight;
use crate::random::{Purpose, stream};
use anyhow::{Context, Result, ensure};
use candle_core::{Device, Tensor};
use rand::RngCore;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

/// The cases to measure.
struct Cases {
    config: Config,
    /// Numbers of sequences that decode together; `context` has the tokens in each one's cache.
    sequences: &'static [usize],
    context: &'static [usize],
    prefill: usize,
    /// Tokens per step, in sequences of `length`.
    training: &'static [usize],
    length: usize,
}

const WARM_UPS: usize = 2;
/// Measurements, of which the median is printed.
const MEASUREMENTS: usize = 5;
/// Memory left beside the cache, for one forward and the logits.
const SPARE_BYTES: u64 = 4 << 30;

fn gpt_oss_20b() -> Cases {
    let yarn = Yarn { truncate: false, ..Yarn::default() };
    Cases {
        config: Config {
            family: Family::default(),
            vocab_size: 201_088,
            hidden_size: 2880,
            num_hidden_layers: 24,
            num_attention_heads: 64,
            num_key_value_heads: 8,
            head_dim: 64,
            intermediate_size: 2880,
            num_local_experts: 32,
            num_experts_per_tok: 4,
            sliding_window: 128,
            layer_types: LayerType::alternate(24),
            rope: Rope { theta: 150_000.0, yarn: Some(yarn) },
            rms_norm_eps: 1e-5,
            swiglu_limit: 7.0,
            tie_word_embeddings: false,
            max_position_embeddings: 131_072 + 64,
            bos_token_id: None,
            eos_token_ids: vec![],
            pad_token_id: None,
        },
        sequences: &[1, 8, 64, 256, 1024],
        context: &[1024, 4096, 32_768, 131_072],
        prefill: 4096,
        training: &[4096, 16_384],
        length: 4096,
    }
}

/// Small cases, to test the program.
fn small() -> Cases {
    let large = gpt_oss_20b();
    Cases {
        config: Config {
            vocab_size: 50,
            hidden_size: 32,
            num_hidden_layers: 2,
            num_attention_heads: 2,
            num_key_value_heads: 1,
            intermediate_size: 32,
            num_local_experts: 4,
            num_experts_per_tok: 2,
            layer_types: LayerType::alternate(2),
            max_position_embeddings: 300,
            ..large.config
        },
        sequences: &[2],
        context: &[200],
        prefill: 70,
        training: &[12],
        length: 6,
    }
}

pub(super) fn run(device: &Device, is_small: bool) -> Result<()> {
    let cases = if is_small { small() } else { gpt_oss_20b() };
    println!("\nRandom weights of gpt-oss-20b's shape{}.\n", if is_small { ", made small" } else { "" });
    println!(
        "| work | sequences | tokens of each | ms | tokens/s | GB at most |\n| --- | --- | --- | --- | --- | --- |"
    );
    sampling(device, &cases)?;
    adapted(device, &cases)?;
    training(device, &cases)
}

/// Prints a row of the table. Its memory is the peak of tensors since the previous row.
fn row(
    device: &Device,
    work: &str,
    sequences: usize,
    tokens: usize,
    seconds: f64,
    done: usize,
) -> Result<()> {
    let gpu = device.as_cuda_device()?;
    let (ms, rate) = (seconds * 1e3, done as f64 / seconds);
    let gb = device_memory(gpu)?.used_max as f64 / 1e9;
    println!("| {work} | {sequences} | {tokens} | {ms:.2} | {rate:.0} | {gb:.2} |");
    Ok(reset_memory_peaks(gpu)?)
}

/// Returns the median time of `pass`, which waits for the device itself.
fn median(mut pass: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut seconds = vec![];
    for time in 0..WARM_UPS + MEASUREMENTS {
        let begun = Instant::now();
        pass()?;
        if time >= WARM_UPS {
            seconds.push(begun.elapsed().as_secs_f64());
        }
    }
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[MEASUREMENTS / 2])
}

/// Returns random frozen weights. Tensors of equal shape hold equal numbers, each in its own memory.
fn packed_weights(config: &Config, device: &Device) -> Result<Parameters> {
    let mut made: HashMap<Vec<usize>, Weight> = HashMap::new();
    let mut held = |spec: &ParameterSpec| -> Result<Weight> {
        let shape = spec.working_shape();
        if !made.contains_key(&shape) {
            made.insert(shape.clone(), random(spec, &shape)?);
        }
        copy_to_device(&made[&shape], device, spec)
    };
    let specs = parameter_specs(config);
    let loaded = specs.into_iter().map(|spec| {
        let held = held(&spec)?;
        Ok((spec, TensorStorage::from_weight(held)))
    });
    Parameters::load(config, &on(device), loaded)
}

/// Returns the backend of one process that computes on `device`.
fn on(device: &Device) -> Backend {
    Backend { device: device.clone(), ..Backend::default() }
}

/// Returns a tensor on the host: MXFP4 for experts, others with the magnitude of trained weights.
fn random(spec: &ParameterSpec, shape: &[usize]) -> Result<Weight> {
    let mut random = stream(7, Purpose::Initialisation, &[]);
    let count = shape.iter().product();
    if let (Some(PackedFormat::Mxfp4), Some(of)) =
        (spec.packed_format(WeightFormat::Mxfp4), spec.matrix_shape())
    {
        let mut bytes = vec![0; PackedFormat::Mxfp4.bytes(of)];
        random.fill_bytes(&mut bytes);
        // A block's scales come before its numbers: 2^-8.
        let block = PackedFormat::Mxfp4.bytes([1, crate::ops::mxfp4::BLOCK, PANEL_COLUMNS]);
        bytes.chunks_exact_mut(block).for_each(|block| block[..PANEL_COLUMNS].fill(119));
        return Ok(Weight::Packed(Arc::new(PackedMatrix::from_bytes(PackedFormat::Mxfp4, of, bytes))));
    }
    if !spec.is_matrix() {
        return Ok(Weight::dense(&Tensor::ones(shape, candle_core::DType::F32, &Device::Cpu)?));
    }
    let mut bytes = vec![0; count];
    random.fill_bytes(&mut bytes);
    let values: Vec<f32> = bytes.into_iter().map(|byte| (f32::from(byte) - 127.5) / 4096.0).collect();
    Ok(Weight::dense(&Tensor::from_vec(values, shape, &Device::Cpu)?))
}

fn sampling(device: &Device, cases: &Cases) -> Result<()> {
    let config = &cases.config;
    let parameters = packed_weights(config, device)?;
    let model = Model::new(config.clone(), config.max_position_embeddings);
    let policy = PolicyView::without_ablations(&model, &parameters)?;
    compare_recorded(device, &policy)?;
    for &context in cases.context {
        for &sequences in cases.sequences {
            let tokens = context + 2 * (WARM_UPS + MEASUREMENTS);
            let capacity = CacheCapacity { sequences, tokens, fed_tokens_max: sequences };
            let free = free_memory(device.as_cuda_device()?)?;
            if capacity.device_bytes(config) + SPARE_BYTES.min(free / 2) > free {
                println!("| decode | {sequences} | {context} | does not fit | | |");
                continue;
            }
            let caches = CacheFactory::new(config, device, capacity)?;
            let mut held: Vec<SequenceCache> = (0..sequences).map(|_| caches.sequence()).collect();
            held.iter_mut().try_for_each(|cache| cache.reserve(config, context))?;
            let mut decoder = Decoder::new(&policy.decoder_stack());
            let seconds = median(|| step(&policy, &mut held, 1, decoder.as_mut()))?;
            row(device, "decode", sequences, context, seconds, sequences)?;
            if context == cases.context[0] {
                let seconds = median(|| step(&policy, &mut held, 1, None))?;
                row(device, "decode, kernel by kernel", sequences, context, seconds, sequences)?;
            }
        }
    }
    let tokens = cases.prefill;
    let capacity = CacheCapacity { sequences: 1, tokens, fed_tokens_max: tokens };
    let caches = CacheFactory::new(config, device, capacity)?;
    let seconds = median(|| step(&policy, &mut [caches.sequence()], tokens, None))?;
    row(device, "prefill", 1, tokens, seconds, tokens)?;
    Ok(())
}

/// Returns an error when decode by a CUDA graph and decode by single launches differ in bits.
fn compare_recorded(device: &Device, policy: &PolicyView) -> Result<()> {
    const STEPS: usize = 4;
    let (stack, config) = (policy.decoder_stack(), &policy.model.config);
    let capacity = CacheCapacity { sequences: 4, tokens: 80, fed_tokens_max: 140 };
    let caches = CacheFactory::new(config, device, capacity)?;
    let mut plain = [caches.sequence(), caches.sequence()];
    let id = |i: usize| (i * 7919 % config.vocab_size) as u32;
    stack.forward_cached(
        (0..70).map(id).collect(),
        &mut plain.each_mut()[..],
        &[61, 9],
        &mut keep_nothing,
    )?;
    let mut recorded = plain.clone();
    let mut decoder = Decoder::new(&stack).context("decode cannot be recorded here")?;
    for step in 0..STEPS {
        let fed = vec![id(step), id(step + 9)];
        let bits = |x: Tensor| x.flatten_all()?.to_vec1::<half::bf16>();
        let one = bits(decoder.decode_step(&stack, fed.clone(), &mut recorded.each_mut()[..])?)?;
        let other =
            bits(stack.forward_cached(fed, &mut plain.each_mut()[..], &[1, 1], &mut keep_nothing)?)?;
        ensure!(one == other, "step {step}: recorded decode has other bits than decode kernel by kernel");
    }
    ensure!(decoder.replay_count() > 0, "decode was not recorded");
    println!("| decode, recorded beside kernel by kernel: the same bits | 2 | 61 | | | |");
    Ok(())
}

/// Feeds `count` new tokens of each sequence, by `decoder` if there is one, and draws the next token.
fn step(
    policy: &PolicyView,
    held: &mut [SequenceCache],
    count: usize,
    decoder: Option<&mut Decoder>,
) -> Result<()> {
    let sequences = held.len();
    let vocabulary = policy.model.config.vocab_size;
    let fed = (0..sequences * count).map(|i| (i * 7919 % vocabulary) as u32).collect();
    let mut caches: Vec<&mut SequenceCache> = held.iter_mut().collect();
    let hidden = match decoder {
        Some(decoder) => decoder.decode_step(&policy.decoder_stack(), fed, &mut caches)?,
        None => policy.decoder_stack().forward_cached(
            fed,
            &mut caches,
            &vec![count; sequences],
            &mut keep_nothing,
        )?,
    };
    let last: Vec<u32> = (0..sequences).map(|i| ((i + 1) * count - 1) as u32).collect();
    let sampling = SamplingParameters::with_temperature(1.0);
    for rows in last.chunks(logits_rows_max(vocabulary)) {
        let normed = policy.decoder_stack().final_norm_rows(&hidden, &Arc::new(rows.to_vec()))?;
        let draws: Vec<(usize, f64)> = (0..rows.len()).map(|row| (row, 0.5)).collect();
        policy.decoder_stack().logits(&normed, &sampling)?.draw(&sampling, &draws)?;
    }
    Ok(())
}

/// Trains adapters of rank 8 on all layers of packed weights.
fn adapted(device: &Device, cases: &Cases) -> Result<()> {
    let mut parameters = packed_weights(&cases.config, device)?;
    let base = parameters.specs.clone();
    let lora = Lora { rank: 8, alpha: 16.0, rslora: false, targets: default_targets(&cases.config) };
    let start = lora.initial_values(&base, 1, Owner::Policy)?;
    parameters.attach_adapter(lora, start)?;
    let factors = parameters.len() - base.len();
    parameters.set_trainable(&[vec![false; base.len()], vec![true; factors]].concat())?;
    let model = Model::new(cases.config.clone(), cases.config.max_position_embeddings);
    passes(device, cases, &model, parameters, "training through an adapter, packed").map(drop)
}

fn training(device: &Device, cases: &Cases) -> Result<()> {
    let mut of_layers = vec![];
    for layers in [1, 2] {
        of_layers.push(train(device, cases, layers)?);
    }
    let all = cases.config.num_hidden_layers;
    for (index, &tokens) in cases.training.iter().enumerate() {
        let (one, two) = (of_layers[0][index], of_layers[1][index]);
        let extrapolated = one + (all - 1) as f64 * (two - one);
        println!(
            "| training, {all} layers, extrapolated | {} | {} | {:.2} | {:.0} | |",
            tokens / cases.length,
            cases.length,
            extrapolated * 1e3,
            tokens as f64 / extrapolated
        );
    }
    Ok(())
}

/// Trains `layers` layers and the head in full; the results are as in [`passes`].
fn train(device: &Device, cases: &Cases, layers: usize) -> Result<Vec<f64>> {
    let layer_types = LayerType::alternate(layers);
    let config = Config { num_hidden_layers: layers, layer_types, ..cases.config.clone() };
    let settings = InitSettings { embedding_std: 0.5, head_scale: 0.5, sink: 0.0 };
    let drawn = init(&config, &settings, 1)?;
    let drawn = drawn.into_iter().map(|(spec, values)| {
        let stored = TensorStorage::variable(&spec, values)?;
        Ok((spec, stored))
    });
    let mut parameters = Parameters::load(&config, &on(device), drawn)?;
    parameters.set_trainable(&vec![true; parameters.len()])?;
    let model = Model::new(config.clone(), config.max_position_embeddings);
    passes(device, cases, &model, parameters, &format!("training, layers: {layers}"))
}

/// Returns the seconds of forward and backward with recomputed layers, one per number of tokens, then those
/// of an update.
fn passes(
    device: &Device,
    cases: &Cases,
    model: &Model,
    mut parameters: Parameters,
    work: &str,
) -> Result<Vec<f64>> {
    let mut optimizer = Optimizer::new(&OptimizerSettings::default(), &mut parameters, true)?;
    let threads = Threads::new(1)?;
    let settings = PassSettings {
        recompute_layers: true,
        temperature: 1.0,
        load_balance: 0.0,
        forward: ForwardOptions::default(),
    };
    let mut times = vec![];
    for &tokens in cases.training {
        let sequence = |_| Sequence {
            tokens: (0..=cases.length).map(|i| (i * 7919 % model.config.vocab_size) as u32).collect(),
            mask: (0..=cases.length).map(|i| i > 0).collect(),
        };
        let sequences: Vec<Sequence> = (0..tokens / cases.length).map(sequence).collect();
        let batches = MicroBatch::split(&sequences, tokens);
        let runner = BatchRunner { threads: &threads, model, parameters: &parameters };
        let seconds = median(|| {
            let objective = |_: usize, [log_probs, entropies]: [&[f32]; 2]| {
                Ok([vec![-1.0 / tokens as f32; log_probs.len()], vec![0.0; entropies.len()]])
            };
            runner.accumulate(&batches, settings, &objective)?;
            Ok(device.synchronize()?)
        })?;
        row(device, work, sequences.len(), cases.length, seconds, tokens)?;
        times.push(seconds);
    }
    let seconds = median(|| {
        optimizer.update(&parameters, 1e-6)?;
        Ok(device.synchronize()?)
    })?;
    println!("| {work}: AdamW's update | | | {:.2} | | |", seconds * 1e3);
    Ok(times)
}
