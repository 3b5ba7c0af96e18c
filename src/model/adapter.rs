//! Low-rank adapters (LoRA, Hu et al. 2021): the adapted matrices, and the names, shapes and initial values
//! of the factors.
//!
//! A matrix `W [in, out]` acts as `W + s · A · B` with `A [in, r]` and `B [r, out]`. Each expert has its own
//! pair of factors. Neither rollout nor training forms the sum `W + s · A · B`.

use super::config::Config;
use super::names::{Layout, ParameterSpec, TensorRole};
use crate::random::{Purpose, stream};
use anyhow::{Context, Result};
use rand::Rng;
use rayon::prelude::*;

/// The name of the LM head, as a target of an adapter. A tied head has it too: there its adapter acts on the
/// head's use of the shared matrix alone.
pub const HEAD: &str = "lm_head.weight";

/// The configuration of an adapter. The values of the factors are stored elsewhere.
#[derive(Debug, Clone, PartialEq)]
pub struct Lora {
    /// The rank `r`.
    pub rank: usize,
    pub alpha: f64,
    /// Whether the scale is `alpha / √r` (Kalajdzievski 2023) instead of `alpha / r`.
    pub rslora: bool,
    /// Names of the adapted tensors, in the order of the model's tensors.
    pub targets: Vec<String>,
}

/// The model that an adapter belongs to. Each owner draws its initial values from its own random stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    Policy = 0,
    Critic = 1,
}

impl Lora {
    /// Returns the scale `s`.
    pub fn scale(&self) -> f32 {
        let rank = self.rank as f64;
        (self.alpha / if self.rslora { rank.sqrt() } else { rank }) as f32
    }

    /// Returns the names of the factors `A` and `B` of the tensor `target`.
    pub fn factor_names(target: &str) -> [String; 2] {
        let stem = target.strip_suffix(".weight").unwrap_or(target);
        [format!("{stem}.lora_A"), format!("{stem}.lora_B")]
    }

    /// Returns the specs of the factors of every target in working layout, `A` before `B`. `base` holds the
    /// tensors of the model.
    ///
    /// # Errors
    /// When a target is not in `base`, or is not a matrix.
    pub fn factor_specs(&self, base: &[ParameterSpec]) -> Result<Vec<ParameterSpec>> {
        let mut specs = Vec::with_capacity(2 * self.targets.len());
        for target in &self.targets {
            let spec = target_spec(base, target)
                .with_context(|| format!("the adapter's target {target} is not a tensor of the model"))?;
            let (experts, input, output) = match *spec.working_shape() {
                [input, output] => (vec![], input, output),
                [experts, input, output] => (vec![experts], input, output),
                _ => anyhow::bail!("the adapter's target {target} is not a matrix"),
            };
            for (name, shape) in
                Self::factor_names(target).into_iter().zip([[input, self.rank], [self.rank, output]])
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

    /// Returns initial values of the factors, in the order of [`Self::factor_specs`]. `A` is uniform within
    /// ±in^-1/2 (Kaiming with a = √5, as in PEFT). `B` is 0, so a new adapter does not change the model.
    ///
    /// # Errors
    /// Errors of [`Self::factor_specs`].
    pub fn initial_values(&self, base: &[ParameterSpec], seed: u64, owner: Owner) -> Result<Vec<Vec<f32>>> {
        let specs: Vec<_> = self.factor_specs(base)?.into_iter().enumerate().collect();
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

/// Returns whether a tensor can have an adapter. Matrices of attention, of experts and of dense MLPs can, and
/// the LM head; routers cannot.
pub fn is_adaptable(spec: &ParameterSpec) -> bool {
    let is_matrix = matches!(spec.role, TensorRole::InputProjection | TensorRole::OutputProjection);
    is_matrix && spec.layer.is_some() || spec.name == HEAD
}

/// Returns the tensors of `base` and, if the head is tied, the head under its own name.
pub fn specs_with_head(base: &[ParameterSpec]) -> Vec<ParameterSpec> {
    let mut specs = base.to_vec();
    let tied =
        base.iter().find(|spec| spec.role == TensorRole::Embedding && spec.layout == Layout::Transposed);
    if let (Some(tied), false) = (tied, base.iter().any(|spec| spec.role == TensorRole::Head)) {
        specs.push(ParameterSpec { name: HEAD.to_owned(), role: TensorRole::Head, ..tied.clone() });
    }
    specs
}

/// Returns the tensor that an adapter's target names.
pub fn target_spec(base: &[ParameterSpec], target: &str) -> Option<ParameterSpec> {
    match base.iter().find(|spec| spec.name == target) {
        Some(spec) => Some(spec.clone()),
        None => specs_with_head(base).pop().filter(|spec| spec.name == target),
    }
}

/// Returns the default targets: the names of all tensors of the layers that can have an adapter.
pub fn default_targets(config: &Config) -> Vec<String> {
    let specs = super::names::parameter_specs(config);
    let of_layers = specs.into_iter().filter(|spec| is_adaptable(spec) && spec.layer.is_some());
    of_layers.map(|spec| spec.name).collect()
}
