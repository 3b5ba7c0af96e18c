//! The weights in memory, and how the forward asks for them.

use super::config::Config;
use super::names::{ParameterSpec, parameter_specs};
use anyhow::{Context, Result, ensure};
use candle_core::{Tensor, Var};
use std::collections::HashMap;

/// A matrix `[in, out]` and its bias `[out]`, or one of each an expert.
#[derive(Debug, Clone)]
pub struct Linear {
    pub weight: Tensor,
    pub bias: Tensor,
}

/// The tensors of one layer, in working layout.
#[derive(Debug, Clone)]
pub struct LayerWeights {
    pub input_norm: Tensor,
    pub q: Linear,
    pub k: Linear,
    pub v: Linear,
    /// `[N]`.
    pub sinks: Tensor,
    pub o: Linear,
    pub post_attention_norm: Tensor,
    pub router: Linear,
    /// `[E, H, 2I]` and `[E, 2I]`, gate and up interleaved.
    pub gate_up: Linear,
    /// `[E, I, H]` and `[E, H]`.
    pub down: Linear,
}

/// Where the forward takes weights from, a layer at a time. Resident weights answer from memory; sharded ones gather.
pub trait WeightSource {
    /// `[V, H]`.
    fn embedding(&self) -> Result<Tensor>;
    /// The weights of layer `index`.
    fn layer(&self, index: usize) -> Result<LayerWeights>;
    /// `[H]`.
    fn final_norm(&self) -> Result<Tensor>;
    /// `[H, V]`.
    fn lm_head(&self) -> Result<Tensor>;
}

/// Every trainable tensor, by Hugging Face name, in [`parameter_specs`] order.
#[derive(Debug)]
pub struct Parameters {
    pub specs: Vec<ParameterSpec>,
    vars: Vec<Var>,
    index: HashMap<String, usize>,
}

impl Parameters {
    /// Takes tensors in working layout, in the order of [`parameter_specs`].
    ///
    /// # Errors
    /// When names or shapes are not those of `config`.
    pub fn new(config: &Config, tensors: Vec<(ParameterSpec, Tensor)>) -> Result<Self> {
        let expected = parameter_specs(config);
        ensure!(tensors.len() == expected.len(), "{} tensors, expected {}", tensors.len(), expected.len());
        let mut vars = Vec::with_capacity(tensors.len());
        for ((spec, tensor), expected) in tensors.iter().zip(&expected) {
            ensure!(spec == expected, "tensor {} where {} was expected", spec.name, expected.name);
            ensure!(tensor.dims() == spec.working_shape(), "{}: shape {:?}", spec.name, tensor.dims());
            vars.push(Var::from_tensor(tensor)?);
        }
        let index = expected.iter().enumerate().map(|(i, s)| (s.name.clone(), i)).collect();
        Ok(Self { specs: expected, vars, index })
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.vars.len()
    }

    /// True for a model without tensors, which there is none of.
    pub fn is_empty(&self) -> bool {
        self.vars.is_empty()
    }

    /// Number of values over all tensors.
    pub fn element_count(&self) -> usize {
        self.specs.iter().map(ParameterSpec::element_count).sum()
    }

    /// Tensor `index` as a variable.
    pub fn var(&self, index: usize) -> &Var {
        &self.vars[index]
    }

    /// Place of the tensor named `name`.
    pub fn position(&self, name: &str) -> Option<usize> {
        self.index.get(name).copied()
    }

    /// The weights without gradient tracking: what rollout and recomputed forwards use.
    pub fn detached(&self) -> Resident<'_> {
        Resident { parameters: self, tracked: Tracked::None }
    }

    /// The weights with gradient tracking for those that `trainable` marks (all of `len()`).
    pub fn tracked<'a>(&'a self, trainable: &'a [bool]) -> Resident<'a> {
        Resident { parameters: self, tracked: Tracked::Where(trainable) }
    }
}

#[derive(Clone, Copy)]
enum Tracked<'a> {
    None,
    Where(&'a [bool]),
}

/// Weights that all lie in this process's memory.
#[derive(Clone, Copy)]
pub struct Resident<'a> {
    parameters: &'a Parameters,
    tracked: Tracked<'a>,
}

impl Resident<'_> {
    fn tensor(&self, name: &str) -> Result<Tensor> {
        let index = self.parameters.position(name).with_context(|| format!("no tensor {name}"))?;
        let tensor = self.parameters.vars[index].as_tensor();
        let tracked = match self.tracked {
            Tracked::None => false,
            Tracked::Where(trainable) => trainable[index],
        };
        Ok(if tracked { tensor.clone() } else { tensor.detach() })
    }

    fn linear(&self, weight: &str, bias: &str) -> Result<Linear> {
        Ok(Linear { weight: self.tensor(weight)?, bias: self.tensor(bias)? })
    }
}

impl WeightSource for Resident<'_> {
    fn embedding(&self) -> Result<Tensor> {
        self.tensor("model.embed_tokens.weight")
    }

    fn layer(&self, index: usize) -> Result<LayerWeights> {
        let name = |rest: &str| format!("model.layers.{index}.{rest}");
        let linear = |stem: &str| {
            self.linear(&name(&format!("{stem}.weight")), &name(&format!("{stem}.bias")))
        };
        let experts = |stem: &str| {
            self.linear(&name(&format!("mlp.experts.{stem}")), &name(&format!("mlp.experts.{stem}_bias")))
        };
        Ok(LayerWeights {
            input_norm: self.tensor(&name("input_layernorm.weight"))?,
            q: linear("self_attn.q_proj")?,
            k: linear("self_attn.k_proj")?,
            v: linear("self_attn.v_proj")?,
            sinks: self.tensor(&name("self_attn.sinks"))?,
            o: linear("self_attn.o_proj")?,
            post_attention_norm: self.tensor(&name("post_attention_layernorm.weight"))?,
            router: linear("mlp.router")?,
            gate_up: experts("gate_up_proj")?,
            down: experts("down_proj")?,
        })
    }

    fn final_norm(&self) -> Result<Tensor> {
        self.tensor("model.norm.weight")
    }

    fn lm_head(&self) -> Result<Tensor> {
        self.tensor("lm_head.weight")
    }
}
