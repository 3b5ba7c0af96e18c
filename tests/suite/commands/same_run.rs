//! What must not change a run's results: time, threads, which log-probabilities the ratio is taken against.

use super::{assert_same_results, baseline, copy_folder, done, phase, rloss, rows, small};
use serde_json::Value;
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
    assert_ne!(super::results(&out), super::results(baseline()));
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
fn a_checkpoint_loads_as_the_model_that_was_evaluated() {
    let folder = TempDir::new().unwrap();
    let (run, copy, again) =
        (folder.path().join("run"), folder.path().join("copy"), folder.path().join("again"));
    // Greedy: the samples then do not depend on the step that the seed derives from.
    let sets = ["eval.temperature=0", "checkpoint.dtype=f32"];
    done(&mut small(&run, &sets));
    copy_folder(&run.join("checkpoints/step-000004"), &copy);
    for name in ["trainer.json", "trainer.safetensors"] {
        std::fs::remove_file(copy.join(name)).unwrap();
    }
    let model = format!("model.path={}", copy.display());
    done(&mut small(&again, &[&model, "eval.temperature=0", "cold_start.steps=0", "train.steps=1"]));

    let evaluated = |run: &std::path::Path, step: u64| -> Value {
        let rows = super::results(run);
        let mut row = phase(&rows, "eval").find(|row| row["step"] == step).unwrap().clone();
        row.as_object_mut().unwrap().remove("step");
        row
    };
    assert_eq!(evaluated(&again, 0), evaluated(&run, 4));
    let sampled = |run: &std::path::Path, step: u64| -> Vec<(Value, Value)> {
        let text = std::fs::read_to_string(run.join(format!("trajectories/eval-{step:06}.jsonl"))).unwrap();
        let row = |line| -> Value { serde_json::from_str(line).unwrap() };
        text.lines().map(row).map(|row| (row["tokens"].clone(), row["logprobs"].clone())).collect()
    };
    assert_eq!(sampled(&again, 0), sampled(&run, 4));
    assert_ne!(sampled(&again, 0), sampled(&run, 0), "training changed the model");
}
