//! What must not change a run's results: time, threads, which log-probabilities the ratio is taken against.

use super::{assert_same_results, baseline, copy_model, done, phase, results, resumed, rloss, rows, small};
use serde_json::Value;
use std::path::Path;
use tempfile::TempDir;

#[test]
fn the_small_run_is_worth_comparing() {
    let rows = rows(baseline());
    let count = |name| phase(&rows, name).count();
    // Cold start: a row before the first step. Evaluations: before training, at 2 and at 4.
    assert_eq!((count("cold_start"), count("rl"), count("eval")), (5, 4, 3));
    assert!(phase(&rows, "rl").any(|row| row["actor/grad_norm"].as_f64().unwrap() > 0.0));
    assert!(phase(&rows, "rl").any(|row| row["tool/answered"].as_f64().unwrap() > 0.0));
}

#[test]
fn the_same_seed_gives_the_same_metrics_with_any_number_of_threads() {
    let folder = TempDir::new().unwrap();
    for threads in ["1", "2", "4"] {
        let out = folder.path().join(threads);
        done(&mut small(&out, &[&format!("parallel.threads={threads}")]));
        assert_same_results(&out, baseline());
    }
}

#[test]
fn another_seed_gives_other_metrics() {
    let folder = TempDir::new().unwrap();
    let out = folder.path().join("run");
    done(&mut small(&out, &["train.seed=1"]));
    assert_ne!(results(&out), results(baseline()));
}

#[test]
fn rollout_and_training_log_probs_are_equal_bit_for_bit() {
    for row in phase(&rows(baseline()), "rl") {
        assert_eq!(row["mismatch/log_ppl_abs_diff_max"].as_f64(), Some(0.0), "{row}");
        assert_eq!(row["mismatch/logprob_abs_diff_max"].as_f64(), Some(0.0), "{row}");
        assert_eq!(row["mismatch/bit_equal_fraction"].as_f64(), Some(1.0), "{row}");
    }
}

#[test]
fn old_log_probs_from_rollout_or_recomputed_change_nothing() {
    let folder = TempDir::new().unwrap();
    for source in ["rollout", "recompute"] {
        let out = folder.path().join(source);
        done(&mut small(&out, &[&format!("policy.old_logprob={source}")]));
        assert_same_results(&out, baseline());
    }
}

#[test]
fn layers_computed_again_change_nothing() {
    let folder = TempDir::new().unwrap();
    let out = folder.path().join("run");
    done(&mut small(&out, &["train.recompute_layers=true"]));
    assert_same_results(&out, baseline());
}

#[test]
fn training_without_sinks_opens_a_gap() {
    let folder = TempDir::new().unwrap();
    let out = folder.path().join("run");
    done(&mut small(&out, &["arms.no_train_sinks=true", "train.steps=2", "cold_start.steps=0"]));
    for row in phase(&rows(&out), "rl") {
        assert!(row["mismatch/log_ppl_abs_diff_max"].as_f64().unwrap() > 1e-3, "{row}");
        assert!(row["mismatch/bit_equal_fraction"].as_f64().unwrap() < 1.0, "{row}");
    }
}

#[test]
fn the_resolved_recipe_is_the_same_run() {
    let folder = TempDir::new().unwrap();
    let out = folder.path().join("run");
    let recipe = baseline().join("recipe.toml");
    // From another working directory: the resolved recipe's paths are absolute.
    done(rloss().current_dir(&folder).arg("train").arg(&recipe).arg("--out").arg(&out));
    assert_same_results(&out, baseline());
    assert_eq!(
        std::fs::read_to_string(out.join("recipe.toml")).unwrap(),
        std::fs::read_to_string(recipe).unwrap()
    );
}

#[test]
fn a_checkpoint_loads_as_the_model_that_went_on() {
    let folder = TempDir::new().unwrap();
    let (run, copy, again) =
        (folder.path().join("run"), folder.path().join("copy"), folder.path().join("again"));
    done(&mut small(&run, &["checkpoint.dtype=f32", "checkpoint.keep=9"]));
    // The model alone: the files of a resumable checkpoint stay behind.
    copy_model(&run.join("checkpoints/cold-start-000004"), &copy);
    let model = format!("model.path={}", copy.display());
    done(&mut small(&again, &[&model, "cold_start.steps=0"]));
    let without_cold_start =
        |run| -> Vec<Value> { results(run).into_iter().filter(|row| row["phase"] != "cold_start").collect() };
    assert_eq!(without_cold_start(&again), without_cold_start(&run));
    assert_eq!(sampled(&again, "eval-000000"), sampled(&run, "eval-000000"));
}

/// Tokens and log-probabilities of the trajectories in a file.
fn sampled(run: &Path, name: &str) -> Vec<(Value, Value)> {
    let text = std::fs::read_to_string(run.join(format!("trajectories/{name}.jsonl"))).unwrap();
    let row = |line| -> Value { serde_json::from_str(line).unwrap() };
    text.lines().map(row).map(|row| (row["tokens"].clone(), row["logprobs"].clone())).collect()
}

#[test]
fn frozen_experts_survive_a_checkpoint_in_mxfp4_to_the_bit() {
    let folder = TempDir::new().unwrap();
    let (straight, broken) = (folder.path().join("straight"), folder.path().join("broken"));
    let sets =
        ["checkpoint.dtype=mxfp4", "train.freeze=[\"*experts*\"]", "train.optimizer.schedule=constant"];
    done(&mut small(&straight, &sets));
    let half: Vec<&str> = sets.iter().copied().chain(["train.steps=2"]).collect();
    done(&mut small(&broken, &half));
    done(&mut resumed(&broken, &sets));
    let rl = |run: &Path| phase(&results(run), "rl").cloned().collect::<Vec<_>>();
    assert_eq!(rl(&broken), rl(&straight));
}
