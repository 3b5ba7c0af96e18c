//! Losses that select tokens over the whole batch.

use super::*;
use rloss::policy::loss::{ClipCovSettings, KlCovSettings};

fn policy(name: &str, old_logprob: OldLogProbSource) -> PolicySettings {
    PolicySettings {
        loss: loss(name),
        old_logprob,
        clip_cov: ClipCovSettings { fraction: 0.1, covariance_min: 0.0, covariance_max: 100.0 },
        kl_cov: KlCovSettings { fraction: 0.1, coefficient: 10.0 },
        ..PolicySettings::default()
    }
}

/// The split into micro-batches changes neither the selection nor the gradient. Covariances of a single
/// micro-batch would: its means differ from those of the batch.
#[test]
fn the_selection_does_not_depend_on_the_split_into_micro_batches() {
    let mut fixture = Fixture::new();
    // Away from the policy, so that the penalty has a gradient.
    fixture.trajectories().for_each(|t| t.log_probs.iter_mut().for_each(|l| *l -= 0.125));
    for name in ["clip_cov", "kl_cov"] {
        let policy = policy(name, OldLogProbSource::Rollout);
        let at = |tokens, seed, step| {
            let fixture = fixture.with_micro_batches_of(tokens);
            let train = TrainSettings { seed, ..TrainSettings::default() };
            let step = PolicyStep { train: &train, step, ..fixture.step(&policy, None) };
            let (batch, _, metrics) = fixture.prepare(&step).unwrap();
            let update = values(&fixture.learned(&step, &batch).unwrap().unwrap());
            (batch.selected.unwrap(), update, metrics.get("actor/selected_fraction").unwrap())
        };
        let (selected, whole, fraction) = at(100_000, 1, 1);
        let count = selected.iter().filter(|&&s| s).count();
        assert_eq!(count, selected.len() / 10, "{name}");
        assert_eq!(fraction, count as f64 / selected.len() as f64);
        let (again, split, _) = at(32, 1, 1);
        assert_eq!(again, selected, "{name}");
        assert!(distance(&split, &whole) < 1e-5, "{name}");
        // Clip-Cov draws from seed and step, KL-Cov draws nothing.
        for (seed, step) in [(2, 1), (1, 2)] {
            assert_eq!(at(32, seed, step).0 == selected, name == "kl_cov", "{name}");
        }
        let plain =
            PolicySettings { loss: loss("ppo"), old_logprob: OldLogProbSource::Rollout, ..policy.clone() };
        assert!(distance(&whole, &values(&fixture.update(&plain))) > 1e-3, "{name} selects nothing");
    }
}

#[test]
fn minibatches_have_the_selection_of_their_batch() {
    let fixture = Fixture::new();
    let policy = policy("clip_cov", OldLogProbSource::Recompute);
    let batch = fixture.prepared(&fixture.step(&policy, None));
    let of_batch = batch.selected.as_ref().unwrap();
    let minibatch = batch.select(&[4, 1]);
    let span = |s: usize| of_batch[batch.cu_seqlens[s]..batch.cu_seqlens[s + 1]].to_vec();
    assert_eq!(minibatch.selected.as_ref().unwrap(), &[span(4), span(1)].concat());
    assert!(of_batch.contains(&true));
}

#[test]
fn a_selection_needs_old_log_probs_from_before_the_update() {
    let fixture = Fixture::new();
    let policy = policy("kl_cov", OldLogProbSource::Detach);
    let refused = fixture.prepare(&fixture.step(&policy, None)).err().unwrap();
    assert!(format!("{refused:#}").contains("selects tokens before the first update"), "{refused:#}");
}
