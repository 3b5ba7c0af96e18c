//! Muon against its author's reference, its tensors, and an exact resume.

use super::*;
use candle_core::Device;
use rloss::model::names::TensorRole;
use rloss::ops::muon::{Muon, muon};

#[derive(Deserialize)]
struct Trace {
    shape: Vec<usize>,
    settings: TraceSettings,
    initial: Vec<f32>,
    gradients: Vec<Vec<f32>>,
    weights: Vec<Vec<f32>>,
}

#[derive(Deserialize)]
struct TraceSettings {
    lr: f64,
    momentum: f64,
    weight_decay: f64,
}

fn tensor(values: &[f32], shape: &[usize]) -> Tensor {
    Tensor::from_slice(values, shape, &Device::Cpu).unwrap()
}

/// `scripts/make_reference_values.py` ran the reference.
#[test]
fn muon_follows_its_authors_reference_over_ten_steps() {
    let traces: Vec<Trace> = serde_json::from_str(include_str!("../../fixtures/muon.json")).unwrap();
    for Trace {
        shape,
        settings: TraceSettings { lr, momentum, weight_decay },
        initial,
        gradients,
        weights,
    } in traces
    {
        assert_eq!((gradients.len(), weights.len()), (10, 10));
        let step = Muon {
            shrink: (1.0 - lr * weight_decay) as f32,
            rate: lr as f32,
            momentum: momentum as f32,
            one_minus_momentum: (1.0 - momentum) as f32,
        };
        let (w, m) = (tensor(&initial, &shape), tensor(&vec![0.0; initial.len()], &shape));
        let mut worst = 0f32;
        for (gradient, expected) in gradients.iter().zip(&weights) {
            muon(&w, &m, &tensor(gradient, &shape), &step).unwrap();
            let largest = expected.iter().map(|b| b.abs()).fold(0.0, f32::max);
            let found = tiny::values(&w);
            let gaps = found.iter().zip(expected).map(|(a, b)| (a - b).abs() / largest);
            worst = worst.max(gaps.fold(0.0, f32::max));
        }
        let moved = initial.iter().zip(&weights[9]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        println!("Muon, {shape:?}: worst relative difference {worst:.2e}");
        assert!(worst <= 1e-5 && moved > 1e-2, "{shape:?}: {worst:e}, moved {moved}");
    }
    let (w, other) = (tensor(&[0.0; 6], &[6]), tensor(&[0.0; 6], &[2, 3]));
    let step = Muon { shrink: 1.0, rate: 0.1, momentum: 0.95, one_minus_momentum: 0.05 };
    assert!(muon(&w, &w, &w, &step).unwrap_err().to_string().contains("no matrix"));
    assert!(muon(&w, &w, &other, &step).is_err());
}

/// A model under Muon after random updates.
fn updated(threads: usize, updates: &[(usize, u64)]) -> Vec<Vec<u8>> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    pool.install(|| {
        let (mut parameters, mut optimizer) = model();
        for &(count, seed) in updates {
            random_updates(&mut parameters, &mut optimizer, count, seed);
        }
        everything(&parameters)
    })
}

fn model() -> (Parameters, Optimizer) {
    let (_, mut parameters) = tiny::model(tiny::config(false), 0);
    parameters.set_trainable(&vec![true; parameters.len()]).unwrap();
    let optimizer = Optimizer::new(&of_kind(OptimizerKind::Muon), &mut parameters, false).unwrap();
    (parameters, optimizer)
}

#[test]
fn matrices_of_layers_have_a_momentum_and_other_tensors_two_moments() {
    let (parameters, _) = model();
    let mut momenta = 0;
    for (index, spec) in parameters.specs.iter().enumerate() {
        let states: Vec<&str> = parameters.state(index).keys().copied().collect();
        let is_vector = !spec.is_matrix();
        if is_vector || matches!(spec.role, TensorRole::Embedding | TensorRole::Head) {
            assert_eq!(states, ["first", "second"], "{}", spec.name);
        } else {
            assert_eq!(states, ["momentum"], "{}", spec.name);
            momenta += 1;
        }
    }
    // Of each layer: q, k, v, o, the router, and the two matrices of the experts.
    assert_eq!(momenta, 7 * tiny::config(false).num_hidden_layers);
}

/// Vectors, embedding and head have the bits of AdamW.
#[test]
fn tensors_that_are_no_matrices_of_layers_have_adamws_bits() {
    let run = |kind| {
        let mut learner = Learner::of_matrix(70, &of_kind(kind));
        random_updates(&mut learner.parameters, &mut learner.optimizer, 3, 5);
        everything(&learner.parameters)
    };
    assert!(run(OptimizerKind::Muon) == run(OptimizerKind::AdamW));
}

#[test]
fn a_matrix_has_the_same_bits_on_any_number_of_threads() {
    let one = updated(1, &[(3, 5)]);
    for threads in [2, 3] {
        assert!(updated(threads, &[(3, 5)]) == one, "{threads} threads");
    }
}

/// Equal gradients of two experts give equal updates, whatever the others' gradients are.
#[test]
fn each_expert_is_updated_by_itself() {
    let step = Muon { shrink: 1.0, rate: 0.1, momentum: 0.95, one_minus_momentum: 0.05 };
    let gradient: Vec<f32> = (0..24).map(|i| ((i * 7 % 11) as f32 - 5.0) / 4.0).collect();
    let update = |gradient: &[f32], shape: &[usize]| {
        let w = Tensor::zeros(shape, candle_core::DType::F32, &Device::Cpu).unwrap();
        let momentum = Tensor::zeros(shape, candle_core::DType::F32, &Device::Cpu).unwrap();
        muon(&w, &momentum, &tensor(gradient, shape), &step).unwrap();
        tiny::values(&w)
    };
    let alone = update(&gradient, &[4, 6]);
    let large: Vec<f32> = gradient.iter().map(|g| 1e3 * g * g).collect();
    let both = update(&[large, gradient].concat(), &[2, 4, 6]);
    assert_eq!(both[24..], alone[..]);
    assert!(both[..24].iter().all(|w| w.is_finite()));
}
