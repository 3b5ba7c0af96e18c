//! The model against PyTorch and transformers: logits, log-probabilities, gradients, an optimizer's step.

pub mod case;

use crate::cli::in_repository;
use crate::tiny::{self, load};
use case::{Case, Figures};
use rloss::actor::PolicyColumns;
use rloss::actor::forward_backward::Pass;
use rloss::actor::micro_batch::MicroBatch;
use rloss::checkpoint::save::{CompanionFiles, SHARD_BYTES_MAX, save};
use rloss::model::config::{Config, WeightFormat};
use rloss::model::forward::ForwardOptions;
use rloss::model::init::{InitSettings, init};
use rloss::model::names::TensorRole;
use rloss::model::parameters::Parameters;
use std::path::PathBuf;

fn fixture(name: &str) -> PathBuf {
    in_repository("tests/fixtures").join(name)
}

fn compare(case: Case, name: &str) -> Figures {
    let figures = case.figures();
    println!("parity {name}{figures}"); // scripts/parity.py reads this line.
    figures
}

#[test]
fn fixtures_agree_with_transformers_with_yarn() {
    compare(Case::read(&fixture("gpt_oss_yarn")), "yarn").check("yarn");
}

#[test]
fn fixtures_agree_with_transformers_with_plain_rope_and_odd_sizes() {
    compare(Case::read(&fixture("gpt_oss_plain")), "plain").check("plain");
}

#[test]
fn fixtures_of_the_dense_family_agree_with_transformers() {
    for name in ["qwen2", "qwen2_tied"] {
        let figures = compare(Case::read(&fixture(name)), name);
        assert!(figures.adamw.difference > 0.0, "{name}: an AdamW step is compared");
        figures.check(name);
    }
}

#[test]
fn fixtures_of_qwen3_agree_with_transformers() {
    for name in ["qwen3", "qwen3_moe"] {
        let figures = compare(Case::read(&fixture(name)), name);
        assert!(figures.adamw.difference > 0.0, "{name}: an AdamW step is compared");
        figures.check(name);
    }
}

/// The cases that `scripts/parity.py models` makes, in the folder that `RLOSS_PARITY` names. Each model is
/// saved again, in `saved/`, for the script to load in transformers.
#[test]
fn random_models_agree_with_transformers() {
    let Some(folder) = std::env::var_os("RLOSS_PARITY") else {
        crate::skips::note("no RLOSS_PARITY (scripts/parity.py models makes them and sets it)", "");
        return;
    };
    let mut cases: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    cases.sort();
    assert!(!cases.is_empty(), "RLOSS_PARITY names an empty folder");
    let compared: Vec<(String, Figures)> = cases
        .iter()
        .map(|folder| {
            let (case, name) = (Case::read(folder), folder.file_name().unwrap().to_string_lossy());
            case.save(&folder.join("saved"));
            (name.to_string(), compare(case, &name))
        })
        .collect();
    compared.iter().for_each(|(name, figures)| figures.check(name));
}

#[test]
fn arms_break_what_their_names_say() {
    let case = Case::read(&fixture("gpt_oss_yarn"));
    let run = |sinks, sink_gradient| {
        case.forward_backward(true, ForwardOptions { sinks, sink_gradient, ..ForwardOptions::default() })
    };
    let (plain, no_gradient, no_sinks) = (run(true, true), run(true, false), run(false, true));
    assert_eq!(plain.columns.log_probs, no_gradient.columns.log_probs);
    let pairs = plain.columns.log_probs.iter().zip(&no_sinks.columns.log_probs);
    let moved = pairs.map(|(a, b)| (a - b).abs());
    assert!(moved.fold(0.0, f32::max) > 0.01, "without sinks the model is another");
    for (index, spec) in case.parameters.specs.iter().enumerate() {
        let [plain, no_gradient, no_sinks] =
            [&plain, &no_gradient, &no_sinks].map(|o| o.gradients.values[index].as_ref().unwrap());
        if spec.role == TensorRole::Sinks {
            assert!(plain.iter().all(|&g| g != 0.0), "{}", spec.name);
            assert!(no_gradient.iter().chain(no_sinks).all(|&g| g == 0.0), "{}", spec.name);
        } else {
            assert_eq!(plain, no_gradient, "{}", spec.name);
            assert_ne!(plain, no_sinks, "{}", spec.name);
        }
    }
}

fn log_probs(config: &Config, parameters: &Parameters, lengths: &[usize]) -> Vec<f32> {
    let model = rloss::model::forward::Model::new(config.clone(), config.max_position_embeddings);
    let pass = Pass {
        model: &model,
        weights: &parameters.frozen_weights(None).unwrap(),
        batch: &MicroBatch::split(&crate::tiny::sequences(config.vocab_size, lengths, 4), usize::MAX)[0],
        settings: tiny::pass_settings(1.0, 0.0),
        recompute_layers: true,
        teacher: None,
    };
    pass.forward::<PolicyColumns>(&|| ()).unwrap().columns.log_probs
}

#[test]
fn an_mxfp4_folder_computes_as_its_dequantised_weights_to_the_bit() {
    let config = crate::model_files::config();
    let tensors = init(&config, &InitSettings { embedding_std: 0.5, head_scale: 0.5, sink: 1.0 }, 8).unwrap();
    let write = |parameters: &Parameters, format| {
        let folder = tempfile::tempdir().unwrap();
        let tensor =
            |spec: &rloss::model::names::ParameterSpec| Ok(tiny::named(parameters, &spec.name).clone());
        save(folder.path(), &config, format, &CompanionFiles::default(), SHARD_BYTES_MAX, tensor).unwrap();
        crate::tiny::parameters(&config, load(folder.path(), &config).unwrap()).unwrap()
    };
    let original = crate::tiny::parameters(&config, tensors.into_iter().map(Ok)).unwrap();
    let packed = write(&original, WeightFormat::Mxfp4);
    let dequantised = [write(&packed, WeightFormat::F32), write(&packed, WeightFormat::Bf16)];
    let lengths = [70, 1, 2, 33];
    let expected = log_probs(&config, &packed, &lengths);
    assert!(expected.len() > 20 && expected != log_probs(&config, &original, &lengths));
    for other in dequantised {
        assert_eq!(expected, log_probs(&config, &other, &lengths));
    }
}
