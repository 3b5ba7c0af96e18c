//! A matrix with its bias and its adapter: the matrices of layers, the LM head and the embedding.

use super::expert_parallel::ExpertParallel;
use crate::ops::logits::{Logits, SamplingParameters};
use crate::ops::weight::Weight;
use crate::ops::{self, Dispatch, Parameter};
use anyhow::{Result, bail, ensure};
use candle_core::Tensor;
use std::collections::HashMap;
use std::sync::Arc;

/// A matrix `[in, out]` with a bias `[out]`, or `[E, in, out]` and `[E, out]` with one entry for each
/// expert.
#[derive(Clone)]
pub struct Matrix {
    weight: Weight,
    bias: Option<Parameter>,
    adapter: Option<Adapter>,
}

/// The two factors of a low-rank adapter, `scale · A · B`. They are never merged with the matrix.
#[derive(Clone)]
pub struct Adapter {
    /// `[in, r]`, or `[E, in, r]`.
    pub a: Parameter,
    /// `[r, out]`, or `[E, r, out]`.
    pub b: Parameter,
    pub scale: f32,
}

impl Adapter {
    fn without_gradient(&self) -> Self {
        Self { a: self.a.without_gradient(), b: self.b.without_gradient(), scale: self.scale }
    }
}

impl Matrix {
    /// Returns the matrix without gradients.
    pub fn without_gradient(&self) -> Self {
        Self {
            weight: self.weight.without_gradient(),
            bias: self.bias.as_ref().map(Parameter::without_gradient),
            adapter: self.adapter.as_ref().map(Adapter::without_gradient),
        }
    }

    /// Multiplies `x [T, in]` → `[T, out]`.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn matmul(&self, x: &Tensor) -> Result<Tensor> {
        self.adapted(self.weight.matmul(x, self.bias.as_ref())?, x, None)
    }

    /// Multiplies as [`Self::matmul`], but accumulates in f32 on every device: for router logits and
    /// values.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn matmul_f32(&self, x: &Tensor) -> Result<Tensor> {
        self.adapted(self.weight.matmul_f32(x, self.bias.as_ref())?, x, None)
    }

    /// Multiplies each row by its expert's matrix: `x [T·K, in]`, sorted by `plan`, → `[T·K, out]`.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn grouped_matmul(&self, x: &Tensor, plan: &Dispatch) -> Result<Tensor> {
        self.adapted(self.weight.grouped_matmul(x, self.bias.as_ref(), plan)?, x, Some(plan))
    }

    /// Adds the adapter's output for `x` to `y`.
    fn adapted(&self, y: Tensor, x: &Tensor, plan: Option<&Dispatch>) -> Result<Tensor> {
        Ok(match &self.adapter {
            None => y,
            Some(Adapter { a, b, scale }) => ops::add_low_rank(&y, x, [a, b], *scale, plan)?,
        })
    }

    /// Returns rows `ids` of an embedding `[V, H]`, `[T, H]`.
    ///
    /// # Errors
    /// When an id is not below `V`.
    pub fn lookup_rows(&self, ids: &Arc<Vec<u32>>) -> Result<Tensor> {
        Ok(self.plain()?.rows(ids)?)
    }

    /// Returns columns `ids` of an LM head `[H, V]` that is also the embedding, as rows `[T, H]`.
    ///
    /// # Errors
    /// When an id is not below `V`.
    pub fn lookup_columns(&self, ids: &Arc<Vec<u32>>) -> Result<Tensor> {
        Ok(self.plain()?.columns(ids)?)
    }

    /// Returns log-probabilities and entropies of `targets` after `h [R, H]`, `[2, R]`. The matrix is an LM
    /// head.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn log_prob_and_entropy(
        &self,
        h: &Tensor,
        targets: &Arc<Vec<u32>>,
        temperature: f64,
    ) -> Result<Tensor> {
        Ok(ops::log_prob_and_entropy(h, self.plain()?, targets, temperature)?)
    }

    /// Returns the logits of `h [R, H]`, for a sampler. The matrix is an LM head.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn logits(&self, h: &Tensor, sampling: &SamplingParameters) -> Result<Logits> {
        Ok(ops::logits(h, self.plain()?, sampling)?)
    }

    /// Returns the weight of an LM head or an embedding, which have neither bias nor adapter.
    fn plain(&self) -> Result<&Weight> {
        ensure!(self.bias.is_none() && self.adapter.is_none(), "a head or embedding with bias or adapter");
        Ok(&self.weight)
    }
}

/// Finds a model's tensors by name.
#[derive(Clone, Copy)]
pub struct ModelTensors<'a> {
    pub find: &'a dyn Fn(&str) -> Result<Weight>,
    /// The key is the name of the adapted matrix.
    pub adapters: &'a HashMap<String, Adapter>,
    /// Present under expert parallelism.
    pub ranks: Option<&'a Arc<ExpertParallel>>,
}

impl ModelTensors<'_> {
    /// Returns the small dense tensor `name`: a bias, a norm or sinks.
    ///
    /// # Errors
    /// When it is missing or packed.
    pub fn vector(&self, name: &str) -> Result<Parameter> {
        match (self.find)(name)? {
            Weight::Dense(parameter) => Ok(parameter),
            Weight::Packed(_) => bail!("{name} is packed, but must be dense"),
        }
    }

    /// Returns the matrix `name` with the bias named `bias`, if given.
    ///
    /// # Errors
    /// When there is no such tensor.
    pub fn matrix(&self, name: &str, bias: Option<&str>) -> Result<Matrix> {
        let bias = bias.map(|bias| self.vector(bias)).transpose()?;
        Ok(Matrix { weight: (self.find)(name)?, bias, adapter: self.adapters.get(name).cloned() })
    }

    /// Returns the tensors of layer `index`.
    pub fn layer(&self, index: usize) -> LayerTensors<'_> {
        LayerTensors { tensors: *self, prefix: format!("model.layers.{index}.") }
    }
}

/// Finds the tensors of one layer by the rest of their name after the layer's prefix.
pub struct LayerTensors<'a> {
    tensors: ModelTensors<'a>,
    prefix: String,
}

impl LayerTensors<'_> {
    /// Returns the small dense tensor `name` of the layer, as [`ModelTensors::vector`].
    ///
    /// # Errors
    /// As [`ModelTensors::vector`].
    pub fn vector(&self, name: &str) -> Result<Parameter> {
        self.tensors.vector(&format!("{}{name}", self.prefix))
    }

    /// Returns the matrix `STEM.weight` with the bias `STEM.bias`.
    ///
    /// # Errors
    /// When there are no such tensors.
    pub fn linear(&self, stem: &str) -> Result<Matrix> {
        let stem = format!("{}{stem}", self.prefix);
        self.tensors.matrix(&format!("{stem}.weight"), Some(&format!("{stem}.bias")))
    }

    /// Returns the matrix `STEM.weight`, which has no bias.
    ///
    /// # Errors
    /// When there is no such tensor.
    pub fn linear_without_bias(&self, stem: &str) -> Result<Matrix> {
        self.tensors.matrix(&format!("{}{stem}.weight", self.prefix), None)
    }

    /// Returns the experts' matrices `STEM` with their biases `STEM_bias`.
    ///
    /// # Errors
    /// When there are no such tensors.
    pub fn expert_matrices(&self, stem: &str) -> Result<Matrix> {
        let stem = format!("{}{stem}", self.prefix);
        self.tensors.matrix(&stem, Some(&format!("{stem}_bias")))
    }

    /// Returns the placement of experts on ranks, under expert parallelism.
    pub fn expert_parallel(&self) -> Option<Arc<ExpertParallel>> {
        self.tensors.ranks.cloned()
    }
}
