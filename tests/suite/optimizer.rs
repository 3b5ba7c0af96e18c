//! The optimizers: AdamW and SGD against PyTorch, Muon against its reference, 8-bit moments against exact ones, what is kept of a
//! tensor, and that a checkpoint gives it back.

mod muon;

use crate::cli::{in_repository, text_of};
use crate::{skips, tiny};
use candle_core::{DType, Tensor};
use rand::Rng;
use rloss::actor::batch_runner::BatchRunner;
use rloss::actor::forward_backward::PassOutput;
use rloss::actor::micro_batch::MicroBatch;
use rloss::actor::optimizer::Optimizer;
use rloss::actor::{OptimizerKind, OptimizerSettings as Settings};
use rloss::checkpoint::save::CompanionFiles;
use rloss::checkpoint::{self, ModelFiles, Snapshot, TrainerState, restore};
use rloss::error::BadInput;
use rloss::learner::CriticSettings;
use rloss::learner::critic::Critic;
use rloss::metrics::{Phase, Progress};
use rloss::model::config::{Config, WeightFormat};
use rloss::model::forward::Model;
use rloss::model::init::{InitSettings, init};
use rloss::model::names::value_model_specs;
use rloss::model::parameters::{Backend, OptimizerState, Parameters};
use rloss::model::settings::Dtype;
use rloss::model::storage::StoredFormat;
use rloss::model::storage::TensorStorage;
use rloss::ops::cpu::{edit, edit_codes};
use rloss::ops::product::Precision;
use rloss::ops::threads::Threads;
use rloss::random::{Purpose, stream};
use rloss::recipe::Recipe;
use rloss::run::memory::{
    MemoryChoices, MemoryPlan, MemoryPlanInput, ModelCommand, ToolInput, TrainableInput, WeightPlacement,
};
use serde::Deserialize;
use std::path::Path;

/// A model of which one tensor learns, and its optimizer.
struct Learner {
    parameters: Parameters,
    index: usize,
    optimizer: Optimizer,
}

impl Learner {
    fn new(config: Config, name: &str, initial: &[f32], settings: &Settings) -> Self {
        let (_, mut parameters) = tiny::model(config, 0);
        let index = parameters.index_of(name).unwrap();
        tiny::set(&parameters, index, initial);
        parameters.set_trainable(&(0..parameters.len()).map(|i| i == index).collect::<Vec<_>>()).unwrap();
        let optimizer = Optimizer::new(settings, &mut parameters, false).unwrap();
        Self { parameters, index, optimizer }
    }

    /// The vector of the last norm.
    fn of_vector(initial: &[f32], settings: &Settings) -> Self {
        let config = Config { hidden_size: initial.len(), ..tiny::config(false) };
        Self::new(config, "model.norm.weight", initial, settings)
    }

    /// An embedding of `words` words of 64 values that start from 0.
    fn of_matrix(words: usize, settings: &Settings) -> Self {
        let config = Config { vocab_size: words, ..tiny::config(false) };
        Self::new(config, "model.embed_tokens.weight", &vec![0.0; words * 64], settings)
    }

    fn update(&mut self, gradient: &[f32], lr: f64) {
        set_gradient(&self.parameters, self.index, gradient);
        let update = self.optimizer.settings.for_update(lr, None);
        self.optimizer.update(&self.parameters, &update).unwrap();
    }

    fn weights(&self) -> Vec<f32> {
        tiny::values(self.parameters.values(self.index).unwrap())
    }

    fn state(&self) -> &OptimizerState {
        self.parameters.state(self.index)
    }
}

fn set_gradient(parameters: &Parameters, index: usize, values: &[f32]) {
    edit(parameters.gradient(index).unwrap(), |g| {
        g.copy_from_slice(values);
        Ok(())
    })
    .unwrap();
}

fn of_kind(kind: OptimizerKind) -> Settings {
    Settings { kind, ..Settings::default() }
}

/// All update rules, SGD without and with momentum.
fn kinds() -> [Settings; 5] {
    let momentum = Settings { momentum: 0.9, ..of_kind(OptimizerKind::Sgd) };
    let [adamw, in_8_bits, sgd, muon] =
        [OptimizerKind::AdamW, OptimizerKind::AdamW8Bit, OptimizerKind::Sgd, OptimizerKind::Muon]
            .map(of_kind);
    [adamw, in_8_bits, sgd, momentum, muon]
}

fn bytes(tensor: &Tensor) -> Vec<u8> {
    let flat = tensor.flatten_all().unwrap();
    match tensor.dtype() {
        DType::U8 => flat.to_vec1().unwrap(),
        _ => flat.to_vec1::<f32>().unwrap().iter().flat_map(|v| v.to_le_bytes()).collect(),
    }
}

/// All weights and all that the optimizer keeps, to the bit.
fn everything(parameters: &Parameters) -> Vec<Vec<u8>> {
    let of = |index| {
        let kept = parameters.state(index).values().map(bytes);
        std::iter::once(bytes(parameters.values(index).unwrap())).chain(kept).collect::<Vec<_>>()
    };
    (0..parameters.len()).flat_map(of).collect()
}

/// Updates with gradients drawn by `seed`.
fn random_updates(parameters: &mut Parameters, optimizer: &mut Optimizer, count: usize, seed: u64) {
    let mut rng = stream(seed, Purpose::Problem, &[]);
    for _ in 0..count {
        for index in 0..parameters.len() {
            if let Some(gradient) = parameters.gradient(index) {
                let values: Vec<f32> =
                    (0..gradient.elem_count()).map(|_| rng.random_range(-1f32..1.0).powi(5)).collect();
                set_gradient(parameters, index, &values);
            }
        }
        let update = optimizer.settings.for_update(1e-3, None);
        optimizer.update(parameters, &update).unwrap();
    }
}

/// What `scripts/make_fixtures.py` had PyTorch do.
#[derive(Deserialize)]
struct Trace<T> {
    settings: T,
    initial: Vec<f32>,
    gradients: Vec<Vec<f32>>,
    weights: Vec<Vec<f32>>,
}

#[derive(Deserialize)]
struct AdamW {
    lr: f64,
    betas: [f64; 2],
    eps: f64,
    weight_decay: f64,
}

#[derive(Deserialize)]
struct Sgd {
    lr: f64,
    momentum: f64,
}

fn traces<T: for<'a> Deserialize<'a>>(name: &str) -> Vec<Trace<T>> {
    let path = in_repository("tests/fixtures").join(name);
    let traces: Vec<Trace<T>> = serde_json::from_str(&text_of(path)).unwrap();
    assert!(traces.iter().all(|trace| (trace.gradients.len(), trace.weights.len()) == (10, 10)));
    traces
}

/// The largest difference from PyTorch's weights after each of the ten steps, against the largest of these.
fn worst<T>(trace: &Trace<T>, settings: &Settings) -> f64 {
    let mut learner = Learner::of_vector(&trace.initial, settings);
    let mut worst = 0f64;
    for (gradient, expected) in trace.gradients.iter().zip(&trace.weights) {
        learner.update(gradient, settings.lr);
        let difference =
            learner.weights().iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        let largest = expected.iter().map(|b| b.abs()).fold(0.0, f32::max);
        worst = worst.max(f64::from(difference / largest));
    }
    worst
}

#[test]
fn adamw_follows_pytorch_over_ten_steps() {
    for trace in traces::<AdamW>("adamw.json") {
        let AdamW { lr, betas: [beta1, beta2], eps, weight_decay } = trace.settings;
        let settings = Settings { lr, beta1, beta2, eps, weight_decay, ..Settings::default() };
        let worst = worst(&trace, &settings);
        println!("AdamW, beta2 {beta2}, weight decay {weight_decay}: worst relative difference {worst:.2e}");
        assert!(worst <= 1e-6, "worst relative difference {worst:e}");
        // Sixteen values are too few to be worth codes: the same bits.
        let in_8_bits = Settings { kind: OptimizerKind::AdamW8Bit, ..settings };
        assert_eq!(worst.to_bits(), self::worst(&trace, &in_8_bits).to_bits());
    }
}

#[test]
fn sgd_has_pytorchs_bits_with_and_without_momentum() {
    for trace in traces::<Sgd>("sgd.json") {
        let Sgd { lr, momentum } = trace.settings;
        let settings = Settings { lr, momentum, ..of_kind(OptimizerKind::Sgd) };
        assert_eq!(worst(&trace, &settings), 0.0, "momentum {momentum}");
    }
}

/// AdamW in f64.
struct Exact {
    weights: Vec<f64>,
    moments: Vec<[f64; 2]>,
    updates: i32,
}

impl Exact {
    fn update(&mut self, gradient: &[f32], s: &Settings) {
        self.updates += 1;
        let corrections = [s.beta1, s.beta2].map(|beta| 1.0 - beta.powi(self.updates));
        for ((w, [m, v]), &g) in self.weights.iter_mut().zip(&mut self.moments).zip(gradient) {
            let g = f64::from(g);
            *m = s.beta1 * *m + (1.0 - s.beta1) * g;
            *v = s.beta2 * *v + (1.0 - s.beta2) * g * g;
            *w -= s.lr * *m / corrections[0] / ((*v / corrections[1]).sqrt() + s.eps);
        }
    }
}

/// How far 200 updates lead from where the exact ones lead, against how far these lead: both as Euclidean
/// norms. Gradients are noise around a drift of half its size; magnitudes within a block differ by up to
/// `decades` powers of ten.
fn deviation(kind: OptimizerKind, decades: f32, beta2: f64) -> f64 {
    // 70 blocks and a quarter.
    let words = 281;
    let settings = Settings { lr: 1e-3, beta2, ..of_kind(kind) };
    let mut learner = Learner::of_matrix(words, &settings);
    let count = words * 64;
    let mut exact = Exact { weights: vec![0.0; count], moments: vec![[0.0; 2]; count], updates: 0 };
    let mut rng = stream(3, Purpose::Problem, &[]);
    let magnitudes: Vec<f32> =
        (0..count).map(|_| 10f32.powf(-decades * rng.random_range(0f32..1.0))).collect();
    let drift: Vec<f32> = magnitudes.iter().map(|m| m * rng.random_range(-1f32..1.0)).collect();
    for _ in 0..200 {
        let noise = magnitudes.iter().map(|m| m * rng.random_range(-2f32..2.0));
        let gradient: Vec<f32> = drift.iter().zip(noise).map(|(drift, noise)| drift + noise).collect();
        learner.update(&gradient, settings.lr);
        exact.update(&gradient, &settings);
    }
    let difference =
        learner.weights().iter().zip(&exact.weights).map(|(&a, b)| (f64::from(a) - b).powi(2)).sum::<f64>();
    (difference / exact.weights.iter().map(|b| b * b).sum::<f64>()).sqrt()
}

#[test]
fn moments_of_8_bits_lead_nearly_where_exact_ones_do() {
    for (decades, beta2, bound) in
        [(0.0, 0.99, 0.02), (0.0, 0.999, 0.02), (2.0, 0.99, 0.08), (2.0, 0.999, 0.08)]
    {
        let [exact, coded] =
            [OptimizerKind::AdamW, OptimizerKind::AdamW8Bit].map(|kind| deviation(kind, decades, beta2));
        println!("beta2 {beta2}, {decades} decades: f32 {exact:.2e}, 8 bits {coded:.2e}");
        assert!(exact < 1e-4 && coded > 1e-4 && coded < bound, "f32 {exact:e}, 8 bits {coded:e}");
    }
}

/// One gradient of a block is huge, the others are small and then gone: what remains of their first moment
/// must not be divided by a second that was rounded to nothing.
#[test]
fn a_block_with_one_huge_gradient_does_not_leap() {
    let settings = Settings { lr: 1.0, ..of_kind(OptimizerKind::AdamW8Bit) };
    let steps = |lost: bool| {
        let mut learner = Learner::of_matrix(64, &settings);
        let mut gradient = vec![1e-5; 4096];
        (0..16).for_each(|block| gradient[256 * block + 7] = 1.0);
        learner.update(&gradient, settings.lr);
        let before = learner.weights();
        if lost {
            // What rounding to the nearest would have made of it.
            edit_codes(&learner.state()["second_codes"], |codes| {
                assert_eq!(codes.iter().filter(|&&code| code == 1).count(), 4096 - 16);
                codes.iter_mut().filter(|code| **code == 1).for_each(|code| *code = 0);
                Ok(())
            })
            .unwrap();
        }
        learner.update(&vec![0.0; 4096], settings.lr);
        before.iter().zip(learner.weights()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
    };
    let (kept, lost) = (steps(false), steps(true));
    println!("longest step, in learning rates: {kept}, with a lost second moment {lost}");
    assert!(kept < 1.0, "{kept}");
    assert!(lost > 100.0, "{lost}");
}

#[test]
fn updates_have_the_same_bits_on_any_number_of_threads() {
    for settings in kinds() {
        let run = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                // Several parts a tensor, the last a broken block.
                let mut learner = Learner::of_matrix(1001, &settings);
                random_updates(&mut learner.parameters, &mut learner.optimizer, 3, 5);
                everything(&learner.parameters)
            })
        };
        let one = run(1);
        assert!(one.iter().flatten().any(|&byte| byte != 0));
        for threads in [2, 3, 4] {
            assert!(run(threads) == one, "{settings:?}, {threads} threads");
        }
    }
}

/// Bytes that the optimizer keeps.
fn kept_bytes(parameters: &Parameters) -> u64 {
    let of = |tensor: &Tensor| (tensor.elem_count() * tensor.dtype().size_in_bytes()) as u64;
    (0..parameters.len()).flat_map(|index| parameters.state(index).values().map(of)).sum()
}

#[test]
fn the_plan_holds_the_bytes_that_optimizers_keep() {
    for (settings, dtype) in kinds().into_iter().flat_map(|s| [(s.clone(), Dtype::F32), (s, Dtype::Bf16)]) {
        let config = tiny::config(false);
        let (model, mut parameters) = tiny::model(config.clone(), 0);
        // Some of each size are frozen.
        let mark = |tensors: usize| -> Vec<bool> { (0..tensors).map(|i| i % 3 > 0).collect() };
        let (trainable, critic_trainable) = (mark(parameters.len()), mark(value_model_specs(&config).len()));
        parameters.set_trainable(&trainable).unwrap();
        let rounds = dtype == Dtype::Bf16;
        Optimizer::new(&settings, &mut parameters, rounds).unwrap();
        let critic_settings = CriticSettings { optimizer: settings.clone(), ..CriticSettings::default() };
        let policy = tiny::actor(model, parameters, 1, 64, true);
        let critic = Critic::new(&policy, &critic_trainable, &critic_settings, 0, rounds).unwrap();
        let parameters = &policy.parameters;

        let mut recipe = Recipe { critic: Some(critic_settings), ..Recipe::default() };
        recipe.model.dtype = dtype;
        recipe.train.optimizer = settings.clone();
        recipe.cold_start.steps = 0;
        let subject = MemoryPlanInput {
            command: ModelCommand::Train,
            recipe: &recipe,
            config: &config,
            formats: &vec![StoredFormat::F32; parameters.len()],
            trainable: TrainableInput { policy: trainable, critic: Some(critic_trainable), adapter: None },
            tokenizer_bytes: 0,
            tools: ToolInput { python_workers: 0, reply_chars_max: None },
            threads: 1,
            placement: WeightPlacement::whole(1),
            choices: MemoryChoices::default(),
            sft_row_tokens_max: None,
            teacher: None,
        };
        let plan = MemoryPlan::new(&subject);
        let planned =
            |name: &str| plan.resident.iter().find(|part| part.name == name).map_or(0, |part| part.bytes);
        assert_eq!(planned("optimizer"), kept_bytes(parameters), "{settings:?}, {dtype:?}");
        assert_eq!(
            planned("critic's optimizer"),
            kept_bytes(&critic.actor.parameters),
            "{settings:?}, {dtype:?}"
        );
        assert_eq!(kept_bytes(parameters) == 0, settings == kinds()[2] && !rounds);

        let remedies: Vec<String> =
            subject.remedies(u64::MAX).into_iter().map(|remedy| remedy.change).collect();
        let offered = |change: &str| remedies.iter().any(|remedy| remedy == change);
        let is_sgd = settings.kind == OptimizerKind::Sgd;
        let has_f32_state = matches!(settings.kind, OptimizerKind::AdamW | OptimizerKind::Muon);
        assert_eq!(offered("train.optimizer.kind = \"adamw_8bit\""), has_f32_state);
        assert_eq!(offered("train.optimizer.kind = \"sgd\""), !is_sgd);
        assert_eq!(offered("train.optimizer.momentum = 0"), settings.momentum > 0.0);
    }
}

/// Writes a checkpoint of `parameters` into `run`.
fn saved(run: &Path, parameters: &Parameters, format: WeightFormat) -> std::path::PathBuf {
    let state = TrainerState {
        phase: Phase::Rl,
        step: 1,
        updates: 2,
        critic_updates: 0,
        metrics_bytes: 0,
        metrics_digest: None,
        reference_digest: None,
        teacher_digest: None,
        kl_coefficient: None,
    };
    let (config, companions) = (&tiny::config(false), &CompanionFiles::default());
    let files = ModelFiles { config, format, companions, base: None };
    let snapshot = Snapshot { files, parameters, critic: None, recipe: "", sampled_ahead: None, state };
    snapshot.write(run, 1).unwrap()
}

/// Bytes of the tensors in the safetensors file at `path`.
fn tensor_bytes(path: &Path) -> u64 {
    let bytes = std::fs::read(path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    bytes.len() as u64 - 8 - header
}

/// Under bf16 the masters were counted twice.
#[test]
fn a_checkpoint_takes_the_bytes_it_says_and_gives_back_every_bit() {
    for (settings, rounds) in kinds().into_iter().flat_map(|s| [(s.clone(), false), (s, true)]) {
        let fresh = |settings: &Settings, seed| {
            let (_, mut parameters) = tiny::model(tiny::config(false), seed);
            let optimizer = Optimizer::new(settings, &mut parameters, rounds).unwrap();
            (parameters, optimizer)
        };
        let (mut parameters, mut optimizer) = fresh(&settings, 0);
        random_updates(&mut parameters, &mut optimizer, 2, 7);
        let run = tempfile::tempdir().unwrap();
        let folder = saved(run.path(), &parameters, WeightFormat::Bf16);
        let written =
            ["model.safetensors", "trainer.safetensors"].map(|name| tensor_bytes(&folder.join(name)));
        assert_eq!(
            checkpoint::estimate_bytes(WeightFormat::Bf16, &parameters),
            written.iter().sum::<u64>(),
            "{settings:?}"
        );

        let (mut again, resumed) = fresh(&settings, 1);
        assert!(everything(&again) != everything(&parameters));
        restore(&folder, &mut again).unwrap();
        resumed.write_weights(&mut again).unwrap();
        assert!(everything(&again) == everything(&parameters), "{settings:?}");

        for other in kinds().into_iter().filter(|other| *other != settings) {
            let (mut again, _) = fresh(&other, 1);
            let error = restore(&folder, &mut again).unwrap_err();
            assert!(error.downcast_ref::<BadInput>().is_some(), "{error:#}");
            let text = format!("{error:#}");
            assert!(text.contains("trainer.safetensors"), "{text}");
            assert!(
                ["is missing", "another model or optimizer"].iter().any(|what| text.contains(what)),
                "{text}"
            );
        }
    }
}

/// The log-probs of random sequences, computed with bf16 products, and the names of the tensors that have a
/// master beside them.
fn with_bf16_products(config: &Config, round: impl Fn(f32) -> f32) -> (Vec<f32>, Vec<String>) {
    let settings = InitSettings { embedding_std: 0.5, head_scale: 0.5, sink: 1.0 };
    let tensors = init(config, &settings, 5).unwrap().into_iter().map(|(spec, values)| {
        let stored = TensorStorage::variable(&spec, values.into_iter().map(&round).collect())?;
        Ok((spec, stored))
    });
    let backend = Backend { precision: Precision::Bf16Dot, ..Backend::default() };
    let mut parameters = Parameters::load(config, &backend, tensors).unwrap();
    parameters.set_trainable(&vec![true; parameters.len()]).unwrap();
    Optimizer::new(&Settings::default(), &mut parameters, true).unwrap();
    let model = Model::new(config.clone(), config.max_position_embeddings);
    let batches = MicroBatch::split(&tiny::sequences(config.vocab_size, &[30, 41], 4), usize::MAX);
    let threads = Threads::new(2).unwrap();
    let runner =
        BatchRunner { threads: &threads, model: &model, parameters: &parameters, recompute_layers: false };
    let pass = tiny::pass_settings(1.0, 0.0);
    let output: PassOutput = runner.forward(&batches, pass, &Progress::hidden()).unwrap().remove(0);
    let has_master = |index: &usize| parameters.state(*index).contains_key("master");
    let names = (0..parameters.len()).filter(has_master).map(|index| parameters.specs[index].name.clone());
    (output.columns.log_probs, names.collect())
}

/// The masters of a warm-up stayed in memory during the training after it: the new ones were tracked copies.
#[test]
fn a_new_optimizer_does_not_keep_the_masters_of_the_former_one() {
    let (_, mut parameters) = tiny::model(tiny::config(false), 0);
    parameters.set_trainable(&vec![true; parameters.len()]).unwrap();
    for _ in 0..2 {
        Optimizer::new(&Settings::default(), &mut parameters, true).unwrap();
        let masters = (0..parameters.len()).filter_map(|index| parameters.state(index).get("master"));
        let tracked: Vec<bool> = masters.map(|master| master.track_op()).collect();
        assert!(!tracked.is_empty() && !tracked.contains(&true), "{tracked:?}");
    }
}

/// A master beside every matrix took 4 bytes a weight for nothing: products in bf16 round them as they read.
#[test]
fn matrices_of_bf16_products_are_their_own_masters() {
    if !Precision::Bf16Dot.is_supported() {
        return skips::note(skips::NO_BF16, "");
    }
    for tied in [false, true] {
        let config = Config { tie_word_embeddings: tied, ..tiny::config(false) };
        let (log_probs, masters) = with_bf16_products(&config, |value| value);
        let rounded = |value: f32| half::bf16::from_f32(value).to_f32();
        assert_eq!(log_probs, with_bf16_products(&config, rounded).0, "tied: {tied}");
        let vectors = |name: &&String| {
            !["norm", "bias", "sinks", "router.weight"].iter().any(|part| name.contains(part))
        };
        assert_eq!(masters.iter().find(vectors), None);
        assert!(masters.iter().any(|name| name.ends_with("router.weight")), "{masters:?}");
    }
}
