//! Sequences that begin alike share rows: the forward's bits stay, a gradient is the same sum in another
//! order.

use crate::tiny::{self, Gradients, Learned, learned};
use rloss::actor::batch_runner::BatchRunner;
use rloss::actor::forward_backward::{ColumnLoss, PassOutput, PassSettings};
use rloss::actor::micro_batch::{MicroBatch, Sequence};
use rloss::actor::{Columns, PolicyColumns};
use rloss::metrics::Progress;
use rloss::ops::threads::Threads;

/// Groups whose prompts end within blocks of 32 keys and at their bounds, inside the window of 16 and far
/// beyond it; a sample that another one continues, one that is all prompt, and samples that go on alike
/// for a while.
fn groups() -> Vec<Sequence> {
    let mut sequences = vec![];
    for (seed, prompt, responses) in
        [(1, 5, vec![9, 40, 1]), (2, 64, vec![30, 30, 0, 33]), (3, 45, vec![70, 2]), (4, 1, vec![20, 20])]
    {
        let tokens = |length, seed| tiny::sequences(272, &[length], seed)[0].tokens.clone();
        let prompt = tokens(prompt, seed);
        let mut responses: Vec<Vec<u32>> =
            (0..).zip(responses).map(|(i, length)| tokens(length, 10 * seed + i)).collect();
        let again = responses[0].clone();
        responses.push([&again[..], &[7, 8, 9]].concat());
        responses.push([&again[..again.len() / 2], &tokens(12, 10 * seed + 9)].concat());
        for response in responses {
            let mask = (0..prompt.len() + response.len()).map(|i| i >= prompt.len()).collect();
            sequences.push(Sequence { tokens: [&prompt[..], &response].concat(), mask, kept_tokens: vec![] });
        }
    }
    sequences
}

fn settings(load_balance: f64) -> PassSettings {
    tiny::pass_settings(0.9, load_balance)
}

/// Every token weighs something else.
fn loss(PolicyColumns { log_probs, entropies, .. }: &PolicyColumns) -> anyhow::Result<PolicyColumns> {
    let weight = |i: usize| ((i * 7 % 11) as f32 - 4.0) / log_probs.len() as f32;
    Ok(PolicyColumns {
        log_probs: (0..log_probs.len()).map(weight).collect(),
        entropies: (0..entropies.len()).map(|i| 0.1 * weight(i + 3)).collect(),
        divergences: None,
    })
}

fn pass(batch: &MicroBatch, settings: PassSettings, recompute: bool) -> Learned<PassOutput> {
    let (model, parameters) = tiny::model(tiny::config(true), 3);
    learned(&parameters, (&model, batch, settings, recompute), |pass| {
        pass.forward_backward(&ColumnLoss { gradient: &loss, skips_zeros: false }, &|| ())
    })
}

fn whole(sequences: &[Sequence], sharing: bool) -> MicroBatch {
    let mut batches = if sharing {
        MicroBatch::split_with_prefixes(sequences, 100_000, |_| usize::MAX)
    } else {
        MicroBatch::split(sequences, 100_000)
    };
    assert_eq!(batches.len(), 1);
    batches.remove(0)
}

/// The largest difference of two tensors over the largest value.
fn distance(a: &[f32], b: &[f32]) -> f32 {
    let largest = a.iter().fold(f32::MIN_POSITIVE, |largest, x| largest.max(x.abs()));
    a.iter().zip(b).fold(0.0, |most: f32, (a, b)| most.max((a - b).abs())) / largest
}

fn assert_close(a: &Gradients, b: &Gradients) {
    for (index, (a, b)) in a.values.iter().zip(&b.values).enumerate() {
        let distance = distance(a.as_ref().unwrap(), b.as_ref().unwrap());
        assert!(distance < 2e-5, "tensor {index}: {distance:e}");
    }
}

#[test]
fn shared_rows_change_no_bit_of_the_forward_and_no_gradient_beyond_the_order_of_its_sum() {
    let sequences = groups();
    let (separate, shared) = (whole(&sequences, false), whole(&sequences, true));
    assert!(shared.tokens.len() * 3 < separate.tokens.len() * 2, "{} rows", shared.tokens.len());
    assert_eq!(shared.sequence_rows.positions_count(), separate.tokens.len());
    for load_balance in [0.0, 0.5] {
        let settings = settings(load_balance);
        let (separate, shared) = (pass(&separate, settings, false), pass(&shared, settings, false));
        assert_eq!(separate.columns, shared.columns);
        assert!((separate.load_balance_loss - shared.load_balance_loss).abs() < 1e-5);
        assert_close(&separate.gradients, &shared.gradients);
    }
}

#[test]
fn a_load_balancing_loss_counts_a_shared_row_as_often_as_it_is_held() {
    let sequences = groups();
    let nothing = |batch| {
        let (model, parameters) = tiny::model(tiny::config(true), 3);
        let zero = |columns: &PolicyColumns| Ok(columns.zeros());
        learned(&parameters, (&model, batch, settings(1.0), false), |pass| {
            pass.forward_backward(&ColumnLoss { gradient: &zero, skips_zeros: false }, &|| ())
        })
    };
    let (separate, shared) = (nothing(&whole(&sequences, false)), nothing(&whole(&sequences, true)));
    assert!((separate.load_balance_loss - shared.load_balance_loss).abs() < 1e-5);
    for (separate, shared) in separate.gradients.values.iter().zip(&shared.gradients.values) {
        let (separate, shared) = (separate.as_ref().unwrap(), shared.as_ref().unwrap());
        let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-4 * a.abs().max(1e-3);
        assert!(separate.iter().zip(shared).all(close), "distance {:e}", distance(separate, shared));
    }
    assert!(separate.gradients.values.iter().flatten().flatten().any(|&g| g.abs() > 1e-3));
}

#[test]
fn shared_rows_keep_their_bits_recomputed_and_on_any_number_of_threads() {
    let batch = whole(&groups(), true);
    let run = |threads: usize, recompute: bool| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).stack_size(64 << 20).build().unwrap();
        pool.install(|| pass(&batch, settings(0.5), recompute))
    };
    let one = run(1, false);
    for (threads, recompute) in [(1, true), (2, false), (3, true)] {
        let other = run(threads, recompute);
        assert_eq!(one.columns, other.columns);
        assert_eq!(one.gradients.values, other.gradients.values, "{threads} threads");
    }
}

#[test]
fn a_cut_through_a_group_changes_no_log_prob() {
    let sequences = groups();
    let (model, parameters) = tiny::model(tiny::config(true), 3);
    let threads = Threads::new(2).unwrap();
    let runner =
        BatchRunner { threads: &threads, model: &model, parameters: &parameters, recompute_layers: false };
    let log_probs = |batches: &[MicroBatch]| -> Vec<f32> {
        let outputs = runner.forward(batches, settings(0.0), &Progress::hidden()).unwrap();
        outputs.into_iter().flat_map(|output: PassOutput| output.columns.log_probs).collect()
    };
    let separate = log_probs(&MicroBatch::split(&sequences, 64));
    for tokens_max in [1, 64, 100, 300] {
        let batches = MicroBatch::split_with_prefixes(&sequences, tokens_max, |_| usize::MAX);
        assert!(batches.len() > 1);
        assert_eq!(log_probs(&batches), separate, "{tokens_max} rows");
    }
}
