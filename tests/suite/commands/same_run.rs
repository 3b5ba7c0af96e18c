//! What must not change a run's results: time, threads, which log-probabilities the ratio is taken against.

use super::*;

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
fn threads_old_log_probs_and_layers_computed_again_change_nothing() {
    for set in [
        "parallel.threads=1",
        "parallel.threads=2",
        "parallel.threads=4",
        "policy.old_logprob=rollout",
        "policy.old_logprob=recompute",
        "train.recompute_layers=true",
    ] {
        println!("{set}");
        let (_folder, [out]) = scratch([set]);
        done(&mut small(&out, &[set]));
        assert_same_results(&out, baseline());
    }
}

#[test]
fn another_seed_gives_other_metrics() {
    let (_folder, [out]) = scratch(["run"]);
    done(&mut small(&out, &["train.seed=1"]));
    assert_ne!(results(&out), results(baseline()));
}

#[test]
fn rollout_and_training_log_probs_are_equal_bit_for_bit() {
    assert_no_gap(baseline());
}

#[test]
fn training_without_sinks_opens_a_gap() {
    let (_folder, [out]) = scratch(["run"]);
    done(&mut small(&out, &["arms.no_train_sinks=true", "train.steps=2", "cold_start.steps=0"]));
    for row in phase(&rows(&out), "rl") {
        assert!(row["mismatch/log_ppl_abs_diff_max"].as_f64().unwrap() > 1e-3, "{row}");
        assert!(row["mismatch/bit_equal_fraction"].as_f64().unwrap() < 1.0, "{row}");
    }
}

#[test]
fn the_resolved_recipe_is_the_same_run() {
    let (folder, [out]) = scratch(["run"]);
    let recipe = baseline().join("recipe.toml");
    // From another working directory: the resolved recipe's paths are absolute.
    done(rloss().current_dir(&folder).arg("train").arg(&recipe).arg("--out").arg(&out));
    assert_same_results(&out, baseline());
    assert_eq!(text_of(out.join("recipe.toml")), text_of(recipe));
}

#[test]
fn a_checkpoint_loads_as_the_model_that_went_on() {
    let (_folder, [run, copy, again]) = scratch(["run", "copy", "again"]);
    done(&mut small(&run, &["checkpoint.dtype=f32", "checkpoint.keep=9"]));
    // The model alone: the files of a resumable checkpoint stay behind.
    copy_model(&run.join("checkpoints/cold-start-000004"), &copy);
    let model = model_path(&copy);
    done(&mut small(&again, &[&model, "cold_start.steps=0"]));
    let without_cold_start =
        |run| -> Vec<Value> { results(run).into_iter().filter(|row| row["phase"] != "cold_start").collect() };
    assert_eq!(without_cold_start(&again), without_cold_start(&run));
    assert_eq!(sampled(&again, "eval-000000"), sampled(&run, "eval-000000"));
}

/// Tokens and log-probabilities of the trajectories in a file.
fn sampled(run: &Path, name: &str) -> Vec<(Value, Value)> {
    let rows = json_lines(run.join(format!("trajectories/{name}.jsonl")));
    rows.iter().map(|row| (row["tokens"].clone(), row["logprobs"].clone())).collect()
}

#[test]
fn frozen_experts_survive_a_checkpoint_in_mxfp4_to_the_bit() {
    let (_folder, [straight, broken]) = scratch(["straight", "broken"]);
    let sets =
        ["checkpoint.dtype=mxfp4", "train.freeze=[\"*experts*\"]", "train.optimizer.schedule=constant"];
    done(&mut small(&straight, &sets));
    done(&mut small(&broken, &[&sets[..], &["train.steps=2"]].concat()));
    done(&mut resumed(&broken, &sets));
    let rl = |run: &Path| phase(&results(run), "rl").cloned().collect::<Vec<_>>();
    assert_eq!(rl(&broken), rl(&straight));
}
