//! Recipes whose steps train on samples of older weights.

use super::refused::mistake;
use rloss::recipe::resolve;
use std::path::Path;

const ROLLOUT: &str = "policy.old_logprob = \"rollout\"\n";

#[test]
fn recipes_that_cannot_be_stale_are_refused_with_the_key_to_change() {
    let detach = "policy.old_logprob = \"detach\" takes their ratio as 1; write old_logprob = \"rollout\"";
    for (text, key, reason) in [
        ("rollout.lag_steps = 1", "rollout.lag_steps", detach),
        ("rollout.step_tokens_max = 10", "rollout.step_tokens_max", detach),
        (
            &format!("{ROLLOUT}rollout.lag_steps = 1\ntrain.trajectories = \"Cargo.toml\""),
            "rollout.lag_steps",
            "nothing is sampled",
        ),
        ("rollout.lag_steps = 65", "rollout.lag_steps", "0 to 64"),
        (
            &format!("{ROLLOUT}rollout.step_tokens_max = 10\nrollout.resample_rounds_max = 1"),
            "rollout.step_tokens_max",
            "dynamic sampling replaces groups within a step",
        ),
        (
            &format!("{ROLLOUT}rollout.step_tokens_max = 10\npolicy.advantage = \"remax\""),
            "rollout.step_tokens_max",
            "several versions sample a partial trajectory",
        ),
    ] {
        let found = mistake(text, &[]);
        assert!(found.contains(&format!(" {key}: ")) && found.contains(reason), "{text}: {found}");
    }
}

#[test]
fn stale_samples_without_a_correction_are_warned_about() {
    let warnings = |text: &str| resolve(Path::new("r.toml"), text, &[]).unwrap().warnings;
    let recompute = "rollout.lag_steps = 1\npolicy.old_logprob = \"recompute\"\n";
    // A mask of whole sequences corrects no ratio.
    for text in [recompute.to_owned(), format!("{recompute}policy.correction.off_policy_mask = 0.5")] {
        let [warning] = &warnings(&text)[..] else { panic!("one warning: {text}") };
        assert!(
            warning.contains("rollout.lag_steps") && warning.contains("nothing corrects this"),
            "{warning}"
        );
    }
    for text in [
        &format!("{recompute}policy.correction.is = \"token\""),
        &format!("{ROLLOUT}rollout.lag_steps = 1\nrollout.step_tokens_max = 8"),
    ] {
        assert_eq!(warnings(text), Vec::<String>::new(), "{text}");
    }
}
