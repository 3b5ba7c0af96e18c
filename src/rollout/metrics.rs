//! Metrics of a step's groups, under verl's names where it has one.

use crate::metrics::Accumulator;
use crate::trajectory::{CallOutcome, Group, Outcome};

/// What the groups come to. Everything is a function of the recipe: no times.
///
/// | name | of |
/// | --- | --- |
/// | `critic/rewards/{mean,max,min}`, `critic/success/mean` | trajectories |
/// | `response_length/{mean,max,min}` | sampled tokens of a trajectory, insertions left out |
/// | `prompt_length/{mean,max,min}` | tokens of a trajectory's prompt |
/// | `num_turns/{mean,max,min}` | stretches of sampled tokens of a trajectory |
/// | `outcome/<name>` | number of trajectories that ended so; every outcome, 0 included |
/// | `tool/<name>` | number of calls that came to this; every one, 0 included |
/// | `group/zero_signal_fraction` | share of groups whose rewards are all equal: they teach nothing |
pub fn metrics(groups: &[Group]) -> Accumulator {
    let mut metrics = Accumulator::new();
    for outcome in Outcome::ALL {
        metrics.sum(&format!("outcome/{}", outcome.name()), 0.0);
    }
    for outcome in CallOutcome::ALL {
        metrics.sum(&format!("tool/{}", outcome.name()), 0.0);
    }
    for group in groups {
        let mut rewards = group.trajectories.iter().map(|t| t.reward);
        let first = rewards.next();
        let flat = rewards.all(|reward| Some(reward) == first);
        metrics.mean("group/zero_signal_fraction", f64::from(u8::from(flat)), 1.0);
        for trajectory in &group.trajectories {
            let mut spread = |name: &str, value: f64| {
                metrics.mean(&format!("{name}/mean"), value, 1.0);
                metrics.max(&format!("{name}/max"), value);
                metrics.min(&format!("{name}/min"), value);
            };
            spread("critic/rewards", f64::from(trajectory.reward));
            spread("response_length", trajectory.sampled_tokens() as f64);
            spread("prompt_length", trajectory.prompt_tokens as f64);
            spread("num_turns", trajectory.turns.len() as f64);
            metrics.mean("critic/success/mean", f64::from(u8::from(trajectory.success)), 1.0);
            metrics.sum(&format!("outcome/{}", trajectory.outcome.name()), 1.0);
            for call in trajectory.turns.iter().filter_map(|turn| turn.call) {
                metrics.sum(&format!("tool/{}", call.name()), 1.0);
            }
        }
    }
    metrics
}
