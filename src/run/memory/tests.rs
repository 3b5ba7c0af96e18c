//! The plan against what processes hold.

use super::*;
use crate::dist::Mesh;
use crate::model::init::{InitSettings, init};
use crate::model::parameters::Parameters;
use crate::recipe::{OptimizerKind, resolve};
use crate::run::source::ModelSource;
use crate::train::optimizer::Optimizer;
use std::path::Path;

#[test]
fn each_process_holds_what_is_planned_for_it_to_the_byte() {
    let plan = resolve(Path::new("a.toml"), "", &[]).unwrap();
    let config = ModelSource::open(&plan.recipe).unwrap().config;
    let settings = InitSettings { embedding_std: 1.0, head_scale: 1.0, sink: 0.0 };
    let values = init(&config, &settings, 0).unwrap();
    let trainable = vec![true; values.len()];
    for kind in [OptimizerKind::AdamW, OptimizerKind::AdamW8Bit] {
        let mut recipe = plan.recipe.clone();
        recipe.cold_start.steps = 0;
        recipe.train.optimizer.kind = kind;
        let mut alone = 0;
        for processes in [1, 2, 4, 8] {
            let mut held = [0; 3];
            for rank in 0..processes {
                let mesh = Mesh::apart(rank, processes);
                let drawn = values.iter().map(|(spec, values)| Ok((spec.clone(), values.clone())));
                let mut parameters = Parameters::new(&config, drawn).unwrap().shared_by(&mesh);
                parameters.learn(&trainable).unwrap();
                Optimizer::new(&recipe.train.optimizer, &mut parameters, false).unwrap();
                let bytes = |tensor: &candle_core::Tensor| {
                    (tensor.elem_count() * tensor.dtype().size_in_bytes()) as u64
                };
                let places = 0..parameters.len();
                let own = [
                    places.clone().map(|i| bytes(parameters.values(i).unwrap())).sum::<u64>(),
                    places.clone().filter_map(|i| parameters.gradient(i)).map(bytes).sum(),
                    places.flat_map(|i| parameters.state(i).values()).map(bytes).sum(),
                ];
                held = [held[0].max(own[0]), held[1].max(own[1]), held[2].max(own[2])];
            }
            let subject = Subject {
                intent: Intent::Train,
                recipe: &recipe,
                config: &config,
                forms: &vec![Form::F32; values.len()],
                trainable: trainable.clone(),
                critic_trainable: None,
                adapter: None,
                uses_python: false,
                threads: 1,
                streamed: false,
                processes,
            };
            let plan = MemoryPlan::new(&subject);
            let planned = ["weights", "gradients", "optimizer"]
                .map(|name| plan.resident.iter().find(|part| part.name == name).unwrap().bytes);
            assert_eq!(planned, held, "{kind:?} on {processes}");
            let all: u64 = held.iter().sum();
            alone = alone.max(all);
            // Whole blocks, and small tensors that lie on one process.
            assert!(all as f64 <= 1.05 * alone as f64 / processes as f64, "{all} of {alone} on {processes}");
        }
    }
}
