//! Families of the policy that keep state or draw more samples, through the binary.

use super::{done, phase, quickstart, resumed, rloss, rows, small, warm_model};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::Path;
use tempfile::TempDir;

fn number(row: &Value, key: &str) -> f64 {
    row[key].as_f64().unwrap_or_else(|| panic!("no {key} in {row}"))
}

/// Reinforcement learning alone, at one learning rate whatever the number of steps.
const RL: [&str; 2] = ["cold_start.steps=0", "train.optimizer.schedule=constant"];

/// The rows of reinforcement learning, without times.
fn results(run: &Path) -> Vec<Value> {
    let mut rows = super::results(run);
    rows.retain(|row| row["phase"] == "rl");
    rows
}

#[test]
fn a_run_held_to_a_reference_resumes_to_the_same_metrics() {
    let folder = TempDir::new().unwrap();
    let steered = ["policy.kl.target=1e-4", "policy.kl.horizon=50"];
    for (place, more) in [("loss", &[][..]), ("reward", &steered)] {
        let key = format!("policy.kl.place={place}");
        let sets: Vec<&str> = RL.iter().copied().chain([key.as_str()]).chain(more.iter().copied()).collect();
        let (straight, broken) = (folder.path().join(place), folder.path().join(format!("{place}-broken")));
        done(&mut small(&straight, &sets));
        let half: Vec<&str> = sets.iter().copied().chain(["train.steps=2"]).collect();
        done(&mut small(&broken, &half));
        done(&mut resumed(&broken, &sets));
        let expected = results(&straight);
        assert_eq!(results(&broken), expected, "{place}");
        if place == "loss" {
            // At the first step the reference is the model itself.
            assert_eq!(number(&expected[0], "actor/kl_loss"), 0.0);
            assert!(number(&expected[3], "actor/kl_loss") > 0.0);
            continue;
        }
        for pair in expected.windows(2) {
            let error = (number(&pair[0], "actor/reward_kl_penalty") / 1e-4 - 1.0).clamp(-0.2, 0.2);
            let coefficient = number(&pair[0], "actor/reward_kl_penalty_coeff") * (1.0 + error * 8.0 / 50.0);
            assert_eq!(number(&pair[1], "actor/reward_kl_penalty_coeff"), coefficient);
            assert_ne!(error, 0.0);
        }
    }
}

/// Rewards of the groups that a step drew, by index of the prompt.
fn drawn(run: &Path, step: u64) -> BTreeMap<u64, Vec<f64>> {
    let text = std::fs::read_to_string(run.join(format!("trajectories/step-{step:06}.jsonl"))).unwrap();
    let mut groups: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
    for line in text.lines() {
        let row: Value = serde_json::from_str(line).unwrap();
        groups.entry(row["prompt"].as_u64().unwrap()).or_default().push(number(&row, "reward"));
    }
    groups
}

#[test]
fn groups_of_equal_rewards_are_drawn_anew_up_to_the_limit_and_counted() {
    let folder = TempDir::new().unwrap();
    let run = folder.path().join("run");
    let (rounds_max, prompts) = (3, 2);
    let sampling = ["rollout.resample_rounds_max=3", "logging.trajectories_per_step=1000"];
    let sets: Vec<&str> = RL.into_iter().chain(sampling).chain(["train.steps=6"]).collect();
    done(&mut small(&run, &sets));
    let (mut redrawn, mut filled) = (0, 0);
    for row in phase(&rows(&run), "rl") {
        let step = row["step"].as_u64().unwrap();
        let groups = drawn(&run, step);
        // A round's prompts follow from step and round alone.
        let first = |round: u64| ((step - 1) * (rounds_max + 1) + round) * prompts;
        let (mut teaching, mut round, mut seen) = (0, 0, 0);
        loop {
            for index in first(round)..first(round) + prompts - teaching {
                let rewards = &groups[&index];
                assert_eq!(rewards.len(), 4);
                teaching += u64::from(rewards.iter().any(|reward| *reward != rewards[0]));
                seen += 1;
            }
            if teaching == prompts || round == rounds_max {
                break;
            }
            round += 1;
        }
        assert_eq!(groups.len(), seen, "step {step}");
        assert_eq!(number(row, "group/resample_rounds"), round as f64, "step {step}");
        assert_eq!(number(row, "group/discarded"), (seen - prompts as usize) as f64, "step {step}");
        let flat = (seen as u64 - teaching) as f64 / seen as f64;
        assert!((number(row, "group/zero_signal_fraction") - flat).abs() < 1e-12, "step {step}");
        redrawn += u64::from(round > 0);
        filled += u64::from(round > 0 && teaching == prompts);
        if teaching > 0 {
            assert!(number(row, "critic/advantages/max") > 0.0, "step {step}");
        }
    }
    assert!(redrawn > 0 && filled > 0, "{redrawn} steps drew anew, {filled} of them found enough");
}

#[test]
fn where_every_reward_is_equal_the_last_draw_is_kept() {
    let folder = TempDir::new().unwrap();
    let run = folder.path().join("run");
    // Random weights answer nothing.
    let sets = ["rollout.resample_rounds_max=2", "train.steps=1", "eval.before_training=false"];
    let sets: Vec<&str> = RL.into_iter().chain(sets).collect();
    let mut command = super::train(&run, super::SMALL);
    sets.iter().for_each(|set| {
        command.args(["--set", set]);
    });
    done(&mut command);
    let rows = rows(&run);
    let row = phase(&rows, "rl").next().unwrap();
    assert_eq!((number(row, "group/resample_rounds"), number(row, "group/discarded")), (2.0, 4.0));
    assert_eq!(number(row, "group/zero_signal_fraction"), 1.0);
    assert_eq!((number(row, "critic/advantages/max"), number(row, "actor/grad_norm")), (0.0, 0.0));
}

#[test]
fn remax_draws_one_greedy_sample_a_prompt_and_trains_on_none() {
    let folder = TempDir::new().unwrap();
    let (run, plain) = (folder.path().join("run"), folder.path().join("plain"));
    let logged = "logging.trajectories_per_step=1000";
    let sets: Vec<&str> = RL.into_iter().chain(["train.steps=2", logged]).collect();
    done(&mut small(&plain, &sets));
    let remax: Vec<&str> = sets.iter().copied().chain(["policy.advantage=remax"]).collect();
    done(&mut small(&run, &remax));
    for row in phase(&rows(&run), "rl") {
        assert_eq!(number(row, "group/greedy_samples"), 2.0);
        assert!(number(row, "group/greedy_tokens") > 0.0 && number(row, "timing_s/gen_max") > 0.0);
        let outcomes: f64 = row
            .as_object()
            .unwrap()
            .iter()
            .filter(|(key, _)| key.starts_with("outcome/"))
            .map(|(_, v)| v.as_f64().unwrap())
            .sum();
        assert_eq!(outcomes, 8.0, "the greedy samples are not among them");
        assert_eq!(drawn(&run, row["step"].as_u64().unwrap()).values().map(Vec::len).sum::<usize>(), 8);
    }
    // The first step samples what it would without a baseline.
    let first = |run: &Path| {
        let rows = results(run);
        let sampled = |key: &str| key.starts_with("critic/rewards") || key.starts_with("response_length");
        let fields = rows[0].as_object().unwrap().iter().filter(|(key, _)| sampled(key));
        fields.map(|(key, value)| (key.clone(), value.clone())).collect::<Map<_, _>>()
    };
    assert_eq!(first(&run), first(&plain));
    assert_ne!(results(&run)[1], results(&plain)[1]);
}

/// Fixed data with one log-probability in eight trajectories wrong: however the updates cut the batch, it
/// shows.
#[test]
fn mismatch_is_measured_on_the_whole_batch_however_many_updates_take_it() {
    let folder = TempDir::new().unwrap();
    let sampled = folder.path().join("sampled");
    let model = format!("model.path={}", warm_model().display());
    let mut command = rloss();
    command.arg("rollout").arg(quickstart()).arg("--out").arg(&sampled);
    super::SMALL.iter().copied().chain([model.as_str()]).for_each(|set| {
        command.args(["--set", set]);
    });
    done(&mut command);
    let text = std::fs::read_to_string(sampled.join("trajectories/step-000001.jsonl")).unwrap();
    let mut trajectories: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let tokens: usize = trajectories
        .iter()
        .map(|row| row["mask"].as_array().unwrap().iter().filter(|m| m.as_bool() == Some(true)).count())
        .sum();
    let start = trajectories[7]["prompt_tokens"].as_u64().unwrap() as usize;
    let log_prob = trajectories[7]["logprobs"][start].as_f64().unwrap();
    trajectories[7]["logprobs"][start] = (log_prob - 0.5).into();
    let file = folder.path().join("bent.jsonl");
    let lines: Vec<String> = trajectories.iter().map(|row| format!("{row}\n")).collect();
    std::fs::write(&file, lines.concat()).unwrap();
    let data = format!("train.trajectories={}", file.display());
    let mismatch = |minibatches: usize| -> Map<String, Value> {
        let run = folder.path().join(minibatches.to_string());
        let count = format!("train.minibatches={minibatches}");
        let sets = [&data, &count, "policy.old_logprob=rollout", "train.steps=1", "eval.every_steps=0"];
        done(&mut small(&run, &RL.into_iter().chain(sets).collect::<Vec<_>>()));
        let row = results(&run).remove(0);
        let about =
            |key: &str| ["rollout_corr/", "mismatch/", "training/"].iter().any(|p| key.starts_with(p));
        row.as_object()
            .unwrap()
            .iter()
            .filter(|(k, _)| about(k))
            .map(|(k, v)| (k.clone(), v.clone()))
            .collect()
    };
    let whole = mismatch(1);
    assert_eq!(whole["mismatch/bit_equal_fraction"].as_f64(), Some((tokens - 1) as f64 / tokens as f64));
    for minibatches in [2, 8] {
        assert_eq!(mismatch(minibatches), whole, "{minibatches} updates");
    }
}
