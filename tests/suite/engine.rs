//! The engine: a completion depends on weights and request alone; forced tokens, scores, cancels, continuations.

use crate::tiny;
use rloss::engine::{
    Client, Completion, Continuation, Engine, EngineLimits, EngineRequest, FinishReason, NewToken,
    SampleRequest,
};
use rloss::model::cache::CacheCapacity;
use rloss::model::policy_view::PolicyView;
use rloss::ops::logits::SamplingParameters;
use rloss::ops::threads::Threads;
use rloss::random::{Purpose, stream};
use std::collections::BTreeMap;
use std::sync::Mutex;

/// Collects completions, and stops once there are enough.
struct Collector<'a> {
    wanted: usize,
    done: Mutex<BTreeMap<u64, Completion>>,
    /// Is asked after each token whether its sample goes on.
    goes_on: &'a (dyn Fn(u64, &NewToken) -> bool + Sync),
}

impl Client for Collector<'_> {
    fn token(&self, sample: u64, token: &NewToken) -> bool {
        (self.goes_on)(sample, token)
    }

    fn finished(&self, sample: u64, completion: Completion) {
        assert!(self.done.lock().unwrap().insert(sample, completion).is_none(), "one completion a sample");
    }

    fn goes_on(&self, _: u64) -> bool {
        self.done.lock().unwrap().len() < self.wanted
    }
}

/// An engine for a tiny model, with up to `sequences_max` sequences a worker.
fn engine(threads: usize, sequences_max: usize) -> Engine<'static> {
    let (model, parameters) = tiny::model(tiny::config(false), 11);
    // A test's model may live as long as the test program.
    let policy = PolicyView::without_ablations(Box::leak(Box::new(model)), &parameters).unwrap();
    let limits = EngineLimits { sequences_max, cuda_graphs: false, cache_capacity: CacheCapacity::default() };
    Engine::new(Box::leak(Box::new(Threads::new(threads).unwrap())), policy, 7, limits).unwrap()
}

fn run(
    engine: &Engine,
    requests: Vec<EngineRequest>,
    keep_on: &(dyn Fn(u64, &NewToken) -> bool + Sync),
) -> BTreeMap<u64, Completion> {
    let wanted = requests.iter().map(|request| request.samples.len()).sum();
    requests.into_iter().for_each(|request| engine.submit(request).unwrap());
    wait_for(engine, wanted, keep_on)
}

fn wait_for(
    engine: &Engine,
    wanted: usize,
    keep_on: &(dyn Fn(u64, &NewToken) -> bool + Sync),
) -> BTreeMap<u64, Completion> {
    let collector = Collector { wanted, done: Mutex::default(), goes_on: keep_on };
    engine.run(&collector).unwrap();
    collector.done.into_inner().unwrap()
}

fn sample(id: u64, forced: Vec<u32>) -> SampleRequest {
    SampleRequest { id, random: stream(3, Purpose::Request, &[id % 1000]), forced }
}

/// A request of its own length, sampling and number of samples.
fn request(number: u64) -> EngineRequest {
    let length = 1 + (number as usize * 7) % 40;
    let temperature = [1.0, 0.0, 0.7][number as usize % 3];
    EngineRequest {
        tokens: (0..length as u32).map(|i| 16 + (i * 13 + number as u32) % 200).collect(),
        samples: (0..1 + number % 3).map(|index| sample(number + 1000 * index, vec![])).collect(),
        sampling: SamplingParameters { top_p: 0.9, ..SamplingParameters::with_temperature(temperature) },
        stop_tokens: vec![5, 6],
        new_tokens_max: 3 + (number as usize * 5) % 30,
        top_log_probs: number.is_multiple_of(2).then_some(3),
        prompt_log_probs: number.is_multiple_of(4).then_some(2),
        keep_routed_experts: number.is_multiple_of(5),
        keep_sequence: false,
    }
}

#[test]
fn a_request_gives_the_same_alone_and_beside_others_that_come_and_go() {
    let alone: Vec<_> = (0..32).map(|n| run(&engine(1, 64), vec![request(n)], &|_, _| true)).collect();
    let alone: BTreeMap<u64, Completion> = alone.into_iter().flatten().collect();
    for (threads, sequences_max) in [(1, 64), (1, 3), (2, 64), (3, 5)] {
        let together = run(&engine(threads, sequences_max), (0..32).map(request).collect(), &|_, _| true);
        assert!(together == alone, "{threads} threads, {sequences_max} sequences");
    }
    for (id, completion) in &alone {
        assert_eq!(completion.policy_version, 7);
        let request = request(id % 1000);
        assert_eq!(
            completion.prompt_scores.len(),
            request.prompt_log_probs.map_or(0, |_| request.tokens.len() - 1)
        );
        assert!(
            completion.tokens.iter().all(|token| token.scores.is_some() == request.top_log_probs.is_some())
        );
    }
    assert!(alone.values().any(|completion| completion.finish_reason == FinishReason::StopToken));
    assert!(alone.values().any(|completion| completion.finish_reason == FinishReason::Length));
}

#[test]
fn forced_tokens_get_the_log_probs_that_a_prompt_of_them_gets() {
    let engine = engine(1, 8);
    let sampling = SamplingParameters::with_temperature(1.0);
    let tokens: Vec<u32> = (0..50).map(|i| 16 + i * 37 % 200).collect();
    let whole = EngineRequest {
        tokens: tokens.clone(),
        samples: vec![sample(1, vec![])],
        new_tokens_max: 0,
        prompt_log_probs: Some(0),
        sampling,
        ..request(1)
    };
    let forced = EngineRequest {
        tokens: tokens[..1].to_vec(),
        samples: vec![sample(2, tokens[1..].to_vec())],
        stop_tokens: vec![],
        new_tokens_max: tokens.len() - 1,
        sampling,
        ..request(1)
    };
    let done = run(&engine, vec![whole, forced], &|_, _| true);
    assert_eq!((done[&1].tokens.len(), done[&1].finish_reason), (0, FinishReason::Length));
    assert_eq!(done[&2].tokens.iter().map(|token| token.id).collect::<Vec<_>>(), tokens[1..]);
    let scored: Vec<f32> = done[&1].prompt_scores.iter().map(|scores| scores.log_prob).collect();
    assert_eq!(scored, done[&2].tokens.iter().map(|token| token.log_prob).collect::<Vec<_>>());
}

#[test]
fn a_sequence_that_was_kept_goes_on_where_it_ended() {
    let engine = engine(1, 8);
    let plain = EngineRequest {
        sampling: SamplingParameters::with_temperature(0.0),
        stop_tokens: vec![],
        new_tokens_max: 12,
        samples: vec![sample(1, vec![])],
        keep_routed_experts: true,
        prompt_log_probs: None,
        ..request(2)
    };
    let whole = run(&engine, vec![plain.clone()], &|_, _| true).remove(&1).unwrap();
    let kept = EngineRequest { new_tokens_max: 5, keep_sequence: true, ..plain };
    let first = run(&engine, vec![kept], &|_, _| true).remove(&1).unwrap();
    let go_on = |tokens: Vec<u32>| Continuation { tokens, sample: sample(1, vec![]), new_tokens_max: 7 };
    engine.continue_sequence(go_on(vec![])).unwrap();
    let second = wait_for(&engine, 1, &|_, _| true).remove(&1).unwrap();
    engine.release(1);
    assert!(engine.continue_sequence(go_on(vec![])).is_err(), "the sequence is kept no more");
    assert_eq!([first.tokens, second.tokens].concat(), whole.tokens);
    assert_eq!([first.routed_experts, second.routed_experts].concat(), whole.routed_experts);
}

#[test]
fn a_client_ends_a_sample_and_cancels_others() {
    let engine = engine(1, 2);
    let long = |id| EngineRequest {
        stop_tokens: vec![],
        new_tokens_max: 60,
        samples: vec![sample(id, vec![])],
        ..request(1)
    };
    // With the third token of the first sample, the others are cancelled: one under way, one that waits.
    let seen = Mutex::new(0);
    let keep_on = |id: u64, _: &NewToken| {
        let mut seen = seen.lock().unwrap();
        *seen += usize::from(id == 1);
        if *seen == 3 {
            engine.cancel(2);
            engine.cancel(3);
        }
        *seen < 3
    };
    let done = run(&engine, vec![long(1), long(2), long(3)], &keep_on);
    assert_eq!((done[&1].finish_reason, done[&1].tokens.len()), (FinishReason::Client, 3));
    assert!([FinishReason::Cancelled, FinishReason::Client].contains(&done[&2].finish_reason));
    assert!(done[&2].tokens.len() < 60);
    assert_eq!((done[&3].finish_reason, done[&3].tokens.len()), (FinishReason::Cancelled, 0));
}

#[test]
fn requests_that_cannot_be_answered_are_refused() {
    let engine = engine(1, 2);
    let context = engine.context_tokens_max();
    for wrong in [
        EngineRequest { tokens: vec![], ..request(1) },
        EngineRequest { samples: vec![], ..request(1) },
        EngineRequest { new_tokens_max: context, ..request(1) },
    ] {
        assert!(engine.submit(wrong).is_err());
    }
}
