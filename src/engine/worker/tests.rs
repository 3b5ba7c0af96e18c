//! Tests of a worker: which versions of the weights share a forward.

use super::*;
use crate::engine::{EngineRequest, SampleRequest};
use crate::model::adapter::{HEAD, Lora, Owner, default_targets};
use crate::model::config::{Config, LayerType, Rope};
use crate::model::families::Family;
use crate::model::forward::Model;
use crate::model::init::{InitSettings, init};
use crate::model::parameters::{Backend, Parameters};
use crate::model::policy_view::PolicyView;
use crate::model::storage::TensorStorage;
use crate::ops::threads::Threads;
use crate::random::{Purpose, stream};

fn config() -> Config {
    Config {
        family: Family::default(),
        vocab_size: 48,
        hidden_size: 32,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        head_dim: 16,
        intermediate_size: 32,
        num_local_experts: 4,
        num_experts_per_tok: 2,
        sliding_window: 8,
        layer_types: LayerType::alternate(2),
        rope: Rope { theta: 1e4, yarn: None },
        rms_norm_eps: 1e-5,
        swiglu_limit: 7.0,
        tie_word_embeddings: false,
        max_position_embeddings: 64,
        bos_token_id: None,
        eos_token_ids: vec![],
        pad_token_id: None,
    }
}

fn base(seed: u64) -> Parameters {
    let settings = InitSettings { embedding_std: 0.5, head_scale: 0.5, sink: 1.0 };
    let tensors = init(&config(), &settings, seed).unwrap().into_iter().map(|(spec, values)| {
        let stored = TensorStorage::variable(&spec, values)?;
        Ok((spec, stored))
    });
    Parameters::load(&config(), &Backend::default(), tensors).unwrap()
}

fn adapted(base: &Parameters, rank: usize) -> Parameters {
    let head = Some(HEAD.to_owned()).filter(|_| rank != 3);
    let targets = default_targets(&config()).into_iter().skip(rank).chain(head).collect();
    let lora = Lora { rank, alpha: 4.0, rslora: false, targets };
    let mut values = lora.initial_values(&base.specs, rank as u64, Owner::Policy).unwrap();
    values.iter_mut().flatten().for_each(|value| *value += 0.1);
    let mut adapted = base.without_adapter();
    adapted.attach_adapter(lora, values).unwrap();
    adapted
}

struct NoClient;

impl Client for NoClient {
    fn token(&self, _: u64, _: &NewToken) -> bool {
        true
    }

    fn finished(&self, _: u64, _: Completion) {}

    fn goes_on(&self, _: u64) -> bool {
        true
    }
}

#[test]
fn versions_of_one_base_are_one_forward_and_another_base_is_one_more() {
    let (base, other) = (base(1), base(2));
    let model = Model::new(config(), 64);
    let view = |parameters: &Parameters| PolicyView::without_ablations(&model, parameters).unwrap();
    let stores = [&base, &adapted(&base, 2), &other, &adapted(&base, 5), &adapted(&other, 3)];
    let threads = Threads::new(1).unwrap();
    let limits = EngineLimits {
        sequences_max: 64,
        cuda_graphs: false,
        cache_capacity: CacheCapacity::default(),
        prefix_tokens_max: 0,
    };
    let engine = Engine::new(&threads, view(&base), 0, limits).unwrap();
    let versions = stores.map(|store| PolicyVersion::new(1, view(store)));
    let prompt = |number: u32| (0..5 + number).map(|i| (7 * i + number) % 48).collect::<Vec<u32>>();
    // Two prompts of each version, interleaved.
    for number in 0..10 {
        let random = stream(0, Purpose::Request, &[number as u64]);
        let request = EngineRequest {
            version: Some(versions[number as usize % 5].clone()),
            tokens: prompt(number),
            samples: vec![SampleRequest { id: number as u64, random, forced: vec![] }],
            sampling: SamplingParameters::with_temperature(1.0),
            stop_tokens: vec![],
            new_tokens_max: 1,
            top_log_probs: None,
            prompt_log_probs: None,
            keep_routed_experts: false,
            keep_token_sets: false,
            keep_sequence: false,
        };
        engine.submit(request).unwrap();
    }
    let mut worker = Worker::new(&engine, &NoClient);
    assert!(engine.refill(&NoClient, &mut worker.batch, 0));
    let numbers = |part: &[Work]| -> Vec<usize> {
        let number = |work: &Work| versions.iter().position(|version| version == work.version()).unwrap();
        part.iter().map(number).collect()
    };
    let parts = worker.take_parts();
    let found: Vec<_> = parts.iter().map(|part| numbers(part)).collect();
    assert_eq!(found, [vec![0, 1, 3, 0, 1, 3], vec![2, 4, 2, 4]]);
    for part in parts {
        worker.batch = part;
        let first = worker.batch[0].version().clone();
        let mut feed = worker.select_tokens();
        let ends: Vec<u32> = feed.complete.iter().map(|(_, row)| *row).collect();
        let (tokens, versions) = (feed.tokens.len(), feed.versions.clone());
        let mixed = worker.forward(&first, &mut feed).unwrap();
        assert_eq!(mixed.dims(), [tokens, 32], "one forward has the rows of all");
        let raw = SamplingParameters::with_temperature(1.0);
        let scaled = |logits: Logits| logits.scaled_logits().to_vec2::<f32>().unwrap();
        let logits = scaled(PolicyVersion::logits(&versions, &mixed, &raw).unwrap());
        // The same prompts, each in a forward of its own.
        for (work, end) in std::mem::take(&mut worker.batch).into_iter().zip(ends) {
            let version = work.version().clone();
            let Work::Prefill(prefill) = work else { panic!("a sequence without a prompt") };
            let prompt = prefill.reading.tokens.clone();
            let stack = version.decoder_stack();
            let mut cache = engine.caches.sequence();
            let count = prompt.len();
            let alone =
                stack.forward_cached(prompt, &mut [&mut cache], &[count], &mut |_, _, _| Ok(())).unwrap();
            let rows = |hidden: &Tensor, end: usize| {
                hidden.narrow(0, end + 1 - count, count).unwrap().to_vec2::<f32>().unwrap()
            };
            assert!(rows(&alone, count - 1) == rows(&mixed, end as usize));
            let own = scaled(stack.weights.logits(&alone, &raw).unwrap());
            assert!(own[..] == logits[end as usize + 1 - count..=end as usize]);
        }
    }
}
