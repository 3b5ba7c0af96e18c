//! A policy acts whole: weights and forward, as the arms leave them, in every command that samples or
//! compares.

use super::*;

/// Tokens and log-probabilities of every trajectory in `file`, by prompt and sample.
fn sampled(file: &Path) -> Vec<(Value, Value, Value, Value)> {
    let text = text_of(file);
    let row = |line: &str| {
        let mut row: Value = serde_json::from_str(line).unwrap();
        (row["prompt"].take(), row["sample"].take(), row["tokens"].take(), row["logprobs"].take())
    };
    let mut rows: Vec<_> = text.lines().map(row).collect();
    rows.sort_by_key(|(prompt, sample, ..)| (prompt.as_u64(), sample.as_u64()));
    rows
}

/// `rloss rollout` once took the weights without the arms that round them.
#[test]
fn rollout_samples_what_training_samples_under_arms_that_round_weights() {
    let folder = TempDir::new().unwrap();
    let mut seen = vec![];
    for arm in ["arms.rollout_bf16=false", "arms.rollout_bf16=true", "arms.rollout_mxfp4=true"] {
        let run = folder.path().join(arm);
        let sets = ["cold_start.steps=0", "train.steps=1", "logging.trajectories_per_step=1000", arm];
        done(&mut small(&run, &sets));
        let trained = sampled(&run.join("trajectories/step-000001.jsonl"));
        let out = folder.path().join(format!("{arm}-rollout"));
        let model = model_path(warm_model());
        let mut command = rloss();
        command.arg("rollout").arg(quickstart()).arg("--out").arg(&out);
        command.sets([&model, arm, "rollout.prompts_per_step=2", "rollout.samples_per_prompt=4"]);
        done(&mut command);
        assert_eq!(sampled(&out.join("trajectories/step-000001.jsonl")), trained, "{arm}");
        seen.push(trained);
    }
    assert!(seen[0] != seen[1] && seen[0] != seen[2], "an arm changes what is sampled");
}

/// `check-mismatch RUN --set model.path=…` once checked the run's own checkpoint instead.
#[test]
fn check_mismatch_of_a_run_takes_the_model_that_a_set_names() {
    let (folder, [run]) = scratch(["run"]);
    done(&mut small(&run, &["cold_start.steps=0", "train.steps=1"]));
    let check = |set: Option<String>| {
        let mut command = rloss();
        command.arg("check-mismatch").arg(&run).arg("--out").arg(folder.path().join("checked"));
        if let Some(set) = &set {
            command.args(["--set", set]);
        }
        output(&mut command)
    };
    assert_eq!(check(None).code, Some(0));
    let absent = folder.path().join("no such model");
    let refused = check(Some(model_path(&absent)));
    assert_eq!(refused.code, Some(2), "{}", refused.stderr);
    assert!(refused.stderr.contains("no such model"), "{}", refused.stderr);
}
