//! Bad input: one paragraph that names the place and the remedy, exit code 2, nothing written.

use super::*;

/// Runs what must be refused and expects each of `words` in its message.
pub(super) fn refused(command: &mut Command, words: &[&str]) {
    let text = super::refused(command, words);
    assert!(!text.contains("panicked"), "{text}");
    assert!(!text.trim().contains("\n\n"), "one paragraph: {text}");
    assert!(text.matches("error: ").count() == 1, "{text}");
}

#[test]
fn broken_recipes() {
    let (folder, [recipe]) = scratch(["broken.toml"]);
    let out = folder.path().join("run");
    for (text, words) in [
        ("[train]\nstep = 3\n", &["broken.toml:2", "train.step", "train.steps"][..]),
        ("[trian]\nsteps = 3\n", &["broken.toml:1", "trian", "train"]),
        ("[train]\nsteps = \"three\"\n", &["broken.toml:2", "train.steps", "integer"]),
        ("[train]\nsteps = -1\n", &["broken.toml:2", "train.steps"]),
        ("[train]\nsteps = 3\nsteps = 4\n", &["broken.toml:3"]),
        ("[train\nsteps = 3\n", &["broken.toml:1", "not TOML"]),
        ("[rollout]\ntemperature = 0.0\n", &["broken.toml:2", "rollout.temperature"]),
        ("[rollout]\ntop_k = 1\n", &["broken.toml:2", "rollout.top_k"]),
        ("[policy]\nadvantage = \"grop\"\n", &["broken.toml:2", "policy.advantage", "grpo"]),
        ("[task]\nname = \"gsm8k\"\n", &["task.train_file"]),
        (
            "[task]\nname = \"gsm8k\"\ntrain_file = \"missing.jsonl\"\nvalidation_file = \"missing.jsonl\"\n",
            &["broken.toml:3", "broken.toml:4", "missing.jsonl"],
        ),
        ("[model]\npath = \"nowhere\"\n", &["broken.toml:2", "model.path", "nowhere"]),
        ("[model]\ntokenizer = \"nowhere.json\"\n", &["broken.toml:2", "model.tokenizer", "nowhere.json"]),
        ("[model.architecture]\nnum_attention_heads = 3\n", &["num_key_value_heads"]),
        ("[model.architecture]\nhead_dim = 15\n", &["broken.toml:2", "model.architecture.head_dim"]),
        ("[model.architecture]\nnum_experts_per_tok = 9\n", &["num_experts_per_tok"]),
        (
            "[train]\nfreeze = [\"model.layer.*\"]\n",
            &["broken.toml:2", "train.freeze", "matches no parameter"],
        ),
        ("[train]\nfreeze = [\"*\"]\n", &["broken.toml:2", "train.freeze", "every parameter is frozen"]),
        ("[rollout]\nresponse_tokens_max = 500\n", &["broken.toml:2", "rollout.response_tokens_max", "160"]),
        ("[eval]\nsamples = 2\npass_at = [4]\n", &["broken.toml:3", "eval.pass_at"]),
        ("[interpreter]\nkind = \"cpython\"\npython = \"no-such-python\"\n", &["no-such-python"]),
        ("[train]\nsteps = 1\u{1b}[2J\n", &["broken.toml:2"]),
    ] {
        fs::write(&recipe, text).unwrap();
        refused(rloss().arg("train").arg(&recipe).arg("--out").arg(&out), words);
        assert!(!out.exists(), "{text}");
    }
}

#[test]
fn every_mistake_is_reported_at_once() {
    let (folder, [recipe]) = scratch(["broken.toml"]);
    fs::write(&recipe, "[train]\nstep = 3\nseed = -1\n[eval]\nsamples = 0\n").unwrap();
    let words = ["broken.toml:2", "broken.toml:3", "broken.toml:5", "polciy"];
    refused(rloss().arg("train").arg(&recipe).args(["--set", "polciy.loss=ppo"]), &words);
    // Those of the recipe against the model and the task's data, too.
    let text = "[task]\nname = \"gsm8k\"\ntrain_file = \"broken.toml\"\nvalidation_file = \"broken.toml\"\n[train]\nfreeze = [\"nothing\"]\n";
    fs::write(&recipe, text).unwrap();
    let words = ["2 mistakes:\n  ", "broken.toml: cannot read the rows", "broken.toml:6: train.freeze"];
    refused(rloss().current_dir(&folder).arg("train").arg(&recipe), &words);
}

#[test]
fn broken_command_lines() {
    let (folder, [out]) = scratch(["run"]);
    for (arguments, word) in
        [(&["trian"][..], "'train'"), (&[], "Usage"), (&["train"], "<RECIPE>"), (&["report"], "<RUNS>")]
    {
        super::refused(rloss().args(arguments), &[word]);
    }
    refused(rloss().args(["train", "nowhere.toml"]).arg("--out").arg(&out), &["nowhere.toml"]);
    refused(&mut train(&out, &["train.steps"]), &["train.steps", "key=value"]);
    refused(&mut train(&out, &["train.stpes=1"]), &["train.stpes", "train.steps"]);
    refused(rloss().arg("train").arg(folder.path()).arg("--out").arg(&out), &["recipe.toml"]);
    refused(rloss().arg("report").arg(folder.path()), &[&folder.path().display().to_string()]);
    assert!(!out.exists());
}

/// A copy of the warm model, for damage.
fn model_copy(folder: &Path) -> PathBuf {
    let copy = folder.join("model");
    copy_model(&first_checkpoint(warm_model()), &copy);
    copy
}

fn model_refused(folder: &Path, model: &Path, words: &[&str]) {
    let out = folder.join("run");
    refused(&mut small(&out, &[&model_path(model)]), words);
    assert!(!out.exists());
}

#[test]
fn a_truncated_weights_file() {
    let folder = TempDir::new().unwrap();
    let model = model_copy(folder.path());
    let file = model.join("model.safetensors");
    let bytes = fs::read(&file).unwrap();
    for length in [bytes.len() - 1, bytes.len() / 2, 100, 4, 0] {
        fs::write(&file, &bytes[..length]).unwrap();
        model_refused(folder.path(), &model, &["model.safetensors"]);
    }
}

#[test]
fn a_config_that_contradicts_the_tensors() {
    let folder = TempDir::new().unwrap();
    let model = model_copy(folder.path());
    let file = model.join("config.json");
    let original = text_of(&file);
    for (key, value) in [
        ("hidden_size", 128),
        ("num_hidden_layers", 5),
        ("num_local_experts", 8),
        ("intermediate_size", 32),
        ("num_key_value_heads", 4),
        ("vocab_size", 300),
    ] {
        let mut config: Value = serde_json::from_str(&original).unwrap();
        assert!(config[key].is_u64(), "{key}");
        config[key] = value.into();
        if key == "num_hidden_layers" {
            config["layer_types"].as_array_mut().unwrap().push("sliding_attention".into());
        }
        fs::write(&file, config.to_string()).unwrap();
        model_refused(folder.path(), &model, &[&model.display().to_string()]);
    }
    for text in ["", "{", "[]", "{}"] {
        fs::write(&file, text).unwrap();
        model_refused(folder.path(), &model, &["config.json"]);
    }
}

#[test]
fn a_tokenizer_without_harmony_tokens() {
    let folder = TempDir::new().unwrap();
    let model = model_copy(folder.path());
    let file = model.join("tokenizer.json");
    let text = text_of(&file);
    fs::write(&file, text.replace("<|call|>", "<|called|>")).unwrap();
    model_refused(folder.path(), &model, &["tokenizer.json", "<|call|>"]);
    fs::write(&file, "{}").unwrap();
    model_refused(folder.path(), &model, &["tokenizer.json"]);
    fs::remove_file(&file).unwrap();
    model_refused(folder.path(), &model, &["tokenizer.json"]);
}

#[test]
fn a_folder_without_a_model() {
    let (folder, [empty]) = scratch(["empty"]);
    fs::create_dir(&empty).unwrap();
    model_refused(folder.path(), &empty, &["empty", "config.json"]);
}

#[test]
fn a_broken_row_of_data() {
    let (folder, [good, broken]) = scratch(["good.jsonl", "broken.jsonl"]);
    let row = "{\"question\": \"How many legs have two cows?\", \"answer\": \"2 * 4 = 8\\n#### 8\"}\n";
    fs::write(&good, row.repeat(20)).unwrap();
    for bad in [
        "{\"question\": \"How many\n",
        "{\"question\": \"How many?\"}\n",
        "[1]\n",
        "{\"question\": \"a\", \"answer\": \"no mark\"}\n",
    ] {
        fs::write(&broken, row.repeat(16) + bad + &row.repeat(3)).unwrap();
        let out = folder.path().join("run");
        for (first, second) in [(&broken, &good), (&good, &broken)] {
            let files = [
                format!("task.train_file={}", first.display()),
                format!("task.validation_file={}", second.display()),
            ];
            let sets = ["task.name=gsm8k", "cold_start.steps=0", &files[0], &files[1]];
            refused(&mut train(&out, &sets), &["broken.jsonl", "row 17"]);
            assert!(!out.exists());
        }
        // The same row as a demonstration of the cold start.
        let file = format!("cold_start.train_file={}", broken.display());
        refused(&mut train(&out, &[&file]), &["broken.jsonl", "row 1"]);
        assert!(!out.exists());
    }
}

#[test]
fn a_run_that_exists_is_not_overwritten() {
    let (folder, [out]) = scratch(["run"]);
    fs::create_dir(&out).unwrap();
    for name in ["recipe.toml", "metrics.jsonl"] {
        fs::copy(baseline().join(name), out.join(name)).unwrap();
    }
    refused(&mut small(&out, &[]), &["already contains a run", "--resume", "--out"]);
    refused(&mut resumed(&out, &["train.seed=7"]), &["train.seed", "recipe.toml"]);
    let words = ["rollout.temperature", "policy.clip_low"];
    refused(&mut resumed(&out, &["rollout.temperature=0.5", "policy.clip_low=0.1"]), &words);
    for name in ["recipe.toml", "metrics.jsonl"] {
        let bytes = |folder: &Path| fs::read(folder.join(name)).unwrap();
        assert_eq!(bytes(&out), bytes(baseline()), "{name}");
    }
    refused(&mut resumed(&folder.path().join("nothing"), &[]), &["no run to resume"]);
    assert!(!folder.path().join("nothing").exists());
}

#[test]
fn a_folder_that_cannot_be_made() {
    let (_folder, [file]) = scratch(["file"]);
    fs::write(&file, "text").unwrap();
    refused(&mut small(&file.join("run"), &[]), &["file/run", "--out"]);
    refused(&mut small(&file, &[]), &["file", "--out"]);
    assert_eq!(text_of(&file), "text");
}

#[test]
fn a_damaged_checkpoint_names_itself() {
    let (_folder, [out]) = scratch(["run"]);
    done(&mut small(&out, &["train.steps=2", "train.optimizer.schedule_steps=4"]));
    let checkpoint = out.join("checkpoints/step-000002");
    let tensors = checkpoint.join("trainer.safetensors");
    let bytes = fs::read(&tensors).unwrap();
    fs::write(&tensors, &bytes[..bytes.len() / 2]).unwrap();
    refused(&mut resumed(&out, &[]), &["step-000002/trainer.safetensors", "newest intact"]);
    fs::write(checkpoint.join("trainer.json"), "{").unwrap();
    refused(&mut resumed(&out, &[]), &["step-000002/trainer.json", "cold-start-000004"]);
    // The remedy works.
    fs::remove_dir_all(&checkpoint).unwrap();
    done(&mut resumed(&out, &[]));
    assert_same_results(&out, baseline());
}

#[test]
fn control_characters_in_an_error_are_shown_not_obeyed() {
    let (_folder, [recipe]) = scratch(["broken.toml"]);
    fs::write(&recipe, "[train]\n\"\\u001b[2Jsteps\" = 3\n").unwrap();
    let text = super::refused(rloss().arg("train").arg(&recipe), &[]);
    assert!(!text.contains('\u{1b}'), "{text}");
}
