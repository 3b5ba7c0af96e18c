//! Adapters: PEFT's numbers and PEFT's files, one forward beside a packed base, and folders that do not fit.

use crate::cli::{in_repository, text_of};
use crate::model::case::{Case, Figures};
use crate::tiny::{self, load};
use crate::{model_files, qwen2, qwen3};
use rloss::actor::batch_runner::BatchRunner;
use rloss::actor::forward_backward::{Pass, PassSettings};
use rloss::actor::gradients;
use rloss::actor::micro_batch::{MicroBatch, Sequence};
use rloss::actor::optimizer::Optimizer;
use rloss::actor::{Actor, Columns, CriticColumns, OptimizerSettings, PolicyColumns, UpdateSettings};
use rloss::checkpoint::BaseModel;
use rloss::checkpoint::load::ModelFolder;
use rloss::checkpoint::merge::{merge, merged_config};
use rloss::checkpoint::peft::{self, AdapterFolder};
use rloss::checkpoint::save::{CompanionFiles, SHARD_BYTES_MAX, save};
use rloss::error::BadInput;
use rloss::integrity::Manifest;
use rloss::learner::CriticSettings;
use rloss::learner::critic::Critic;
use rloss::metrics::Progress;
use rloss::model::adapter::{HEAD, Lora, Owner, default_targets};
use rloss::model::config::{Config, WeightFormat};
use rloss::model::forward::Model;
use rloss::model::init::{InitSettings, init};
use rloss::model::names::{ParameterSpec, parameter_specs};
use rloss::model::parameters::{Backend, Parameters};
use rloss::model::policy_view::PolicyView;
use rloss::model::storage::TensorStorage;
use rloss::ops::threads::Threads;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

fn fixture(name: &str) -> PathBuf {
    in_repository("tests/fixtures").join(name)
}

/// The adapters of `scripts/parity.py adapters --fixtures`, each with its base.
const FIXTURES: [(&str, &str); 2] = [("adapter_gpt_oss", "gpt_oss_yarn"), ("adapter_qwen2", "qwen2")];

fn compare(case: Case, name: &str) -> Figures {
    let figures = case.figures();
    println!("parity {name}{figures}"); // scripts/parity.py reads this line.
    figures
}

#[test]
fn fixtures_agree_with_peft() {
    for (name, base) in FIXTURES {
        let figures = compare(Case::adapted(&fixture(base), &fixture(name)), name);
        assert!(figures.adamw.difference > 0.0 && figures.sgd.difference > 0.0, "{name}: steps are compared");
        figures.check(name);
    }
}

/// The cases that `scripts/parity.py adapters` makes, in the folder that `RLOSS_ADAPTER_PARITY` names. Each
/// adapter is written again, in `saved/`, and merged into its base, in `merged/`, for the script to load.
#[test]
fn random_adapters_agree_with_peft() {
    let Some(folder) = std::env::var_os("RLOSS_ADAPTER_PARITY") else {
        crate::skips::note("no RLOSS_ADAPTER_PARITY (scripts/parity.py adapters makes them and sets it)", "");
        return;
    };
    let mut cases: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    cases.sort();
    assert!(!cases.is_empty(), "RLOSS_ADAPTER_PARITY names an empty folder");
    let compared: Vec<(String, Figures)> = cases
        .iter()
        .map(|folder| {
            let name = folder.file_name().unwrap().to_string_lossy().into_owned();
            let base = folder.join("base");
            let case = Case::adapted(&base, folder);
            rewrite(&folder.join("adapter"), &base, &folder.join("saved"));
            let tensor = |spec: &ParameterSpec| merge(&case.parameters, spec);
            std::fs::create_dir_all(folder.join("merged")).unwrap();
            let (config, companions) = (&case.model.config, CompanionFiles::default());
            save(&folder.join("merged"), config, WeightFormat::F32, &companions, SHARD_BYTES_MAX, tensor)
                .unwrap();
            (name.clone(), compare(case, &name))
        })
        .collect();
    compared.iter().for_each(|(name, figures)| figures.check(name));
}

/// Reads the adapter in `from` and writes it to `to`.
fn rewrite(from: &Path, base: &Path, to: &Path) {
    let specs = parameter_specs(&Config::read(base).unwrap());
    let adapter = AdapterFolder::open(from, &specs).unwrap();
    let names = adapter.lora.factor_specs(&specs).unwrap().into_iter().map(|spec| spec.name);
    let values: BTreeMap<String, Vec<f32>> = names.zip(adapter.read_values(&specs).unwrap()).collect();
    std::fs::create_dir_all(to).unwrap();
    let mut manifest = Manifest::default();
    let base = BaseModel::from_folder(base).unwrap();
    let factor = |name: &str| Ok(values[name].clone());
    peft::write(to, &mut manifest, (&adapter.lora, &specs), &base, factor).unwrap();
}

#[test]
fn what_was_read_is_written_with_pefts_names_shapes_and_values() {
    for (name, base) in FIXTURES {
        let (folder, from) = (TempDir::new().unwrap(), fixture(name).join("adapter"));
        rewrite(&from, &fixture(base), folder.path());
        let read = |folder: &Path| {
            let file = folder.join("adapter_model.safetensors");
            let tensors = crate::tiny::load_safetensors(file);
            tensors
                .into_iter()
                .map(|(name, tensor)| (name, (tensor.dims().to_vec(), tiny::values(&tensor))))
                .collect::<BTreeMap<_, _>>()
        };
        assert!(read(folder.path()) == read(&from), "{name}");
        let config = |folder: &Path| -> serde_json::Value {
            serde_json::from_str(&text_of(folder.join("adapter_config.json"))).unwrap()
        };
        let (ours, theirs) = (config(folder.path()), config(&from));
        let sorted = |json: &serde_json::Value, key: &str| -> Vec<String> {
            let mut names: Vec<String> =
                json[key].as_array().into_iter().flatten().map(|name| name.to_string()).collect();
            names.sort();
            names
        };
        for key in ["target_modules", "target_parameters"] {
            assert_eq!(sorted(&ours, key), sorted(&theirs, key), "{name}: {key}");
        }
        for key in ["r", "lora_alpha", "use_rslora", "bias", "peft_type"] {
            let number = |json: &serde_json::Value| {
                json[key].as_f64().map_or(json[key].to_string(), |n| n.to_string())
            };
            assert_eq!(number(&ours), number(&theirs), "{name}: {key}");
        }
    }
}

fn settings() -> PassSettings {
    tiny::pass_settings(0.8, 0.0)
}

/// An adapter of `rank` on all matrices of the layers, with values of which every one matters.
fn adapt(parameters: &mut Parameters, config: &Config, rank: usize) {
    adapt_targets(parameters, rank, default_targets(config));
}

/// An adapter on the head too.
fn adapt_with_head(parameters: &mut Parameters, config: &Config, rank: usize) {
    let targets = default_targets(config).into_iter().chain([HEAD.to_owned()]).collect();
    adapt_targets(parameters, rank, targets);
}

fn adapt_targets(parameters: &mut Parameters, rank: usize, targets: Vec<String>) {
    let lora = Lora { rank, alpha: 8.0, rslora: true, targets };
    let mut values = lora.initial_values(&parameters.specs, 3, Owner::Policy).unwrap();
    for values in &mut values {
        values.iter_mut().enumerate().for_each(|(i, v)| *v += ((i * 7 % 13) as f32 - 6.0) * 0.01);
    }
    let base = parameters.len();
    parameters.attach_adapter(lora, values).unwrap();
    parameters.set_trainable(&(0..parameters.len()).map(|i| i >= base).collect::<Vec<_>>()).unwrap();
}

/// A random model of `config` as its folder in `format` gives it: decoded, and held as it lies there.
fn both(config: &Config, format: WeightFormat) -> [Parameters; 2] {
    let start = InitSettings { embedding_std: 0.5, head_scale: 0.5, sink: 1.0 };
    let parameters =
        crate::tiny::parameters(config, init(config, &start, 8).unwrap().into_iter().map(Ok)).unwrap();
    let folder = TempDir::new().unwrap();
    let tensor = |spec: &ParameterSpec| Ok(tiny::named(&parameters, &spec.name).clone());
    save(folder.path(), config, format, &CompanionFiles::default(), SHARD_BYTES_MAX, tensor).unwrap();
    let files = ModelFolder::open(folder.path(), config).unwrap();
    let held = parameter_specs(config).into_iter().map(|spec| {
        let stored = match files.read_packed(&spec, files.format_of(&spec))? {
            Some(packed) => TensorStorage::from_weight(packed),
            None => TensorStorage::variable(&spec, files.read_values(&spec)?)?,
        };
        Ok((spec, stored))
    });
    [
        crate::tiny::parameters(config, load(folder.path(), config).unwrap()).unwrap(),
        Parameters::load(config, &Backend::default(), held).unwrap(),
    ]
}

fn log_probs(model: &Model, parameters: &Parameters, batches: &[MicroBatch]) -> Vec<f32> {
    let weights = &parameters.frozen_weights(None).unwrap();
    let forward = |batch| {
        let settings = settings();
        let pass = Pass { model, weights, batch, settings, recompute_layers: true, teacher: None };
        pass.forward::<PolicyColumns>(&|| ()).unwrap().columns.log_probs
    };
    batches.iter().flat_map(forward).collect()
}

/// A loss whose gradient with respect to every log-probability is `gradient`.
fn log_prob_gradients(gradient: f32) -> impl Fn(usize, &PolicyColumns) -> anyhow::Result<PolicyColumns> {
    move |_, columns| {
        Ok(PolicyColumns { log_probs: vec![gradient; columns.log_probs.len()], ..columns.zeros() })
    }
}

fn every(sequences: &[Sequence]) -> Vec<Sequence> {
    let all = |s: &Sequence| Sequence {
        tokens: s.tokens.clone(),
        mask: (0..s.tokens.len()).map(|i| i > 0).collect(),
        kept_tokens: vec![],
    };
    sequences.iter().map(all).collect()
}

#[test]
fn an_adapter_beside_a_packed_base_is_one_forward() {
    let cases = [
        (model_files::config(), WeightFormat::Mxfp4),
        (model_files::config(), WeightFormat::Bf16),
        (qwen2::config(true), WeightFormat::Bf16),
        (qwen3::config("qwen3"), WeightFormat::Bf16),
        (qwen3::config("qwen3_moe"), WeightFormat::Bf16),
    ];
    for (config, format) in cases {
        for rank in [1, 2, 3, 8, 33] {
            let [mut plain, mut packed] = both(&config, format);
            let adapt = if rank == 2 { adapt } else { adapt_with_head };
            adapt(&mut plain, &config, rank);
            adapt(&mut packed, &config, rank);
            let model = Model::new(config.clone(), config.max_position_embeddings);
            let sequences = every(&tiny::sequences(config.vocab_size, &[40, 1, 2, 33, 19], 4));
            let alone = MicroBatch::split(&sequences, 1);
            let together = MicroBatch::split(&sequences, usize::MAX);
            let found = log_probs(&model, &packed, &alone);
            assert!(found.len() > 80);
            assert_eq!(found, log_probs(&model, &packed, &together), "rank {rank}: rows alone and together");
            assert_eq!(found, log_probs(&model, &plain, &together), "rank {rank}: packed and decoded base");
            assert_ne!(found, log_probs(&model, &packed.without_adapter(), &together), "rank {rank}");
            let policy = PolicyView::without_ablations(&model, &packed).unwrap();
            let tokens: Vec<&[u32]> = sequences.iter().map(|s| &s.tokens[..]).collect();
            assert_eq!(found, policy.prefill(&tokens, 0.8).unwrap().concat(), "rank {rank}: prefill");
            assert_eq!(found, policy.decode(&tokens, 0.8, &|_| ()).unwrap().concat(), "rank {rank}: decode");
        }
    }
}

#[test]
fn gradients_beside_a_packed_base_do_not_depend_on_threads_or_on_recomputation() {
    let config = model_files::config();
    let [mut plain, mut packed] = both(&config, WeightFormat::Mxfp4);
    let mut found = vec![];
    for parameters in [&mut plain, &mut packed] {
        adapt_with_head(parameters, &config, 5);
        for (threads, recompute_layers) in [(1, true), (3, true), (2, false)] {
            let (model, threads) = (Model::new(config.clone(), 256), Threads::new(threads).unwrap());
            let sequences = tiny::sequences(config.vocab_size, &[40, 12, 33, 60, 7], 4);
            let batches = MicroBatch::split(&sequences, 50);
            let runner =
                BatchRunner { threads: &threads, model: &model, parameters: &*parameters, recompute_layers };
            gradients::clear(parameters).unwrap();
            let loss = log_prob_gradients(-0.01);
            runner.accumulate(&batches, settings(), None, &loss, &Progress::hidden()).unwrap();
            found.push(tiny::Gradients::of(parameters));
        }
    }
    let learning = found[0].values.iter().flatten();
    assert!(learning.clone().count() > 10);
    assert!(learning.clone().all(|gradient| gradient.iter().any(|&g| g != 0.0)));
    assert!(found.iter().all(|other| *other == found[0]));
}

#[test]
fn a_fresh_adapter_leaves_every_bit_and_off_it_is_the_base() {
    let config = tiny::config(true);
    let (model, mut parameters) = tiny::model(config.clone(), 2);
    let batches = MicroBatch::split(&every(&tiny::sequences(272, &[50, 31, 9], 1)), usize::MAX);
    let before = log_probs(&model, &parameters, &batches);
    let lora = Lora { rank: 4, alpha: 8.0, rslora: false, targets: default_targets(&config) };
    let start = lora.initial_values(&parameters.specs, 0, Owner::Policy).unwrap();
    assert_ne!(start, lora.initial_values(&parameters.specs, 0, Owner::Critic).unwrap());
    parameters.attach_adapter(lora, start).unwrap();
    assert_eq!(before, log_probs(&model, &parameters, &batches));
    assert_eq!(before, log_probs(&model, &parameters.without_adapter(), &batches));
}

#[test]
fn a_critic_beside_an_adapter_shares_the_base() {
    let config = tiny::config(false);
    let (model, mut policy) = tiny::model(config.clone(), 2);
    adapt(&mut policy, &config, 3);
    let base = parameter_specs(&config).len();
    let head = (0..base + 1).map(|i| i >= base - 1);
    let trainable: Vec<bool> = head.chain(vec![true; policy.len() - base]).collect();
    let policy = tiny::actor(model, policy, 2, usize::MAX, true);
    let critic = Critic::new(&policy, &trainable, &CriticSettings::default(), 7, false).unwrap();
    let (mut critic, policy, model) = (critic.actor, &policy.parameters, &policy.model);
    assert_eq!(critic.parameters.len(), policy.len() + 1);
    let learning = (0..critic.parameters.len()).filter(|&i| critic.parameters.is_trained(i)).count();
    assert_eq!(learning, policy.len() - base + 2);
    let batches = MicroBatch::split(&tiny::sequences(272, &[30, 41], 4), usize::MAX);
    let values = |critic: &Actor| {
        let outputs = tiny::runner(critic).forward(&batches, settings(), &Progress::hidden());
        let CriticColumns { values } = outputs.unwrap().remove(0).columns;
        values
    };
    let before = values(&critic);
    let policy_before = log_probs(model, policy, &batches);
    let loss = |_: usize, CriticColumns { values }: &CriticColumns| {
        Ok(CriticColumns { values: values.iter().map(|v| v - 1.0).collect() })
    };
    let update = CriticSettings::default().optimizer.for_update(1e-2, None);
    for _ in 0..3 {
        tiny::runner(&critic).accumulate(&batches, settings(), None, &loss, &Progress::hidden()).unwrap();
        critic.optim_step(&UpdateSettings { grad_norm_max: 0.0, ..update }).unwrap();
    }
    let loss = |values: &[f32]| values.iter().map(|v| (v - 1.0).powi(2)).sum::<f32>();
    assert!(loss(&values(&critic)) < 0.9 * loss(&before));
    assert_eq!(policy_before, log_probs(model, policy, &batches), "the policy is left as it is");
}

#[test]
fn an_optimizer_keeps_nothing_of_the_base_and_moves_it_not() {
    let config = tiny::config(false);
    let (model, mut parameters) = tiny::model(config.clone(), 2);
    let base: Vec<Vec<f32>> =
        (0..parameters.len()).map(|i| tiny::values(parameters.values(i).unwrap())).collect();
    adapt(&mut parameters, &config, 3);
    let mut optimizer = Optimizer::new(&OptimizerSettings::default(), &mut parameters, true).unwrap();
    let threads = Threads::new(2).unwrap();
    let batches = MicroBatch::split(&tiny::sequences(272, &[30, 41], 4), usize::MAX);
    BatchRunner { threads: &threads, model: &model, parameters: &parameters, recompute_layers: true }
        .accumulate(&batches, settings(), None, &log_prob_gradients(-0.1), &Progress::hidden())
        .unwrap();
    let before = log_probs(&model, &parameters, &batches);
    optimizer.update(&parameters, &OptimizerSettings::default().for_update(1e-3, None)).unwrap();
    assert_ne!(before, log_probs(&model, &parameters, &batches));
    for (index, values) in base.iter().enumerate() {
        assert!(parameters.state(index).is_empty());
        assert_eq!(*values, tiny::values(parameters.values(index).unwrap()));
    }
    // bf16 rounds a model's weights, and leaves an adapter in f32: no master beside it.
    let factor = base.len() + 1;
    assert!(!parameters.state(factor).is_empty());
    assert!(parameters.state(factor).get("master").is_none());
}

/// A copy of the GPT-OSS fixture's adapter with its config changed.
fn changed(change: impl Fn(&mut serde_json::Value)) -> TempDir {
    let folder = TempDir::new().unwrap();
    let from = fixture("adapter_gpt_oss/adapter");
    std::fs::copy(from.join("adapter_model.safetensors"), folder.path().join("adapter_model.safetensors"))
        .unwrap();
    let mut config: serde_json::Value =
        serde_json::from_str(&text_of(from.join("adapter_config.json"))).unwrap();
    change(&mut config);
    std::fs::write(folder.path().join("adapter_config.json"), config.to_string()).unwrap();
    folder
}

fn refusal(folder: &Path, base: &str) -> String {
    let specs = parameter_specs(&Config::read(&fixture(base)).unwrap());
    let error = AdapterFolder::open(folder, &specs).err().expect("refused");
    assert!(error.is::<BadInput>(), "{error:#}");
    format!("{error:#}")
}

#[test]
fn what_we_do_not_have_is_named_with_the_remedy() {
    let set = |key: &'static str, value: serde_json::Value| {
        let folder = changed(|config| config[key] = value.clone());
        refusal(folder.path(), "gpt_oss_yarn")
    };
    let merge = "merge the adapter into its base";
    for (key, value, words) in [
        ("use_dora", true.into(), [r#"use_dora is true"#, merge]),
        ("lora_dropout", 0.1.into(), ["lora_dropout is 0.1", "set it to 0"]),
        ("modules_to_save", vec!["lm_head"].into(), ["modules_to_save", merge]),
        ("bias", "all".into(), ["bias is \"all\"", "bias \"none\""]),
        ("rank_pattern", serde_json::json!({"q_proj": 4}), ["rank_pattern", merge]),
        ("peft_type", "IA3".into(), ["peft_type is \"IA3\"", "only \"LORA\""]),
        ("init_lora_weights", "pissa".into(), ["also changes the base", merge]),
        ("r", 0.into(), ["r is 0", "1 or more"]),
        ("lora_alpha", "x".into(), ["lora_alpha", "above 0"]),
        // Its factors were infinite.
        ("lora_alpha", 1e308.into(), ["lora_alpha", "at most 1000000"]),
        // Another rank than the tensors have.
        ("r", 4.into(), ["shape [12, ", "requires [16, "]),
    ] {
        let text = set(key, value);
        words.into_iter().for_each(|word| assert!(text.contains(word), "{word:?} is not in: {text}"));
    }
}

#[test]
fn an_adapter_of_another_model_is_refused_by_its_shapes() {
    let text = refusal(&fixture("adapter_gpt_oss/adapter"), "gpt_oss_plain");
    assert!(text.contains("has shape") && text.contains("requires"), "{text}");
    let text = refusal(&fixture("adapter_gpt_oss/adapter"), "qwen2");
    assert!(text.contains("has an adapter, but this model has no such matrix"), "{text}");
    let text = refusal(&fixture("adapter_qwen2/adapter"), "gpt_oss_yarn");
    assert!(text.contains("has an adapter, but this model has no such matrix"), "{text}");
    let cut = changed(|_| ());
    let file = cut.path().join("adapter_model.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    std::fs::write(&file, &bytes[..bytes.len() - 4]).unwrap();
    assert!(refusal(cut.path(), "gpt_oss_yarn").contains("truncated"));
}

#[test]
fn a_merged_matrix_acts_as_the_two_side_by_side() {
    for (name, base) in FIXTURES {
        let case = Case::adapted(&fixture(base), &fixture(name));
        let specs = parameter_specs(&case.model.config);
        let values = specs.into_iter().map(|spec| {
            let values = tiny::values(&merge(&case.parameters, &spec)?);
            Ok((spec, values))
        });
        let merged = crate::tiny::parameters(&case.model.config, values).unwrap();
        let vocabulary = case.model.config.vocab_size;
        let batches = MicroBatch::split(&every(&tiny::sequences(vocabulary, &[30, 12], 5)), usize::MAX);
        let (a, b) =
            (log_probs(&case.model, &case.parameters, &batches), log_probs(&case.model, &merged, &batches));
        let largest = a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(largest > 0.0 && largest < 1e-4, "{name}: {largest:e}");
    }
}

#[test]
fn the_adapter_of_a_tied_head_is_written_read_and_merged_into_a_matrix_of_its_own() {
    for tied in [true, false] {
        let config = Config { tie_word_embeddings: tied, ..qwen2::config(true) };
        let [mut parameters, _] = both(&config, WeightFormat::F32);
        adapt_with_head(&mut parameters, &config, 3);
        let lora = parameters.adapter().unwrap().clone();
        let specs = parameter_specs(&config);
        let value = |name: &str| tiny::values(tiny::named(&parameters, name));
        let folder = TempDir::new().unwrap();
        let base = BaseModel { path: PathBuf::from("base"), digest: String::new(), exact_blocks: true };
        let mut manifest = Manifest::default();
        peft::write(folder.path(), &mut manifest, (&lora, &specs), &base, |name| Ok(value(name))).unwrap();
        let read = AdapterFolder::open(folder.path(), &specs).unwrap();
        assert_eq!(read.lora, lora);
        let factors = lora.factor_specs(&specs).unwrap();
        assert_eq!(factors.last().unwrap().name, "lm_head.lora_B");
        for (factor, values) in factors.iter().zip(read.read_values(&specs).unwrap()) {
            assert_eq!(values, value(&factor.name), "{}", factor.name);
        }
        let merged = merged_config(&config, &parameters);
        assert!(!merged.tie_word_embeddings);
        let folder = TempDir::new().unwrap();
        let tensor = |spec: &ParameterSpec| merge(&parameters, spec);
        let (format, companions) = (WeightFormat::F32, CompanionFiles::default());
        save(folder.path(), &merged, format, &companions, SHARD_BYTES_MAX, tensor).unwrap();
        let whole = crate::tiny::parameters(&merged, load(folder.path(), &merged).unwrap()).unwrap();
        let sequences = every(&tiny::sequences(config.vocab_size, &[40, 2, 19], 4));
        let batches = MicroBatch::split(&sequences, usize::MAX);
        let log_probs =
            |config: &Config, parameters| log_probs(&Model::new(config.clone(), 256), parameters, &batches);
        let (adapted, whole) = (log_probs(&config, &parameters), log_probs(&merged, &whole));
        let bare = log_probs(&config, &parameters.without_adapter());
        let distance = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(distance(&adapted, &whole) < 1e-4, "tied {tied}: {}", distance(&adapted, &whole));
        assert!(distance(&adapted, &bare) > 1e-2, "the adapter matters");
    }
}
