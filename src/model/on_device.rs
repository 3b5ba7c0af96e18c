//! Tests of whole models on a GPU or the emulated driver. They check that training, prefill and decode give
//! the same bits, and that gradients are close to those of the CPU.

mod adapted;
mod launches;
mod lost_capture;

use super::attention::PackedAttention;
use super::cache::{CacheCapacity, CacheFactory, SequenceCache};
use super::config::{Config, Rope};
use super::decode::{DecodeCounts, Decoder};
use super::decoder_stack::{DecoderStack, keep_nothing};
use super::families::Family;
use super::forward::{ForwardOptions, Model, Rows};
use super::init::{InitSettings, init};
use super::matrix::ModelTensors;
use super::weights::Weights;
use crate::ops::cuda::open;
use crate::ops::graph::differentiate;
use crate::ops::log_prob::HeadTargets;
use crate::ops::parameter::GradientSink;
use crate::ops::weight::Weight;
use crate::ops::{Parameter, SequenceRows, logits::SamplingParameters, select_rows};
use crate::settings::Choice;
use candle_core::{DType, Device, Tensor, Var};
use std::collections::HashMap;
use std::sync::Arc;

fn family(name: &str) -> Family {
    Family::from_name(name).unwrap()
}

fn config(family: Family, heads: usize, kv_heads: usize, window: usize) -> Config {
    let experts = family.has_experts;
    Config {
        family,
        vocab_size: 101,
        hidden_size: 40,
        num_hidden_layers: 2,
        num_attention_heads: heads,
        num_key_value_heads: kv_heads,
        head_dim: if family.name().starts_with("qwen3") { 128 } else { 64 },
        intermediate_size: 24,
        num_local_experts: if experts { 6 } else { 0 },
        num_experts_per_tok: if experts { 2 } else { 0 },
        sliding_window: window,
        layer_types: (family.layer_types)(2),
        rope: Rope { theta: 10000.0, yarn: None },
        rms_norm_eps: 1e-5,
        swiglu_limit: 7.0,
        tie_word_embeddings: false,
        max_position_embeddings: 256,
        bos_token_id: None,
        eos_token_ids: vec![0],
        pad_token_id: None,
    }
}

/// Gradient buffers, one per parameter.
struct Buffers(Vec<Tensor>);

impl GradientSink for Buffers {
    fn add(
        &self,
        parameter: usize,
        add: &mut dyn FnMut(&Tensor) -> candle_core::Result<()>,
    ) -> candle_core::Result<()> {
        add(&self.0[parameter])
    }
}

/// A model whose weights are all trainable. On a GPU its matrices are bf16. On both devices bf16 represents
/// all values exactly.
struct Learner {
    model: Model,
    weights: Weights,
    /// The weights of a sampler, without gradients.
    frozen: Weights,
    names: Vec<String>,
    gradients: Arc<Buffers>,
}

fn learner(config: &Config, device: &Device) -> Learner {
    let settings = InitSettings { embedding_std: 1.0, head_scale: 1.0, sink: 0.5 };
    let (mut names, mut values, mut buffers) = (vec![], vec![], vec![]);
    for (spec, of_spec) in init(config, &settings, 5).unwrap() {
        let shape = spec.working_shape();
        let matrix = spec.packed_format(super::config::WeightFormat::Bf16).is_some();
        let rounded =
            Tensor::from_vec(of_spec, shape.clone(), &Device::Cpu).unwrap().to_dtype(DType::BF16).unwrap();
        let dtype = if matrix && device.is_cuda() { DType::BF16 } else { DType::F32 };
        values.push(Var::from_tensor(&rounded.to_dtype(dtype).unwrap().to_device(device).unwrap()).unwrap());
        buffers.push(Tensor::zeros(shape, DType::F32, device).unwrap());
        names.push(spec.name);
    }
    let gradients = Arc::new(Buffers(buffers));
    let indices: HashMap<_, _> = names.iter().enumerate().map(|(i, name)| (name.clone(), i)).collect();
    let find = |name: &str| {
        let i = indices[name];
        Ok(Weight::Dense(Parameter::with_gradient_sink(&values[i], gradients.clone(), i)))
    };
    let tensors = ModelTensors { find: &find, adapters: &HashMap::new(), expert_parallel: None };
    let weights = Weights::new(config, false, 0, None, tensors).unwrap();
    Learner::new(config, weights, names, gradients)
}

fn floats(x: &Tensor) -> Vec<f32> {
    let x = x.to_device(&Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
    x.flatten_all().unwrap().to_vec1().unwrap()
}

fn ids(count: usize) -> Vec<u32> {
    (0..count).map(|i| (i * i * 7 % 101) as u32).collect()
}

impl Learner {
    fn new(config: &Config, weights: Weights, names: Vec<String>, gradients: Arc<Buffers>) -> Self {
        let frozen = weights.without_gradient();
        Self { model: Model::new(config.clone(), 256), weights, frozen, names, gradients }
    }

    fn stack(&self) -> DecoderStack<'_> {
        DecoderStack { model: &self.model, weights: &self.weights, forward: ForwardOptions::default() }
    }

    /// Returns the decoder stack of a sampler, in which ops share launches.
    fn sampler(&self) -> DecoderStack<'_> {
        DecoderStack { weights: &self.frozen, ..self.stack() }
    }

    /// Returns the log-probabilities of the targets and the entropies after every row, `[2, T]`, as training
    /// computes them. Sequences have the lengths `lengths`. Differentiable.
    fn training(&self, tokens: &[u32], lengths: &[usize]) -> Tensor {
        let mut starts = vec![0];
        lengths.iter().for_each(|length| starts.push(starts[starts.len() - 1] + length));
        let sequence_rows = Arc::new(SequenceRows::from_cu_seqlens(&starts));
        let positions = lengths.iter().flat_map(|&length| 0..length as u32).collect();
        let attention = &mut PackedAttention { sequence_rows };
        let rotation = self.model.rotation(positions);
        let rows = &mut Rows { rotation, attention, replay: None };
        let hidden = self.stack().forward(&Arc::new(tokens.to_vec()), rows, &mut keep_nothing).unwrap();
        let all = Arc::new((0..tokens.len() as u32).collect());
        let normed = self.stack().final_norm_rows(&hidden, &all).unwrap();
        let targets =
            HeadTargets { tokens: &Arc::new(targets(tokens)), kept: None, skips_zero_gradients: false };
        self.stack().weights.head(&normed, targets, 1.0).unwrap()
    }

    /// Returns the log-probabilities of the targets as a sampler computes them. A forward pass has up to
    /// `pace` new tokens of each sequence. If `decoder` is given, it runs the passes. Each pass then has one
    /// new token of each sequence.
    fn sample(
        &self,
        caches: &CacheFactory,
        tokens: &[u32],
        lengths: &[usize],
        pace: usize,
        mut decoder: Option<&mut Decoder>,
    ) -> Vec<f32> {
        let mut caches: Vec<_> = lengths.iter().map(|_| caches.sequence()).collect();
        let starts: Vec<usize> =
            lengths.iter().scan(0, |at, length| Some(std::mem::replace(at, *at + length))).collect();
        let targets = targets(tokens);
        let mut out = vec![f32::NAN; tokens.len()];
        loop {
            let at: Vec<usize> = caches.iter().map(SequenceCache::len).collect();
            let counts: Vec<usize> =
                lengths.iter().zip(&at).map(|(length, at)| pace.min(length - at)).collect();
            if counts.iter().all(|&count| count == 0) {
                return out;
            }
            let rows: Vec<usize> =
                (0..lengths.len()).flat_map(|i| starts[i] + at[i]..starts[i] + at[i] + counts[i]).collect();
            let fed: Vec<u32> = rows.iter().map(|&row| tokens[row]).collect();
            let open = caches.iter_mut().zip(&counts).filter(|(_, count)| **count > 0);
            let mut open: Vec<_> = open.map(|(cache, _)| cache).collect();
            let counts: Vec<usize> = counts.iter().copied().filter(|&count| count > 0).collect();
            let (hidden, places) = match &mut decoder {
                Some(decoder) => decoder.decode_step(&self.sampler(), &fed, &mut open).unwrap(),
                None => {
                    let hidden =
                        self.sampler().forward_cached(fed, &mut open, &counts, &mut keep_nothing).unwrap();
                    (hidden, (0..rows.len() as u32).collect())
                }
            };
            let normed = self.sampler().final_norm_rows(&hidden, &Arc::new(places)).unwrap();
            let sampling = SamplingParameters::with_temperature(1.0);
            let logits = self.sampler().weights.logits(&normed, &sampling).unwrap();
            let asked: Vec<_> = rows.iter().enumerate().map(|(i, &row)| (i, targets[row])).collect();
            for (&row, log_prob) in rows.iter().zip(logits.log_probs(&sampling, &asked).unwrap()) {
                out[row] = log_prob;
            }
        }
    }
}

fn targets(tokens: &[u32]) -> Vec<u32> {
    tokens.iter().map(|id| (id * 3 + 1) % 101).collect()
}

#[test]
fn decode_and_chunks_have_the_bits_of_training() {
    let gpu = open(0).unwrap();
    let shapes = [
        config(Family::default(), 4, 2, 20),
        config(Family::default(), 3, 1, 5),
        config(Family::default(), 16, 1, 64),
        config(family("qwen2"), 2, 2, 20),
        config(family("qwen3"), 4, 2, 20),
        config(family("qwen3_moe"), 3, 1, 20),
    ];
    for config in shapes {
        check_sampling(&config, &learner(&config, &gpu), &gpu);
    }
}

/// Checks at every pace that the log-probabilities of sampling and training are bit-identical.
fn check_sampling(config: &Config, learner: &Learner, gpu: &Device) {
    let lengths = [70, 1, 9];
    let tokens = ids(lengths.iter().sum());
    let trained = floats(&learner.training(&tokens, &lengths));
    assert!(trained.iter().all(|x| x.is_finite()));
    for pace in [1, 7, 64, 100] {
        let capacity = CacheCapacity { sequences: 3, tokens: 70, fed_tokens_max: 3 * pace };
        let caches = CacheFactory::new(config, gpu, capacity).unwrap();
        let sample = learner.sample(&caches, &tokens, &lengths, pace, None);
        assert_eq!(sample, trained[..tokens.len()], "{:?} at pace {pace}", config.family);
    }
    let capacity = CacheCapacity { sequences: 3, tokens: 70, fed_tokens_max: 3 };
    let caches = CacheFactory::new(config, gpu, capacity).unwrap();
    let mut decoder = Decoder::new(&learner.sampler(), capacity).unwrap();
    let sample = learner.sample(&caches, &tokens, &lengths, 1, Some(&mut decoder));
    assert_eq!(sample, trained[..tokens.len()], "{:?} captured", config.family);
    // Three and two sequences take 4 rows for 9 steps, and the last one a row for 61. The first step of each
    // shape launches every kernel separately.
    let DecodeCounts { steps, replays, graphs, .. } = decoder.counts;
    assert_eq!((steps, replays, graphs), (70, 8 + 60, 2));
}

#[test]
fn few_graphs_serve_a_rollout_whose_sequences_end_at_different_steps() {
    let gpu = open(0).unwrap();
    let shape = config(Family::default(), 2, 1, 20);
    let learner = learner(&shape, &gpu);
    // Most sequences end early, and there are steps with any number of them.
    let length = |i: usize| 2 + (200.0 * (i as f64 / 255.0).powi(14)) as usize;
    let lengths: Vec<usize> = (0..256).map(|i| length(i * 101 % 256)).collect();
    let tokens = ids(lengths.iter().sum());
    let trained = floats(&learner.training(&tokens, &lengths));
    let capacity = CacheCapacity { sequences: 256, tokens: 202, fed_tokens_max: 256 };
    let caches = CacheFactory::new(&shape, &gpu, capacity).unwrap();
    let mut decoder = Decoder::new(&learner.sampler(), capacity).unwrap();
    let sample = learner.sample(&caches, &tokens, &lengths, 1, Some(&mut decoder));
    assert_eq!(sample, trained[..tokens.len()]);
    let DecodeCounts { steps, replays, graphs, .. } = decoder.counts;
    println!("{} tokens, {steps} steps, {replays} replays of {graphs} graphs", tokens.len());
    assert_eq!(steps, 202);
    assert!(graphs <= 8 && 100 * replays >= 95 * steps, "{steps} steps, {replays} replays, {graphs} graphs");
}

/// Bytes that a step sends outside of the forward pass, for each sequence: the row of the final norm, and the
/// row and the number of a draw.
const DRAW_BYTES: u64 = 4 + 4 + 8;

#[test]
fn a_steady_step_sends_few_bytes() {
    let gpu = open(0).unwrap();
    let shape = config(Family::default(), 2, 1, 20);
    let learner = learner(&shape, &gpu);
    // Batches with few sequences for their rows, and a full one.
    for sequences in [1, 2, 5, 17, 32] {
        let capacity = CacheCapacity { sequences, tokens: 200, fed_tokens_max: 3 * sequences };
        let caches = CacheFactory::new(&shape, &gpu, capacity).unwrap();
        let mut caches: Vec<_> = (0..sequences).map(|_| caches.sequence()).collect();
        let mut open: Vec<_> = caches.iter_mut().collect();
        let mut decoder = Decoder::new(&learner.sampler(), capacity).unwrap();
        let fed = ids(3 * sequences);
        learner.sampler().forward_cached(fed, &mut open, &vec![3; sequences], &mut keep_nothing).unwrap();
        for step in 0..4 {
            let before = decoder.counts.sent_bytes;
            decoder.decode_step(&learner.sampler(), &ids(sequences), &mut open).unwrap();
            let sent = (decoder.counts.sent_bytes - before) / sequences as u64 + DRAW_BYTES;
            println!("{sequences} sequences, step {step}: {sent} bytes a sequence");
            assert!(step == 0 || sent <= 64, "{sequences} sequences, step {step}: {sent} bytes a sequence");
        }
    }
}

#[test]
fn captured_decode_of_long_sequences_has_the_bits_of_separate_launches() {
    let gpu = open(0).unwrap();
    // Attention splits keys into chunks of 512. From position 1025 on there are one more chunk and one more
    // page.
    let shape =
        Config { max_position_embeddings: 1100, num_hidden_layers: 2, ..config(Family::default(), 2, 1, 70) };
    let learner = learner(&shape, &gpu);
    let stack = DecoderStack { model: &Model::new(shape.clone(), 1100), ..learner.sampler() };
    let capacity = CacheCapacity { sequences: 6, tokens: 1100, fed_tokens_max: 1100 };
    let caches = CacheFactory::new(&shape, &gpu, capacity).unwrap();
    let mut long = caches.sequence();
    stack.forward_cached(ids(1021), &mut [&mut long], &[1021], &mut keep_nothing).unwrap();
    // One sequence is new, and the other two share the page in which the prompt ends.
    let mut recorded = [long.clone(), long.clone(), caches.sequence()];
    let mut plain = [long.clone(), long, caches.sequence()];
    let mut decoder = Decoder::new(&stack, CacheCapacity { sequences: 3, ..capacity }).unwrap();
    for step in 0..7u32 {
        let tokens = vec![step, step + 9, step + 20];
        let mut open: Vec<_> = recorded.iter_mut().collect();
        let (hidden, rows) = decoder.decode_step(&stack, &tokens, &mut open).unwrap();
        let got = floats(&select_rows(&hidden, &Arc::new(rows)).unwrap());
        let mut open: Vec<_> = plain.iter_mut().collect();
        assert_eq!(
            got,
            floats(&stack.forward_cached(tokens, &mut open, &[1; 3], &mut keep_nothing).unwrap()),
            "step {step}"
        );
        if step == 1 {
            // Another prompt allocates pages between two steps.
            let mut other = caches.sequence();
            stack.forward_cached(ids(80), &mut [&mut other], &[80], &mut keep_nothing).unwrap();
        }
    }
    assert_eq!(decoder.counts.replays, 2 + 3);
    let full = &mut [&mut caches.sequence()];
    stack.forward_cached(ids(1100), full, &[1100], &mut keep_nothing).unwrap();
    let error = decoder.decode_step(&stack, &[1], full).unwrap_err().to_string();
    assert!(error.contains("positions up to 1101"), "{error}");
}

#[test]
fn log_probabilities_and_gradients_are_the_cpus_up_to_bf16() {
    let gpu = open(0).unwrap();
    for config in [
        config(Family::default(), 4, 2, 20),
        config(family("qwen2"), 2, 1, 20),
        config(family("qwen3"), 4, 2, 20),
        config(family("qwen3_moe"), 3, 1, 20),
    ] {
        check_gradients([learner(&config, &Device::Cpu), learner(&config, &gpu)], &gpu);
    }
}

/// Checks that log-probabilities and gradients on a GPU equal those of the CPU up to bf16 rounding.
fn check_gradients([cpu, own]: [Learner; 2], gpu: &Device) {
    let lengths = [23, 1, 6];
    let tokens = ids(30);
    let of = |learner: &Learner, device: &Device| {
        // The gradient reaches the log-probabilities only.
        let dy: Vec<f32> = (0..60).map(|i| if i < 30 { 1.0 - (i % 7) as f32 / 3.0 } else { 0.0 }).collect();
        let dy = Tensor::from_vec(dy, (2, 30), device).unwrap();
        let mut log_probs = vec![];
        let pass = differentiate(&[], || {
            let out = learner.training(&tokens, &lengths);
            log_probs = floats(&out);
            candle_core::Result::Ok(vec![(out, dy)])
        });
        pass.unwrap();
        log_probs
    };
    let (exact, got) = (of(&cpu, &Device::Cpu), of(&own, gpu));
    for (got, exact) in got.iter().zip(&exact) {
        assert!((got - exact).abs() <= 0.05 * (1.0 + exact.abs()), "{got}, exactly {exact}");
    }
    for (i, name) in own.names.iter().enumerate() {
        let (got, exact) = (floats(&own.gradients.0[i]), floats(&cpu.gradients.0[i]));
        let norm = |x: &[f32]| x.iter().map(|x| f64::from(x * x)).sum::<f64>().sqrt();
        let difference: Vec<f32> = got.iter().zip(&exact).map(|(a, b)| a - b).collect();
        println!("{name} {:.4} of {:.4}", norm(&difference), norm(&exact));
        assert!(norm(&difference) <= 0.05 * norm(&exact) + 1e-6, "{name}: {got:?} {exact:?}");
    }
}
