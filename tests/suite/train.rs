//! The training pass and the optimizer.

use crate::tiny::{self, Gradients, Learned, learned};
use rloss::actor::PolicyColumns;
use rloss::actor::batch_runner::{BatchRunner, MicroBatchLoss};
use rloss::actor::forward_backward::{ColumnLoss, Pass, PassOutput, PassSettings};
use rloss::actor::micro_batch::MicroBatch;
use rloss::metrics::Progress;
use rloss::model::cache::SequenceCache;
use rloss::model::decoder_stack;
use rloss::model::policy_view::PolicyView;
use rloss::ops::threads::Threads;
use rloss::rollout::SamplingParameters;

fn settings() -> PassSettings {
    tiny::pass_settings(0.9, 0.01)
}

/// Mean negative log-likelihood of the targets plus a little entropy: every gradient path is used.
fn loss(PolicyColumns { log_probs, entropies, .. }: &PolicyColumns) -> anyhow::Result<PolicyColumns> {
    let n = log_probs.len() as f32;
    Ok(PolicyColumns {
        log_probs: vec![-1.0 / n; log_probs.len()],
        entropies: vec![0.01 / n; entropies.len()],
        divergences: None,
    })
}

fn pass(seed: u64, recompute: bool) -> Learned<PassOutput> {
    let (model, parameters) = tiny::model(tiny::config(true), seed);
    let sequences = tiny::sequences(272, &[40, 1, 2, 77, 160], seed);
    let batch = &MicroBatch::split(&sequences, 100_000)[0];
    learned(&parameters, (&model, batch, settings(), recompute), |pass| {
        pass.forward_backward(&ColumnLoss { gradient: &loss, skips_zeros: false }, &|| ())
    })
}

#[test]
fn recomputed_layers_give_the_same_bits_as_the_whole_graph() {
    let (whole, recomputed) = (pass(3, false), pass(3, true));
    assert_eq!(whole.columns, recomputed.columns);
    assert_eq!(whole.load_balance_loss.to_bits(), recomputed.load_balance_loss.to_bits());
    assert_eq!(whole.gradients.values, recomputed.gradients.values);
}

#[test]
fn every_trainable_tensor_gets_a_finite_non_zero_gradient() {
    let (_, parameters) = tiny::model(tiny::config(true), 1);
    let output = pass(1, true);
    for (spec, gradient) in parameters.specs.iter().zip(&output.gradients.values) {
        let gradient = gradient.as_ref().unwrap_or_else(|| panic!("{}: no gradient", spec.name));
        assert!(gradient.iter().all(|g| g.is_finite()), "{}: not finite", spec.name);
        assert!(gradient.iter().any(|&g| g != 0.0), "{}: all zero", spec.name);
    }
}

#[test]
fn gradients_are_equal_on_any_number_of_threads() {
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).stack_size(64 << 20).build().unwrap();
        pool.install(|| pass(5, true))
    };
    let one = run(1);
    for threads in [2, 3, 4] {
        let other = run(threads);
        assert_eq!(one.columns, other.columns);
        assert_eq!(one.gradients.values, other.gradients.values);
    }
}

/// Gradients of nine micro-batches that `threads` threads share out, or the message of the one that fails.
fn gradients_of_a_batch(threads: usize, fails: Option<usize>) -> Result<Gradients, String> {
    let (model, parameters) = tiny::model(tiny::config(true), 5);
    let sequences = tiny::sequences(272, &[70, 33, 64, 90, 12, 55, 80, 41, 90], 6);
    let batches = MicroBatch::split(&sequences, 64);
    assert_eq!(batches.len(), 9);
    let threads = Threads::new(threads).unwrap();
    let runner =
        BatchRunner { threads: &threads, model: &model, parameters: &parameters, recompute_layers: false };
    let failing: MicroBatchLoss<'_, PolicyColumns> = &|index, columns| {
        anyhow::ensure!(fails != Some(index), "number {index} fails");
        loss(columns)
    };
    let found = runner.accumulate(&batches, settings(), None, failing, &Progress::hidden());
    found.map(|_| Gradients::of(&parameters)).map_err(|error| format!("{error:#}"))
}

#[test]
fn a_batchs_gradients_add_up_in_batch_order_on_any_number_of_threads() {
    let one = gradients_of_a_batch(1, None).unwrap();
    assert!(one.values.iter().all(|values| values.as_ref().unwrap().iter().any(|&g| g != 0.0)));
    for threads in [2, 3, 4, 9] {
        assert!(gradients_of_a_batch(threads, None).unwrap() == one, "{threads} threads");
    }
}

#[test]
fn a_micro_batch_that_fails_ends_the_batch_and_nobody_waits_for_it() {
    for threads in [1, 2, 4] {
        for fails in [0, 4, 8] {
            let error = gradients_of_a_batch(threads, Some(fails)).unwrap_err();
            assert!(error.contains(&format!("number {fails} fails")), "{threads} threads: {error}");
        }
    }
}

/// Log-probabilities of every next token of `tokens`, through the KV cache, `chunk` tokens at a time.
fn cached_log_probs(chunk: usize, tokens: &[u32], seed: u64) -> Vec<f32> {
    let (model, parameters) = tiny::model(tiny::config(true), seed);
    let policy = PolicyView::without_ablations(&model, &parameters).unwrap();
    let (stack, sampling) = (policy.decoder_stack(), SamplingParameters::with_temperature(0.9));
    let mut cache = SequenceCache::new(&model.config);
    let mut log_probs = vec![];
    for part in tokens.chunks(chunk) {
        let x = stack
            .forward_cached(part.to_vec(), &mut [&mut cache], &[part.len()], &mut decoder_stack::keep_nothing)
            .unwrap();
        let rows = std::sync::Arc::new((0..part.len() as u32).collect());
        let logits = stack.weights.logits(&stack.final_norm_rows(&x, &rows).unwrap(), &sampling).unwrap();
        let next = tokens[log_probs.len() + 1..].iter().copied().take(part.len());
        let asked: Vec<(usize, u32)> = next.enumerate().collect();
        log_probs.extend(logits.log_probs(&sampling, &asked).unwrap());
    }
    log_probs
}

#[test]
fn decode_and_prefill_in_any_chunks_equal_the_training_forward() {
    let mut sequences = tiny::sequences(272, &[150, 33, 64], 9);
    sequences.iter_mut().for_each(|s| s.mask.iter_mut().skip(1).for_each(|m| *m = true));
    let (model, parameters) = tiny::model(tiny::config(true), 7);
    let batch = &MicroBatch::split(&sequences, 100_000)[0];
    let weights = &parameters.frozen_weights(None).unwrap();
    let (model, settings) = (&model, settings());
    let pass = Pass { model, weights, batch, settings, recompute_layers: true, teacher: None };
    let training = pass.forward::<PolicyColumns>(&|| ()).unwrap().columns.log_probs;
    let mut start = 0;
    for sequence in &sequences {
        let end = start + sequence.tokens.len() - 1;
        for chunk in [1, 2, 3, 7, 32, 100, 150] {
            assert_eq!(
                cached_log_probs(chunk, &sequence.tokens, 7),
                training[start..end],
                "chunks of {chunk}"
            );
        }
        start = end;
    }
}
