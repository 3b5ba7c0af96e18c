//! AdamW and SGD on f32 masters, with state that can be saved.

use super::gradients::Gradients;
use crate::model::weights::Parameters;
use crate::recipe::{Optimizer as Settings, OptimizerKind, Schedule};
use anyhow::Result;
use candle_core::{Device, Tensor};
use half::bf16;
use multiversion::multiversion;

/// Learning rate of update number `step` (from 0) of `steps`: linear warm-up, then the schedule down to the last update.
pub fn learning_rate(settings: &Settings, step: u64, steps: u64) -> f64 {
    if step < settings.warmup_steps {
        return settings.lr * (step + 1) as f64 / settings.warmup_steps as f64;
    }
    let span = steps.saturating_sub(settings.warmup_steps).saturating_sub(1).max(1) as f64;
    let progress = ((step - settings.warmup_steps) as f64 / span).min(1.0);
    let last = settings.lr_final_fraction;
    let fraction = match settings.schedule {
        Schedule::Constant => 1.0,
        Schedule::Linear => 1.0 + (last - 1.0) * progress,
        Schedule::Cosine => last + (1.0 - last) * 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()),
    };
    settings.lr * fraction
}

/// f32 state of one parameter, in working layout.
#[derive(Debug, Clone, PartialEq)]
pub struct ParameterState {
    /// The weight as it is updated; the model computes with it, rounded to the recipe's `model.dtype`.
    pub master: Vec<f32>,
    /// First moment; empty for SGD.
    pub first: Vec<f32>,
    /// Second moment; empty for SGD.
    pub second: Vec<f32>,
}

/// An optimizer over the parameters that learn.
#[derive(Debug, Clone)]
pub struct Optimizer {
    settings: Settings,
    round_to_bf16: bool,
    /// Updates made.
    pub updates: u64,
    /// One entry a parameter; `None` for those that do not learn.
    pub states: Vec<Option<ParameterState>>,
}

impl Optimizer {
    /// Fresh state for the parameters that `trainable` marks. `masters`, where given, hold more digits than the
    /// parameters themselves (a resumed bf16 run).
    ///
    /// # Errors
    /// When a parameter cannot be read.
    pub fn new(
        settings: &Settings,
        parameters: &Parameters,
        trainable: &[bool],
        round_to_bf16: bool,
    ) -> Result<Self> {
        let mut states = Vec::with_capacity(parameters.len());
        for (index, &learns) in trainable.iter().enumerate() {
            states.push(if learns {
                let master = parameters.var(index).flatten_all()?.to_vec1::<f32>()?;
                let moments = if settings.kind == OptimizerKind::AdamW { master.len() } else { 0 };
                Some(ParameterState { master, first: vec![0.0; moments], second: vec![0.0; moments] })
            } else {
                None
            });
        }
        Ok(Self { settings: settings.clone(), round_to_bf16, updates: 0, states })
    }

    /// One update at learning rate `lr`; writes the new weights into `parameters`.
    ///
    /// AdamW (Loshchilov, Hutter 2019), elementwise: `w ← w (1 − lr λ)`, `m ← β₁m + (1−β₁)g`, `v ← β₂v + (1−β₂)g²`,
    /// `w ← w − lr/(1−β₁ᵗ) · m / (√v / √(1−β₂ᵗ) + ε)`. SGD: `w ← w (1 − lr λ) − lr g`.
    ///
    /// # Errors
    /// When a weight cannot be written.
    pub fn update(&mut self, parameters: &Parameters, gradients: &Gradients, lr: f64) -> Result<()> {
        self.updates += 1;
        let t = self.updates as i32;
        let s = &self.settings;
        let step = Step {
            shrink: (1.0 - lr * s.weight_decay) as f32,
            // From f64: 1 − β₂ of an f32 β₂ = 0.999 is already 1e-5 off.
            one_minus_beta1: (1.0 - s.beta1) as f32,
            beta2: s.beta2 as f32,
            one_minus_beta2: (1.0 - s.beta2) as f32,
            rate: match s.kind {
                OptimizerKind::AdamW => (lr / (1.0 - s.beta1.powi(t))) as f32,
                OptimizerKind::Sgd => lr as f32,
            },
            root_correction: (1.0 - s.beta2.powi(t)).sqrt() as f32,
            eps: s.eps as f32,
        };
        for (state, gradient) in self.states.iter_mut().zip(&gradients.values) {
            let (Some(state), Some(gradient)) = (state, gradient) else { continue };
            match s.kind {
                OptimizerKind::AdamW => step.adamw(state, gradient),
                OptimizerKind::Sgd => step.sgd(state, gradient),
            }
        }
        self.write_weights(parameters)
    }

    /// Writes every master into `parameters` as the model computes with it.
    ///
    /// # Errors
    /// When a weight cannot be written.
    pub fn write_weights(&self, parameters: &Parameters) -> Result<()> {
        (0..self.states.len()).try_for_each(|index| self.write_weight(parameters, index))
    }

    fn write_weight(&self, parameters: &Parameters, index: usize) -> Result<()> {
        let Some(state) = &self.states[index] else { return Ok(()) };
        let var = parameters.var(index);
        let weights = working_weights(&state.master, self.round_to_bf16);
        Ok(var.set(&Tensor::from_vec(weights, var.shape(), &Device::Cpu)?)?)
    }
}

/// Masters as the model computes with them.
pub fn working_weights(master: &[f32], round_to_bf16: bool) -> Vec<f32> {
    if round_to_bf16 { master.iter().map(|&w| bf16::from_f32(w).to_f32()).collect() } else { master.to_vec() }
}

/// The constants of one update.
struct Step {
    shrink: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    rate: f32,
    root_correction: f32,
    eps: f32,
}

impl Step {
    fn adamw(&self, state: &mut ParameterState, gradient: &[f32]) {
        let moments = state.first.iter_mut().zip(&mut state.second);
        for ((w, (m, v)), &g) in state.master.iter_mut().zip(moments).zip(gradient) {
            *m += (g - *m) * self.one_minus_beta1;
            *v = *v * self.beta2 + g * g * self.one_minus_beta2;
            *w = *w * self.shrink - self.rate * *m / (v.sqrt() / self.root_correction + self.eps);
        }
    }

    fn sgd(&self, state: &mut ParameterState, gradient: &[f32]) {
        descend(&mut state.master, gradient, self.shrink, self.rate);
    }
}

/// `w ← w · shrink − rate · g` with the product fused into the sum: one rounding fewer beside a large `w`, and PyTorch's bits.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
fn descend(weights: &mut [f32], gradient: &[f32], shrink: f32, rate: f32) {
    for (w, &g) in weights.iter_mut().zip(gradient) {
        *w = (-rate).mul_add(g, *w * shrink);
    }
}
