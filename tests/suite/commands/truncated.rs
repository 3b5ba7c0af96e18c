//! Training on tokens that were drawn with top-p, top-k or min-p.

use super::*;

/// Reinforcement learning alone, at one learning rate whatever the number of steps.
const RL: [&str; 5] = [
    "cold_start.steps=0",
    "train.steps=3",
    "eval.every_steps=0",
    "eval.before_training=false",
    "train.optimizer.schedule=constant",
];
const TOP_P: &str = "rollout.top_p=0.9";
const TOP_K: &str = "rollout.top_k=20";
const MIN_P: &str = "rollout.min_p=0.05";

fn sets<'a>(more: &[&'a str]) -> Vec<&'a str> {
    RL.iter().chain(more).copied().collect()
}

/// A change of a row's sets.
type Change<'a> = &'a dyn Fn(&mut Value);

/// Asserts that rollout and training agree to the bit in every step, over sets of tokens.
fn assert_no_gap(run: &Path, what: &str) {
    println!("{what}");
    super::assert_no_gap(run);
    let rows = rows(run);
    assert!(phase(&rows, "rl").count() > 0);
    for row in phase(&rows, "rl") {
        assert!(number(row, "kept_tokens/min") >= 1.0 && number(row, "kept_tokens/mean") < 272.0, "{row}");
    }
    assert!(phase(&rows, "rl").any(|row| number(row, "actor/grad_norm") > 0.0), "{what}: nothing is learned");
}

#[test]
fn truncated_samples_have_no_gap_and_give_the_same_metrics_on_any_number_of_threads() {
    let folder = TempDir::new().unwrap();
    for (name, more) in
        [("top_p", &[TOP_P][..]), ("top_k", &[TOP_K]), ("min_p", &[MIN_P]), ("all", &[TOP_P, TOP_K, MIN_P])]
    {
        // From random weights the kept sets are large; the warm model's are small.
        let more = [more, &["rollout.temperature=1.3"]].concat();
        let out = |threads: usize| folder.path().join(format!("{name}-{threads}"));
        for threads in 1..=3 {
            let threads_key = format!("parallel.threads={threads}");
            done(&mut small(&out(threads), &sets(&[&more[..], &[&threads_key]].concat())));
            assert_same_results(&out(threads), &out(1));
        }
        assert_no_gap(&out(1), name);
    }
}

#[test]
fn large_sets_of_random_weights_have_no_gap() {
    let (_folder, [out]) = scratch(["run"]);
    let more = ["rollout.prompts_per_step=2", "rollout.samples_per_prompt=4", "parallel.threads=2", TOP_P];
    done(&mut train(&out, &sets(&more)));
    for row in phase(&rows(&out), "rl") {
        assert_eq!(number(row, "mismatch/logprob_abs_diff_max"), 0.0, "{row}");
        assert!(number(row, "kept_tokens/mean") > 20.0, "{row}");
    }
}

#[test]
fn several_updates_a_step_and_a_reference_keep_every_ratio_finite_and_resume_to_the_same_metrics() {
    let folder = TempDir::new().unwrap();
    let run = |name: &str| folder.path().join(name);
    let more = [
        TOP_P,
        "rollout.temperature=1.3",
        "train.minibatches=4",
        "train.optimizer.lr=1e-3",
        "policy.kl.place=loss",
        "policy.entropy_coefficient=0.01",
        "checkpoint.every_steps=1",
    ];
    for source in ["rollout", "recompute"] {
        let source_key = format!("policy.old_logprob={source}");
        done(&mut small(&run(source), &sets(&[&more[..], &[&source_key]].concat())));
    }
    assert_same_results(&run("recompute"), &run("rollout"));
    assert_no_gap(&run("rollout"), "four updates a step");
    for row in phase(&rows(&run("rollout")), "rl") {
        for (key, value) in row.as_object().unwrap() {
            assert!(!value.is_null() && value.as_f64().is_none_or(f64::is_finite), "{key} in {row}");
        }
        assert_ne!(number(row, "actor/ppo_kl"), 0.0, "the updates move the policy: {row}");
    }
    let rollout = [&more[..], &["policy.old_logprob=rollout"]].concat();
    done(&mut small(&run("broken"), &sets(&[&rollout[..], &["train.steps=1"]].concat())));
    done(&mut resumed(&run("broken"), &sets(&rollout)));
    assert_same_results(&run("broken"), &run("rollout"));
}

#[test]
fn check_mismatch_finds_truncated_samples_equal_and_an_ablation_different() {
    let (_folder, [out]) = scratch(["out"]);
    let model = model_path(warm_model());
    let mut command = rloss();
    command.args(["check-mismatch", "quickstart", "--arms", "no_train_sinks", "--out"]).arg(&out);
    command.sets([&model, "rollout.prompts_per_step=2", "rollout.samples_per_prompt=2", TOP_P, MIN_P]);
    assert_has(&done(&mut command).stdout, &["rollout and training are bitwise equal on"]);
    assert_has(&text_of(out.join("mismatch.json")), &["sinks missing"]);

    // Only the search of the engine's file had a limit.
    command.args(["--search-minutes", "0"]);
    done(&mut command);
    assert_has(&text_of(out.join("mismatch.json")), &["training: differs: the search ended early"]);
}

#[test]
fn stored_trajectories_train_over_their_own_sets_and_damaged_ones_are_refused() {
    let (_folder, [rollout, out, against, bad, never]) =
        scratch(["rollout", "run", "against", "bad.jsonl", "never"]);
    let model = model_path(warm_model());
    let mut command = rloss();
    command.args(["rollout", "quickstart", "--out"]).arg(&rollout);
    done(command.sets([&model, "rollout.prompts_per_step=2", "rollout.samples_per_prompt=4", TOP_P]));
    let file = rollout.join("trajectories/step-000001.jsonl");
    let stored = format!("train.trajectories={}", file.display());
    done(&mut small(&out, &sets(&[&stored, "train.steps=1"])));
    assert_no_gap(&out, "stored trajectories");

    // The file's log-probs are compared over its own sets.
    let mut command = rloss();
    command.args(["check-mismatch", "quickstart", "--set", &model, "--against"]);
    let text = done(command.arg(&file).arg("--out").arg(against)).stdout;
    assert!(!text.contains("after top-p"), "{text}");

    let mut row = json_lines(&file).swap_remove(0);
    let sampled = row["mask"].as_array().unwrap().iter().position(|mask| *mask == true).unwrap();
    let changes: [(Change, &str); 4] = [
        (&|kept| drop(kept.as_array_mut().unwrap().pop()), "`kept_tokens` has"),
        (&|kept| kept[sampled] = "?".into(), "is not a set of tokens"),
        // The set {0}, which a sampled token is not in.
        (&|kept| kept[sampled] = "AQE=".into(), "does not contain the sampled token"),
        // All ids below 2^20: more than the model has.
        (&|kept| kept[sampled] = "AACAgEA=".into(), "not below 272"),
    ];
    let whole = row["kept_tokens"].clone();
    for (change, words) in changes {
        row["kept_tokens"] = whole.clone();
        change(&mut row["kept_tokens"]);
        fs::write(&bad, format!("{row}\n")).unwrap();
        let stored = format!("train.trajectories={}", bad.display());
        refused(&mut small(&never, &sets(&[&stored])), &["bad.jsonl: line 1", words]);
    }
}

#[test]
fn a_gpu_does_not_train_on_truncated_samples_and_names_the_keys() {
    let (_folder, [out]) = scratch(["run"]);
    let gpu = ["device=cuda", "model.dtype=bf16", "model.architecture.head_dim=64"];
    let refusal = |more: &[&str]| refused(&mut train(&out, &[&gpu[..], more].concat()), &[]);
    let remedy = "write 1, rollout.min_p = 0, or use the CPU";
    let words = ["rollout.top_p: no GPU kernel computes training's log-probs", remedy];
    assert_has(&refusal(&[TOP_P, MIN_P]), &words);
    assert!(!refusal(&["eval.top_p=0.9"]).contains("no GPU kernel"));
}
