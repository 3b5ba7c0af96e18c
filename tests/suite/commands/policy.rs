//! Families of the policy that keep state or draw more samples, through the binary.

use super::*;
use serde_json::Map;
use std::collections::BTreeMap;

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
    let steered = ["policy.kl.target=1e-4", "policy.kl.horizon=50"];
    for (place, more) in [("loss", &[][..]), ("reward", &steered)] {
        let key = format!("policy.kl.place={place}");
        let (_folder, [straight, broken]) = scratch([place, "broken"]);
        assert_resumes(&straight, &broken, &[&RL[..], &[&key], more].concat(), &["train.steps=2"]);
        let expected = results(&straight);
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
    let mut groups: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
    for row in json_lines(run.join(format!("trajectories/step-{step:06}.jsonl"))) {
        groups.entry(row["prompt"].as_u64().unwrap()).or_default().push(number(&row, "reward"));
    }
    groups
}

#[test]
fn groups_of_equal_rewards_are_drawn_anew_up_to_the_limit_and_counted() {
    let (_folder, [run]) = scratch(["run"]);
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
    let (_folder, [run]) = scratch(["run"]);
    // Random weights answer nothing.
    let sets = ["rollout.resample_rounds_max=2", "train.steps=1", "eval.before_training=false"];
    done(train(&run, SMALL).sets(RL).sets(sets));
    let rows = rows(&run);
    let row = phase(&rows, "rl").next().unwrap();
    assert_eq!((number(row, "group/resample_rounds"), number(row, "group/discarded")), (2.0, 4.0));
    assert_eq!(number(row, "group/zero_signal_fraction"), 1.0);
    assert_eq!((number(row, "critic/advantages/max"), number(row, "actor/grad_norm")), (0.0, 0.0));
}

#[test]
fn remax_draws_one_greedy_sample_a_prompt_and_trains_on_none() {
    let (_folder, [run, plain]) = scratch(["run", "plain"]);
    let logged = "logging.trajectories_per_step=1000";
    let sets = [&RL[..], &["train.steps=2", logged]].concat();
    done(&mut small(&plain, &sets));
    done(&mut small(&run, &[&sets[..], &["policy.advantage=remax"]].concat()));
    for row in phase(&rows(&run), "rl") {
        assert_eq!(number(row, "group/greedy_samples"), 2.0);
        assert!(number(row, "group/greedy_tokens") > 0.0 && number(row, "timing_s/gen_max") > 0.0);
        let outcomes = row.as_object().unwrap().keys().filter(|key| key.starts_with("outcome/"));
        assert_eq!(
            outcomes.map(|key| number(row, key)).sum::<f64>(),
            8.0,
            "the greedy samples are not among them"
        );
        assert_eq!(drawn(&run, row["step"].as_u64().unwrap()).values().map(Vec::len).sum::<usize>(), 8);
    }
    // The first step samples what it would without a baseline.
    let first = |run: &Path| {
        let mut row = results(run)[0].as_object().unwrap().clone();
        row.retain(|key, _| key.starts_with("critic/rewards") || key.starts_with("response_length"));
        row
    };
    assert_eq!(first(&run), first(&plain));
    assert_ne!(results(&run)[1], results(&plain)[1]);
}

/// Fixed data with one log-probability in eight trajectories wrong: however the updates cut the batch, it
/// shows.
#[test]
fn mismatch_is_measured_on_the_whole_batch_however_many_updates_take_it() {
    let (folder, [sampled]) = scratch(["sampled"]);
    let model = model_path(warm_model());
    let mut command = rloss();
    command.arg("rollout").arg(quickstart()).arg("--out").arg(&sampled);
    done(command.sets(SMALL).sets([&model]));
    let mut trajectories = json_lines(sampled.join("trajectories/step-000001.jsonl"));
    let tokens: usize = trajectories
        .iter()
        .map(|row| row["mask"].as_array().unwrap().iter().filter(|m| m.as_bool() == Some(true)).count())
        .sum();
    let start = trajectories[7]["prompt_tokens"].as_u64().unwrap() as usize;
    let log_prob = trajectories[7]["logprobs"][start].as_f64().unwrap();
    trajectories[7]["logprobs"][start] = (log_prob - 0.5).into();
    let file = folder.path().join("bent.jsonl");
    let lines: Vec<String> = trajectories.iter().map(|row| format!("{row}\n")).collect();
    fs::write(&file, lines.concat()).unwrap();
    let data = format!("train.trajectories={}", file.display());
    let mismatch = |minibatches: usize| -> Map<String, Value> {
        let run = folder.path().join(minibatches.to_string());
        let count = format!("train.minibatches={minibatches}");
        let sets = [&data, &count, "policy.old_logprob=rollout", "train.steps=1", "eval.every_steps=0"];
        done(&mut small(&run, &[&RL[..], &sets].concat()));
        let mut row = results(&run).remove(0).as_object().unwrap().clone();
        row.retain(|key, _| ["rollout_corr/", "mismatch/", "training/"].iter().any(|p| key.starts_with(p)));
        row
    };
    let whole = mismatch(1);
    assert_eq!(whole["mismatch/bit_equal_fraction"].as_f64(), Some((tokens - 1) as f64 / tokens as f64));
    for minibatches in [2, 8] {
        assert_eq!(mismatch(minibatches), whole, "{minibatches} updates");
    }
}
