//! The Qwen3 families, dense and with experts: config, folders, adapters, GGUF files, whole runs, and the
//! keys and files that they refuse.

use crate::cli::{self, done, scratch, text_of};
use crate::model_files::refused;
use crate::small_runs::{self, assert_no_gap, hotter, rloss};
use crate::tiny::{self, load, saved, values};
use rloss::chat::ChatFormat;
use rloss::checkpoint::BaseModel;
use rloss::checkpoint::gguf::{GgufFormat, GgufModel, GgufTokenizer};
use rloss::checkpoint::load::ModelFolder;
use rloss::checkpoint::peft::{self, AdapterFolder};
use rloss::integrity::Manifest;
use rloss::model::adapter::{Lora, Owner, default_targets};
use rloss::model::config::{Config, LayerType, WeightFormat};
use rloss::model::families::Family;
use rloss::model::names::{ParameterSpec, layer_norm_width, parameter_specs};
use rloss::run::memory::PassShape;
use rloss::settings::Choice;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

const FAMILIES: [&str; 2] = ["qwen3", "qwen3_moe"];

/// A tiny model of a family; that of `qwen3_moe` is `recipes/quickstart_qwen3_moe.toml`'s.
pub fn config(family: &str) -> Config {
    let family = Family::from_name(family).unwrap();
    let experts = family.has_experts;
    Config {
        family,
        num_key_value_heads: 4,
        num_local_experts: if experts { 4 } else { 0 },
        num_experts_per_tok: if experts { 2 } else { 0 },
        sliding_window: 0,
        layer_types: vec![LayerType::Full; 4],
        swiglu_limit: 0.0,
        max_position_embeddings: 192,
        eos_token_ids: vec![2, 0],
        ..tiny::config(false)
    }
}

/// `config.json` of `family` with keys changed; null removes a key.
fn changed(family: &str, changes: Value) -> anyhow::Result<Config> {
    let mut json = config(family).to_json(WeightFormat::Bf16);
    json.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    Config::from_json(&json)
}

#[test]
fn the_published_shapes_have_the_published_numbers_of_parameters() {
    let shared = json!({
        "hidden_act": "silu", "attention_bias": false, "attention_dropout": 0.0, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0, "rope_scaling": null, "sliding_window": null, "use_sliding_window": false,
        "vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960, "eos_token_id": 151645,
        "bos_token_id": 151643, "torch_dtype": "bfloat16",
    });
    for (changes, parameters) in [
        (
            json!({
                "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                "num_attention_heads": 16, "num_key_value_heads": 8, "max_window_layers": 28,
                "tie_word_embeddings": true,
            }),
            596_049_920,
        ),
        (
            json!({
                "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
                "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
                "num_key_value_heads": 4, "max_window_layers": 48, "num_experts": 128, "num_experts_per_tok": 8,
                "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [],
                "output_router_logits": false, "router_aux_loss_coef": 0.001, "tie_word_embeddings": false,
            }),
            30_532_122_624,
        ),
    ] {
        let mut json = shared.clone();
        json.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        let config = Config::from_json(&json).unwrap();
        assert_eq!(rloss::model::names::parameter_count(&config), parameters);
        assert_eq!(config.head_dim, 128);
        assert_eq!(Config::from_json(&config.to_json(WeightFormat::Bf16)).unwrap(), config);
    }
}

#[test]
fn the_memory_plan_counts_norms_of_heads_from_the_specs_of_a_layer() {
    for family in FAMILIES {
        let config = config(family);
        let heads = config.num_attention_heads + config.num_key_value_heads;
        assert_eq!(layer_norm_width(&config), 2 * config.hidden_size + heads * config.head_dim, "{family}");
        let pass = |config: &Config| {
            let pass = PassShape {
                config,
                tokens: 100,
                targets: 100,
                has_adapter: false,
                on_gpu: false,
                teacher: None,
                sequence_ranks: 1,
            };
            pass.forward_backward_bytes(false)
        };
        // Qwen2 has no norms of heads. The plan knows a model by its config alone.
        let without = Config { family: Family::from_name("qwen2").unwrap(), ..config.clone() };
        assert_eq!(layer_norm_width(&without), 2 * config.hidden_size, "{family}");
        let normed_heads = config.num_hidden_layers * 100 * heads * config.head_dim * 4;
        assert_eq!(pass(&config) - pass(&without), normed_heads as u64, "{family}");
    }
}

#[test]
fn both_dialects_of_config_are_read_and_what_is_not_built_is_refused() {
    for family in FAMILIES {
        assert_eq!(changed(family, json!({})).unwrap(), config(family));
        let newer = json!({
            "rope_theta": null, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "layer_types": vec!["full_attention"; 4], "sliding_window": 4096,
        });
        assert_eq!(changed(family, newer).unwrap(), config(family));
        for (changes, parts) in [
            (json!({ "swiglu_limit": 7.0 }), &["swiglu_limit = 7.0", "not supported"][..]),
            (json!({ "swiglu_alpha": 1.702 }), &["swiglu_alpha = 1.702", "not supported"]),
            (json!({ "use_sliding_window": true }), &["use_sliding_window = true", "full attention"]),
            (json!({ "layer_types": vec!["sliding_attention"; 4] }), &["layer_types", "does not support"]),
            (json!({ "attention_bias": true }), &["attention_bias = true", "must be false"]),
            (json!({ "head_dim": null }), &["`head_dim` is missing"]),
            (json!({ "quantization_config": {"quant_method": "mxfp4"} }), &["mxfp4", "bf16 weights"]),
            (json!({ "quantization_config": {"quant_method": "fp8"} }), &["fp8", "bf16 weights"]),
        ] {
            refused(changed(family, changes), parts);
        }
    }
    for (changes, parts) in [
        (json!({ "norm_topk_prob": false }), &["norm_topk_prob must be true"][..]),
        (json!({ "norm_topk_prob": null }), &["norm_topk_prob must be true"]),
        (json!({ "mlp_only_layers": [0] }), &["mlp_only_layers = [0]"]),
        (json!({ "decoder_sparse_step": 2 }), &["decoder_sparse_step = 2"]),
        (json!({ "num_experts": null }), &["`num_experts` is missing"]),
        (json!({ "num_experts": 1 }), &["num_experts_per_tok"]),
        (json!({ "moe_intermediate_size": null }), &["`moe_intermediate_size` is missing"]),
    ] {
        refused(changed("qwen3_moe", changes), parts);
    }
}

/// The later and the multimodal Qwen3 are other models under names that begin alike.
#[test]
fn a_folder_of_qwen3_5_or_qwen3_vl_is_refused_with_what_is_supported() {
    for name in ["qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe"] {
        let folder = TempDir::new().unwrap();
        let json =
            json!({ "model_type": name, "architectures": ["Other"], "text_config": {"hidden_size": 8} });
        std::fs::write(folder.path().join("config.json"), json.to_string()).unwrap();
        let path = format!("model.path={}", folder.path().display());
        let check = ["check", "quickstart_qwen3_moe", "--set", &path, "--set", "cold_start.steps=0"];
        let wanted = format!(
            "model_type = \"{name}\" is not supported; known: \"gpt_oss\", \"qwen2\", \"qwen3\", \"qwen3_moe\""
        );
        cli::refused(&mut rloss(&check), &[&wanted]);
    }
}

#[test]
fn folders_give_back_every_bit_under_the_published_names() {
    for (family, name) in FAMILIES.into_iter().zip(["mlp.gate_proj", "mlp.experts.3.gate_proj"]) {
        let config = config(family);
        let (_, before) = tiny::model(config.clone(), 3);
        let folder = saved(&config, &before, WeightFormat::F32);
        assert_eq!(Config::read(folder.path()).unwrap(), config);
        let tensors = crate::tiny::load_safetensors(folder.path().join("model.safetensors"));
        assert_eq!(tensors[&format!("model.layers.1.{name}.weight")].dims(), [64, 64]);
        assert_eq!(tensors["model.layers.0.self_attn.q_norm.weight"].dims(), [16]);
        let after = tiny::parameters(&config, load(folder.path(), &config).unwrap()).unwrap();
        for (index, spec) in before.specs.iter().enumerate() {
            let [a, b] = [&before, &after].map(|all| values(all.values(index).unwrap()));
            assert_eq!(a, b, "{}", spec.name);
        }
        tiny::assert_mxfp4_is_refused(&config);
        let missing = Config { num_hidden_layers: 5, layer_types: vec![LayerType::Full; 5], ..config };
        let words = ["`model.layers.4.input_layernorm.weight` is missing"];
        refused(ModelFolder::open(folder.path(), &missing).map(drop), &words);
    }
    let config = config("qwen3_moe");
    let folder = saved(&config, &tiny::model(config.clone(), 3).1, WeightFormat::Bf16);
    let more = Config { num_local_experts: 5, ..config };
    let words = ["`model.layers.0.mlp.experts.4.gate_proj.weight` is missing"];
    refused(ModelFolder::open(folder.path(), &more).map(drop), &words);
}

/// Tensors that only GPT-OSS has are refused in a folder of these families.
#[test]
fn sinks_in_a_folder_are_refused_by_name() {
    let config = config("qwen3");
    let folder = saved(&config, &tiny::model(config.clone(), 3).1, WeightFormat::F32);
    let file = folder.path().join("model.safetensors");
    let mut tensors = crate::tiny::load_safetensors(&file);
    let sinks = candle_core::Tensor::new(&[1f32; 4], &candle_core::Device::Cpu).unwrap();
    tensors.insert("model.layers.0.self_attn.sinks".to_owned(), sinks);
    candle_core::safetensors::save(&tensors, &file).unwrap();
    let words = ["\"model.layers.0.self_attn.sinks\" is not a tensor of this model"];
    refused(ModelFolder::open(folder.path(), &config).map(drop), &words);
}

/// Writes a random adapter of `config` on all matrices to a folder and returns its values.
fn adapter(config: &Config, base: &Path) -> (TempDir, BTreeMap<String, Vec<f32>>) {
    let specs = parameter_specs(config);
    let lora = Lora { rank: 3, alpha: 8.0, rslora: false, targets: default_targets(config) };
    let mut start = lora.initial_values(&specs, 3, Owner::Policy).unwrap();
    let every = start.iter_mut().flatten().enumerate();
    every.for_each(|(i, value)| *value += (i % 1009) as f32 * 1e-3);
    let names = lora.factor_specs(&specs).unwrap().into_iter().map(|spec| spec.name);
    let values: BTreeMap<String, Vec<f32>> = names.zip(start).collect();
    let (folder, mut manifest) = (TempDir::new().unwrap(), Manifest::default());
    let base = BaseModel::from_folder(base).unwrap();
    peft::write(folder.path(), &mut manifest, (&lora, &specs), &base, |name| Ok(values[name].clone()))
        .unwrap();
    (folder, values)
}

#[test]
fn adapters_of_experts_give_back_every_bit_and_one_that_lacks_an_expert_is_refused() {
    for family in FAMILIES {
        let config = config(family);
        let base = saved(&config, &tiny::model(config.clone(), 3).1, WeightFormat::F32);
        let (folder, values) = adapter(&config, base.path());
        let specs = parameter_specs(&config);
        let read = AdapterFolder::open(folder.path(), &specs).unwrap();
        assert_eq!(read.lora.targets, default_targets(&config));
        let found = read.read_values(&specs).unwrap();
        let names = read.lora.factor_specs(&specs).unwrap().into_iter().map(|spec| spec.name);
        assert!(names.zip(found).collect::<BTreeMap<_, _>>() == values, "{family}");
    }
    let config = config("qwen3_moe");
    let specs = parameter_specs(&config);
    let base = saved(&config, &tiny::model(config.clone(), 3).1, WeightFormat::F32);
    let (folder, _) = adapter(&config, base.path());
    let file = folder.path().join("adapter_model.safetensors");
    let whole = crate::tiny::load_safetensors(&file);
    let module = "base_model.model.model.layers.1.mlp.experts.2.up_proj";
    assert_eq!(whole[&format!("{module}.lora_A.weight")].dims(), [3, 64]);
    let mut lacks_one = whole.clone();
    lacks_one.retain(|name, _| !name.starts_with(module));
    candle_core::safetensors::save(&lacks_one, &file).unwrap();
    let words = ["model.layers.1.mlp.experts.up_proj.weight", "3 of 4 experts have an adapter"];
    refused(AdapterFolder::open(folder.path(), &specs).map(drop), &words);
    for (number, words) in [
        // Expert 2 once more: its factors took the place of the first ones in silence.
        (".02.", &["is a second adapter of model.layers.1.mlp.experts.2.up_proj.weight"][..]),
        (".4.", &["experts.4.up_proj", "no such matrix"]),
    ] {
        let mut more = whole.clone();
        for factor in ["lora_A", "lora_B"] {
            let tensor = more[&format!("{module}.{factor}.weight")].clone();
            more.insert(format!("{}.{factor}.weight", module.replace(".2.", number)), tensor);
        }
        candle_core::safetensors::save(&more, &file).unwrap();
        refused(AdapterFolder::open(folder.path(), &specs).map(drop), words);
    }
}

#[test]
fn gguf_files_give_back_config_and_values() {
    for family in FAMILIES {
        let config = config(family);
        let (_, before) = tiny::model(config.clone(), 3);
        let (_folder, [path]) = scratch(["a.gguf"]);
        let chat = config.family.chat.from_embedded().unwrap();
        let tensor = |spec: &ParameterSpec| Ok(tiny::named(&before, &spec.name).clone());
        for form in [GgufFormat::F32, GgufFormat::Bf16, GgufFormat::F16, GgufFormat::Q8] {
            let json = chat.vocabulary().json_bytes();
            let tokenizer = GgufTokenizer { json, template: chat.jinja(), tool_use: None };
            rloss::checkpoint::gguf::write(&path, &config, form, tokenizer, tensor).unwrap();
            let read = GgufModel::open(&path).unwrap();
            // GGUF has one end of a text, and its tokenizer no token for the beginning.
            assert_eq!(Config { eos_token_ids: vec![2, 0], ..read.config.clone() }, config, "{family}");
            assert_eq!(read.template.default, chat.jinja());
            let again = read.config.family.chat.with_template(read.vocabulary, "a.gguf", &read.template);
            assert!(!again.unwrap().has_own_template());
            let files = ModelFolder::from_gguf(&path, read.weights);
            for spec in parameter_specs(&config) {
                let wanted = values(tiny::named(&before, &spec.name));
                let found = files.read_values(&spec).unwrap();
                let rounded: Vec<f32> = wanted.iter().map(|v| half::bf16::from_f32(*v).to_f32()).collect();
                let is_exact = match form {
                    GgufFormat::F32 => found == wanted,
                    // Vectors and routers are F32 in every file.
                    _ if !spec.is_matrix() || spec.name.ends_with("mlp.gate.weight") => found == wanted,
                    GgufFormat::Bf16 => found == rounded,
                    // Half of 1/127 of a block's largest value.
                    _ => {
                        let largest = wanted.iter().fold(0f32, |m, v| m.max(v.abs()));
                        found.iter().zip(&wanted).all(|(a, b)| (a - b).abs() <= 0.008 * largest)
                    }
                };
                assert!(is_exact, "{family} as {form:?}: {}", spec.name);
            }
        }
        let json = chat.vocabulary().json_bytes();
        let tokenizer = GgufTokenizer { json, template: chat.jinja(), tool_use: None };
        let words = ["MXFP4", "bf16"];
        refused(rloss::checkpoint::gguf::write(&path, &config, GgufFormat::Mxfp4, tokenizer, tensor), &words);
    }
}

fn train(out: &Path, sets: &[&str]) -> Command {
    small_runs::train("quickstart_qwen3_moe", out, sets)
}

/// A run whose checkpoint another goes on from, with an adapter or a dense model; all links hold.
#[test]
fn the_quickstart_with_experts_trains_saves_and_goes_on() {
    let (folder, [first, second, dense]) = scratch(["first", "second", "dense"]);
    done(&mut train(&first, &["train.load_balance_coefficient=0.01"]));
    let again = format!("model.path={}", first.display());
    done(&mut train(&second, &[&again, "cold_start.steps=0", "adapter.rank=4", "chat.enable_thinking=true"]));
    let without = ["cold_start.load_balance_coefficient=0", "model.architecture.model_type=qwen3"];
    done(&mut train(&dense, &[&without[..], &["model.architecture.tie_word_embeddings=true"]].concat()));
    for run in [&first, &second, &dense] {
        assert_no_gap(run);
    }
    let checkpoint = first.join("checkpoints/step-000002");
    let read = |name: &str| text_of(checkpoint.join(name));
    let config: Value = serde_json::from_str(&read("config.json")).unwrap();
    assert_eq!((&config["model_type"], &config["norm_topk_prob"]), (&json!("qwen3_moe"), &json!(true)));
    assert_eq!(read("chat_template.jinja"), ChatFormat::ThinkingChatMl.from_embedded().unwrap().jinja());
    let prompt = |run: &Path| {
        let text = text_of(run.join("trajectories/step-000001.jsonl"));
        let row: Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
        let tokens = row["tokens"].as_array().unwrap().iter().map(|token| token.as_u64().unwrap() as u32);
        let tokens: Vec<u32> = tokens.collect();
        ChatFormat::ThinkingChatMl.from_embedded().unwrap().vocabulary().decode(&tokens)
    };
    let empty = "<|im_start|>assistant\n<think>\n\n</think>\n\n";
    assert!(prompt(&first).contains(empty), "{}", prompt(&first));
    assert!(!prompt(&second).contains(empty), "{}", prompt(&second));

    // What it sampled, as another engine's rows: they agree; at another temperature they do not.
    let check = |file: &Path| {
        let (run, out) = (first.to_str().unwrap(), folder.path().join("checked"));
        let out = out.to_str().unwrap();
        cli::output(&mut rloss(&["check-mismatch", run, "--against", file.to_str().unwrap(), "--out", out]))
    };
    let checked = check(&hotter(folder.path(), &first.join("trajectories/step-000002.jsonl")));
    let verdict = checked.stdout;
    assert_eq!(checked.code, Some(3), "{verdict}");
    assert!(verdict.contains("another temperature") && !verdict.contains("sink"), "{verdict}");

    // Ablations: noise of the router opens a gap, rollout in bf16 too; a clean arm has none.
    let arms = "router_noise_train,rollout_bf16,rollout_mxfp4";
    let arms_out = folder.path().join("arms").display().to_string();
    done(&mut rloss(&["check-mismatch", first.to_str().unwrap(), "--arms", arms, "--out", &arms_out]));
    let result = text_of(folder.path().join("arms/mismatch.json"));
    let result: Value = serde_json::from_str(&result).unwrap();
    let gap = |name: &str| {
        let line = result["rows"].as_array().unwrap().iter().find(|line| line["name"] == name);
        line.unwrap_or_else(|| panic!("{name}: {result}"))["mismatch/logprob_abs_diff_max"].as_f64().unwrap()
    };
    assert_eq!(gap("the recipe without changes"), 0.0);
    assert!(arms.split(',').all(|arm| gap(arm) > 0.0), "{result}");
}

#[test]
fn keys_that_mean_nothing_to_the_families_are_refused_by_name() {
    let (_folder, [out]) = scratch(["run"]);
    for (set, words) in [
        ("arms.no_train_sinks=true", &["arms.no_train_sinks", "qwen3_moe", "no sinks"][..]),
        ("arms.no_sink_gradient=true", &["arms.no_sink_gradient", "no sinks"]),
        ("model.init.sink=1.0", &["model.init.sink", "no sinks"]),
        ("model.architecture.swiglu_limit=5.0", &["model.architecture.swiglu_limit", "no clamp"]),
        ("model.architecture.sliding_window=8", &["model.architecture.sliding_window", "full attention"]),
        ("checkpoint.dtype=mxfp4", &["checkpoint.dtype", "MXFP4"]),
        ("chat.reasoning_effort=low", &["chat.reasoning_effort", "qwen3_moe"]),
        ("chat.knowledge_cutoff=2024-06", &["chat.knowledge_cutoff"]),
        ("chat.current_date=2025-06-28", &["chat.current_date"]),
    ] {
        cli::refused(&mut train(&out, &[set]), words);
        assert!(!out.exists(), "{set}");
    }
    // The dense family has no experts, and the other families no thoughts.
    for (sets, words) in [
        (&["arms.router_noise=0.3"][..], &["arms.router_noise", "\"qwen3\"", "no experts"][..]),
        (&["model.architecture.num_local_experts=8"], &["model.architecture.num_local_experts"]),
    ] {
        let dense = ["model.architecture.model_type=qwen3", "cold_start.load_balance_coefficient=0"];
        cli::refused(&mut train(&out, &[&dense[..], sets].concat()), words);
    }
    for recipe in ["quickstart", "quickstart_dense"] {
        let thinking = ["--set", "chat.enable_thinking=false", "--out", out.to_str().unwrap()];
        let mut train = rloss(&[&["train", recipe][..], &thinking].concat());
        cli::refused(&mut train, &["chat.enable_thinking", "no thoughts"]);
    }
}

/// A GPU has heads of 64 and 128: `device = "cuda"` refuses others before any work. A build without the feature
/// refuses the device alone.
#[test]
fn a_gpu_is_refused_for_heads_of_another_size_alone() {
    let (_folder, [out]) = scratch(["run"]);
    let gpu = ["device=cuda", "model.dtype=bf16"];
    for (head_dim, lines) in [(64, 0), (96, 1), (128, 0)] {
        let heads = format!("model.architecture.head_dim={head_dim}");
        let text = cli::refused(&mut train(&out, &[&gpu[..], &[&heads]].concat()), &[]);
        assert!(text.contains("the head size is 96") == (head_dim == 96), "{text}");
        assert!(text.contains("--features cuda") == (head_dim != 96), "{text}");
        assert_eq!(text.matches("model.architecture.head_dim").count(), lines, "{text}");
    }
}
