//! The off-policy sequence mask in an update.

use super::*;

fn policy(name: &str, off_policy_mask: Option<f64>) -> PolicySettings {
    let correction = CorrectionSettings { off_policy_mask, ..CorrectionSettings::default() };
    PolicySettings { loss: loss(name), correction, ..PolicySettings::default() }
}

/// The policy finds responses 0 and 1 less likely than the rollout did. Response 1 has a negative advantage.
#[test]
fn unlikely_responses_with_a_negative_advantage_have_weight_0_and_count_in_the_denominators() {
    let mut fixture = Fixture::new();
    for trajectory in fixture.trajectories().take(2) {
        trajectory.log_probs.iter_mut().for_each(|l| *l += 0.25);
    }
    for name in ["reinforce", "ppo", "gspo", "vespo", "sapo"] {
        let masking = policy(name, Some(0.2));
        let step = fixture.step(&masking, None);
        let (batch, _, metrics) = fixture.prepare(&step).unwrap();
        let span = |s: usize| batch.cu_seqlens[s]..batch.cu_seqlens[s + 1];
        assert!(batch.advantages[span(0)][0] > 0.0 && batch.advantages[span(1)][0] < 0.0);
        let weights = batch.weights.as_ref().unwrap();
        let is_masked = |t: usize| span(1).contains(&t);
        assert!(weights.iter().enumerate().all(|(t, &w)| w == f32::from(!is_masked(t))), "{name}");
        assert!(batch.mask.iter().all(|&valid| valid), "the denominators count every token");
        let share = |name: &str| metrics.get(&format!("rollout_corr/{name}")).unwrap();
        assert_eq!(share("off_policy_mask_fraction"), span(1).len() as f64 / weights.len() as f64);
        assert_eq!(share("off_policy_mask_seq_fraction"), 1.0 / 6.0);

        // An advantage of 0 has the same gradient.
        let plain = policy(name, None);
        let step_without = fixture.step(&plain, None);
        let mut without: Batch = fixture.prepared(&step_without);
        without.advantages[span(1)].fill(0.0);
        let gradient = |step, batch: &Batch| values(&fixture.learned(step, batch).unwrap().unwrap());
        let masked = gradient(&step, &batch);
        assert!(distance(&masked, &gradient(&step_without, &without)) < 1e-6, "{name}");

        // Above the distance of 0.25 nothing is masked.
        let wide = policy(name, Some(0.3));
        let update = values(&fixture.update(&wide));
        assert_eq!(update, values(&fixture.update(&plain)), "{name}");
        assert!(distance(&masked, &update) > 1e-3, "{name}");
    }
}
