//! `train.on_bad_step`: a gradient that is not finite, or far above those of the last steps.

use super::*;

/// The group with the bad reward; a step trains on one group.
const BAD: usize = 10;

/// Trajectories of 12 groups of two. The rewards of group `BAD` are ±`reward`, those of the others ±1.
fn trajectories(folder: &Path, reward: f64) -> PathBuf {
    let sampled = folder.join("sampled");
    if !sampled.exists() {
        let mut command = rloss();
        command.args(["rollout", "quickstart", "--out"]).arg(&sampled);
        command.args(["--set", "rollout.prompts_per_step=12", "--set", "rollout.samples_per_prompt=2"]);
        done(command.args(["--set", "rollout.response_tokens_max=24"]));
    }
    let text = text_of(sampled.join("trajectories/step-000001.jsonl"));
    let row = |(index, line): (usize, &str)| {
        let mut row: Value = serde_json::from_str(line).unwrap();
        let sign = if index % 2 == 0 { -1.0 } else { 1.0 };
        row["reward"] = json!(if index / 2 == BAD { sign * reward } else { sign });
        format!("{row}\n")
    };
    let file = folder.join(format!("{reward:e}.jsonl"));
    fs::write(&file, text.lines().enumerate().map(row).collect::<String>()).unwrap();
    file
}

fn train(out: &Path, trajectories: &Path, on_bad_step: &str, more: &[&str]) -> Command {
    let sets = [
        &format!("train.trajectories={}", trajectories.display()),
        &format!("train.on_bad_step={on_bad_step}"),
        "train.steps=12",
        "train.optimizer.schedule=constant",
        "rollout.prompts_per_step=1",
        "rollout.samples_per_prompt=2",
        "policy.advantage=dr_grpo",
        "cold_start.steps=0",
        "eval.before_training=false",
        "eval.every_steps=0",
        "checkpoint.every_steps=1",
        "checkpoint.keep=100",
    ];
    let mut command = super::train(out, &sets);
    command.sets(more);
    command
}

/// A low temperature makes the gradient of a large reward overflow.
const COLD: &str = "rollout.temperature=0.01";

/// Whether step `BAD + 1` left the weights as they were, and step `BAD` did not.
fn is_unchanged(run: &Path) -> bool {
    let weights = |step: usize| {
        let folder = run.join(format!("checkpoints/step-{step:06}"));
        ["model.safetensors", "trainer.safetensors"].map(|file| fs::read(folder.join(file)).unwrap())
    };
    assert!(weights(BAD - 1) != weights(BAD), "other steps train");
    weights(BAD) == weights(BAD + 1)
}

#[test]
fn an_infinite_gradient_stops_the_run_or_is_skipped() {
    let folder = TempDir::new().unwrap();
    let stored = trajectories(folder.path(), 3e38);
    let (stops, skips) = (folder.path().join("stops"), folder.path().join("skips"));
    let text = done(&mut train(&skips, &stored, "skip", &[COLD])).stderr;
    assert_has(&text, &["step 11: skipped updates of actor", "the gradient norm is not finite"]);
    assert!(is_unchanged(&skips));
    let row = &rows(&skips)[BAD];
    assert_eq!((&row["actor/updates_bad"], row.get("actor/grad_norm")), (&json!(1), None));

    ended(&mut train(&stops, &stored, "stop", &[COLD]), 1, &["train.on_bad_step = \"skip\""]);
    assert_eq!(checkpoints(&stops).last().unwrap(), "step-000010");
    done(rloss().arg("train").arg(&stops).args(["--resume", "--set", "train.on_bad_step=skip"]));
    assert_same_results(&stops, &skips);
}

#[test]
fn a_gradient_far_above_those_of_the_last_steps_is_skipped_and_a_resumed_run_decides_alike() {
    let folder = TempDir::new().unwrap();
    let stored = trajectories(folder.path(), 1e6);
    let (whole, parted, trained) =
        (folder.path().join("whole"), folder.path().join("parted"), folder.path().join("trained"));
    ended(&mut train(&whole, &stored, "skip", &[]), 0, &["10 times the median of the recent steps"]);
    assert!(is_unchanged(&whole));
    assert!(rows(&whole)[BAD]["actor/grad_norm_bad"].as_f64().unwrap() > 1e6);
    // Two halves: the norms of the first are in its metrics.
    done(&mut train(&parted, &stored, "skip", &["train.steps=9"]));
    done(train(&parted, &stored, "skip", &[]).arg("--resume"));
    assert_same_results(&parted, &whole);
    // The norm is finite: without "skip" the step trains.
    done(&mut train(&trained, &stored, "stop", &[]));
    assert!(!is_unchanged(&trained));
}

#[test]
fn too_many_bad_steps_in_a_row_stop_the_run() {
    let folder = TempDir::new().unwrap();
    let stored = trajectories(folder.path(), 3e38);
    let text = text_of(&stored);
    let group: String = text.lines().skip(2 * BAD).take(2).map(|line| format!("{line}\n")).collect();
    fs::write(&stored, group).unwrap();
    let words = ["6 consecutive steps were skipped because of their gradients"];
    ended(&mut train(&folder.path().join("run"), &stored, "skip", &[COLD]), 1, &words);
}
