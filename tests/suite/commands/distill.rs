//! Distillation through the binary.

use super::refused::refused;
use super::*;
use crate::tiny;
use rloss::actor::forward_backward::Pass;
use rloss::actor::micro_batch::MicroBatch;
use rloss::metrics::Console;
use rloss::recipe::resolve;
use rloss::run::memory::{AvailableMemory, MemoryPlan, ModelCommand};
use rloss::run::startup::Startup;

/// Reinforcement learning alone, at one learning rate whatever the number of steps.
const RL: [&str; 5] = [
    "cold_start.steps=0",
    "eval.every_steps=0",
    "eval.before_training=false",
    "train.optimizer.schedule=constant",
    "checkpoint.every_steps=2",
];

fn divergences(run: &Path) -> Vec<f64> {
    phase(&rows(run), "rl").map(|row| number(row, "actor/distill_kl")).collect()
}

/// Random weights learn from a trained model: on any number of threads, and after an interruption, with the
/// same metrics.
#[test]
fn a_teacher_lowers_the_divergence_and_a_resumed_run_has_the_same_metrics() {
    let folder = TempDir::new().unwrap();
    let run = |name: &str| folder.path().join(name);
    copy_model(&first_checkpoint(warm_model()), &run("teacher"));
    let teacher = format!("policy.distill.teacher={}", run("teacher").display());
    let common = [
        &teacher,
        "policy.distill.policy_loss_coefficient=0",
        "rollout.prompts_per_step=4",
        "rollout.samples_per_prompt=1",
        "train.optimizer.lr=3e-3",
    ];
    let sets = |more: &[&'static str]| [&RL[..], &common, more].concat();
    let straight = ["train.steps=6", "parallel.threads=2"];
    let told = done(&mut train(&run("straight"), &sets(&straight))).stderr;
    assert!(!told.contains("different rewards"), "a group of one has the teacher's signal: {told}");
    done(&mut train(&run("one_thread"), &sets(&["train.steps=6", "parallel.threads=1"])));
    assert_same_results(&run("one_thread"), &run("straight"));
    done(&mut train(&run("broken"), &sets(&["train.steps=4", "parallel.threads=2"])));
    done(train(&run("broken"), &sets(&straight)).arg("--resume"));
    assert_same_results(&run("broken"), &run("straight"));
    assert_no_gap(&run("straight"));
    let divergences = divergences(&run("straight"));
    assert!(divergences[5] < 0.85 * divergences[0], "{divergences:?}");
    let rows = rows(&run("straight"));
    assert!(phase(&rows, "rl").all(|row| row.get("actor/pg_loss").is_none()));
    // Another model in the teacher's folder would change the metrics of the rest of the run.
    let weights = "model.safetensors";
    fs::copy(first_checkpoint(&run("straight")).join(weights), run("teacher").join(weights)).unwrap();
    let further = sets(&["train.steps=7", "parallel.threads=2"]);
    refused(
        train(&run("straight"), &further).arg("--resume"),
        &["policy.distill.teacher: ", "holds another model now than at the start of the run; restore it"],
    );
}

/// The policy at the start of the run, under another system prompt, beside the policy loss.
#[test]
fn the_policy_teaches_itself_under_another_system_prompt() {
    let folder = TempDir::new().unwrap();
    let run = |name: &str| folder.path().join(name);
    let sets = [
        "task.name=arithmetic_single",
        "rollout.prompt_tokens_max=64",
        "rollout.response_tokens_max=24",
        "rollout.turns_max=1",
        "train.minibatches=2",
        "policy.old_logprob=rollout",
        "policy.distill.system_prompt=Be brief.",
        "policy.distill.coefficient=0.1",
    ];
    let sets = [&RL[..], &sets].concat();
    assert_resumes(&run("straight"), &run("broken"), &sets, &["train.steps=2"]);
    assert!(run("straight/reference.safetensors").exists());
    assert_no_gap(&run("straight"));
    assert!(divergences(&run("straight")).iter().all(|kl| *kl > 0.0));
    // An adapter needs no copy: its teacher is the model without it.
    done(&mut small(&run("adapter"), &[&sets[..], &["adapter.rank=4", "train.steps=2"]].concat()));
    assert!(!run("adapter/reference.safetensors").exists());
    assert!(divergences(&run("adapter")).iter().all(|kl| *kl > 0.0));
}

/// Opens the quickstart's model with `warm_model` as teacher, for `available` bytes of memory. Returns the
/// planned peak, the warnings, and the teacher's rows for some sequences.
fn teacher_rows(available: Option<u64>) -> (u64, Vec<String>, Vec<f32>) {
    let text = format!(
        "task.name = \"arithmetic_single\"\n[policy.distill]\nteacher = {:?}\n",
        warm_model().display().to_string()
    );
    let plan = resolve(Path::new("r.toml"), &text, &[]).unwrap();
    let console = Console::silent();
    let mut startup = Startup::open(plan, ModelCommand::Train, &console).unwrap();
    let available = available.map(|bytes| AvailableMemory { bytes, limit: String::new() });
    startup.choose_sharding(1, available.as_ref());
    let peak = MemoryPlan::new(&startup.memory_plan_input()).peak_bytes();
    let started = startup.load(&console).unwrap();
    let teacher = &started.loaded.teacher.as_ref().unwrap().actor;
    let weights = &teacher.parameters.pass_weights(None).unwrap();
    let batch = &MicroBatch::split(&tiny::sequences(272, &[40, 30], 4), 1000)[0];
    let settings = tiny::pass_settings(1.0, 0.0);
    let model = &teacher.model;
    let pass = Pass { model, weights, batch, settings, recompute_layers: false, teacher: None };
    (peak, started.environment.plan.warnings.clone(), tiny::values(&pass.teacher_rows().unwrap().h))
}

#[test]
fn a_teacher_stays_on_disk_if_memory_is_short_and_gives_the_same_bits() {
    let (peak, warnings, rows) = teacher_rows(None);
    let is_on_disk =
        |warnings: &[String]| warnings.iter().any(|warning| warning.contains("the teacher's weights"));
    assert!(!is_on_disk(&warnings), "{warnings:?}");
    let (peak_on_disk, warnings, rows_on_disk) = teacher_rows(Some(peak / 2));
    assert!(is_on_disk(&warnings), "{warnings:?}");
    assert!(peak_on_disk < peak, "{peak_on_disk} {peak}");
    assert_eq!(rows_on_disk, rows);
}

#[test]
fn a_teacher_that_does_not_fit_is_refused_before_the_run() {
    let (folder, [out]) = scratch(["run"]);
    let recipe = folder.path().join("distill.toml");
    let warm = warm_model().display();
    let warm = format!("teacher = \"{warm}\"");
    let text = |teacher: &str| format!("[policy.distill]\n{teacher}\n");
    for (text, words) in [
        (
            text("teacher = \"nowhere\""),
            &[
                "distill.toml:2: policy.distill.teacher: no folder and no GGUF file at",
                "nowhere; name a model's folder",
            ][..],
        ),
        (
            text("teacher = \"src\""),
            &["distill.toml:2: policy.distill.teacher", "has neither config.json nor a run's checkpoints"],
        ),
        (
            format!("{}[model.architecture]\nmodel_type = \"qwen2\"\n", text(&warm)),
            &[
                "distill.toml:2: policy.distill.teacher",
                "another vocabulary than the policy: id ",
                "name a teacher",
            ],
        ),
        (
            text("system_prompt = \"Be brief.\""),
            &[
                "distill.toml:2: policy.distill.system_prompt: the teacher's context has 160 tokens",
                "lower rollout",
            ],
        ),
    ] {
        fs::write(&recipe, &text).unwrap();
        refused(rloss().arg("train").arg(&recipe).arg("--out").arg(&out), words);
        assert!(!out.exists(), "{text}");
    }
}
