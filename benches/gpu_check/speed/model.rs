//! Tokens per second of whole models with gpt-oss-20b's shape and random weights.
//!
//! Decode, prefill and adapter training run all layers, with experts packed in MXFP4 as in the released
//! model. Full training of all layers does not fit in memory, so it is measured with one and with two layers.
//! The difference is the time of one layer, which gives an estimate for all layers.

use super::Extent;
use anyhow::{Context, Result, ensure};
use candle_core::{Device, Tensor};
use rand::RngCore;
use rloss::actor::batch_runner::BatchRunner;
use rloss::actor::forward_backward::PassSettings;
use rloss::actor::micro_batch::{MicroBatch, Sequence};
use rloss::actor::optimizer::Optimizer;
use rloss::actor::{OptimizerSettings, PolicyColumns};
use rloss::metrics::Progress;
use rloss::model::adapter::{Lora, Owner, default_targets};
use rloss::model::cache::{CacheCapacity, CacheFactory, SequenceCache};
use rloss::model::config::{Config, LayerType, Rope, WeightFormat};
use rloss::model::decode::Decoder;
use rloss::model::decoder_stack::keep_nothing;
use rloss::model::families::Family;
use rloss::model::forward::{ForwardOptions, Model};
use rloss::model::init::{InitSettings, init};
use rloss::model::names::{ParameterSpec, parameter_specs};
use rloss::model::parameters::{Backend, Parameters};
use rloss::model::policy_view::PolicyView;
use rloss::model::settings::Yarn;
use rloss::model::storage::{TensorStorage, copy_to_device};
use rloss::ops::cuda::{device_memory, free_memory, reset_memory_peaks};
use rloss::ops::logits::{SamplingParameters, sampled_rows_max};
use rloss::ops::packed_weights::{PANEL_COLUMNS, PackedFormat, PackedMatrix};
use rloss::ops::select_rows;
use rloss::ops::threads::Threads;
use rloss::ops::weight::Weight;
use rloss::random::{Purpose, stream};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

/// The cases to measure.
struct Cases {
    config: Config,
    /// Numbers of sequences that are decoded together.
    sequences: &'static [usize],
    /// Numbers of tokens in the cache, per sequence.
    context_tokens: &'static [usize],
    prefill_tokens: usize,
    /// Numbers of tokens per training step.
    step_tokens: &'static [usize],
    /// Number of tokens per training sequence.
    sequence_tokens: usize,
}

const WARM_UPS: usize = 2;
/// Number of measurements. Their median is printed.
const MEASUREMENTS: usize = 5;
/// Memory that the cache must leave free, for one forward pass and its logits.
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
        context_tokens: &[1024, 4096, 32_768, 131_072],
        prefill_tokens: 4096,
        step_tokens: &[4096, 16_384],
        sequence_tokens: 4096,
    }
}

/// Returns small cases for tests of this code.
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
        context_tokens: &[200],
        prefill_tokens: 70,
        step_tokens: &[12],
        sequence_tokens: 6,
    }
}

/// Returns decode of usual batches, and one step of training.
fn short() -> Cases {
    Cases { sequences: &[64, 256], context_tokens: &[1024], step_tokens: &[4096], ..gpt_oss_20b() }
}

pub fn run(device: &Device, extent: Extent) -> Result<()> {
    let (cases, size) = match extent {
        Extent::Small => (small(), ", made small"),
        Extent::Short => (short(), ""),
        Extent::Full => (gpt_oss_20b(), ""),
    };
    println!("\nRandom weights of gpt-oss-20b's shape{size}.\n");
    println!(
        "| work | sequences | tokens of each | ms | tokens/s | GB at most |\n| --- | --- | --- | --- | --- | --- |"
    );
    measure_sampling(device, &cases)?;
    measure_adapter_training(device, &cases)?;
    if extent == Extent::Short { Ok(()) } else { measure_full_training(device, &cases) }
}

/// Prints a row of the table. The last column is the peak memory since the previous row. `processed` is the
/// number of tokens that took `seconds`.
fn print_row(
    device: &Device,
    work: &str,
    sequences: usize,
    tokens: usize,
    seconds: f64,
    processed: usize,
) -> Result<()> {
    let gpu = device.as_cuda_device()?;
    let (ms, rate) = (seconds * 1e3, processed as f64 / seconds);
    let gb = device_memory(gpu)?.used_max as f64 / 1e9;
    println!("| {work} | {sequences} | {tokens} | {ms:.2} | {rate:.0} | {gb:.2} |");
    Ok(reset_memory_peaks(gpu)?)
}

/// Returns the median time of `pass`, in seconds. `pass` must wait for the device.
fn median_seconds(mut pass: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut seconds = vec![];
    for time in 0..WARM_UPS + MEASUREMENTS {
        let start = Instant::now();
        pass()?;
        if time >= WARM_UPS {
            seconds.push(start.elapsed().as_secs_f64());
        }
    }
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[MEASUREMENTS / 2])
}

/// Returns random frozen weights. Tensors of the same shape have the same values, but separate memory.
fn random_packed_weights(config: &Config, device: &Device) -> Result<Parameters> {
    let mut by_shape: HashMap<Vec<usize>, Weight> = HashMap::new();
    let mut weight = |spec: &ParameterSpec| -> Result<Weight> {
        let shape = spec.working_shape();
        if !by_shape.contains_key(&shape) {
            by_shape.insert(shape.clone(), random_weight(spec, &shape)?);
        }
        copy_to_device(&by_shape[&shape], device, spec)
    };
    let specs = parameter_specs(config);
    let tensors = specs.into_iter().map(|spec| {
        let weight = weight(&spec)?;
        Ok((spec, TensorStorage::from_weight(weight)))
    });
    Parameters::load(config, &backend(device), tensors)
}

/// Returns the backend of a single process that computes on `device`.
fn backend(device: &Device) -> Backend {
    Backend { device: device.clone(), ..Backend::default() }
}

/// Returns a random tensor on the host, of about the same magnitude as trained weights. Experts are in MXFP4.
fn random_weight(spec: &ParameterSpec, shape: &[usize]) -> Result<Weight> {
    let mut rng = stream(7, Purpose::Initialisation, &[]);
    let count = shape.iter().product();
    if let (Some(PackedFormat::Mxfp4), Some(matrix_shape)) =
        (spec.packed_format(WeightFormat::Mxfp4), spec.matrix_shape())
    {
        let mut bytes = vec![0; PackedFormat::Mxfp4.bytes(matrix_shape)];
        rng.fill_bytes(&mut bytes);
        // The scales come first in a block. All scales are 2^-8.
        let block = PackedFormat::Mxfp4.bytes([1, rloss::ops::mxfp4::BLOCK, PANEL_COLUMNS]);
        bytes.chunks_exact_mut(block).for_each(|block| block[..PANEL_COLUMNS].fill(119));
        let matrix = PackedMatrix::from_bytes(PackedFormat::Mxfp4, matrix_shape, bytes);
        return Ok(Weight::Packed(Arc::new(matrix)));
    }
    if !spec.is_matrix() {
        return Ok(Weight::dense(&Tensor::ones(shape, candle_core::DType::F32, &Device::Cpu)?));
    }
    let mut bytes = vec![0; count];
    rng.fill_bytes(&mut bytes);
    let values: Vec<f32> = bytes.into_iter().map(|byte| (f32::from(byte) - 127.5) / 4096.0).collect();
    Ok(Weight::dense(&Tensor::from_vec(values, shape, &Device::Cpu)?))
}

/// Measures decode and prefill.
fn measure_sampling(device: &Device, cases: &Cases) -> Result<()> {
    let config = &cases.config;
    let parameters = random_packed_weights(config, device)?;
    let model = Model::new(config.clone(), config.max_position_embeddings);
    let policy = PolicyView::without_ablations(&model, &parameters)?;
    compare_recorded_decode(device, &policy)?;
    for &context in cases.context_tokens {
        for &sequences in cases.sequences {
            let tokens = context + 2 * (WARM_UPS + MEASUREMENTS);
            let capacity = CacheCapacity { sequences, tokens, fed_tokens_max: sequences };
            let free = free_memory(device.as_cuda_device()?)?;
            if capacity.device_bytes(config) + SPARE_BYTES.min(free / 2) > free {
                println!("| decode | {sequences} | {context} | does not fit | | |");
                continue;
            }
            let caches = CacheFactory::new(config, device, capacity)?;
            let mut sequence_caches: Vec<SequenceCache> = (0..sequences).map(|_| caches.sequence()).collect();
            sequence_caches.iter_mut().try_for_each(|cache| cache.reserve(config, context))?;
            let mut decoder = Decoder::new(&policy.decoder_stack(), capacity);
            let seconds = median_seconds(|| run_step(&policy, &mut sequence_caches, 1, decoder.as_mut()))?;
            print_row(device, "decode", sequences, context, seconds, sequences)?;
            if context == cases.context_tokens[0] {
                let seconds = median_seconds(|| run_step(&policy, &mut sequence_caches, 1, None))?;
                print_row(device, "decode, kernel by kernel", sequences, context, seconds, sequences)?;
            }
        }
    }
    let tokens = cases.prefill_tokens;
    let capacity = CacheCapacity { sequences: 1, tokens, fed_tokens_max: tokens };
    let caches = CacheFactory::new(config, device, capacity)?;
    let seconds = median_seconds(|| run_step(&policy, &mut [caches.sequence()], tokens, None))?;
    print_row(device, "prefill", 1, tokens, seconds, tokens)?;
    Ok(())
}

/// Checks that decode with a CUDA graph is bitwise equal to decode with single launches.
///
/// # Errors
/// When their bits differ.
fn compare_recorded_decode(device: &Device, policy: &PolicyView) -> Result<()> {
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
    let mut decoder = Decoder::new(&stack, capacity).context("decode cannot be recorded here")?;
    for step in 0..STEPS {
        let tokens = vec![id(step), id(step + 9)];
        let bits = |x: Tensor| x.flatten_all()?.to_vec1::<half::bf16>();
        let (hidden, rows) = decoder.decode_step(&stack, &tokens, &mut recorded.each_mut()[..])?;
        let one = bits(select_rows(&hidden, &Arc::new(rows))?)?;
        let other =
            bits(stack.forward_cached(tokens, &mut plain.each_mut()[..], &[1, 1], &mut keep_nothing)?)?;
        ensure!(one == other, "step {step}: recorded decode has other bits than decode kernel by kernel");
    }
    ensure!(decoder.counts.replays > 0, "decode was not recorded");
    println!("| decode, recorded and kernel by kernel: the same bits | 2 | 61 | | | |");
    Ok(())
}

/// Runs a step of sampling: the forward pass of `count` new tokens per sequence, then the draw of the next
/// token. The forward pass uses `decoder`, if given.
fn run_step(
    policy: &PolicyView,
    sequence_caches: &mut [SequenceCache],
    count: usize,
    decoder: Option<&mut Decoder>,
) -> Result<()> {
    let sequences = sequence_caches.len();
    let vocabulary = policy.model.config.vocab_size;
    let tokens: Vec<u32> = (0..sequences * count).map(|i| (i * 7919 % vocabulary) as u32).collect();
    let mut caches: Vec<&mut SequenceCache> = sequence_caches.iter_mut().collect();
    let hidden = match decoder {
        // The rows may be in another order, which changes no time.
        Some(decoder) => decoder.decode_step(&policy.decoder_stack(), &tokens, &mut caches)?.0,
        None => policy.decoder_stack().forward_cached(
            tokens,
            &mut caches,
            &vec![count; sequences],
            &mut keep_nothing,
        )?,
    };
    let last: Vec<u32> = (0..sequences).map(|i| ((i + 1) * count - 1) as u32).collect();
    let sampling = SamplingParameters::with_temperature(1.0);
    for rows in last.chunks(sampled_rows_max(vocabulary, hidden.device())) {
        let normed = policy.decoder_stack().final_norm_rows(&hidden, &Arc::new(rows.to_vec()))?;
        let draws: Vec<(usize, f64)> = (0..rows.len()).map(|row| (row, 0.5)).collect();
        policy.weights.logits(&normed, &sampling)?.draw(&sampling, &draws)?;
    }
    Ok(())
}

/// Measures training of an adapter of rank 8 on all layers of packed weights.
fn measure_adapter_training(device: &Device, cases: &Cases) -> Result<()> {
    let mut parameters = random_packed_weights(&cases.config, device)?;
    let base = parameters.specs.clone();
    let lora = Lora { rank: 8, alpha: 16.0, rslora: false, targets: default_targets(&cases.config) };
    let start = lora.initial_values(&base, 1, Owner::Policy)?;
    parameters.attach_adapter(lora, start)?;
    let factors = parameters.len() - base.len();
    parameters.set_trainable(&[vec![false; base.len()], vec![true; factors]].concat())?;
    let model = Model::new(cases.config.clone(), cases.config.max_position_embeddings);
    measure_training(device, cases, &model, parameters, "training through an adapter, packed").map(drop)
}

/// Measures full training of one and of two layers. Extrapolates to all layers.
fn measure_full_training(device: &Device, cases: &Cases) -> Result<()> {
    let one_layer = measure_layers(device, cases, 1)?;
    let two_layers = measure_layers(device, cases, 2)?;
    let layers = cases.config.num_hidden_layers;
    for (index, &tokens) in cases.step_tokens.iter().enumerate() {
        let (one, two) = (one_layer[index], two_layers[index]);
        let extrapolated = one + (layers - 1) as f64 * (two - one);
        println!(
            "| training, {layers} layers, extrapolated | {} | {} | {:.2} | {:.0} | |",
            tokens / cases.sequence_tokens,
            cases.sequence_tokens,
            extrapolated * 1e3,
            tokens as f64 / extrapolated
        );
    }
    Ok(())
}

/// Measures full training of `layers` layers and the head. Returns the times of [`measure_training`].
fn measure_layers(device: &Device, cases: &Cases, layers: usize) -> Result<Vec<f64>> {
    let layer_types = LayerType::alternate(layers);
    let config = Config { num_hidden_layers: layers, layer_types, ..cases.config.clone() };
    let settings = InitSettings { embedding_std: 0.5, head_scale: 0.5, sink: 0.0 };
    let tensors = init(&config, &settings, 1)?;
    let tensors = tensors.into_iter().map(|(spec, values)| {
        let storage = TensorStorage::variable(&spec, values)?;
        Ok((spec, storage))
    });
    let mut parameters = Parameters::load(&config, &backend(device), tensors)?;
    parameters.set_trainable(&vec![true; parameters.len()])?;
    let model = Model::new(config.clone(), config.max_position_embeddings);
    measure_training(device, cases, &model, parameters, &format!("training, layers: {layers}"))
}

/// Measures forward and backward passes with recomputed layers, and an update. Prints the rows for `work`.
/// Returns the seconds of a forward and backward pass for each of the cases' `step_tokens`.
fn measure_training(
    device: &Device,
    cases: &Cases,
    model: &Model,
    mut parameters: Parameters,
    work: &str,
) -> Result<Vec<f64>> {
    let mut optimizer = Optimizer::new(&OptimizerSettings::default(), &mut parameters, true)?;
    let threads = Threads::new(1)?;
    let settings = PassSettings {
        temperature: 1.0,
        load_balance_coefficient: 0.0,
        keeps_routed_experts: false,
        forward: ForwardOptions::default(),
    };
    let mut times = vec![];
    for &tokens in cases.step_tokens {
        let sequence = |_| Sequence {
            tokens: (0..=cases.sequence_tokens)
                .map(|i| (i * 7919 % model.config.vocab_size) as u32)
                .collect(),
            mask: (0..=cases.sequence_tokens).map(|i| i > 0).collect(),
            kept_tokens: vec![],
        };
        let sequences: Vec<Sequence> = (0..tokens / cases.sequence_tokens).map(sequence).collect();
        let batches = MicroBatch::split(&sequences, tokens);
        let runner =
            BatchRunner { threads: &threads, model, parameters: &parameters, recompute_layers: true };
        let seconds = median_seconds(|| {
            let loss = |_: usize, columns: &PolicyColumns| {
                let count = columns.log_probs.len();
                let (log_probs, entropies) = (vec![-1.0 / tokens as f32; count], vec![0.0; count]);
                Ok(PolicyColumns { log_probs, entropies, divergences: None })
            };
            runner.accumulate(&batches, settings, None, &loss, &Progress::hidden())?;
            Ok(device.synchronize()?)
        })?;
        print_row(device, work, sequences.len(), cases.sequence_tokens, seconds, tokens)?;
        times.push(seconds);
    }
    let update = optimizer.settings.for_update(1e-6, None);
    let seconds = median_seconds(|| {
        optimizer.update(&parameters, &update)?;
        Ok(device.synchronize()?)
    })?;
    println!("| {work}: AdamW's update | | | {:.2} | | |", seconds * 1e3);
    Ok(times)
}
