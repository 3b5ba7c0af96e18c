//! The weights in memory, and how the forward asks for them.

use super::config::Config;
use super::names::{ParameterSpec, parameter_specs, value_model_specs};
use anyhow::{Context, Result, bail, ensure};
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

/// What reads the trunk's last hidden states.
#[derive(Debug, Clone)]
pub enum Head {
    /// `[H, V]`: scores of the next token.
    LanguageModel(Tensor),
    /// `[H, 1]` and `[1]`: one value a token.
    Value(Linear),
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
        Self::of(parameter_specs(config), tensors)
    }

    /// The same for a model with a value head, in the order of [`value_model_specs`].
    ///
    /// # Errors
    /// When names or shapes are not those of `config`.
    pub fn with_value_head(config: &Config, tensors: Vec<(ParameterSpec, Tensor)>) -> Result<Self> {
        Self::of(value_model_specs(config), tensors)
    }

    fn of(expected: Vec<ParameterSpec>, tensors: Vec<(ParameterSpec, Tensor)>) -> Result<Self> {
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
    ///
    /// # Errors
    /// When a tensor of the architecture is missing.
    pub fn detached(&self) -> Result<Resident> {
        Resident::new(self, &|_, tensor| Ok(tensor.detach()))
    }

    /// The weights after `map`, without gradient tracking.
    ///
    /// # Errors
    /// Those of `map`.
    pub fn mapped(&self, map: &dyn Fn(&ParameterSpec, &Tensor) -> Result<Tensor>) -> Result<Resident> {
        Resident::new(self, &|index, tensor| map(&self.specs[index], &tensor.detach()))
    }

    /// The weights with gradient tracking for those that `trainable` marks (all of `len()`).
    ///
    /// # Errors
    /// When a tensor of the architecture is missing.
    pub fn tracked(&self, trainable: &[bool]) -> Result<Resident> {
        let tracked = |index: usize, tensor: &Tensor| {
            Ok(if trainable[index] { tensor.clone() } else { tensor.detach() })
        };
        Resident::new(self, &tracked)
    }
}

/// Weights that all lie in this process's memory.
#[derive(Debug, Clone)]
pub struct Resident {
    embedding: Tensor,
    layers: Vec<LayerWeights>,
    final_norm: Tensor,
    head: Head,
}

impl Resident {
    fn new(parameters: &Parameters, map: &dyn Fn(usize, &Tensor) -> Result<Tensor>) -> Result<Self> {
        let layers = parameters.specs.iter().filter_map(|s| s.layer).max().map_or(0, |last| last + 1);
        let find = |name: &str| {
            let index = parameters.position(name).with_context(|| format!("no tensor {name}"))?;
            map(index, parameters.vars[index].as_tensor())
        };
        Ok(Self {
            embedding: find("model.embed_tokens.weight")?,
            layers: (0..layers).map(|layer| layer_weights(layer, &find)).collect::<Result<_>>()?,
            final_norm: find("model.norm.weight")?,
            head: match parameters.position("score.weight") {
                Some(_) => Head::Value(Linear { weight: find("score.weight")?, bias: find("score.bias")? }),
                None => Head::LanguageModel(find("lm_head.weight")?),
            },
        })
    }

    /// The head, whichever it is.
    pub fn head(&self) -> &Head {
        &self.head
    }
}

fn layer_weights(layer: usize, find: &dyn Fn(&str) -> Result<Tensor>) -> Result<LayerWeights> {
    let tensor = |rest: &str| find(&format!("model.layers.{layer}.{rest}"));
    let pair = |weight: &str, bias: &str| {
        Ok::<_, anyhow::Error>(Linear { weight: tensor(weight)?, bias: tensor(bias)? })
    };
    let linear = |stem: &str| pair(&format!("{stem}.weight"), &format!("{stem}.bias"));
    let experts = |stem: &str| pair(&format!("mlp.experts.{stem}"), &format!("mlp.experts.{stem}_bias"));
    Ok(LayerWeights {
        input_norm: tensor("input_layernorm.weight")?,
        q: linear("self_attn.q_proj")?,
        k: linear("self_attn.k_proj")?,
        v: linear("self_attn.v_proj")?,
        sinks: tensor("self_attn.sinks")?,
        o: linear("self_attn.o_proj")?,
        post_attention_norm: tensor("post_attention_layernorm.weight")?,
        router: linear("mlp.router")?,
        gate_up: experts("gate_up_proj")?,
        down: experts("down_proj")?,
    })
}

impl WeightSource for Resident {
    fn embedding(&self) -> Result<Tensor> {
        Ok(self.embedding.clone())
    }

    fn layer(&self, index: usize) -> Result<LayerWeights> {
        self.layers.get(index).cloned().with_context(|| format!("no layer {index}"))
    }

    fn final_norm(&self) -> Result<Tensor> {
        Ok(self.final_norm.clone())
    }

    fn lm_head(&self) -> Result<Tensor> {
        match &self.head {
            Head::LanguageModel(weight) => Ok(weight.clone()),
            Head::Value(_) => bail!("a critic has no head over the vocabulary"),
        }
    }
}
