//! The launches of a decode step. The emulated driver names what it records in a CUDA graph.

use super::adapted::{adapted, blocks};
use super::{Config, Learner, config, family, ids, learner};
use crate::model::cache::{CacheCapacity, CacheFactory};
use crate::model::config::LayerType;
use crate::model::decode::Decoder;
use crate::model::decoder_stack::keep_nothing;
use crate::model::families::Family;
use crate::ops::cuda::open;
use candle_core::Device;
use std::collections::BTreeMap;
use std::process::Command;

/// Maximum number of launches per layer.
const LAUNCHES_MAX: usize = 12;
/// Maximum number of launches of a layer whose experts have gate and up as two tensors.
const SEPARATE_GATE_LAUNCHES_MAX: usize = 17;
/// Number of keys. They are split into two chunks, whose results are merged by one more launch.
const TOKENS: usize = 520;

/// A form of a model, with models of one and of two layers.
struct Form {
    name: &'static str,
    /// Maximum number of launches per layer.
    launches_max: usize,
    models: [(Config, Learner); 2],
}

fn forms(gpu: &Device) -> Vec<Form> {
    let layers = |config: Config, build: &dyn Fn(&Config) -> Learner| {
        [1, 2].map(|layers| {
            let layer_types = vec![LayerType::Full; layers];
            let config = Config {
                num_hidden_layers: layers,
                layer_types,
                max_position_embeddings: 600,
                ..config.clone()
            };
            let mut learner = build(&config);
            learner.model = super::Model::new(config.clone(), 600);
            (config, learner)
        })
    };
    let dense = |config: &Config| learner(config, gpu);
    let of = |name| config(family(name), 4, 2, 20);
    let form = |name, launches_max, models| Form { name, launches_max, models };
    vec![
        form("gpt_oss", LAUNCHES_MAX, layers(config(Family::default(), 4, 2, 20), &dense)),
        form("gpt_oss in MXFP4", LAUNCHES_MAX, layers(blocks(4, 2), &|config| adapted(config, 0, gpu))),
        form("qwen2", LAUNCHES_MAX, layers(of("qwen2"), &dense)),
        form("qwen3", LAUNCHES_MAX, layers(of("qwen3"), &dense)),
        form("qwen3_moe", SEPARATE_GATE_LAUNCHES_MAX, layers(of("qwen3_moe"), &dense)),
    ]
}

/// The part of the next test that runs in a process of its own.
#[test]
#[ignore = "the next test runs it"]
fn decode_steps_are_recorded() {
    let gpu = open(0).unwrap();
    for Form { name, models, .. } in forms(&gpu) {
        for (config, learner) in models {
            let capacity = CacheCapacity { sequences: 1, tokens: 600, fed_tokens_max: 600 };
            let caches = CacheFactory::new(&config, &gpu, capacity).unwrap();
            let mut sequence = caches.sequence();
            let stack = learner.sampler();
            stack.forward_cached(ids(TOKENS), &mut [&mut sequence], &[TOKENS], &mut keep_nothing).unwrap();
            let mut decoder = Decoder::new(&stack, capacity).unwrap();
            for _ in 0..2 {
                eprintln!("# {name}, {} layers", config.num_hidden_layers);
                decoder.decode_step(&stack, &[1], &mut [&mut sequence]).unwrap();
            }
            assert_eq!(decoder.counts.graphs, 1);
        }
    }
}

/// Returns the recorded launches of each step by the step's heading. Memory that is allocated or freed is no
/// launch.
fn recorded(trace: &str) -> BTreeMap<String, BTreeMap<String, usize>> {
    let (mut steps, mut heading) = (BTreeMap::<_, BTreeMap<_, _>>::new(), String::new());
    for line in trace.lines() {
        if let Some(next) = line.strip_prefix("# ") {
            heading = next.to_string();
        }
        let work = line.strip_prefix("cuda-emulator: stream ").and_then(|rest| rest.split_once(": "));
        let work = work.and_then(|(_, work)| work.strip_suffix(", recorded"));
        if let Some(launch) =
            work.filter(|work| !work.starts_with("cuMemAlloc") && !work.starts_with("cuMemFree"))
        {
            *steps.entry(heading.clone()).or_default().entry(launch.to_string()).or_insert(0) += 1;
        }
    }
    steps
}

#[test]
fn a_layer_of_a_decode_step_has_at_most_twelve_launches() {
    let gpu = open(0).unwrap();
    let name = gpu.as_cuda_device().unwrap().cuda_stream().context().name().unwrap();
    if name != "emulated H100" {
        return println!("skipped: {name} does not say what it records");
    }
    let test = "model::on_device::launches::decode_steps_are_recorded";
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", test, "--ignored", "--nocapture"]).env("CUDA_EMULATOR_TRACE", "1");
    let output = child.output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{said}");
    let steps = recorded(&said);
    for Form { name, launches_max, .. } in forms(&gpu) {
        let [one, two] = [1, 2].map(|layers| &steps[&format!("{name}, {layers} layers")]);
        let count = |launch: &String| two[launch] - one.get(launch).copied().unwrap_or(0);
        let of_layer: Vec<_> =
            two.keys().map(|launch| (launch, count(launch))).filter(|(_, n)| *n > 0).collect();
        let launches: usize = of_layer.iter().map(|(_, count)| count).sum();
        println!("{name}: {launches} launches per layer: {of_layer:?}");
        assert!((8..=launches_max).contains(&launches), "{name}: {launches} launches: {of_layer:?}");
        assert!(
            of_layer.iter().any(|(launch, _)| launch.contains("merge")),
            "{name}: chunks of keys are merged"
        );
    }
}
