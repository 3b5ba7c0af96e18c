//! Recipes whose steps train on samples of older weights.

use super::refused::mistake;
use super::*;
use crate::cli::assert_has;

const ROLLOUT: &str = "policy.old_logprob = \"rollout\"\n";

#[test]
fn stale_samples_without_a_correction_are_warned_about() {
    let warnings = |text: &str| resolve(Path::new("r.toml"), text, &[]).unwrap().warnings;
    let recompute = "rollout.lag_steps = 1\npolicy.old_logprob = \"recompute\"\n";
    // A mask of whole sequences corrects no ratio.
    for text in [recompute.to_owned(), format!("{recompute}policy.correction.off_policy_mask = 0.5")] {
        let [warning] = &warnings(&text)[..] else { panic!("one warning: {text}") };
        assert_has(warning, &["rollout.lag_steps", "nothing corrects this"]);
    }
    for text in [
        &format!("{recompute}policy.correction.is = \"token\""),
        &format!("{ROLLOUT}rollout.lag_steps = 1\nrollout.step_tokens_max = 8"),
    ] {
        assert_eq!(warnings(text), Vec::<String>::new(), "{text}");
    }
}

#[test]
fn a_loss_without_a_ratio_on_stale_samples_is_warned_about() {
    let text = format!("{ROLLOUT}rollout.lag_steps = 1\npolicy.loss = \"reinforce\"\n");
    let warnings = |text: &str| resolve(Path::new("r.toml"), text, &[]).unwrap().warnings;
    let found = warnings(&text);
    assert!(
        found.iter().any(|w| w.contains("reinforce has no ratio, so nothing corrects this")),
        "{found:?}"
    );
    let weighted = warnings(&format!("{text}policy.correction.is = \"token\""));
    assert!(!weighted.iter().any(|w| w.contains("nothing corrects this")), "{weighted:?}");
}

/// They were accepted, and did nothing.
#[test]
fn keys_without_the_key_that_switches_them_on_are_refused() {
    for (text, key, switch) in [
        ("policy.kl.coefficient = 0.04", "policy.kl.coefficient", "policy.kl.place"),
        ("policy.correction.threshold = [5.0]", "policy.correction.threshold", "policy.correction.is"),
        ("[policy.overlong]\npenalty = 0.5", "policy.overlong.penalty", "policy.overlong.buffer_tokens"),
    ] {
        let found = mistake(text, &[]);
        assert!(found.contains(&format!(" {key}: has no effect without {switch}")), "{text}: {found}");
        // A recipe that switches off what its base has is no mistake.
        let off = match switch {
            "policy.kl.place" => "policy.kl.place=none",
            "policy.correction.is" => "policy.correction.is=none",
            _ => "policy.overlong.buffer_tokens=0",
        };
        resolve(Path::new("r.toml"), text, &[off.to_owned()]).unwrap();
    }
}

#[test]
fn k1_in_the_loss_is_warned_about() {
    let text = "[policy.kl]\nplace = \"loss\"\ncoefficient = 0.1\nestimator = ";
    let warnings = |estimator: &str| {
        resolve(Path::new("r.toml"), &format!("{text}\"{estimator}\""), &[]).unwrap().warnings
    };
    let [warning] = &warnings("k1")[..] else { panic!("one warning") };
    assert!(warning.contains("policy.kl.estimator") && warning.contains("k1+"), "{warning}");
    assert!(warnings("k1+").is_empty() && warnings("k2").is_empty());
}

#[test]
fn dynamic_sampling_is_refused_if_the_teacher_alone_teaches() {
    let text = "[rollout]\nresample_rounds_max = 1\n[policy.distill]\nsystem_prompt = \"Be short.\"\npolicy_loss_coefficient = 0.0";
    let found = mistake(text, &[]);
    assert_has(&found, &["rollout.resample_rounds_max", "the teacher teaches"]);
}
