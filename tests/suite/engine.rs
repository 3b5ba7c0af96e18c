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
    engine_with_prefixes(threads, sequences_max, 0)
}

/// The same engine, which keeps up to `prefix_tokens_max` tokens for requests that begin alike.
fn engine_with_prefixes(threads: usize, sequences_max: usize, prefix_tokens_max: usize) -> Engine<'static> {
    let (model, parameters) = tiny::model(tiny::config(false), 11);
    // A test's model may live as long as the test program.
    let policy = PolicyView::without_ablations(Box::leak(Box::new(model)), &parameters).unwrap();
    let limits = EngineLimits {
        sequences_max,
        cuda_graphs: false,
        cache_capacity: CacheCapacity::default(),
        prefix_tokens_max,
    };
    Engine::new(Box::leak(Box::new(Threads::new(threads).unwrap())), policy, 7, limits).unwrap()
}

pub fn run(
    engine: &Engine,
    requests: Vec<EngineRequest>,
    keep_on: &(dyn Fn(u64, &NewToken) -> bool + Sync),
) -> BTreeMap<u64, Completion> {
    let wanted = requests.iter().map(|request| request.samples.len()).sum();
    requests.into_iter().for_each(|request| engine.submit(request).unwrap());
    wait_for(engine, wanted, keep_on)
}

pub fn wait_for(
    engine: &Engine,
    wanted: usize,
    keep_on: &(dyn Fn(u64, &NewToken) -> bool + Sync),
) -> BTreeMap<u64, Completion> {
    let collector = Collector { wanted, done: Mutex::default(), goes_on: keep_on };
    engine.run(&collector).unwrap();
    collector.done.into_inner().unwrap()
}

pub fn sample(id: u64, forced: Vec<u32>) -> SampleRequest {
    SampleRequest { id, random: stream(3, Purpose::Request, &[id % 1000]), forced }
}

/// A request of its own length, sampling and number of samples.
pub fn request(number: u64) -> EngineRequest {
    let length = 1 + (number as usize * 7) % 40;
    let temperature = [1.0, 0.0, 0.7][number as usize % 3];
    EngineRequest {
        version: None,
        tokens: (0..length as u32).map(|i| 16 + (i * 13 + number as u32) % 200).collect(),
        samples: (0..1 + number % 3).map(|index| sample(number + 1000 * index, vec![])).collect(),
        sampling: SamplingParameters { top_p: 0.9, ..SamplingParameters::with_temperature(temperature) },
        stop_tokens: vec![5, 6],
        new_tokens_max: 3 + (number as usize * 5) % 30,
        top_log_probs: number.is_multiple_of(2).then_some(3),
        prompt_log_probs: number.is_multiple_of(4).then_some(2),
        keep_routed_experts: number.is_multiple_of(5),
        keep_token_sets: false,
        keep_sequence: false,
    }
}

/// One sample of [`request`] 1 that no token ends.
pub fn endless(id: u64, new_tokens_max: usize) -> EngineRequest {
    EngineRequest { stop_tokens: vec![], new_tokens_max, samples: vec![sample(id, vec![])], ..request(1) }
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
    let (first, samples) = (tokens[..1].to_vec(), vec![sample(2, tokens[1..].to_vec())]);
    let forced = EngineRequest { tokens: first, samples, sampling, ..endless(2, tokens.len() - 1) };
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
    let long = |id| endless(id, 60);
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

/// Cancels a request before the second forward, which reads the second part of its prompt.
struct CancelsPrompt<'a> {
    engine: &'a Engine<'a>,
    forwards: Mutex<u64>,
    done: Mutex<Option<Completion>>,
}

impl Client for CancelsPrompt<'_> {
    fn token(&self, _: u64, _: &NewToken) -> bool {
        panic!("no token is drawn for a cancelled prompt");
    }

    fn finished(&self, _: u64, completion: Completion) {
        *self.done.lock().unwrap() = Some(completion);
    }

    fn goes_on(&self, _: u64) -> bool {
        let mut forwards = self.forwards.lock().unwrap();
        *forwards += 1;
        if *forwards == 2 {
            [1, 2].into_iter().for_each(|id| self.engine.cancel(id));
        }
        self.done.lock().unwrap().is_none()
    }
}

/// Regression test: the prompts of clients that had left were read to their end.
#[test]
fn a_cancelled_prompt_is_not_read_on() {
    let mut config = tiny::config(false);
    config.max_position_embeddings = 4000;
    let (model, parameters) = tiny::model(config, 11);
    let policy = PolicyView::without_ablations(Box::leak(Box::new(model)), &parameters).unwrap();
    let limits = EngineLimits {
        sequences_max: 8,
        cuda_graphs: false,
        cache_capacity: CacheCapacity::default(),
        prefix_tokens_max: 0,
    };
    let threads = Threads::new(1).unwrap();
    let engine = Engine::new(&threads, policy, 7, limits).unwrap();
    // A forward reads up to 1024 tokens.
    let long = EngineRequest {
        tokens: (0..3000).map(|i| 16 + i % 200).collect(),
        samples: vec![sample(1, vec![]), sample(2, vec![])],
        prompt_log_probs: None,
        ..request(1)
    };
    engine.submit(long).unwrap();
    let client = CancelsPrompt { engine: &engine, forwards: Mutex::default(), done: Mutex::default() };
    engine.run(&client).unwrap();
    assert_eq!(client.done.lock().unwrap().as_ref().unwrap().finish_reason, FinishReason::Cancelled);
    assert_eq!(engine.prefill_counts().read, 1024);
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

/// Requests whose prompts share 70 tokens, more than the window, and end with tokens of their own.
fn alike(number: u64) -> EngineRequest {
    let own = 1 + (number as u32 * 11) % 40;
    EngineRequest {
        tokens: (0..70)
            .map(|i| 16 + i * 29 % 200)
            .chain((0..own).map(|i| 16 + (i + number as u32) % 200))
            .collect(),
        new_tokens_max: 40,
        stop_tokens: vec![],
        ..request(number)
    }
}

#[test]
fn a_prefix_that_another_request_has_read_gives_the_same_bits() {
    let plain: Vec<_> = (0..16).map(|n| run(&engine(1, 64), vec![alike(n)], &|_, _| true)).collect();
    let plain: BTreeMap<u64, Completion> = plain.into_iter().flatten().collect();
    for (threads, sequences_max, kept) in [(1, 64, 4096), (1, 3, 96), (1, 64, 32), (2, 64, 4096), (3, 5, 512)]
    {
        let engine = engine_with_prefixes(threads, sequences_max, kept);
        let what = format!("{threads} threads, {sequences_max} sequences, {kept} tokens kept");
        // At once, and again one after the other, when earlier requests have left their blocks.
        let mut together = run(&engine, (0..16).map(alike).collect(), &|_, _| true);
        assert!(together == plain, "{what}");
        let first = engine.prefill_counts();
        assert!(first.kept <= kept, "{what}: {first:?}");
        (0..16).for_each(|n| together.extend(run(&engine, vec![alike(n)], &|_, _| true)));
        assert!(together == plain, "{what}, again");
        let prompts: usize = (0..16).map(|n| alike(n).tokens.len()).sum();
        let second = engine.prefill_counts();
        assert_eq!(second.read + second.reused, 2 * prompts as u64, "{what}");
        if kept == 4096 && threads == 1 {
            // Requests for scores of the prompt or for routed experts read all of it; the others read the two
            // whole blocks of 32 tokens that they share once.
            let needs_rows = |n: &u64| n.is_multiple_of(4) || n.is_multiple_of(5);
            let others = (0..16).filter(|n| !needs_rows(n)).count() as u64;
            assert_eq!(first.reused, 64 * others);
            assert!(second.reused >= 2 * first.reused, "{second:?}");
        }
    }
}

#[test]
fn a_chats_next_turn_reads_only_what_is_new() {
    let engine = engine_with_prefixes(1, 8, 4096);
    let turn = |tokens: Vec<u32>| EngineRequest { tokens, prompt_log_probs: None, ..endless(1, 20) };
    let mut tokens: Vec<u32> = (0..40).map(|i| 16 + i * 7 % 200).collect();
    let (mut before, mut reused) = (0usize, 0);
    for _ in 0..4 {
        let request = turn(tokens.clone());
        let answer = run(&engine, vec![request.clone()], &|_, _| true);
        assert!(answer == run(&self::engine(1, 8), vec![request], &|_, _| true));
        // The turn before has left all its tokens but the last, which was never read.
        reused += before.saturating_sub(1);
        assert_eq!(engine.prefill_counts().reused, reused as u64);
        tokens.extend(answer[&1].tokens.iter().map(|token| token.id));
        before = tokens.len();
        tokens.extend([17, 18, 19]);
    }
}

/// Counts the forwards of one worker, and submits a request before one of them.
struct LateRequest<'a> {
    engine: &'a Engine<'a>,
    /// The forward before which it is submitted.
    at: u64,
    request: EngineRequest,
    forwards: Mutex<(u64, Option<u64>)>,
    done: Mutex<usize>,
}

impl Client for LateRequest<'_> {
    fn token(&self, sample: u64, _: &NewToken) -> bool {
        let mut forwards = self.forwards.lock().unwrap();
        if sample == self.request.samples[0].id {
            let now = forwards.0;
            forwards.1.get_or_insert(now);
        }
        true
    }

    fn finished(&self, _: u64, _: Completion) {
        *self.done.lock().unwrap() += 1;
    }

    fn goes_on(&self, _: u64) -> bool {
        let now = {
            let mut forwards = self.forwards.lock().unwrap();
            forwards.0 += 1;
            forwards.0
        };
        if now == self.at {
            self.engine.submit(self.request.clone()).unwrap();
        }
        *self.done.lock().unwrap() < 33
    }
}

#[test]
fn a_late_requests_first_token_comes_with_the_forward_that_reads_its_prompt() {
    let engine = engine(1, 64);
    let decode = |id| endless(id, 60);
    (0..32).for_each(|id| engine.submit(decode(id)).unwrap());
    let late =
        EngineRequest { tokens: (0..140).map(|i| 16 + i % 200).collect(), new_tokens_max: 4, ..decode(99) };
    let client = LateRequest {
        engine: &engine,
        at: 20,
        request: late,
        forwards: Mutex::default(),
        done: Mutex::default(),
    };
    engine.run(&client).unwrap();
    // It is submitted while forward 20 is chosen, and so is read by that one together with 32 decode steps.
    assert_eq!(client.forwards.lock().unwrap().1, Some(20));
}
