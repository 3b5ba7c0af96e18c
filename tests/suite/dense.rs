//! One expert as wide as the two that a token uses elsewhere: the dense control of the mixture.

use crate::cli::{done, json_of};
use crate::small_runs::{self, assert_no_gap};
use crate::tiny::load;
use crate::tiny::{self, Learned, learned};
use rloss::actor::forward_backward::{ColumnLoss, PassOutput, PassSettings};
use rloss::actor::micro_batch::MicroBatch;
use rloss::actor::{Columns, PolicyColumns};
use rloss::model::config::{Config, WeightFormat};
use rloss::model::forward::{ForwardOptions, Model};
use rloss::model::names::{ParameterSpec, parameter_specs};
use rloss::model::parameters::Parameters;

fn dense() -> Config {
    Config { num_local_experts: 1, num_experts_per_tok: 1, intermediate_size: 128, ..tiny::config(false) }
}

/// A tensor's values.
type Values = Vec<f32>;

/// Every tensor, in the order of the specs.
fn tensors(parameters: &Parameters) -> Vec<Values> {
    (0..parameters.len()).map(|i| tiny::values(parameters.values(i).unwrap())).collect()
}

fn parameters(config: &Config, values: Vec<Values>) -> Parameters {
    let mut parameters =
        crate::tiny::parameters(config, parameter_specs(config).into_iter().zip(values).map(Ok)).unwrap();
    parameters.set_trainable(&vec![true; parameters.len()]).unwrap();
    parameters
}

/// Forward and backward of the mean negative log-likelihood and the load-balancing loss.
fn pass(config: &Config, parameters: &Parameters) -> Learned<PassOutput> {
    let batch = &MicroBatch::split(&tiny::sequences(272, &[40, 2, 77], 5), usize::MAX)[0];
    let forward = ForwardOptions::default();
    let model = &Model::new(config.clone(), config.max_position_embeddings);
    let settings = PassSettings {
        temperature: 1.0,
        load_balance_coefficient: 0.01,
        keeps_routed_experts: true,
        forward,
    };
    let loss = |columns: &PolicyColumns| {
        let n = columns.log_probs.len();
        Ok(PolicyColumns { log_probs: vec![-1.0 / n as f32; n], ..columns.zeros() })
    };
    learned(parameters, (model, batch, settings, true), |pass| {
        pass.forward_backward(&ColumnLoss { gradient: &loss, skips_zeros: false }, &|| ())
    })
}

#[test]
fn the_only_expert_has_weight_one_and_its_router_has_no_say() {
    let (_, plain) = tiny::model(dense(), 3);
    let output = pass(&dense(), &plain);
    assert_eq!(output.load_balance_loss, 1.0);
    for (spec, gradient) in plain.specs.iter().zip(&output.gradients.values) {
        let gradient = gradient.as_ref().unwrap_or_else(|| panic!("{}: no gradient", spec.name));
        let router = spec.name.contains("router");
        assert!(gradient.iter().all(|g| g.is_finite()), "{}", spec.name);
        assert_eq!(gradient.iter().all(|&g| g == 0.0), router, "{}", spec.name);
    }
    let changed = |(spec, values): (&ParameterSpec, Values)| {
        if spec.name.contains("router") { values.iter().map(|v| 3.0 - 7.0 * v).collect() } else { values }
    };
    let values = plain.specs.iter().zip(tensors(&plain)).map(changed).collect();
    let other = pass(&dense(), &parameters(&dense(), values));
    assert_eq!(output.columns, other.columns);
    assert_eq!(output.gradients.values, other.gradients.values);
}

/// Two experts that are the same one, of which a token uses both, are that one, whatever their shares.
#[test]
fn twins_in_a_mixture_are_the_dense_model() {
    let (_, one) = tiny::model(dense(), 3);
    let twins = Config { num_local_experts: 2, num_experts_per_tok: 2, ..dense() };
    let double = |(spec, values): (&ParameterSpec, Values)| {
        if spec.name.contains(".mlp.") { [values.clone(), values].concat() } else { values }
    };
    let values = one.specs.iter().zip(tensors(&one)).map(double).collect();
    let two = parameters(&twins, values);
    let (a, b) = (pass(&dense(), &one), pass(&twins, &two));
    let worst =
        a.columns.log_probs.iter().zip(&b.columns.log_probs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst < 1e-5, "{worst}");
    for ((spec, a), b) in one.specs.iter().zip(&a.gradients.values).zip(&b.gradients.values) {
        let (a, b) = (a.as_ref().unwrap(), b.as_ref().unwrap());
        let expert = spec.name.contains("experts");
        if spec.name.contains("router") {
            continue;
        }
        let largest = a.iter().fold(0f32, |m, g| m.max(g.abs()));
        for (i, &g) in a.iter().enumerate() {
            let both = if expert { b[i] + b[i + a.len()] } else { b[i] };
            assert!((g - both).abs() <= 1e-4 * largest, "{} {i}: {g} against {both}", spec.name);
        }
    }
}

#[test]
fn a_dense_folder_gives_back_every_bit() {
    let (_, before) = tiny::model(dense(), 3);
    let folder = tiny::saved(&dense(), &before, WeightFormat::F32);
    let config = Config::read(folder.path()).unwrap();
    assert_eq!(config, dense());
    let after = crate::tiny::parameters(&config, load(folder.path(), &config).unwrap()).unwrap();
    assert_eq!(tensors(&before), tensors(&after));
    assert_eq!(pass(&dense(), &before).columns, pass(&config, &after).columns);
}

#[test]
fn the_quickstart_trains_a_dense_model_and_goes_on_from_its_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let shape = [
        "model.architecture.num_local_experts=1",
        "model.architecture.num_experts_per_tok=1",
        "model.architecture.intermediate_size=128",
        "cold_start.steps=20",
    ];
    let train = |name: &str, sets: &[&str]| {
        let out = folder.path().join(name);
        done(&mut small_runs::train("quickstart", &out, sets));
        out
    };
    let first = train("first", &shape);
    let again = format!("model.path={}", first.display());
    let second = train("second", &[&again, "cold_start.steps=0"]);
    assert_no_gap(&first);
    assert_no_gap(&second);
    let config = json_of(second.join("checkpoints/step-000002/config.json"));
    let figures = ["num_local_experts", "num_experts_per_tok", "intermediate_size"].map(|key| &config[key]);
    assert_eq!(figures, [1, 1, 128]);
}
