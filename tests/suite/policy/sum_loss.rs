//! The losses of the Tinker API, against torch: `scripts/make_reference_values.py`.

use rloss::policy::sum_loss::{SumLoss, SumLossInput};
use std::collections::BTreeMap;

/// Numbers in [-1, 1), as the script has them.
fn noise(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(next).collect()
}

#[test]
fn sums_and_gradients_are_torchs() {
    let text = include_str!("../../fixtures/sum_losses.json");
    let expected: BTreeMap<String, Vec<Vec<f64>>> = serde_json::from_str(text).unwrap();
    assert_eq!(expected.keys().map(String::as_str).collect::<Vec<_>>(), {
        let mut names = SumLoss::NAMES;
        names.sort_unstable();
        names
    });
    for (name, rows) in expected {
        let loss = SumLoss::new(&name, &BTreeMap::new()).unwrap();
        assert_eq!(rows.len(), 100);
        for (batch, row) in rows.iter().enumerate() {
            let count = 1 + batch % 7;
            let values = noise(4 * count, batch as u32 + 1);
            let [first, second, third, weights] = [0, 1, 2, 3].map(|i| &values[i * count..(i + 1) * count]);
            let log_probs: Vec<f32> = first.iter().map(|x| 2.0 * x - 2.0).collect();
            let sampled: Vec<f32> = log_probs.iter().zip(second).map(|(l, x)| l + x).collect();
            let advantages: Vec<f32> = third.iter().map(|x| 2.0 * x).collect();
            let mask: Vec<f32> = (0..count).map(|index| if index % 3 == 2 { 0.0 } else { 1.0 }).collect();
            let input = SumLossInput {
                log_probs: &log_probs,
                weights,
                sampled_log_probs: &sampled,
                advantages: &advantages,
                ratio_mask: &mask,
            };
            let (value, gradient) = loss.compute(&input).unwrap();
            let found = std::iter::once(value).chain(gradient.into_iter().map(f64::from));
            for (found, expected) in found.zip(row) {
                let distance = (found - expected).abs();
                assert!(distance <= 1e-6 + 5e-6 * expected.abs(), "{name} {batch}: {found} for {expected}");
            }
        }
    }
}
