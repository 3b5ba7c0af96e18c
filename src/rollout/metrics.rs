//! Metrics of a step's groups. A metric that verl also has gets verl's name.

use crate::metrics::Accumulator;
use crate::trajectory::{CallOutcome, Group, Outcome, Trajectory};

/// Computes the metrics of groups. They contain no times, so the recipe determines all of them.
///
/// | name | statistics of |
/// | --- | --- |
/// | `critic/rewards/{mean,max,min}`, `critic/success/mean` | all trajectories; of an agent, all episodes |
/// | `reward/<name>/{mean,std}` | rewards of this name from the task, not yet multiplied by their weight; trajectories without one do not count |
/// | `reward/<name>/failed` | number of trajectories for which the task failed to compute this reward |
/// | `trajectory/dropped` | number of trajectories that no step trains on, because a program, a tool or the grader failed; they do not count in rewards, success and signal |
/// | `response_length/{mean,max,min}` | number of sampled tokens of a trajectory, without insertions |
/// | `kept_tokens/{mean,max,min}` | number of tokens that a sampled token was drawn from; only under truncated sampling |
/// | `prompt_length/{mean,max,min}` | number of tokens of a trajectory's prompt |
/// | `num_turns/{mean,max,min}` | number of turns of a trajectory |
/// | `outcome/<name>` | number of trajectories with this outcome; every outcome is present, even if 0 |
/// | `tool/<name>` | number of calls with this outcome; every outcome is present, even if 0 |
/// | `trajectory/failed_fraction` | fraction of trajectories that failed for a reason outside the policy: `task_failed`, or `worker_died` |
/// | `trajectory/later_parts` | number of trajectories that go on with an episode whose earlier turns were written again; only if there are any |
/// | `group/zero_signal_fraction` | fraction of groups whose rewards (including the greedy sample's) are all equal, before shaping and KL penalty |
/// | `critic/reward_baselines/{mean,max,min}` | rewards of the greedy samples, if there are any |
/// | `group/greedy_samples`, `group/greedy_tokens` | number of greedy samples, and of their sampled tokens; other counts exclude greedy samples |
pub fn metrics(groups: &[Group]) -> Accumulator {
    let mut metrics = Accumulator::new();
    for &outcome in Outcome::ALL {
        metrics.sum(&format!("outcome/{}", outcome.name()), 0.0);
    }
    for &outcome in CallOutcome::ALL {
        metrics.sum(&format!("tool/{}", outcome.name()), 0.0);
    }
    let mut dropped = 0;
    for group in groups {
        let graded = || group.trajectories.iter().filter(|trajectory| !trajectory.dropped);
        let mut rewards = graded().chain(&group.greedy).map(|t| t.reward);
        let first = rewards.next();
        let all_equal = rewards.all(|reward| Some(reward) == first);
        // All episodes of an agent's group may have failed. Then it has no rewards.
        if first.is_some() {
            metrics.mean("group/zero_signal_fraction", f64::from(u8::from(all_equal)), 1.0);
        }
        if let Some(greedy) = &group.greedy {
            add_mean_max_min(&mut metrics, "critic/reward_baselines", f64::from(greedy.reward));
            metrics.sum("group/greedy_samples", 1.0);
            metrics.sum("group/greedy_tokens", greedy.sampled_tokens() as f64);
        }
        for trajectory in &group.trajectories {
            for name in &trajectory.failed_rewards {
                metrics.sum(&format!("reward/{name}/failed"), 1.0);
            }
            dropped += u32::from(trajectory.dropped);
            if trajectory.begins_episode() && !trajectory.dropped {
                add_mean_max_min(&mut metrics, "critic/rewards", f64::from(trajectory.reward));
                metrics.mean("critic/success/mean", f64::from(u8::from(trajectory.success)), 1.0);
                for (name, &value) in &trajectory.rewards {
                    metrics.mean(&format!("reward/{name}/mean"), f64::from(value), 1.0);
                    metrics.deviation(&format!("reward/{name}/std"), f64::from(value));
                }
            }
            for (name, value) in [
                ("response_length", trajectory.sampled_tokens() as f64),
                ("prompt_length", trajectory.prompt_tokens as f64),
                ("num_turns", trajectory.turns.len() as f64),
            ] {
                add_mean_max_min(&mut metrics, name, value);
            }
            if trajectory.part > 0 {
                metrics.sum("trajectory/later_parts", 1.0);
            }
            add_kept_tokens(&mut metrics, trajectory);
            metrics.mean("trajectory/failed_fraction", f64::from(u8::from(trajectory.has_failure())), 1.0);
            metrics.sum(&format!("outcome/{}", trajectory.outcome.name()), 1.0);
            for call in trajectory.turns.iter().flat_map(|turn| &turn.calls) {
                metrics.sum(&format!("tool/{}", call.name()), 1.0);
            }
        }
    }
    if dropped > 0 {
        metrics.sum("trajectory/dropped", f64::from(dropped));
    }
    metrics
}

/// Adds the sizes of the sets that the tokens of `trajectory` were drawn from.
fn add_kept_tokens(metrics: &mut Accumulator, trajectory: &Trajectory) {
    let counts: Vec<f64> =
        trajectory.kept_tokens.iter().flatten().map(|set| set.ids().len() as f64).collect();
    if counts.is_empty() {
        return;
    }
    let tokens = counts.len() as f64;
    metrics.mean("kept_tokens/mean", counts.iter().sum::<f64>() / tokens, tokens);
    metrics.max("kept_tokens/max", counts.iter().copied().fold(0.0, f64::max));
    metrics.min("kept_tokens/min", counts.into_iter().fold(f64::INFINITY, f64::min));
}

/// Computes the staleness of `groups`, which the weights of version `version` are trained on.
///
/// | name | statistics of |
/// | --- | --- |
/// | `staleness/steps/{mean,max,min}` | number of training steps between the weights that sampled a token and those that are trained on it, over sampled tokens |
pub fn staleness<'a>(groups: impl IntoIterator<Item = &'a Group>, version: u64) -> Accumulator {
    let mut metrics = Accumulator::new();
    for trajectory in groups.into_iter().flat_map(|group| &group.trajectories) {
        let sampled = trajectory.mask.iter().enumerate().filter(|(_, mask)| **mask);
        for sampled_by in sampled.filter_map(|(index, _)| trajectory.version_of(index)) {
            add_mean_max_min(&mut metrics, "staleness/steps", version.saturating_sub(sampled_by) as f64);
        }
    }
    metrics
}

fn add_mean_max_min(metrics: &mut Accumulator, name: &str, value: f64) {
    metrics.mean(&format!("{name}/mean"), value, 1.0);
    metrics.max(&format!("{name}/max"), value);
    metrics.min(&format!("{name}/min"), value);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trajectory::Turn;

    /// Returns a trajectory of `sampled` tokens after a prompt of 3 tokens. It has one turn for each of
    /// `calls`, the outcome that ends the turn.
    fn trajectory(
        reward: f32,
        sampled: usize,
        calls: &[Option<CallOutcome>],
        outcome: Outcome,
    ) -> Trajectory {
        let n = 3 + sampled;
        Trajectory {
            step: 0,
            prompt: 0,
            sample: 0,
            part: 0,
            policy_version: None,
            policy_versions: vec![],
            problem_id: String::new(),
            tokens: vec![0; n],
            prompt_tokens: 3,
            mask: (0..n).map(|i| i >= 3).collect(),
            log_probs: vec![0.0; n],
            kept_tokens: vec![],
            routed_experts: vec![],
            turns: calls
                .iter()
                .map(|call| Turn { start: 3, end: n, calls: call.iter().copied().collect() })
                .collect(),
            outcome,
            reward,
            success: reward > 0.0,
            rewards: Default::default(),
            failed_rewards: vec![],
            dropped: false,
            tool_s: 0.0,
        }
    }

    #[test]
    fn every_name_is_there_and_counts_what_it_says() {
        let answered = [Some(CallOutcome::Answered), Some(CallOutcome::Raised), None];
        let groups = [
            Group {
                trajectories: vec![
                    trajectory(1.0, 10, &answered, Outcome::Finished),
                    trajectory(-1.0, 4, &[None], Outcome::TruncatedLength),
                ],
                greedy: None,
            },
            Group {
                trajectories: vec![
                    trajectory(-1.0, 1, &[Some(CallOutcome::MalformedCall)], Outcome::Malformed),
                    trajectory(-1.0, 5, &[None], Outcome::Finished),
                ],
                greedy: None,
            },
        ];
        let metrics = metrics(&groups).finish().unwrap();
        let expected = [
            ("critic/rewards/mean", -0.5),
            ("critic/rewards/max", 1.0),
            ("critic/rewards/min", -1.0),
            ("critic/success/mean", 0.25),
            ("response_length/mean", 5.0),
            ("response_length/max", 10.0),
            ("response_length/min", 1.0),
            ("prompt_length/mean", 3.0),
            ("num_turns/mean", 1.5),
            ("num_turns/max", 3.0),
            ("outcome/finished", 2.0),
            ("outcome/truncated_length", 1.0),
            ("outcome/malformed", 1.0),
            ("outcome/task_failed", 0.0),
            ("tool/answered", 1.0),
            ("tool/raised", 1.0),
            ("tool/malformed_call", 1.0),
            ("tool/tool_timeout", 0.0),
            ("group/zero_signal_fraction", 0.5),
            ("trajectory/failed_fraction", 0.0),
        ];
        for (name, value) in expected {
            assert_eq!(metrics.get(name), Some(value), "{name}");
        }
        assert_eq!(metrics.len(), 15 + Outcome::ALL.len() + CallOutcome::ALL.len());
    }

    #[test]
    fn named_rewards_are_kept_apart() {
        let named = |rewards: &[(&str, f32)]| Trajectory {
            rewards: rewards.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect(),
            ..trajectory(0.5, 1, &[None], Outcome::Finished)
        };
        let trajectories = vec![
            named(&[("right", 1.0), ("short", 0.25)]),
            named(&[("right", 0.0), ("short", 0.75)]),
            // The program failed to grade this trajectory.
            named(&[]),
        ];
        let metrics = metrics(&[Group { trajectories, greedy: None }]).finish().unwrap();
        assert_eq!(metrics.get("reward/right/mean"), Some(0.5));
        assert_eq!(metrics.get("reward/short/mean"), Some(0.5));
        assert_eq!(metrics.get("reward/right/std"), Some(0.5f64.sqrt()));
        assert_eq!(metrics.get("reward/short/std"), Some(0.125f64.sqrt()));
    }

    #[test]
    fn greedy_samples_are_counted_apart_and_a_better_one_is_a_signal() {
        let two = |greedy| Group {
            trajectories: vec![
                trajectory(-1.0, 1, &[None], Outcome::Finished),
                trajectory(-1.0, 3, &[None], Outcome::Finished),
            ],
            greedy: Some(greedy),
        };
        let groups = [
            two(trajectory(1.0, 7, &[None], Outcome::TruncatedLength)),
            two(trajectory(-1.0, 2, &[None], Outcome::Finished)),
        ];
        let metrics = metrics(&groups).finish().unwrap();
        let expected = [
            ("critic/rewards/mean", -1.0),
            ("critic/reward_baselines/mean", 0.0),
            ("critic/reward_baselines/max", 1.0),
            ("response_length/max", 3.0),
            ("outcome/truncated_length", 0.0),
            ("group/greedy_samples", 2.0),
            ("group/greedy_tokens", 9.0),
            ("group/zero_signal_fraction", 0.5),
        ];
        for (name, value) in expected {
            assert_eq!(metrics.get(name), Some(value), "{name}");
        }
    }

    #[test]
    fn failed_is_what_the_policy_did_not_do() {
        let of = |trajectories| metrics(&[Group { trajectories, greedy: None }]).finish().unwrap();
        let died = trajectory(-1.0, 2, &[Some(CallOutcome::WorkerDied), None], Outcome::Finished);
        let failed = trajectory(0.0, 2, &[None], Outcome::TaskFailed);
        let slow = trajectory(-1.0, 2, &[Some(CallOutcome::ToolTimeout)], Outcome::TurnsExhausted);
        let wrong = trajectory(-1.0, 2, &[Some(CallOutcome::MemoryLimit)], Outcome::Malformed);
        assert_eq!(of(vec![died, failed, slow, wrong]).get("trajectory/failed_fraction"), Some(0.5));
    }
}
