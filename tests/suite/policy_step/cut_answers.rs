//! Answers that were cut at a limit of tokens: trained, without a loss, or with the reward 0.

use super::*;
use rloss::policy::Truncated;
use rloss::trajectory::Outcome;

/// Two groups of three. One answer of each was cut.
fn cut() -> Fixture {
    let mut fixture = Fixture::new();
    for trajectory in fixture.trajectories().step_by(3) {
        trajectory.outcome = Outcome::TruncatedLength;
    }
    fixture
}

fn policy(truncated: Truncated) -> PolicySettings {
    PolicySettings { truncated, ..PolicySettings::default() }
}

#[test]
fn a_masked_cut_answer_counts_in_its_group_and_has_no_loss() {
    let fixture = cut();
    let (trained, masked) = (policy(Truncated::Train), policy(Truncated::Mask));
    let expected = {
        let step = fixture.step(&trained, Some(&fixture.actor));
        let mut batch = fixture.prepared(&step);
        for first in [0, 3] {
            batch.mask[batch.cu_seqlens[first]..batch.cu_seqlens[first + 1]].fill(false);
        }
        fixture.learned(&step, &batch).unwrap().unwrap()
    };
    let step = fixture.step(&masked, Some(&fixture.actor));
    let batch = fixture.prepared(&step);
    assert_eq!(batch.advantages, fixture.prepared(&fixture.step(&trained, None)).advantages);
    let found = fixture.learned(&step, &batch).unwrap().unwrap();
    assert!(values(&found) == values(&expected), "the tokens of cut answers have no loss");
    assert!(values(&found) != values(&fixture.update(&trained)), "the cut answers are trained by default");
}

#[test]
fn a_zeroed_cut_answer_is_trained_with_the_reward_0() {
    let mut fixture = cut();
    let found = values(&fixture.update(&policy(Truncated::Zero)));
    let untouched = values(&fixture.update(&policy(Truncated::Train)));
    for trajectory in fixture.trajectories().step_by(3) {
        assert!(trajectory.reward > 0.0);
        trajectory.reward = 0.0;
    }
    assert!(found == values(&fixture.update(&policy(Truncated::Train))));
    assert!(found != untouched);
}
