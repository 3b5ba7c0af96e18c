//! Runs with an adapter: what a checkpoint holds, how it goes on, what its base must be, and what is
//! exported.

use super::*;

/// Reinforcement learning alone, of an adapter that learns fast enough to be seen.
pub(super) const LORA: [&str; 6] = [
    "cold_start.steps=0",
    "adapter.rank=3",
    "adapter.alpha=12.0",
    "train.optimizer.lr=2e-2",
    "train.optimizer.schedule=constant",
    "logging.trajectories_per_step=4",
];

fn with<'a>(sets: &[&'a str]) -> Vec<&'a str> {
    LORA.iter().chain(sets).copied().collect()
}

/// The run that others are compared with.
fn straight() -> &'static Path {
    static STRAIGHT: Shared = OnceLock::new();
    shared(&STRAIGHT, "straight", |out| drop(done(&mut small(out, &LORA))))
}

fn newest(run: &Path) -> PathBuf {
    run.join("checkpoints/step-000004")
}

fn stdout(command: &mut Command) -> String {
    done(command).stdout
}

/// The base of the runs, by itself.
fn base() -> PathBuf {
    first_checkpoint(warm_model())
}

#[test]
fn a_checkpoint_holds_the_adapter_and_never_the_base() {
    let rows = rows(straight());
    let steps: Vec<_> = phase(&rows, "rl").collect();
    assert_eq!(steps.len(), 4);
    for row in &steps {
        assert_eq!(row["mismatch/log_ppl_abs_diff_max"], 0.0);
    }
    assert!(steps.iter().any(|row| row["actor/grad_norm"].as_f64().unwrap() > 0.0));
    let names: Vec<String> = fs::read_dir(newest(straight()))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    for name in ["adapter_config.json", "adapter_model.safetensors", "base.json", "trainer.safetensors"] {
        assert!(names.iter().any(|found| found == name), "{name} is not in {names:?}");
    }
    assert!(!names.iter().any(|name| name.starts_with("model")), "{names:?}");
    let bytes = |folder: &Path, name: &str| fs::metadata(folder.join(name)).unwrap().len();
    let weights = bytes(&base(), "model.safetensors");
    assert!(bytes(&newest(straight()), "trainer.safetensors") < weights);
    assert!(!straight().join("base").exists(), "the base is where the recipe says");
}

#[test]
fn a_resumed_run_is_the_same_to_the_last_bit() {
    for sets in [&[][..], &["model.dtype=bf16"], &["policy.kl.place=loss"]] {
        let (_folder, [whole, broken]) = scratch(["whole", "broken"]);
        assert_resumes(&whole, &broken, &with(sets), &["train.steps=2"]);
        for file in ["adapter_model.safetensors", "trainer.safetensors"] {
            let read = |run: &Path| fs::read(newest(run).join(file)).unwrap();
            assert!(read(&broken) == read(&whole), "{sets:?}: {file}");
        }
    }
}

#[test]
fn bug_a_run_that_starts_from_an_adapter_resumes() {
    let (_folder, [whole, broken]) = scratch(["whole", "broken"]);
    let path = format!("model.path={}", base().display());
    let adapter = format!("model.adapter={}", newest(straight()).display());
    let sets = with(&[&path, &adapter]);
    done(&mut small(&whole, &sets));
    done(&mut small(&broken, &[&sets[..], &["train.steps=2"]].concat()));
    done(rloss().arg("train").arg(&broken).args(["--resume", "--set", "train.steps=4"]));
    assert_same_results(&broken, &whole);
    let read = |run: &Path| fs::read(newest(run).join("adapter_model.safetensors")).unwrap();
    assert!(read(&broken) == read(&whole));
    let other = format!("model.adapter={}", newest(&whole).display());
    refused(&mut resumed(&broken, &with(&[&path, &other])), &["other values of model.adapter"]);
}

#[test]
fn bug_a_run_resumes_after_its_base_moved_and_its_first_adapter_is_gone() {
    let folder = TempDir::new().unwrap();
    let [first, adapter, moved, out] =
        ["base", "adapter", "moved", "run"].map(|name| folder.path().join(name));
    copy_model(&base(), &first);
    copy_folder(&newest(straight()), &adapter);
    let path = model_path(&first);
    let start = format!("model.adapter={}", adapter.display());
    done(&mut small(&out, &with(&[&path, &start, "train.steps=1"])));
    fs::rename(&first, &moved).unwrap();
    fs::remove_dir_all(&adapter).unwrap();
    let path = model_path(&moved);
    done(rloss().arg("train").arg(&out).args(["--resume", "--set", "train.steps=2", "--set", &path]));
    done(rloss().arg("train").arg(&out).args(["--resume", "--set", "train.steps=3"]));
    assert_eq!(phase(&rows(&out), "rl").count(), 3);
    done(rloss().arg("eval").arg(&out).args(["--set", "eval.problems_max=4"]));
}

/// The base alone was evaluated, without a word.
#[test]
fn bug_a_base_that_is_named_by_its_runs_folder_keeps_the_adapter() {
    let folder = TempDir::new().unwrap();
    let [mut base_run, moved, out, eval] =
        ["sft", "moved", "run", "eval"].map(|name| folder.path().join(name));
    fs::create_dir_all(base_run.join("checkpoints")).unwrap();
    copy_folder(&base(), &base_run.join("checkpoints").join(base().file_name().unwrap()));
    let path = model_path;
    done(&mut small(&out, &with(&[&path(&base_run), "train.steps=1"])));
    fs::rename(&base_run, &moved).unwrap();
    base_run = moved;
    let sets = ["--set", "eval.problems_max=4", "--set", &path(&base_run), "--out"];
    done(rloss().arg("eval").arg(&out).args(sets).arg(&eval));
    let recipe = text_of(eval.join("recipe.toml"));
    let adapter = out.join("checkpoints/step-000001");
    assert!(recipe.contains(&format!("adapter = \"{}\"", adapter.display())), "{recipe}");
    done(rloss().arg("train").arg(&out).args([
        "--resume",
        "--set",
        "train.steps=2",
        "--set",
        &path(&base_run),
    ]));
}

#[test]
fn bug_an_adapter_that_a_user_names_for_a_run_is_not_ignored() {
    let (_folder, [run]) = scratch(["run"]);
    done(&mut small(&run, &["cold_start.steps=0", "train.steps=1", "checkpoint.every_steps=1"]));
    let adapter = format!("model.adapter={}", straight().display());
    // The run has other weights than the adapter's base.
    refused(rloss().arg("eval").arg(&run).args(["--set", &adapter]), &["was trained on another base"]);
}

/// Results of the run's earlier checkpoint were taken for those of its last one.
#[test]
fn bug_a_run_that_model_adapter_names_is_its_last_checkpoint() {
    let (_folder, [out]) = scratch(["out"]);
    let sets =
        [format!("model.path={}", base().display()), format!("model.adapter={}", straight().display())];
    let mut command = rloss();
    command.arg("rollout").arg(quickstart()).arg("--out").arg(&out);
    command.args(["--set", "rollout.prompts_per_step=1", "--set", &sets[0], "--set", &sets[1]]);
    done(&mut command);
    let recipe = text_of(out.join("recipe.toml"));
    assert!(recipe.contains(&format!("adapter = \"{}\"", newest(straight()).display())), "{recipe}");
}

#[test]
fn a_critic_and_a_reference_beside_the_adapter_keep_the_gap_at_0_and_resume() {
    let folder = TempDir::new().unwrap();
    let sets = with(&[
        "policy.advantage=gae",
        "policy.kl.place=loss",
        "policy.kl.estimator=k3",
        "critic.optimizer.lr=1e-2",
        "critic.optimizer.schedule=constant",
    ]);
    let (whole, broken) = (folder.path().join("whole"), folder.path().join("broken"));
    assert_resumes(&whole, &broken, &sets, &["train.steps=2"]);
    let rows = rows(&whole);
    let steps: Vec<_> = phase(&rows, "rl").collect();
    assert!(steps.iter().all(|row| row["mismatch/log_ppl_abs_diff_max"] == 0.0));
    // At the first step the adapter is 0, and the model is its own reference.
    assert_eq!(steps[0]["actor/kl_loss"], 0.0);
    assert!(steps[3]["actor/kl_loss"].as_f64().unwrap() > 0.0);
    assert!(steps.iter().all(|row| row["critic/grad_norm"].as_f64().unwrap() > 0.0));
    let bytes = |name: &str| fs::metadata(newest(&whole).join(name)).unwrap().len();
    assert!(
        bytes("critic.safetensors") < 2 * bytes("trainer.safetensors"),
        "the critic's trunk is not in it"
    );
}

#[test]
fn a_cold_start_of_the_whole_model_leaves_the_base_in_the_run() {
    let (folder, [whole, broken]) = scratch(["whole", "broken"]);
    // From random weights.
    let sets = [
        "cold_start.steps=4",
        "cold_start.batch_size=4",
        "cold_start.optimizer.warmup_steps=1",
        "adapter.rank=2",
        "adapter.cold_start=false",
        "train.steps=2",
        "eval.problems_max=8",
        "eval.every_steps=1",
        "checkpoint.every_steps=1",
        "rollout.prompts_per_step=2",
        "rollout.samples_per_prompt=2",
        "train.optimizer.schedule=constant",
    ];
    done(&mut train(&whole, &sets));
    let half = [&sets[..], &["train.steps=1"]].concat();
    done(&mut train(&broken, &half));
    // Moved with all that is in it.
    let moved = folder.path().join("moved");
    fs::rename(&broken, &moved).unwrap();
    done(train(&moved, &sets).arg("--resume"));
    assert_same_results(&moved, &whole);
    // A pattern that matches only the base, which the warm-up trained, is no mistake after the warm-up.
    let frozen = [&sets[..], &["train.freeze=[\"*.mlp.router.*\"]"]].concat();
    let run = folder.path().join("frozen");
    done(&mut train(&run, &[&frozen[..], &["train.steps=1"]].concat()));
    done(train(&run, &frozen).arg("--resume"));
    let eval = |run: &Path| stdout(rloss().args(["eval", "--set", "eval.problems_max=4"]).arg(run));
    assert!(eval(&moved).contains("4 problems"));
    done(rloss().arg("verify").arg(&moved));
    let weights = moved.join("base/model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&weights, bytes).unwrap();
    refused(rloss().arg("verify").arg(&moved), &[]);
    refused(train(&moved, &sets).arg("--resume"), &["model.safetensors", "damaged"]);
}

#[test]
fn a_base_is_known_by_its_files_and_found_where_model_path_says() {
    let (folder, [first, out]) = scratch(["base", "run"]);
    copy_model(&base(), &first);
    let path = model_path(&first);
    let half = with(&[&path, "train.steps=2"]);
    let sets = with(&[&path]);
    done(&mut small(&out, &half));
    let moved = folder.path().join("moved");
    fs::rename(&first, &moved).unwrap();
    let words = ["model.path: no folder and no GGUF file at", "set model.path to a folder"];
    refused(&mut resumed(&out, &sets), &words);
    refused(rloss().arg("eval").arg(&out), &words);
    // Another one of the same shape.
    let other = folder.path().join("other");
    copy_folder(&moved, &other);
    let weights = other.join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let last = bytes.len() - 3;
    bytes[last] ^= 1;
    fs::write(&weights, bytes).unwrap();
    let path = model_path(&other);
    let words = ["its base was changed", "the adapter was trained with another config or other weights"];
    refused(&mut resumed(&out, &with(&[&path])), &words);
    let eval = |model: &str| {
        let mut command = rloss();
        command.arg("eval").arg(&out).args(["--set", model, "--set", "eval.problems_max=4"]);
        command
    };
    refused(&mut eval(&path), &["was trained on another base"]);
    let path = model_path(&moved);
    done(&mut eval(&path));
    // It is the run's adapter that was evaluated.
    assert_has(&text_of(out.join("eval/step-000002/sampling.json")), &["adapter_model.safetensors"]);
    done(&mut resumed(&out, &with(&[&path])));
    assert_same_results(&out, straight());
}

#[test]
fn an_exported_adapter_is_the_checkpoints_and_a_merged_model_computes_the_same() {
    let (folder, [alone, merged]) = scratch(["adapter", "merged"]);
    let export = |out: &Path, more: &[&str]| {
        let mut command = rloss();
        command.arg("export").arg(straight()).arg("--out").arg(out).args(more);
        command
    };
    assert!(stdout(&mut export(&alone, &[])).contains("in PEFT's form"));
    for file in ["adapter_model.safetensors", "adapter_config.json", "base.json"] {
        assert!(
            fs::read(alone.join(file)).unwrap() == fs::read(newest(straight()).join(file)).unwrap(),
            "{file}"
        );
    }
    assert_has(&text_of(alone.join("README.md")), &["library_name: peft", "mean reward"]);
    done(rloss().arg("verify").arg(&alone));
    let told = stdout(&mut export(&merged, &["--merged", "--set", "checkpoint.dtype=f32"]));
    assert!(told.contains("% of what training changed"), "{told}");
    assert_has(&text_of(merged.join("README.md")), &["library_name: transformers"]);
    // Programs take an index for a sign of several files.
    assert!(!merged.join("model.safetensors.index.json").exists());
    assert!(merged.join("model.safetensors").is_file());
    let number = |text: &str, after: &str| -> f64 {
        let rest = text.split(after).nth(1).unwrap();
        rest.split_whitespace().next().unwrap().parse().unwrap()
    };
    let in_f32 = number(&told, "change by ");
    assert!(in_f32 > 0.0 && in_f32 < 1e-4, "{told}");
    let rounded = folder.path().join("rounded");
    let told = stdout(&mut export(&rounded, &["--merged"]));
    assert!(told.contains("bf16") && number(&told, "change by ") > in_f32, "{told}");
    let uncompared = folder.path().join("uncompared");
    let told = stdout(&mut export(&uncompared, &["--merged", "--no-compare"]));
    assert!(told.contains("is not measured\n"), "{told}");
    let weights = |folder: &Path| fs::read(folder.join("model.safetensors")).unwrap();
    assert!(weights(&uncompared) == weights(&rounded));
    assert!(!merged.join("adapter_config.json").exists());
    done(rloss().arg("verify").arg(&merged));
    refused(&mut export(&merged, &[]), &["already exists"]);
    let words = ["has no adapter"];
    refused(rloss().arg("export").arg(warm_model()).arg("--out").arg(folder.path().join("none")), &words);
    let (none, deep) = (folder.path().join("none"), folder.path().join("not/there/yet"));
    refused(rloss().args(["export", "quickstart"]).arg("--out").arg(&none), &["has no adapter"]);
    let file = folder.path().join("also/not/there/m.gguf");
    done(rloss().arg("export").arg(straight()).args(["--merged", "--gguf"]).arg(&file));
    assert!(file.is_file());
    assert!(!none.exists());
    // A base that moved is named, as for every other command.
    let moved = format!("model.path={}", base().display());
    done(&mut export(&deep, &["--set", &moved]));
    let read = |folder: &Path| fs::read(folder.join("adapter_model.safetensors")).unwrap();
    assert!(read(&deep) == read(&alone));
    // The exported folder begins another run, on the same base.
    let (model, adapter) =
        (format!("model.path={}", base().display()), format!("model.adapter={}", alone.display()));
    let out = folder.path().join("again");
    done(&mut small(&out, &with(&[&model, &adapter, "train.steps=1"])));
    assert_eq!(phase(&rows(&out), "rl").next().unwrap()["mismatch/log_ppl_abs_diff_max"], 0.0);
}

#[test]
fn what_does_not_fit_is_refused_before_any_work() {
    let (folder, [out]) = scratch(["run"]);
    let run = format!("model.path={}", straight().display());
    let nothing = format!("model.adapter={}", folder.path().display());
    for (sets, words) in [
        (&["adapter.targets=[\"*.conv\"]"][..], &["adapter.targets", "matches no parameter"][..]),
        (&["adapter.targets=[\"q_proj\"]"], &["did you mean \"*.q_proj.*\"?"]),
        (
            &["adapter.targets=[\"all-linear\"]"],
            &["instead of PEFT's \"all-linear\", remove adapter.targets"],
        ),
        (&["adapter.targets=[\"*.router.weight\"]"], &["matches nothing that can have an adapter"]),
        (&["adapter.dropout=0.1"], &["adapter.dropout", "importance ratio"]),
        (&["adapter.rank=0"], &["adapter.rank"]),
        (&["train.freeze=[\"*.nothing\"]"], &["train.freeze", "lora_"]),
        (&["train.freeze=[\"*\"]"], &["every parameter is frozen"]),
        (&[run.as_str(), "adapter.rank=5"], &["has an adapter of rank 3", "requests rank 5"]),
        (&[nothing.as_str()], &["has neither adapter_config.json"]),
    ] {
        refused(&mut small(&out, &with(sets)), words);
        assert!(!out.exists(), "{sets:?}");
    }
}

#[test]
fn check_mismatch_and_rollout_take_the_adapter_of_a_run() {
    let folder = TempDir::new().unwrap();
    let told =
        stdout(rloss().arg("check-mismatch").arg(straight()).arg("--out").arg(folder.path().join("m")));
    assert!(told.contains("are bitwise equal"), "{told}");
    done(rloss().arg("rollout").arg(straight()).arg("--out").arg(folder.path().join("r")));
    let told = stdout(rloss().arg("check").arg(straight()));
    assert!(told.contains("adapter.rank = 3\n"), "{told}");
}

#[test]
fn fifty_updates_with_8_bit_moments_beside_a_packed_base_leave_the_gap_at_0() {
    let (_folder, [packed, out]) = scratch(["packed", "run"]);
    done(&mut small(&packed, &["train.steps=0", "checkpoint.dtype=mxfp4", "checkpoint.keep=1"]));
    let base = packed.join("checkpoints/cold-start-000004");
    let header = fs::read(base.join("model.safetensors")).unwrap();
    assert!(String::from_utf8_lossy(&header[..65536]).contains("gate_up_proj_blocks"));
    let path = model_path(&base);
    let sets = [
        path.as_str(),
        "adapter.rank=16",
        "train.optimizer.kind=adamw_8bit",
        "train.steps=13",
        "train.minibatches=2",
        "train.epochs=2",
        "policy.old_logprob=rollout",
        "policy.advantage=gae",
        "policy.kl.place=loss",
        "critic.optimizer.kind=adamw_8bit",
        "critic.optimizer.lr=1e-2",
        "eval.every_steps=0",
    ];
    done(&mut small(&out, &with(&sets)));
    let rows = rows(&out);
    let updates: f64 = phase(&rows, "rl").map(|row| row["actor/updates"].as_f64().unwrap()).sum();
    assert!(updates >= 50.0, "{updates}");
    for row in phase(&rows, "rl") {
        assert_eq!(row["mismatch/log_ppl_abs_diff_max"], 0.0);
    }
    let state = fs::read(out.join("checkpoints/step-000013/trainer.safetensors")).unwrap();
    assert!(String::from_utf8_lossy(&state[..65536.min(state.len())]).contains("\"U8\""));
}
