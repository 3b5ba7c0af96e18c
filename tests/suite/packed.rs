//! A model that is held packed computes as the decoded one, to the last bit, whatever asks it.

use crate::model_files;
use crate::qwen2;
use crate::qwen3;
use crate::tiny::{self, Gradients, learned, load};
use rloss::actor::forward_backward::{ColumnLoss, Pass, PassSettings};
use rloss::actor::micro_batch::MicroBatch;
use rloss::actor::{Columns, PolicyColumns};
use rloss::checkpoint::load::ModelFolder;
use rloss::checkpoint::save::{CompanionFiles, SHARD_BYTES_MAX, save};
use rloss::error::BadInput;
use rloss::mismatch::causes::{Cause, causes, variant::Variant};
use rloss::model::ablations::Ablations;
use rloss::model::config::{Config, WeightFormat};
use rloss::model::forward::Model;
use rloss::model::init::{InitSettings, init};
use rloss::model::names::{ParameterSpec, parameter_specs};
use rloss::model::parameters::{Backend, Parameters};
use rloss::model::policy_view::PolicyView;
use rloss::model::storage::TensorStorage;
use std::path::Path;
use std::sync::Arc;
use tempfile::TempDir;

fn settings() -> PassSettings {
    tiny::pass_settings(0.8, 0.0)
}

/// A folder of a random model in `format`, in shards of up to `shard_bytes`.
fn folder(config: &Config, format: WeightFormat, shard_bytes: u64) -> TempDir {
    let settings = InitSettings { embedding_std: 0.5, head_scale: 0.5, sink: 1.0 };
    let tensors = init(config, &settings, 8).unwrap();
    let parameters = crate::tiny::parameters(config, tensors.into_iter().map(Ok)).unwrap();
    let folder = TempDir::new().unwrap();
    let tensor = |spec: &ParameterSpec| Ok(tiny::named(&parameters, &spec.name).clone());
    save(folder.path(), config, format, &CompanionFiles::default(), shard_bytes, tensor).unwrap();
    folder
}

/// The folder's model with what `learns` marks decoded, and the rest as it lies there.
fn held(folder: &Path, config: &Config, learns: &dyn Fn(&str) -> bool) -> anyhow::Result<Parameters> {
    let files = ModelFolder::open(folder, config)?;
    Parameters::load(
        config,
        &Backend::default(),
        parameter_specs(config).into_iter().map(|spec| {
            let packed =
                if learns(&spec.name) { None } else { files.read_packed(&spec, files.format_of(&spec))? };
            let stored = match packed {
                Some(packed) => TensorStorage::from_weight(packed),
                None => TensorStorage::variable(&spec, files.read_values(&spec)?)?,
            };
            Ok((spec, stored))
        }),
    )
}

fn cases() -> Vec<(Config, WeightFormat)> {
    let odd = Config { vocab_size: 275, hidden_size: 96, intermediate_size: 32, ..model_files::config() };
    let experts = [model_files::config(), odd]
        .into_iter()
        .flat_map(|config| [(config.clone(), WeightFormat::Mxfp4), (config, WeightFormat::Bf16)]);
    let dense = [false, true].map(|tied| (qwen2::config(tied), WeightFormat::Bf16));
    let qwen3 = ["qwen3", "qwen3_moe"].map(|family| (qwen3::config(family), WeightFormat::Bf16));
    experts.chain(dense).chain(qwen3).collect()
}

#[test]
fn forward_prefill_and_decode_have_the_bits_of_the_decoded_model() {
    for (config, format) in cases() {
        for shard_bytes in [SHARD_BYTES_MAX, 40_000] {
            let folder = folder(&config, format, shard_bytes);
            let plain = crate::tiny::parameters(&config, load(folder.path(), &config).unwrap()).unwrap();
            let packed = held(folder.path(), &config, &|_| false).unwrap();
            let files = ModelFolder::open(folder.path(), &config).unwrap();
            let specs = parameter_specs(&config);
            let planned: u64 = specs.iter().map(|spec| spec.resident_bytes(files.format_of(spec))).sum();
            assert_eq!(packed.bytes(), planned);
            assert!(packed.bytes() < plain.bytes(), "{} of {}", packed.bytes(), plain.bytes());
            let model = Model::new(config.clone(), config.max_position_embeddings);
            let sequences = tiny::sequences(config.vocab_size, &[70, 1, 2, 33], 4);
            let batch = &MicroBatch::split(&sequences, usize::MAX)[0];
            let results = [&plain, &packed].map(|parameters| {
                let weights = &parameters.frozen_weights(None).unwrap();
                let (model, settings) = (&model, settings());
                let pass = Pass { model, weights, batch, settings, recompute_layers: true, teacher: None };
                let policy = PolicyView::without_ablations(model, parameters).unwrap();
                let tokens: Vec<&[u32]> = sequences.iter().map(|s| &s.tokens[..]).collect();
                (
                    pass.forward::<PolicyColumns>(&|| ()).unwrap().columns.log_probs,
                    policy.prefill(&tokens, 0.8).unwrap(),
                    policy.decode(&tokens, 0.8, &|_| ()).unwrap(),
                )
            });
            assert!(results[0].0.len() > 20);
            assert_eq!(results[0], results[1], "{format:?}, shards of {shard_bytes}");
        }
    }
}

#[test]
fn gradients_through_packed_weights_have_the_bits_of_the_decoded_model() {
    for (config, format) in cases() {
        let folder = folder(&config, format, SHARD_BYTES_MAX);
        // Vectors are never packed; of the matrices those of one layer's attention learn.
        let learns =
            |name: &str| !name.contains("weight") || name.contains("norm") || name.contains("0.self_attn");
        let specs = parameter_specs(&config);
        let marks: Vec<bool> = specs
            .iter()
            .map(|spec| learns(&spec.name) && !(spec.is_expert_matrix() || spec.name.contains("embed")))
            .collect();
        let learning =
            |name: &str| specs.iter().zip(&marks).any(|(spec, learns)| spec.name == name && *learns);
        let mut plain = crate::tiny::parameters(&config, load(folder.path(), &config).unwrap()).unwrap();
        let mut packed = held(folder.path(), &config, &learning).unwrap();
        let model = Model::new(config.clone(), config.max_position_embeddings);
        let batch = &MicroBatch::split(&tiny::sequences(config.vocab_size, &[50, 3, 33], 4), usize::MAX)[0];
        let loss = |columns: &PolicyColumns| {
            let n = columns.log_probs.len();
            let (log_probs, entropies) = (vec![-1.0 / n as f32; n], vec![0.01; n]);
            Ok(PolicyColumns { log_probs, entropies, ..columns.zeros() })
        };
        for recompute_layers in [false, true] {
            let [expected, found]: [Gradients; 2] = [&mut plain, &mut packed].map(|parameters| {
                parameters.set_trainable(&marks).unwrap();
                learned(parameters, (&model, batch, settings(), recompute_layers), |pass| {
                    pass.forward_backward(&ColumnLoss { gradient: &loss, skips_zeros: false }, &|| ())
                })
                .gradients
            });
            let moved =
                found.values.iter().flatten().filter(|values| values.iter().any(|&v| v != 0.0)).count();
            assert_eq!(
                moved,
                marks.iter().filter(|learns| **learns).count(),
                "every one that learns has a gradient"
            );
            assert_eq!(expected, found, "{format:?}, recomputed {recompute_layers}");
        }
    }
}

/// What is in memory then is embedding, last norm and head.
#[test]
fn layers_that_stay_on_disk_compute_the_same_bits() {
    for (config, format) in cases() {
        let folder = folder(&config, format, SHARD_BYTES_MAX);
        let resident = held(folder.path(), &config, &|_| false).unwrap();
        let files = Arc::new(ModelFolder::open(folder.path(), &config).unwrap());
        let stored = Parameters::keep_on_disk(&config, &Backend::default(), files, vec![]).unwrap();
        assert_eq!(stored.bytes(), resident.bytes());
        assert!(stored.weight(1).is_err(), "a layer's tensor is not in memory");
        let model = Model::new(config.clone(), config.max_position_embeddings);
        let sequences = tiny::sequences(config.vocab_size, &[40, 17], 4);
        let tokens: Vec<&[u32]> = sequences.iter().map(|s| &s.tokens[..]).collect();
        for arms in [Ablations::default(), Ablations { rollout_mantissa_bits: 3, ..Ablations::default() }] {
            let [expected, found] = [&resident, &stored].map(|parameters| {
                let policy = PolicyView::for_rollout(&model, parameters, &arms, 0).unwrap();
                (policy.prefill(&tokens, 1.0).unwrap(), policy.decode(&tokens, 1.0, &|_| ()).unwrap())
            });
            assert_eq!(expected, found, "{format:?}, {arms:?}");
        }
    }
}

#[test]
fn arms_round_packed_weights_as_they_round_decoded_ones() {
    for (config, format) in cases() {
        let folder = folder(&config, format, SHARD_BYTES_MAX);
        let plain = crate::tiny::parameters(&config, load(folder.path(), &config).unwrap()).unwrap();
        let packed = held(folder.path(), &config, &|_| false).unwrap();
        let model = Model::new(config.clone(), config.max_position_embeddings);
        let sequences = tiny::sequences(config.vocab_size, &[40], 4);
        let tokens: Vec<&[u32]> = sequences.iter().map(|s| &s.tokens[..]).collect();
        for arms in [
            Ablations { rollout_bf16: true, ..Ablations::default() },
            Ablations { rollout_mxfp4: true, ..Ablations::default() },
            Ablations { rollout_mantissa_bits: 3, ..Ablations::default() },
            Ablations { rollout_mantissa_bits: 1, rollout_mxfp4: true, ..Ablations::default() },
        ] {
            let [expected, found] = [&plain, &packed].map(|parameters| {
                PolicyView::for_rollout(&model, parameters, &arms, 0).unwrap().prefill(&tokens, 1.0).unwrap()
            });
            assert_eq!(expected, found, "{format:?}, {arms:?}");
        }
    }
}

/// What `check-mismatch --against` computes to name a mistake that lies in the weights.
#[test]
fn mistakes_in_weights_are_the_same_of_packed_and_of_stored_ones() {
    for (config, format) in cases() {
        let folder = folder(&config, format, SHARD_BYTES_MAX);
        let plain = crate::tiny::parameters(&config, load(folder.path(), &config).unwrap()).unwrap();
        let packed = held(folder.path(), &config, &|_| false).unwrap();
        let files = Arc::new(ModelFolder::open(folder.path(), &config).unwrap());
        let stored = Parameters::keep_on_disk(&config, &Backend::default(), files, vec![]).unwrap();
        let sequences = tiny::sequences(config.vocab_size, &[40], 4);
        let tokens: Vec<&[u32]> = sequences.iter().map(|s| &s.tokens[..]).collect();
        let of = |parameters: &Parameters, cause: Option<&Cause>| {
            let variant = Variant::new(&config, cause);
            let model = variant.model(config.max_position_embeddings);
            variant.policy(&model, parameters, None).unwrap().prefill(&tokens, 1.0).unwrap()
        };
        let right = of(&plain, None);
        let in_weights = |cause: &Cause| !Variant::new(&config, Some(cause)).weight_edits.is_empty();
        let mut moved = 0;
        for cause in causes(&config, false).into_iter().filter(in_weights) {
            let expected = of(&plain, Some(&cause));
            moved += usize::from(expected != right);
            for parameters in [&packed, &stored] {
                assert_eq!(expected, of(parameters, Some(&cause)), "{format:?}, {}", cause.description());
            }
        }
        let least = if config.num_local_experts > 0 { 5 } else { 3 };
        assert!(moved > least, "{moved} mistakes show");
    }
}

#[test]
fn a_packed_tensor_that_holds_no_numbers_is_refused_by_name() {
    let config = model_files::config();
    for (format, name, bytes) in [
        (WeightFormat::Bf16, "model.layers.1.self_attn.q_proj.weight", [0xc0, 0x7f]),
        (WeightFormat::Bf16, "model.embed_tokens.weight", [0x80, 0x7f]),
        (WeightFormat::Bf16, "model.layers.0.mlp.experts.down_proj", [0x80, 0xff]),
        (WeightFormat::Mxfp4, "model.layers.1.mlp.experts.gate_up_proj_scales", [255, 120]),
    ] {
        let folder = folder(&config, format, SHARD_BYTES_MAX);
        let file = folder.path().join("model.safetensors");
        let mut content = std::fs::read(&file).unwrap();
        let header = u64::from_le_bytes(content[..8].try_into().unwrap()) as usize;
        let tensors: serde_json::Value = serde_json::from_slice(&content[8..8 + header]).unwrap();
        let start = 8 + header + tensors[name]["data_offsets"][0].as_u64().unwrap() as usize + 6;
        content[start..start + 2].copy_from_slice(&bytes);
        std::fs::write(&file, content).unwrap();
        let error = held(folder.path(), &config, &|_| false).err().unwrap();
        let text = format!("{error:#}");
        assert!(error.is::<BadInput>() && text.contains(name.trim_end_matches("_scales")), "{text}");
        assert!(text.contains("NaN or an infinite value at element"), "{text}");
    }
}

/// The folder may be on a share, or be written to by another program.
#[test]
fn a_file_that_shrinks_while_it_is_read_is_refused() {
    let config = model_files::config();
    let folder = folder(&config, WeightFormat::Mxfp4, SHARD_BYTES_MAX);
    let files = ModelFolder::open(folder.path(), &config).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(folder.path().join("model.safetensors")).unwrap();
    file.set_len(file.metadata().unwrap().len() / 2).unwrap();
    let failed: Vec<anyhow::Error> = parameter_specs(&config)
        .iter()
        .filter_map(|spec| {
            files.read_packed(spec, files.format_of(spec)).and_then(|_| files.read_values(spec)).err()
        })
        .collect();
    assert!(!failed.is_empty());
    for error in failed {
        assert!(error.is::<BadInput>() && format!("{error:#}").contains("model.safetensors"), "{error:#}");
    }
    assert!(files.read_values(&parameter_specs(&config)[0]).is_ok());
}
