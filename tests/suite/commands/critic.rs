//! Runs with a critic: what must not change their results, what the warm-up leaves alone, what a
//! checkpoint holds.

use super::*;

/// A critic that learns fast enough to be seen, several updates a step, and a warm-up of one step.
const GAE: [&str; 11] = [
    "policy.advantage=gae",
    "policy.old_logprob=rollout",
    "train.minibatches=2",
    "train.epochs=2",
    "critic.warmup_steps=1",
    "critic.minibatches=2",
    "critic.epochs=2",
    "critic.lambda=0.9",
    "critic.value_clip=0.05",
    "critic.optimizer.lr=3e-3",
    "critic.freeze=[\"*.sinks\"]",
];

fn with<'a>(sets: &[&'a str]) -> Vec<&'a str> {
    GAE.iter().chain(sets).copied().collect()
}

/// The run that others are compared with.
fn straight() -> &'static Path {
    static STRAIGHT: Shared = OnceLock::new();
    shared(&STRAIGHT, "straight", |out| drop(done(&mut small(out, &GAE))))
}

#[test]
fn the_run_with_a_critic_is_worth_comparing() {
    let rows = rows(straight());
    for (step, row) in phase(&rows, "rl").enumerate() {
        for key in ["critic/vf_loss", "critic/grad_norm", "critic/lr"] {
            assert!(number(row, key) > 0.0, "{key}");
        }
        for key in ["critic/values/mean", "critic/returns/mean", "critic/vf_clipfrac"] {
            assert!(number(row, key).is_finite(), "{key}");
        }
        let updates = row["actor/updates"].as_f64();
        assert_eq!(updates, (step > 0).then_some(4.0), "step {}", step + 1);
    }
    assert!(phase(&rows, "rl").any(|row| number(row, "critic/vf_clipfrac") > 0.0));
    assert!(phase(&rows, "rl").any(|row| row["critic/vf_explained_var"].as_f64().is_some()));
}

#[test]
fn threads_and_layers_computed_again_change_nothing() {
    let folder = TempDir::new().unwrap();
    for (name, set) in [("threads", "parallel.threads=1"), ("recompute", "train.recompute_layers=true")] {
        let out = folder.path().join(name);
        done(&mut small(&out, &with(&[set])));
        assert_same_results(&out, straight());
    }
}

#[test]
fn a_resumed_run_goes_on_with_its_critic() {
    for dtype in ["bf16", "f32"] {
        let (_folder, [whole, broken]) = scratch(["whole", "broken"]);
        let dtype = format!("model.dtype={dtype}");
        let constant =
            with(&[&dtype, "train.optimizer.schedule=constant", "critic.optimizer.schedule=constant"]);
        assert_resumes(&whole, &broken, &constant, &["train.steps=2"]);
        // To the last bit of weights and moments, policy and critic.
        for file in ["trainer.safetensors", "critic.safetensors"] {
            let read = |run: &Path| fs::read(run.join("checkpoints/step-000004").join(file)).unwrap();
            assert!(read(&broken) == read(&whole), "{file}");
        }
    }
}

#[test]
fn a_checkpoint_without_its_critic_is_refused() {
    let (_folder, [out]) = scratch(["run"]);
    let constant = with(&["train.optimizer.schedule=constant"]);
    done(&mut small(&out, &[&constant[..], &["train.steps=2"]].concat()));
    fs::remove_file(out.join("checkpoints/step-000002/critic.safetensors")).unwrap();
    let words = ["critic.safetensors: damaged: cannot be read", "cold-start-000004; to continue from it"];
    refused(&mut resumed(&out, &constant), &words);
}

#[test]
fn the_warm_up_leaves_the_policy_as_it_is() {
    let (_folder, [out]) = scratch(["run"]);
    let sets = with(&["critic.warmup_steps=2", "checkpoint.keep=9", "checkpoint.every_steps=1"]);
    done(&mut small(&out, &sets));
    let read = |name: &str, file: &str| fs::read(out.join("checkpoints").join(name).join(file)).unwrap();
    let model = |name: &str| read(name, "model.safetensors");
    assert!(model("step-000001") == model("cold-start-000004"));
    assert!(model("step-000002") == model("cold-start-000004"));
    assert!(model("step-000003") != model("step-000002"));
    let critic = |name: &str| read(name, "critic.safetensors");
    assert!(critic("step-000001") != critic("step-000002"));
    let rows = rows(&out);
    let evals: Vec<f64> =
        phase(&rows, "eval").map(|row| number(row, "val-core/arithmetic/acc/mean@1")).collect();
    assert_eq!(evals[0], evals[1]);
    let learned: Vec<bool> = phase(&rows, "rl").map(|row| row.get("actor/grad_norm").is_some()).collect();
    assert_eq!(learned, [false, false, true, true]);
}

#[test]
fn a_pattern_that_freezes_nothing_of_the_critic_is_refused_before_any_work() {
    let (_folder, [out]) = scratch(["run"]);
    for (pattern, reason) in [
        ("critic.freeze=[\"lm_head.weight\"]", "matches no parameter"),
        ("critic.freeze=[\"*\"]", "every parameter is frozen"),
    ] {
        refused(&mut small(&out, &with(&[pattern])), &["critic.freeze: ", reason]);
        assert!(!out.exists());
    }
}
