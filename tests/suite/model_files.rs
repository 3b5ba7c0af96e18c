//! Hugging Face folders: what is saved loads again to the bit, and broken ones are refused by name.

use crate::cli::{bad_input, in_repository};
use crate::data;
use candle_core::{Device, Tensor};
use rloss::chat::ChatFormat;
use rloss::checkpoint::load::has_weights;
use rloss::checkpoint::save::{CompanionFiles, SHARD_BYTES_MAX, save, save_index};
use rloss::integrity::Manifest;
use rloss::model::config::{Config, LayerType, Rope, WeightFormat};
use rloss::model::families::Family;
use rloss::model::init::InitSettings;
use rloss::model::names::{ParameterSpec, TensorRole, parameter_count, parameter_specs};
use rloss::model::settings::Yarn;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

type Parameters = Vec<(ParameterSpec, Tensor)>;

const INIT: InitSettings = InitSettings { embedding_std: 0.5, head_scale: 0.5, sink: 4.0 };

/// Small, with expert inputs that are multiples of 32 so that every form can hold it.
pub fn config() -> Config {
    Config {
        family: Family::default(),
        vocab_size: 272,
        hidden_size: 64,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 16,
        intermediate_size: 32,
        num_local_experts: 4,
        num_experts_per_tok: 2,
        sliding_window: 16,
        layer_types: LayerType::alternate(2),
        rope: Rope { theta: 10_000.0, yarn: None },
        rms_norm_eps: 1e-5,
        swiglu_limit: 7.0,
        tie_word_embeddings: false,
        max_position_embeddings: 160,
        bos_token_id: None,
        eos_token_ids: vec![6],
        pad_token_id: Some(0),
    }
}

fn tensors(
    values: impl Iterator<Item = anyhow::Result<(ParameterSpec, Vec<f32>)>>,
) -> anyhow::Result<Parameters> {
    values
        .map(|found| {
            let (spec, values) = found?;
            let tensor = Tensor::from_vec(values, spec.working_shape(), &Device::Cpu)?;
            Ok((spec, tensor))
        })
        .collect()
}

fn init(config: &Config, settings: &InitSettings, seed: u64) -> anyhow::Result<Parameters> {
    tensors(rloss::model::init::init(config, settings, seed)?.into_iter().map(Ok))
}

fn load(folder: &Path, config: &Config) -> anyhow::Result<Parameters> {
    tensors(crate::tiny::load(folder, config)?)
}

fn fixture(name: &str) -> PathBuf {
    in_repository("tests/fixtures").join(name)
}

fn save_all(
    folder: &Path,
    config: &Config,
    parameters: &Parameters,
    format: WeightFormat,
    shard_bytes_max: u64,
) {
    let tensors: BTreeMap<&str, &Tensor> = parameters.iter().map(|(s, t)| (s.name.as_str(), t)).collect();
    let tensor = |spec: &ParameterSpec| Ok(tensors[spec.name.as_str()].clone());
    save(folder, config, format, &CompanionFiles::default(), shard_bytes_max, tensor).unwrap();
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

fn assert_same(a: &Parameters, b: &Parameters) {
    assert_eq!(a.len(), b.len());
    for ((spec_a, tensor_a), (spec_b, tensor_b)) in a.iter().zip(b) {
        assert_eq!(spec_a, spec_b);
        assert_eq!(tensor_a.dims(), spec_a.working_shape(), "{}", spec_a.name);
        assert!(tensor_a.is_contiguous() && tensor_b.is_contiguous(), "{}", spec_a.name);
        assert!(bits(tensor_a) == bits(tensor_b), "{}", spec_a.name);
    }
}

/// The text of a `BadInput`, which must hold every one of `parts` and be one paragraph.
#[track_caller]
pub fn refused<T>(result: anyhow::Result<T>, parts: &[&str]) {
    let text = bad_input(result, parts);
    assert!(!text.contains('\n'), "{text}");
}

#[test]
fn f32_and_sharded_folders_give_back_every_bit() {
    let config = config();
    let parameters = init(&config, &INIT, 3).unwrap();
    for shard_bytes_max in [SHARD_BYTES_MAX, 60_000, 1] {
        let folder = tempfile::tempdir().unwrap();
        save_all(folder.path(), &config, &parameters, WeightFormat::F32, shard_bytes_max);
        assert_eq!(folder.path().join("model.safetensors").exists(), shard_bytes_max == SHARD_BYTES_MAX);
        assert!(has_weights(folder.path()));
        let config_again = Config::read(folder.path()).unwrap();
        assert_eq!(config_again, config);
        assert_same(&parameters, &load(folder.path(), &config_again).unwrap());
    }
}

#[test]
fn a_bf16_folder_rounds_once_and_then_gives_back_every_bit() {
    let config = config();
    let parameters = init(&config, &INIT, 3).unwrap();
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    save_all(first.path(), &config, &parameters, WeightFormat::Bf16, SHARD_BYTES_MAX);
    let rounded = load(first.path(), &config).unwrap();
    for ((spec, before), (_, after)) in parameters.iter().zip(&rounded) {
        for (before, after) in bits(before).into_iter().zip(bits(after)) {
            let expected = half::bf16::from_f32(f32::from_bits(before)).to_f32();
            assert_eq!(expected.to_bits(), after, "{}", spec.name);
        }
    }
    save_all(second.path(), &config, &rounded, WeightFormat::Bf16, SHARD_BYTES_MAX);
    assert_same(&rounded, &load(second.path(), &config).unwrap());
    let bytes = |folder: &Path| std::fs::read(folder.join("model.safetensors")).unwrap();
    assert!(bytes(first.path()) == bytes(second.path()), "saving is a function of its arguments");
}

#[test]
fn mxfp4_weights_survive_saving_in_mxfp4_to_the_bit() {
    let config = config();
    let parameters = init(&config, &INIT, 3).unwrap();
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    save_all(first.path(), &config, &parameters, WeightFormat::Mxfp4, SHARD_BYTES_MAX);
    let rounded = load(first.path(), &config).unwrap();
    save_all(second.path(), &config, &rounded, WeightFormat::Mxfp4, 20_000);
    assert_same(&rounded, &load(second.path(), &config).unwrap());
    // Nearest: no value moves by more than half the widest gap, 2 of 6 of the block's largest at least 3.
    for ((spec, before), (_, after)) in
        parameters.iter().zip(&rounded).filter(|((s, _), _)| s.is_expert_matrix())
    {
        let before = before.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let largest = before.iter().fold(0f32, |m, v| m.max(v.abs()));
        let after = after.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let error = before.iter().zip(&after).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(error > 0.0 && error <= largest / 3.0, "{}: {error} of {largest}", spec.name);
    }
    assert_eq!(Config::read(first.path()).unwrap(), config);
}

#[test]
fn mxfp4_blocks_decode_to_the_values_of_the_definition() {
    let tensors = crate::tiny::load_safetensors(fixture("mxfp4.safetensors"));
    let bytes = |name: &str| tensors[name].flatten_all().unwrap().to_vec1::<u8>().unwrap();
    let values = rloss::ops::mxfp4::decode(&bytes("blocks"), &bytes("scales"), [2, 64, 6]);
    let expected = bits(&tensors["values"]);
    assert_eq!(tensors["values"].dims(), [2, 64, 6]);
    assert!(values.iter().map(|v| v.to_bits()).eq(expected));
    let (blocks, scales) = rloss::ops::mxfp4::encode(&values, [2, 64, 6]);
    assert!(blocks == bytes("blocks") && scales == bytes("scales"));
}

#[test]
fn folders_saved_by_transformers_load_and_their_copies_are_the_same() {
    for name in ["gpt_oss_yarn", "gpt_oss_plain"] {
        let folder = fixture(name);
        let config = Config::read(&folder).unwrap();
        let parameters = load(&folder, &config).unwrap();
        let raw = crate::tiny::load_safetensors(folder.join("model.safetensors"));
        assert_eq!(raw.len(), parameters.len());
        for (spec, tensor) in &parameters {
            let stored = &raw[&spec.name];
            assert_eq!(stored.dims(), spec.stored_shape);
            let is_linear =
                ["_proj.weight", "router.weight", "lm_head.weight"].iter().any(|n| spec.name.ends_with(n));
            let expected = if is_linear { stored.t().unwrap() } else { stored.clone() };
            assert!(bits(&expected) == bits(tensor), "{}", spec.name);
        }
        let copy = tempfile::tempdir().unwrap();
        save_all(copy.path(), &config, &parameters, WeightFormat::F32, SHARD_BYTES_MAX);
        assert_eq!(Config::read(copy.path()).unwrap(), config);
        assert_same(&parameters, &load(copy.path(), &config).unwrap());
    }
    let yarn = Yarn {
        factor: 8.0,
        original_max_position_embeddings: 32,
        beta_fast: 32.0,
        beta_slow: 1.0,
        truncate: false,
    };
    let config = Config::read(&fixture("gpt_oss_yarn")).unwrap();
    assert_eq!(config.rope, Rope { theta: 150_000.0, yarn: Some(yarn) });
    let config = Config::read(&fixture("gpt_oss_plain")).unwrap();
    assert_eq!(config.layer_types, [LayerType::Full, LayerType::Sliding, LayerType::Full]);
    assert_eq!(config.rope, Rope { theta: 10_000.0, yarn: None });
}

#[test]
fn names_dtypes_and_shapes_match_the_released_vectors() {
    for data::Folder { path, own } in data::folders("gpt-oss") {
        // The published totals: 20.9 B and 116.8 B.
        let published = [("20b", 20_914_757_184), ("120b", 116_829_156_672)];
        let our_own = || std::fs::read_to_string(path.join("parameters-own.json")).expect("read");
        if own {
            names_dtypes_and_shapes_match(&path, "own", our_own().trim().parse().expect("a number"));
        } else {
            published.into_iter().for_each(|(size, n)| names_dtypes_and_shapes_match(&path, size, n));
        }
    }
}

fn names_dtypes_and_shapes_match(folder: &Path, size: &str, parameters: u128) {
    let read = |name: &str| -> Value {
        serde_json::from_str(&std::fs::read_to_string(folder.join(name)).expect("read")).expect("JSON")
    };
    {
        let config = Config::from_json(&read(&format!("config-{size}.json"))).unwrap();
        assert_eq!(Config::from_json(&config.to_json(WeightFormat::Mxfp4)).unwrap(), config);
        let ours: serde_json::Map<String, Value> = parameter_specs(&config)
            .iter()
            .flat_map(|spec| spec.stored_tensors(WeightFormat::Mxfp4))
            .map(|t| (t.name, json!({ "dtype": format!("{:?}", t.dtype), "shape": t.shape })))
            .collect();
        let released = read(&format!("tensors-{size}.json"));
        let released = released.as_object().unwrap();
        assert_eq!(ours.len(), released.len(), "{size}");
        assert_eq!(parameter_count(&config), parameters, "{size}");
        for (name, entry) in released {
            assert_eq!(ours.get(name), Some(entry), "{size}: {name}");
        }
    }
}

#[test]
fn initialisation_has_the_stated_spread_and_depends_only_on_the_seed() {
    let config = config();
    let parameters = init(&config, &INIT, 3).unwrap();
    assert_same(&parameters, &init(&config, &INIT, 3).unwrap());
    let other = init(&config, &INIT, 4).unwrap();
    for ((spec, tensor), (_, other)) in parameters.iter().zip(&other) {
        let values = tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let n = values.len() as f64;
        let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / n;
        let std = (values.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / n).sqrt();
        let expected = match spec.role {
            TensorRole::Embedding => 0.5,
            TensorRole::Head => 0.5 / 8.0,
            TensorRole::InputProjection | TensorRole::Router => 1.0 / 8.0,
            TensorRole::OutputProjection if spec.is_expert_matrix() => 32f64.powf(-0.5) / 2.0,
            TensorRole::OutputProjection => 1.0 / 8.0 / 2.0,
            TensorRole::Bias | TensorRole::Norm(_) | TensorRole::Sinks | TensorRole::AdapterFactor => 0.0,
        };
        // Six standard errors.
        let tolerance = 6.0 * expected / n.sqrt();
        assert!((std - expected).abs() <= tolerance, "{}: {std}, not {expected}", spec.name);
        if expected > 0.0 {
            assert!(mean.abs() <= tolerance, "{}: mean {mean}", spec.name);
            assert!(bits(tensor) != bits(other), "{} does not depend on the seed", spec.name);
        } else {
            let constant = [(TensorRole::Bias, 0.0), (TensorRole::Norm(1), 1.0), (TensorRole::Sinks, 4.0)];
            assert!(constant.contains(&(spec.role, mean)), "{}: {mean}", spec.name);
        }
    }
    // The very numbers, so that a machine that draws others fails here.
    let head: Vec<u32> = bits(&parameters[0].1)[..4].to_vec();
    assert_eq!(head, INIT_FIRST_BITS);
}

const INIT_FIRST_BITS: [u32; 4] = [3191172648, 1049497502, 1031712280, 1049131137];

#[test]
fn a_folder_without_weights_is_told_from_one_with_unreadable_weights() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json", "training_args.bin"] {
        std::fs::write(folder.path().join(name), "{}").unwrap();
        assert!(!has_weights(folder.path()));
    }
    std::fs::write(folder.path().join("pytorch_model.bin"), "").unwrap();
    assert!(has_weights(folder.path()));
    let words = ["weights are read from safetensors files, or from a GGUF file"];
    refused(load(folder.path(), &config()), &words);
}

#[test]
fn companions_travel_unchanged_and_missing_ones_are_derived() {
    let chat = ChatFormat::Harmony.from_embedded().unwrap();
    let config = config();
    let parameters: BTreeMap<String, Tensor> =
        init(&config, &INIT, 1).unwrap().into_iter().map(|(s, t)| (s.name, t)).collect();
    let save_with = |companions: &CompanionFiles| {
        let folder = tempfile::tempdir().unwrap();
        save(folder.path(), &config, WeightFormat::Bf16, companions, SHARD_BYTES_MAX, |s| {
            Ok(parameters[&s.name].clone())
        })
        .unwrap();
        folder
    };
    let first = save_with(&CompanionFiles::from_chat(&chat));
    let json = |name: &str| -> Value {
        serde_json::from_slice(&std::fs::read(first.path().join(name)).unwrap()).unwrap()
    };
    assert_eq!(json("tokenizer_config.json")["eos_token"], "<|return|>");
    assert_eq!(json("tokenizer_config.json")["pad_token"], "<|pad|>");
    assert_eq!(json("generation_config.json")["eos_token_id"], json!([6]));
    std::fs::write(first.path().join("generation_config.json"), r#"{"eos_token_id":[6,5]}"#).unwrap();
    let companions = CompanionFiles::read(first.path(), &chat).unwrap();
    let second = save_with(&companions);
    let index = "model.safetensors.index.json";
    assert!(!second.path().join(index).exists(), "one file needs no index");
    let mut manifest = Manifest::default();
    save_index(second.path(), &config, WeightFormat::Bf16, &mut manifest).unwrap();
    assert!(second.path().join(index).is_file(), "vLLM reads state files without it");
    assert_eq!(CompanionFiles::read(second.path(), &chat).unwrap(), companions);
    let template = |folder: &Path| std::fs::read_to_string(folder.join("chat_template.jinja"));
    assert_eq!(template(second.path()).unwrap(), chat.jinja(), "where the source brought none, it is ours");
    std::fs::write(first.path().join("chat_template.jinja"), "theirs").unwrap();
    let theirs = save_with(&CompanionFiles::read(first.path(), &chat).unwrap());
    assert_eq!(template(theirs.path()).unwrap(), "theirs");
    std::fs::remove_file(first.path().join("chat_template.jinja")).unwrap();
    std::fs::write(first.path().join("tokenizer_config.json"), r#"{"chat_template": "theirs"}"#).unwrap();
    let inside = save_with(&CompanionFiles::read(first.path(), &chat).unwrap());
    assert!(template(inside.path()).is_err(), "a template inside the tokenizer's settings is not overridden");
    // A GGUF file, or a base model without a generation config: an answer did not end for other programs.
    let derived = CompanionFiles::from_gguf(&chat, None).with_generation_config(&config, &chat);
    let written = std::fs::read(save_with(&derived).path().join("generation_config.json")).unwrap();
    let ids = serde_json::from_slice::<Value>(&written).unwrap()["eos_token_id"].clone();
    assert!(chat.stop_tokens().iter().all(|id| ids.as_array().unwrap().contains(&json!(id))), "{ids}");
    // Nothing is overwritten.
    let again = save(second.path(), &config, WeightFormat::Bf16, &companions, SHARD_BYTES_MAX, |s| {
        Ok(parameters[&s.name].clone())
    });
    assert!(format!("{:#}", again.unwrap_err()).contains("model.safetensors"));
}

#[test]
fn broken_weight_files_are_refused_by_name() {
    let config = config();
    let parameters = init(&config, &INIT, 3).unwrap();
    let saved = |shard_bytes_max| {
        let folder = tempfile::tempdir().unwrap();
        save_all(folder.path(), &config, &parameters, WeightFormat::F32, shard_bytes_max);
        folder
    };
    let folder = saved(SHARD_BYTES_MAX);
    let file = folder.path().join("model.safetensors");
    let whole = std::fs::read(&file).unwrap();
    let with = |bytes: &[u8]| {
        std::fs::write(&file, bytes).unwrap();
        load(folder.path(), &config)
    };
    for cut in [0, 7, 8, 100, whole.len() / 2, whole.len() - 1] {
        refused(with(&whole[..cut]), &["model.safetensors", "truncated"]);
    }
    refused(with(&[&whole[..], &[0]].concat()), &["model.safetensors", "1 bytes follow"]);
    let words = ["model.safetensors", "the header has"];
    refused(with(&[&u64::MAX.to_le_bytes()[..], &whole[8..]].concat()), &words);
    let mut damaged = whole.clone();
    damaged[9] = b'!';
    refused(with(&damaged), &["model.safetensors", "header is damaged"]);
    let mut not_a_number = whole.clone();
    let end = not_a_number.len();
    not_a_number[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    refused(with(&not_a_number), &["lm_head.weight", "NaN"]);

    let folder = saved(60_000);
    let first = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
    let first = first.filter(|path| path.extension().is_some_and(|e| e == "safetensors")).min().unwrap();
    std::fs::remove_file(&first).unwrap();
    assert!(has_weights(folder.path()), "the other shards are there");
    let name = first.file_name().unwrap().to_string_lossy().into_owned();
    let words = ["index.json", "files that are missing", "model-00001-of-", &name];
    refused(load(folder.path(), &config), &words);
    let index = folder.path().join("model.safetensors.index.json");
    for (text, part) in [
        ("{", "not valid JSON"),
        ("{}", "weight_map"),
        (r#"{"weight_map": {"a": "../b.safetensors"}}"#, "not a file name"),
        (r#"{"weight_map": {"a": 3}}"#, "not a file name"),
    ] {
        std::fs::write(&index, text).unwrap();
        refused(load(folder.path(), &config), &["index.json", part]);
    }
}

#[test]
fn tensors_that_contradict_the_config_are_all_named() {
    let config = config();
    let parameters = init(&config, &INIT, 3).unwrap();
    let folder = tempfile::tempdir().unwrap();
    save_all(folder.path(), &config, &parameters, WeightFormat::F32, SHARD_BYTES_MAX);
    let wider = Config { intermediate_size: 64, ..config.clone() };
    let words = [
        "layers.0.mlp.experts.gate_up_proj`",
        "layers.1.mlp.experts.down_proj`",
        "[4, 64, 64]",
        "[4, 64, 128]",
    ];
    refused(load(folder.path(), &wider), &words);
    let deeper = Config { num_hidden_layers: 3, layer_types: LayerType::alternate(3), ..config.clone() };
    let words = ["`model.layers.2.input_layernorm.weight` is missing", "and 1 more"];
    refused(load(folder.path(), &deeper), &words);
    let shallower = Config { num_hidden_layers: 1, layer_types: LayerType::alternate(1), ..config.clone() };
    let words = ["model.layers.1.self_attn.sinks\" is not a tensor of this model"];
    refused(load(folder.path(), &shallower), &words);

    let mut raw = crate::tiny::load_safetensors(folder.path().join("model.safetensors"));
    let sinks = raw["model.layers.0.self_attn.sinks"].to_dtype(candle_core::DType::F64).unwrap();
    raw.insert("model.layers.0.self_attn.sinks".into(), sinks);
    raw.remove("model.norm.weight");
    raw.insert("extra".into(), Tensor::zeros(1, candle_core::DType::F32, &Device::Cpu).unwrap());
    candle_core::safetensors::save(&raw, folder.path().join("model.safetensors")).unwrap();
    refused(
        load(folder.path(), &config),
        &["sinks` is F64", "`model.norm.weight` is missing", "\"extra\" is not a tensor of this model"],
    );
}

#[test]
fn half_a_packed_pair_and_sizes_without_whole_blocks_are_refused() {
    let config = config();
    let parameters = init(&config, &INIT, 3).unwrap();
    let folder = tempfile::tempdir().unwrap();
    save_all(folder.path(), &config, &parameters, WeightFormat::Mxfp4, SHARD_BYTES_MAX);
    let mut raw = crate::tiny::load_safetensors(folder.path().join("model.safetensors"));
    let scales = "model.layers.1.mlp.experts.down_proj_scales";
    let tensor = raw.remove(scales).unwrap();
    candle_core::safetensors::save(&raw, folder.path().join("model.safetensors")).unwrap();
    refused(load(folder.path(), &config), &[scales, "is missing"]);
    let all_nan = (tensor.zeros_like().unwrap() + 255.0).unwrap();
    raw.insert(scales.into(), all_nan);
    candle_core::safetensors::save(&raw, folder.path().join("model.safetensors")).unwrap();
    refused(load(folder.path(), &config), &["model.layers.1.mlp.experts.down_proj`", "NaN"]);

    let odd = Config { intermediate_size: 20, ..config };
    let never = |_: &ParameterSpec| -> anyhow::Result<Tensor> { unreachable!() };
    let fresh = tempfile::tempdir().unwrap();
    let result =
        save(fresh.path(), &odd, WeightFormat::Mxfp4, &CompanionFiles::default(), SHARD_BYTES_MAX, never);
    refused(result, &["down_proj", "20 inputs", "bf16"]);
}

#[test]
fn a_diverged_model_is_not_saved() {
    let config = config();
    let folder = tempfile::tempdir().unwrap();
    let result = save(
        folder.path(),
        &config,
        WeightFormat::F32,
        &CompanionFiles::default(),
        SHARD_BYTES_MAX,
        |spec| Ok(Tensor::full(f32::INFINITY, spec.working_shape(), &Device::Cpu)?),
    );
    assert!(format!("{:#}", result.unwrap_err()).contains("diverged"));
    assert!(!folder.path().join("config.json").exists());
}
