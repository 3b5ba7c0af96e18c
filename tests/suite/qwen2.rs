//! The dense family: its tensors and config, the tied head's gradient, whole runs, and what of a recipe
//! means nothing to it.

use crate::cli::{self, Sets, done, scratch, text_of};
use crate::data;
use crate::model_files::refused;
use crate::small_runs::{self, assert_no_gap, hotter, rl_rows, rloss};
use crate::tiny::{self, Gradients, load, saved, values};
use rloss::actor::batch_runner::BatchRunner;
use rloss::actor::forward_backward::{ColumnLoss, PassSettings};
use rloss::actor::micro_batch::MicroBatch;
use rloss::actor::{Columns, PolicyColumns};
use rloss::chat::ChatFormat;
use rloss::checkpoint::load::ModelFolder;
use rloss::metrics::Progress;
use rloss::model::config::{Config, LayerType, WeightFormat};
use rloss::model::families::Family;
use rloss::model::forward::ForwardOptions;
use rloss::model::names::{parameter_count, parameter_specs, value_model_specs};
use rloss::model::parameters::{Backend, Parameters};
use rloss::model::settings::Yarn;
use rloss::model::storage::TensorStorage;
use rloss::ops::threads::Threads;
use rloss::settings::Choice;
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

/// The model of `recipes/quickstart_dense.toml`, or the same with a tied head.
pub fn config(tied: bool) -> Config {
    Config {
        family: Family::from_name("qwen2").unwrap(),
        intermediate_size: 256,
        num_local_experts: 0,
        num_experts_per_tok: 0,
        sliding_window: 0,
        layer_types: vec![LayerType::Full; 4],
        swiglu_limit: 0.0,
        tie_word_embeddings: tied,
        max_position_embeddings: 192,
        eos_token_ids: vec![2, 0],
        ..tiny::config(false)
    }
}

#[test]
fn names_and_shapes_match_the_lists_of_released_models() {
    let Some(folder) = data::folder("qwen2.5") else { return };
    let read = |name: &str| -> Value {
        serde_json::from_str(&std::fs::read_to_string(folder.join(name)).expect("read")).expect("JSON")
    };
    for (size, parameters) in [("0.5b", 494_032_768), ("32b", 32_763_876_352)] {
        let config = Config::from_json(&read(&format!("config-{size}.json"))).unwrap();
        assert_eq!(Config::from_json(&config.to_json(WeightFormat::Bf16)).unwrap(), config);
        assert_eq!((config.rope.theta, config.tie_word_embeddings), (1e6, size == "0.5b"));
        let ours: serde_json::Map<String, Value> = parameter_specs(&config)
            .iter()
            .flat_map(|spec| spec.stored_tensors(WeightFormat::Bf16))
            .map(|t| (t.name, json!({ "dtype": format!("{:?}", t.dtype), "shape": t.shape })))
            .collect();
        let released = read(&format!("tensors-{size}.json"));
        assert_eq!(ours, *released.as_object().unwrap(), "{size}");
        assert_eq!(parameter_count(&config), parameters, "{size}");
    }
    let instruct = Config::from_json(&read("config-32b-instruct.json")).unwrap();
    assert_eq!((instruct.rms_norm_eps, &*instruct.eos_token_ids), (1e-6, &[151_645][..]));
}

#[test]
fn both_dialects_of_config_are_read_and_what_is_not_built_is_refused() {
    let changed = |changes: Value| {
        let mut json = config(false).to_json(WeightFormat::Bf16);
        json.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        Config::from_json(&json)
    };
    assert_eq!(changed(json!({})).unwrap(), config(false));
    let newer = json!({
        "rope_theta": null, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "head_dim": null,
        "layer_types": vec!["full_attention"; 4], "sliding_window": 4096, "tie_word_embeddings": null,
    });
    assert_eq!(changed(newer).unwrap(), config(false));
    let longer = json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768});
    let yarn = changed(json!({ "rope_scaling": longer })).unwrap().rope.yarn;
    assert!(matches!(yarn, Some(Yarn { truncate: true, .. })), "{yarn:?}");
    for (changes, parts) in [
        (json!({ "use_sliding_window": true }), &["use_sliding_window = true", "not supported"][..]),
        (json!({ "layer_types": vec!["sliding_attention"; 4] }), &["sliding_attention", "does not support"]),
        (
            json!({ "head_dim": null, "num_attention_heads": 6, "num_key_value_heads": 6 }),
            &["head_dim", "multiple"],
        ),
        (json!({ "rope_theta": null }), &["`rope_theta` is missing"]),
        (json!({ "hidden_act": "gelu" }), &["hidden_act"]),
        (json!({ "use_mrope": true }), &["use_mrope"]),
        (json!({ "tie_word_embeddings": 1 }), &["tie_word_embeddings = 1"]),
        (json!({ "quantization_config": {"quant_method": "mxfp4"} }), &["mxfp4", "bf16 weights"]),
        (json!({ "model_type": "qwen4" }), &["\"qwen4\"", "known: \"gpt_oss\", \"qwen2\""]),
    ] {
        refused(changed(changes), parts);
    }
}

/// Published folders of tied models, such as Qwen3-0.6B, store the head too. They were refused.
#[test]
fn a_head_that_is_a_copy_of_a_tied_embedding_is_read() {
    let untied = config(false);
    let (_, mut model) = tiny::model(untied.clone(), 3);
    let embedding = values(model.values(model.index_of("model.embed_tokens.weight").unwrap()).unwrap());
    for differs in [false, true] {
        let head = model.index_of("lm_head.weight").unwrap();
        // In memory the head is transposed.
        let (rows, columns) = (untied.vocab_size, untied.hidden_size);
        let mut copy: Vec<f32> = (0..columns)
            .flat_map(|c| (0..rows).map(move |r| (r, c)))
            .map(|(r, c)| embedding[r * columns + c])
            .collect();
        copy[7] += f32::from(u8::from(differs));
        model.overwrite(head, "master", bytemuck::cast_slice(&copy)).unwrap();
        let folder = saved(&untied, &model, WeightFormat::F32);
        let opened = ModelFolder::open(folder.path(), &config(true));
        match differs {
            false => drop(opened.unwrap()),
            true => refused(opened.map(drop), &["differs from the embedding"]),
        }
    }
}

#[test]
fn folders_give_back_every_bit_and_a_tied_head_is_saved_once() {
    for tied in [false, true] {
        let config = config(tied);
        let (_, before) = tiny::model(config.clone(), 3);
        let folder = saved(&config, &before, WeightFormat::F32);
        assert_eq!(Config::read(folder.path()).unwrap(), config);
        let after = crate::tiny::parameters(&config, load(folder.path(), &config).unwrap()).unwrap();
        assert_eq!(after.index_of("lm_head.weight").is_none(), tied);
        for index in 0..before.len() {
            assert_eq!(
                values(before.values(index).unwrap()),
                values(after.values(index).unwrap()),
                "{}",
                before.specs[index].name
            );
        }
        // Tensors that the config contradicts.
        let contradicted = Config { tie_word_embeddings: !tied, ..config.clone() };
        let word = if tied {
            "`lm_head.weight` is missing"
        } else {
            "tie_word_embeddings is true, but \"lm_head.weight\" differs from the embedding"
        };
        refused(ModelFolder::open(folder.path(), &contradicted).map(drop), &[word]);
        let wide = Config { intermediate_size: 255, ..config.clone() };
        refused(ModelFolder::open(folder.path(), &wide).map(drop), &["mlp.gate_proj.weight", "[255, 64]"]);
        tiny::assert_mxfp4_is_refused(&config);
    }
}

/// Gradients of seven micro-batches.
fn gradients(tied: bool, threads: usize, recompute_layers: bool) -> Gradients {
    let (model, parameters) = tiny::model(config(tied), 5);
    let threads = Threads::new(threads).unwrap();
    let runner = BatchRunner { threads: &threads, model: &model, parameters: &parameters, recompute_layers };
    let batches = MicroBatch::split(&tiny::sequences(272, &[30, 7, 41, 12, 25, 33, 18], 6), 40);
    let forward = ForwardOptions::default();
    let settings =
        PassSettings { temperature: 1.0, load_balance_coefficient: 0.5, keeps_routed_experts: true, forward };
    let loss = |_: usize, columns: &PolicyColumns| {
        Ok(PolicyColumns { log_probs: vec![-0.1; columns.log_probs.len()], ..columns.zeros() })
    };
    let outputs = runner.accumulate(&batches, settings, None, &loss, &Progress::hidden()).unwrap();
    assert!(
        batches.len() > 4
            && outputs.iter().all(|o| o.routed_experts.is_empty() && o.load_balance_loss == 0.0)
    );
    Gradients::of(&parameters)
}

/// The head's part of an embedding's gradient and the rows' own go to one buffer, in one order.
#[test]
fn a_tied_heads_gradient_is_the_same_bits_on_any_number_of_threads() {
    for tied in [true, false] {
        let one = gradients(tied, 1, true);
        assert!(
            one.values.iter().all(|g| g.as_ref().unwrap().iter().any(|&g| g != 0.0)),
            "every tensor learns"
        );
        for threads in [2, 3, 4] {
            assert_eq!(gradients(tied, threads, true), one, "{threads} threads");
        }
        assert_eq!(gradients(tied, 2, false), one, "one graph");
    }
}

/// A step whose rewards were all equal ran its whole backward pass, for gradients of 0.
#[test]
fn micro_batches_without_a_gradient_are_skipped_and_the_sum_is_the_same() {
    let (model, parameters) = tiny::model(config(true), 5);
    let batches = MicroBatch::split(&tiny::sequences(272, &[30, 7, 41, 12, 25, 33, 18], 6), 40);
    let settings = tiny::pass_settings(1.0, 0.0);
    let run = |threads: usize,
               recompute_layers: bool,
               chosen: &[usize],
               factor: &(dyn Fn(usize) -> f32 + Sync)| {
        let threads = Threads::new(threads).unwrap();
        let runner =
            BatchRunner { threads: &threads, model: &model, parameters: &parameters, recompute_layers };
        let loss = |index: usize, columns: &PolicyColumns| {
            let log_probs = vec![-0.1 * factor(index); columns.log_probs.len()];
            Ok(PolicyColumns { log_probs, ..columns.zeros() })
        };
        let batches: Vec<MicroBatch> = chosen.iter().map(|&index| batches[index].clone()).collect();
        rloss::actor::gradients::clear(&parameters).unwrap();
        let outputs = runner.accumulate(&batches, settings, None, &loss, &Progress::hidden()).unwrap();
        (Gradients::of(&parameters), outputs.iter().map(|output| output.has_gradients).collect::<Vec<_>>())
    };
    let all: Vec<usize> = (0..batches.len()).collect();
    let odd: Vec<usize> = all.iter().copied().filter(|index| index % 2 == 1).collect();
    let (expected, _) = run(1, true, &odd, &|_| 1.0);
    for recompute_layers in [true, false] {
        for threads in 1..=4 {
            let (found, ran) = run(threads, recompute_layers, &all, &|index| (index % 2) as f32);
            assert_eq!(found, expected, "{threads} threads");
            assert_eq!(ran, all.iter().map(|index| index % 2 == 1).collect::<Vec<_>>());
        }
        let (none, ran) = run(2, recompute_layers, &all, &|_| 0.0);
        assert!(none.values.iter().flatten().flatten().all(|gradient| *gradient == 0.0));
        assert!(!ran.contains(&true));
    }
}

/// With head and embedding apart but of the same values, the two gradients add up to the tied one.
#[test]
fn a_tied_heads_gradient_is_the_sum_of_both_uses() {
    let (tied_model, tied) = tiny::model(config(true), 5);
    let (untied_model, untied) = tiny::model(config(false), 5);
    let (v, h) = (272, 64);
    for (index, spec) in untied.specs.iter().enumerate() {
        let from = if spec.name == "lm_head.weight" { "model.embed_tokens.weight" } else { &spec.name };
        let mut shared = values(tiny::named(&tied, from));
        if spec.name == "model.embed_tokens.weight" {
            // There it lies as the head reads it.
            shared = (0..v * h).map(|i| shared[i % h * v + i / h]).collect();
        }
        tiny::set(&untied, index, &shared);
    }
    let batch = &MicroBatch::split(&tiny::sequences(v, &[40, 20], 6), usize::MAX)[0];
    let settings = tiny::pass_settings(1.0, 0.0);
    let loss = |columns: &PolicyColumns| {
        Ok(PolicyColumns { log_probs: vec![-0.1; columns.log_probs.len()], ..columns.zeros() })
    };
    let [a, b] = [(&tied_model, &tied), (&untied_model, &untied)].map(|(model, parameters)| {
        tiny::learned(parameters, (model, batch, settings, true), |pass| {
            pass.forward_backward(&ColumnLoss { gradient: &loss, skips_zeros: false }, &|| ())
        })
    });
    assert_eq!(a.columns.log_probs, b.columns.log_probs, "the same forward");
    let of = |g: &Gradients, p: &Parameters, name: &str| g.values[p.index_of(name).unwrap()].clone().unwrap();
    let both = of(&a.gradients, &tied, "model.embed_tokens.weight");
    let (rows, head) =
        (of(&b.gradients, &untied, "model.embed_tokens.weight"), of(&b.gradients, &untied, "lm_head.weight"));
    for (i, both) in both.iter().enumerate() {
        assert_eq!(*both, head[i] + rows[i % v * h + i / v], "{i}");
    }
}

#[test]
fn a_critic_of_the_family_uses_the_embedding_once() {
    let config = config(true);
    let specs = value_model_specs(&config);
    assert_eq!(specs.len(), parameter_specs(&config).len() + 2);
    let values = specs.into_iter().map(|spec| {
        let count = spec.element_count();
        let stored = TensorStorage::variable(&spec, vec![0.1; count])?;
        Ok((spec, stored))
    });
    let critic = Parameters::with_value_head(&config, &Backend::default(), values).unwrap();
    assert!((0..critic.len()).all(|index| critic.use_count(index) == 1));
    let (_, policy) = tiny::model(config, 1);
    assert_eq!(policy.use_count(policy.index_of("model.embed_tokens.weight").unwrap()), 2);
}

fn train(out: &Path, sets: &[&str]) -> Command {
    small_runs::train("quickstart_dense", out, sets)
}

/// A run whose checkpoint another goes on from, tied or not, with a critic or without; all links hold.
#[test]
fn the_dense_quickstart_trains_saves_and_goes_on() {
    let (folder, [first, second]) = scratch(["first", "second"]);
    done(&mut train(
        &first,
        &["model.architecture.tie_word_embeddings=true", "train.freeze=[\"*.self_attn.*\"]"],
    ));
    let again = format!("model.path={}", first.display());
    let gae = ["policy.advantage=gae", "policy.old_logprob=rollout", "train.recompute_layers=true"];
    done(&mut train(&second, &[&[again.as_str(), "cold_start.steps=0"], &gae[..]].concat()));
    for run in [&first, &second] {
        assert_no_gap(run);
    }
    let checkpoint = second.join("checkpoints/step-000002");
    let read = |name: &str| text_of(checkpoint.join(name));
    let config: Value = serde_json::from_str(&read("config.json")).unwrap();
    assert_eq!((&config["model_type"], &config["tie_word_embeddings"]), (&json!("qwen2"), &json!(true)));
    assert_eq!(config["eos_token_id"], json!([2, 0]));
    assert_eq!(read("chat_template.jinja"), ChatFormat::ChatMl.from_embedded().unwrap().jinja());
    let text = text_of(second.join("trajectories/step-000001.jsonl"));
    assert!(text.contains("\"tokens\":[1,6,26,"), "the prompt is ChatML: {}", &text[..200]);

    // What it sampled, as another engine's rows: they agree; at a temperature that nobody said, they do not.
    let rows = second.join("trajectories/step-000002.jsonl");
    let check = |file: &Path| {
        let (run, out) = (second.to_str().unwrap(), folder.path().join("checked"));
        let out = out.to_str().unwrap();
        let arguments = ["check-mismatch", run, "--against", file.to_str().unwrap(), "--out", out];
        let ended = cli::output(&mut rloss(&arguments));
        assert_eq!(ended.code, Some(3), "{}", ended.stderr);
        ended.stdout
    };
    let at_start = first.join("trajectories/step-000001.jsonl");
    assert!(at_start.exists() && rows.exists());
    let verdict = check(&hotter(folder.path(), &rows));
    assert!(verdict.contains("another temperature") && !verdict.contains("window"), "{verdict}");
    let ill = folder.path().join("ill.jsonl");
    std::fs::write(&ill, "{\"tokens\": [6, 71, 72], \"logprobs\": [null, -5.0, -5.0]}\n").unwrap();
    assert!(check(&ill).contains("not a well-formed ChatML conversation: 1"), "{}", check(&ill));
}

/// Every task with either format: here those without a tool.
#[test]
fn tasks_without_a_tool_run_too() {
    for task in ["task.name=arithmetic_single", "task.name=format_rules"] {
        let (_folder, [run]) = scratch(["run"]);
        done(&mut train(&run, &[task, "model.architecture.intermediate_size=64", "rollout.turns_max=1"]));
        assert_eq!(rl_rows(&run).len(), 2, "{task}");
    }
}

#[test]
fn keys_that_mean_nothing_to_the_family_are_refused_by_name() {
    let (_folder, [out]) = scratch(["run"]);
    for (set, words) in [
        ("arms.no_train_sinks=true", &["arms.no_train_sinks", "no sinks"][..]),
        ("arms.no_sink_gradient=true", &["arms.no_sink_gradient", "no sinks"]),
        ("arms.router_noise=0.3", &["arms.router_noise", "no experts"]),
        ("arms.router_noise_rollout=0.3", &["arms.router_noise_rollout", "no experts"]),
        ("arms.router_noise_train=0.3", &["arms.router_noise_train", "no experts"]),
        ("arms.rollout_mxfp4=true", &["arms.rollout_mxfp4", "no experts"]),
        ("cold_start.load_balance_coefficient=0.01", &["cold_start.load_balance_coefficient"]),
        ("train.load_balance_coefficient=0.01", &["train.load_balance_coefficient"]),
        ("rollout.keep_routes=true", &["rollout.keep_routes"]),
        ("checkpoint.dtype=mxfp4", &["checkpoint.dtype"]),
        ("model.init.sink=1.0", &["model.init.sink"]),
        ("model.architecture.num_local_experts=8", &["model.architecture.num_local_experts"]),
        ("model.architecture.sliding_window=8", &["model.architecture.sliding_window", "full attention"]),
        ("chat.reasoning_effort=low", &["chat.reasoning_effort", "qwen2"]),
        ("chat.knowledge_cutoff=2024-06", &["chat.knowledge_cutoff"]),
        ("chat.current_date=2025-06-28", &["chat.current_date"]),
        ("chat.developer_instructions=Be brief.", &["chat.developer_instructions", "chat.system_message"]),
    ] {
        cli::refused(&mut train(&out, &[set]), words);
        assert!(!out.exists(), "{set}");
    }
    let recipe = small_runs::recipe("quickstart_dense");
    let arms = ["check-mismatch", recipe.to_str().unwrap(), "--arms", "rollout_bf16,no_train_sinks"];
    let text = cli::refused(&mut rloss(&arms), &["arms.no_train_sinks"]);
    assert!(!text.contains("rollout_bf16"), "{text}");
    let tied = ["--set", "model.architecture.tie_word_embeddings=true", "--out", out.to_str().unwrap()];
    cli::refused(&mut rloss(&[&["train", "quickstart"], &tied[..]].concat()), &["tie_word_embeddings"]);
}

#[test]
fn a_folder_without_chatml_tokens_is_refused() {
    let folder = saved(&config(false), &tiny::model(config(false), 1).1, WeightFormat::F32);
    let harmony = ChatFormat::Harmony.from_embedded().unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), harmony.vocabulary().json_bytes()).unwrap();
    let out = TempDir::new().unwrap();
    let path = format!("model.path={}", folder.path().display());
    let words = ["tokenizer.json", "<|im_start|>, <|im_end|>"];
    cli::refused(&mut train(&out.path().join("run"), &[&path]), &words);
}

/// Regression test: `init` wrote recipes that its own next command refused, for keys that a built-in base has
/// for another family.
#[test]
fn init_writes_a_recipe_that_check_accepts_from_a_base_of_another_family() {
    let (folder, [run]) = scratch(["run"]);
    done(&mut train(&run, &["cold_start.steps=1", "train.steps=1"]));
    let model = run.join("checkpoints/step-000001");
    for base in ["quickstart", "quickstart_ppo", "quickstart_dense", "quickstart_qwen3_moe", "format_rules"] {
        let init = |arguments: &[&str]| done(rloss(arguments).current_dir(folder.path()));
        init(&["init", base, "--from", base, "--model", model.to_str().unwrap()]);
        let recipe = text_of(folder.path().join(base).with_extension("toml"));
        assert!(!recipe.contains("999"), "{recipe}");
        init(&["check", &format!("{base}.toml")]);
    }
    // A task that makes its own problems has no file.
    let arguments = ["init", "filed", "--from", "quickstart", "--train-file", "Cargo.toml", "--model"];
    let mut init = rloss(&[&arguments[..], &[model.to_str().unwrap()]].concat());
    cli::refused(&mut init, &["the task arithmetic of quickstart generates its problems"]);
    // A key of a base that would change the run, or end it at its first checkpoint, is refused.
    for (key, value) in [("checkpoint.dtype", "\"mxfp4\""), ("arms.router_noise", "0.3")] {
        let recipe = |name: &str, text: String| std::fs::write(folder.path().join(name), text).unwrap();
        recipe("experts.toml", format!("base = \"quickstart\"\n{key} = {value}\n"));
        recipe("mine.toml", format!("base = \"experts.toml\"\nmodel.path = {:?}\n", model.to_str().unwrap()));
        cli::refused(&mut rloss(&["check", folder.path().join("mine.toml").to_str().unwrap()]), &[key]);
    }
}

/// Regression test: a run whose base had keys of another family could be neither resumed nor evaluated nor
/// exported, because its own resolved recipe was refused for them.
#[test]
fn a_run_with_a_base_of_another_family_reads_its_own_recipe() {
    let folder = TempDir::new().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    done(&mut train(&folder.path().join("first"), &["cold_start.steps=1", "train.steps=1"]));
    let base = "base = \"quickstart\"\nharmony.reasoning_effort = \"medium\"\n";
    std::fs::write(path("harmony.toml"), base).unwrap();
    let model = path("first/checkpoints/step-000001");
    std::fs::write(path("mine.toml"), format!("base = \"harmony.toml\"\nmodel.path = {model:?}\n")).unwrap();
    let sets = ["cold_start.steps=0", "train.steps=1", "eval.before_training=false", "eval.problems_max=2"];
    let run = path("run");
    let mut train = rloss(&["train", &path("mine.toml"), "--out", &run]);
    done(train.sets(sets).sets(["adapter.rank=2", "adapter.alpha=4.0"]));
    done(&mut rloss(&["eval", &run, "--out", &path("eval")]));
    done(&mut rloss(&["export", &run, "--out", &path("exported")]));
    done(&mut rloss(&["train", &run, "--resume", "--set", "train.steps=2"]));
    let words = ["chat.reasoning_effort"];
    cli::refused(&mut rloss(&["eval", &run, "--set", "chat.reasoning_effort=low"]), &words);
}
