//! Partial trajectories: pauses by the same weights change nothing, and each token has its version.

use super::*;
use rloss::rollout::partial::GroupInProgress;
use rloss::trajectory::{Group, VersionRun};

/// A complete group, and the messages of its trajectories.
type Complete = (Group, Vec<Vec<Message>>);

/// Samples `tokens_max` tokens of each trajectory again and again, each time by an engine of the next of
/// `versions`, until all are finished. Returns the groups and their messages, and the number of rounds.
fn sample_in_rounds(
    world: &World,
    (task, tool): (&dyn Task, &dyn Interpreter),
    (prompts, samples, tokens_max): (&[Prompt], usize, usize),
    versions: impl Iterator<Item = u64>,
) -> (Vec<Complete>, usize) {
    let mut groups: Vec<GroupInProgress> =
        prompts.iter().map(|prompt| GroupInProgress::new(prompt.index, world.plan.step)).collect();
    for (round, version) in (1..).zip(versions) {
        let rollout = world.rollout_of(task, Some(tool), version);
        let limits = (samples, tokens_max);
        let sampled = rollout.sample_in_progress(prompts, groups, limits, &|_| (), &|| false);
        // A checkpoint keeps every bit.
        let text = serde_json::to_string(&sampled.unwrap().expect("nobody stopped it")).unwrap();
        groups = serde_json::from_str(&text).unwrap();
        if groups.iter().all(GroupInProgress::is_complete) {
            let groups = groups.into_iter().map(|group| group.into_group(world.plan.step));
            return (groups.collect(), round);
        }
    }
    panic!("not finished");
}

#[test]
fn pauses_by_the_same_weights_change_no_bit() {
    let mut world = World::new(tiny::config(false), 2);
    world.plan.settings.keep_routes = true;
    // A tool without state, so that pauses fall before and after its replies.
    let (task, tool) = (Questions::new(), echo());
    let prompts = Questions::prompts(5);
    let whole = sample(world.rollout(&task, Some(&tool)), &prompts, 4);
    assert!(whole.trajectories().any(|t| t.turns.len() > 1), "some trajectory has a reply");
    let mut most = 0;
    for tokens_max in [1, 2, 7, 30, 1000] {
        let limits = (&prompts[..], 4, tokens_max);
        let (groups, rounds) = sample_in_rounds(&world, (&task, &tool), limits, std::iter::repeat(3));
        let (groups, messages): (Vec<Group>, Vec<_>) = groups.into_iter().unzip();
        assert_eq!(groups, whole.groups, "pauses after {tokens_max} tokens");
        assert_eq!(messages, whole.messages, "pauses after {tokens_max} tokens");
        most = most.max(rounds);
    }
    assert!(most > 30, "{most} rounds");
}

#[test]
fn each_token_has_the_version_that_sampled_it() {
    let world = World::new(tiny::config(false), 2);
    let (task, tool, prompts) = (Questions::new(), echo(), Questions::prompts(3));
    let (groups, rounds) = sample_in_rounds(&world, (&task, &tool), (&prompts, 3, 10), 5..);
    assert!(rounds > 2, "{rounds} rounds");
    for trajectory in groups.iter().flat_map(|(group, _)| &group.trajectories) {
        let sampled: Vec<usize> = (0..trajectory.tokens.len()).filter(|&i| trajectory.mask[i]).collect();
        let version = |nth: usize| 5 + nth as u64 / 10;
        for (nth, &index) in sampled.iter().enumerate() {
            assert_eq!(trajectory.version_of(index), Some(version(nth)), "token {nth}");
        }
        assert_eq!(trajectory.policy_version, Some(version(sampled.len() - 1)));
        let has_one = sampled.len() <= 10;
        assert_eq!(trajectory.policy_versions.is_empty(), has_one, "{:?}", trajectory.policy_versions);
        let first = VersionRun { start: trajectory.prompt_tokens, version: 5 };
        assert!(has_one || trajectory.policy_versions[0] == first);
    }
}
