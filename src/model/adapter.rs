//! Low-rank adapters (LoRA, Hu et al. 2021): which matrices have one, its factors' names and shapes, and their start.
//!
//! A matrix `W [in, out]` acts as `W + s · A · B` with `A [in, r]` and `B [r, out]`; of experts each has its own pair. The sum is
//! never formed: base and adapter multiply side by side, in rollout and training alike.

use super::config::Config;
use super::names::{Layout, ParameterSpec, TensorRole};
use crate::random::{Purpose, stream};
use anyhow::{Context, Result};
use rand::Rng;
use rayon::prelude::*;

/// An adapter, without its values.
#[derive(Debug, Clone, PartialEq)]
pub struct Lora {
    /// `r`.
    pub rank: usize,
    pub alpha: f64,
    /// Whether the correction is scaled by `alpha / √r` (Kalajdzievski 2023) in place of `alpha / r`.
    pub rslora: bool,
    /// Names of the adapted tensors, in the order of the model's.
    pub targets: Vec<String>,
}

/// Whose adapter it is: another one starts from other random numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    Policy = 0,
    Critic = 1,
}

impl Lora {
    /// `s`.
    pub fn scale(&self) -> f32 {
        let rank = self.rank as f64;
        (self.alpha / if self.rslora { rank.sqrt() } else { rank }) as f32
    }

    /// The names of the factors `A` and `B` of the tensor `target`.
    pub fn factors(target: &str) -> [String; 2] {
        let stem = target.strip_suffix(".weight").unwrap_or(target);
        [format!("{stem}.lora_A"), format!("{stem}.lora_B")]
    }

    /// The factors of every target, `A` before `B`, in working layout; `base` are the model's own tensors.
    ///
    /// # Errors
    /// When a target is not among them, or no matrix.
    pub fn specs(&self, base: &[ParameterSpec]) -> Result<Vec<ParameterSpec>> {
        let mut specs = Vec::with_capacity(2 * self.targets.len());
        for target in &self.targets {
            let spec = base.iter().find(|spec| spec.name == *target);
            let spec = spec.with_context(|| format!("the adapter's target {target} is no tensor"))?;
            let (experts, input, output) = match *spec.working_shape() {
                [input, output] => (vec![], input, output),
                [experts, input, output] => (vec![experts], input, output),
                _ => anyhow::bail!("the adapter's target {target} is no matrix"),
            };
            for (name, shape) in
                Self::factors(target).into_iter().zip([[input, self.rank], [self.rank, output]])
            {
                specs.push(ParameterSpec {
                    name,
                    layer: spec.layer,
                    role: TensorRole::AdapterFactor,
                    stored_shape: experts.iter().copied().chain(shape).collect(),
                    layout: Layout::AsStored,
                });
            }
        }
        Ok(specs)
    }

    /// The factors at the start, in the order of [`Self::specs`]: `A` uniform within ±in^-1/2 (Kaiming with a = √5, as PEFT),
    /// `B` 0, so that the model begins as it is without.
    ///
    /// # Errors
    /// Those of [`Self::specs`].
    pub fn start(&self, base: &[ParameterSpec], seed: u64, owner: Owner) -> Result<Vec<Vec<f32>>> {
        let specs: Vec<_> = self.specs(base)?.into_iter().enumerate().collect();
        let draw = |(index, spec): (usize, ParameterSpec)| {
            let count = spec.element_count();
            if index % 2 == 1 {
                return vec![0.0; count];
            }
            let bound = (spec.fan_in() as f64).powf(-0.5) as f32;
            let mut rng = stream(seed, Purpose::Adapter, &[owner as u64, index as u64]);
            (0..count).map(|_| rng.random_range(-bound..=bound)).collect()
        };
        Ok(specs.into_par_iter().map(draw).collect())
    }
}

/// Whether a tensor can have an adapter: the matrices of attention, of the experts and of the plain gated unit. A router's
/// choice of experts stays the base's.
pub fn is_adaptable(spec: &ParameterSpec) -> bool {
    let is_matrix = matches!(spec.role, TensorRole::InputProjection | TensorRole::OutputProjection);
    is_matrix && spec.layer.is_some() && !spec.name.ends_with(".router.weight")
}

/// The tensors that have an adapter unless a recipe names others: all that can.
pub fn default_targets(config: &Config) -> Vec<String> {
    let specs = super::names::parameter_specs(config);
    specs.into_iter().filter(is_adaptable).map(|spec| spec.name).collect()
}
