//! One engine for several versions of the weights: adapters over one base, and weights of their own.

use crate::engine::{endless, request, run, sample, wait_for};
use crate::{qwen2, qwen3, tiny};
use candle_core::Tensor;
use rand::Rng;
use rloss::engine::{Completion, Continuation, Engine, EngineLimits, EngineRequest, NewToken, PolicyVersion};
use rloss::model::adapter::{Lora, default_targets};
use rloss::model::cache::CacheCapacity;
use rloss::model::config::Config;
use rloss::model::forward::Model;
use rloss::model::parameters::Parameters;
use rloss::model::policy_view::PolicyView;
use rloss::ops::logits::SamplingParameters;
use rloss::ops::threads::Threads;
use rloss::random::{Purpose, stream};
use std::collections::BTreeMap;

type Completions = BTreeMap<u64, Completion>;

fn goes_on(_: u64, _: &NewToken) -> bool {
    true
}

/// `base` with an adapter on some of the matrices that can have one. No factor is 0.
fn adapted(base: &Parameters, config: &Config, rank: usize, on: impl Fn(&str) -> bool) -> Parameters {
    let targets = default_targets(config).into_iter().filter(|name| on(name)).collect();
    let lora = Lora { rank, alpha: 3.0 + rank as f64, rslora: rank > 4, targets };
    let mut rng = stream(rank as u64, Purpose::Adapter, &[]);
    let specs = lora.factor_specs(&base.specs).unwrap();
    let mut values = |count| (0..count).map(|_| rng.random_range(-0.2f32..0.2)).collect();
    let values = specs.iter().map(|spec| values(spec.element_count())).collect();
    let mut adapted = base.without_adapter();
    adapted.attach_adapter(lora, values).unwrap();
    adapted
}

/// A base and adapters over it: of all matrices, of some, of others with another rank.
fn adapters(config: &Config, seed: u64) -> (Model, Vec<Parameters>) {
    let (model, base) = tiny::model(config.clone(), seed);
    let all = adapted(&base, config, 4, |_| true);
    let some = adapted(&base, config, 8, |name| name.contains("v_proj") || name.contains("down_proj"));
    let others = adapted(&base, config, 3, |name| name.contains("layers.1.") || name.contains("o_proj"));
    (model, vec![base, all, some, others])
}

fn view<'m>(model: &'m Model, parameters: &Parameters) -> PolicyView<'m> {
    PolicyView::without_ablations(model, parameters).unwrap()
}

fn engine<'t>(
    threads: &'t Threads,
    version: (PolicyView, u64),
    sequences_max: usize,
    prefix_tokens_max: usize,
) -> Engine<'t> {
    let cache_capacity = CacheCapacity::default();
    let limits = EngineLimits { sequences_max, cuda_graphs: false, cache_capacity, prefix_tokens_max };
    Engine::new(threads, version.0, version.1, limits).unwrap()
}

fn of(version: &PolicyVersion, request: EngineRequest) -> EngineRequest {
    EngineRequest { version: Some(version.clone()), ..request }
}

/// Checks that requests of `views` beside one another get what each gets from an engine of its own version.
/// The first view is the engine's own version.
fn check_mixed(views: &[PolicyView], what: &str) {
    let one = Threads::new(1).unwrap();
    let count = views.len() as u64;
    let alone = |n: u64| {
        let own = (views[(n % count) as usize].clone(), 100 + n % count);
        run(&engine(&one, own, 64, 0), vec![request(n)], &goes_on)
    };
    let alone: Completions = (0..24).flat_map(alone).collect();
    for (threads, sequences_max, kept) in [(1, 64, 0), (1, 3, 0), (2, 64, 0), (1, 64, 4096), (2, 5, 512)] {
        let threads = Threads::new(threads).unwrap();
        let engine = engine(&threads, (views[0].clone(), 100), sequences_max, kept);
        let versions: Vec<PolicyVersion> =
            (100..).zip(views).map(|(number, view)| PolicyVersion::new(number, view.clone())).collect();
        let mixed = |n: u64| match n % count {
            0 => request(n),
            version => of(&versions[version as usize], request(n)),
        };
        for again in [false, true] {
            let together = run(&engine, (0..24).map(mixed).collect(), &goes_on);
            assert!(together == alone, "{what}: {sequences_max} sequences, {kept} tokens kept, {again}");
        }
    }
    assert!(alone.values().any(|completion| completion.tokens.len() > 20));
}

#[test]
fn requests_of_several_adapters_over_one_base_get_what_each_gets_alone() {
    let configs = [
        ("gpt_oss", tiny::config(true)),
        ("qwen2", qwen2::config(false)),
        ("qwen2, tied", qwen2::config(true)),
        ("qwen3_moe", qwen3::config("qwen3_moe")),
    ];
    for (name, config) in configs {
        let (model, parameters) = adapters(&config, 11);
        let views: Vec<PolicyView> = parameters.iter().map(|of| view(&model, of)).collect();
        for (index, one) in views.iter().enumerate() {
            assert!(views.iter().all(|other| one.weights.shares_base(&other.weights)), "{name}: {index}");
        }
        check_mixed(&views, name);
    }
}

#[test]
fn requests_of_weights_that_share_nothing_get_what_each_gets_alone() {
    for config in [tiny::config(false), qwen2::config(false)] {
        let (model, mut parameters) = adapters(&config, 11);
        parameters.truncate(2);
        let (other_model, others) = adapters(&config, 12);
        let views: Vec<PolicyView> = parameters.iter().map(|of| view(&model, of)).collect();
        // Two versions of each base: a step has two forwards.
        let others = [view(&model, &others[0]), view(&model, &others[2]), view(&other_model, &others[3])];
        assert!(!views[0].weights.shares_base(&others[0].weights));
        check_mixed(&[views, others.to_vec()].concat(), "two bases");
    }
}

#[test]
fn versions_give_different_tokens_to_one_request() {
    let (model, parameters) = adapters(&tiny::config(false), 11);
    let threads = Threads::new(1).unwrap();
    let engine = engine(&threads, (view(&model, &parameters[0]), 0), 8, 0);
    let asked = |number: u64| EngineRequest {
        // The same random numbers for all.
        samples: vec![sample(1 + 1000 * number, vec![])],
        sampling: SamplingParameters::with_temperature(1.0),
        stop_tokens: vec![],
        ..request(5)
    };
    let version = |number: u64| PolicyVersion::new(number, view(&model, &parameters[number as usize]));
    let done = run(&engine, (0..4).map(|n| of(&version(n), asked(n))).collect(), &goes_on);
    let of = |number: u64| &done[&(1 + 1000 * number)];
    for one in 0..4 {
        assert_eq!(of(one).policy_version, one);
        assert!((0..one).all(|other| of(one).tokens != of(other).tokens), "{one}");
    }
}

#[test]
fn a_prefix_of_one_version_is_never_reused_by_another() {
    let (model, parameters) = adapters(&tiny::config(false), 11);
    let threads = Threads::new(1).unwrap();
    let engine = engine(&threads, (view(&model, &parameters[0]), 0), 8, 4096);
    let versions = [1, 2, 2].map(|index: u64| {
        PolicyVersion::new(index, view(&model, &parameters[index as usize])) // the last two are equal twins
    });
    let tokens: Vec<u32> = (0..100).map(|i| 16 + i * 29 % 200).collect();
    let asked = || EngineRequest { tokens: tokens.clone(), prompt_log_probs: None, ..endless(1, 20) };
    let reused = || engine.prefill_counts().reused;
    for version in &versions {
        let before = reused();
        let first = run(&engine, vec![of(version, asked())], &goes_on);
        assert_eq!(reused(), before, "the blocks are of other versions");
        assert!(first == run(&engine, vec![of(version, asked())], &goes_on));
        assert_eq!(reused(), before + 96, "whole blocks of its own");
    }
}

#[test]
fn a_continuation_stays_with_the_version_of_its_request() {
    let (model, parameters) = adapters(&tiny::config(false), 11);
    let threads = Threads::new(1).unwrap();
    let version = PolicyVersion::new(5, view(&model, &parameters[1]));
    let asked = |new_tokens_max, keep_sequence| EngineRequest {
        sampling: SamplingParameters::with_temperature(0.0),
        samples: vec![sample(1, vec![])],
        stop_tokens: vec![],
        new_tokens_max,
        keep_sequence,
        ..of(&version, request(2))
    };
    let engine = engine(&threads, (view(&model, &parameters[0]), 4), 8, 0);
    let whole = run(&engine, vec![asked(12, false)], &goes_on).remove(&1).unwrap();
    let first = run(&engine, vec![asked(5, true)], &goes_on).remove(&1).unwrap();
    let sample = sample(1, vec![]);
    engine.continue_sequence(Continuation { tokens: vec![], sample, new_tokens_max: 7 }).unwrap();
    let second = wait_for(&engine, 1, &goes_on).remove(&1).unwrap();
    assert_eq!([first.policy_version, second.policy_version], [5, 5]);
    assert_eq!([first.tokens, second.tokens].concat(), whole.tokens);
}

#[test]
fn an_update_of_an_adapter_does_not_change_a_version_in_use() {
    let (model, mut parameters) = adapters(&tiny::config(false), 11);
    let trained = &mut parameters[1];
    let base = trained.without_adapter().len();
    trained.set_trainable(&(0..trained.len()).map(|index| index >= base).collect::<Vec<_>>()).unwrap();
    let now = |number| PolicyVersion::new(number, view(&model, &parameters[1].snapshot(None).unwrap()));
    let threads = Threads::new(1).unwrap();
    let engine = engine(&threads, (view(&model, &parameters[0]), 0), 8, 0);
    let asked = |version: &PolicyVersion, id| EngineRequest {
        samples: vec![sample(id, vec![])],
        ..of(version, request(5))
    };
    let old = now(1);
    let before = run(&engine, vec![asked(&old, 1)], &goes_on).remove(&1);
    for index in base..parameters[1].len() {
        let values = tiny::values(parameters[1].values(index).unwrap());
        tiny::set(&parameters[1], index, &values.iter().map(|value| 1.5 * value).collect::<Vec<_>>());
    }
    let mut both = run(&engine, vec![asked(&old, 1), asked(&now(2), 1001)], &goes_on);
    assert_eq!(both.remove(&1), before);
    assert_ne!(both[&1001].tokens, before.unwrap().tokens);
}

fn storage(tensor: &Tensor) -> usize {
    std::ptr::from_ref(&*tensor.storage_and_layout().0).addr()
}

#[test]
fn two_adapters_have_their_base_in_memory_once() {
    let (_, parameters) = adapters(&tiny::config(false), 11);
    for index in 0..parameters[0].len() {
        let places = [0, 1, 2].map(|of: usize| storage(parameters[of].values(index).unwrap()));
        assert_eq!(places, [places[0]; 3], "{}", parameters[0].specs[index].name);
    }
}

#[test]
fn a_version_of_another_model_is_refused() {
    let config = tiny::config(false);
    let (model, parameters) = tiny::model(config.clone(), 11);
    let (other_model, others) = tiny::model(Config { hidden_size: 32, ..config }, 11);
    let threads = Threads::new(1).unwrap();
    let engine = engine(&threads, (view(&model, &parameters), 0), 8, 0);
    let other = PolicyVersion::new(3, view(&other_model, &others));
    let error = engine.submit(of(&other, request(1))).unwrap_err().to_string();
    assert!(error.contains("version 3") && error.contains("another model"), "{error}");
}
