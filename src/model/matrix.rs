//! A matrix that the forward multiplies by: a weight with its bias and its adapter. Layers, head and embedding alike are such.

use super::expert_ranks::ExpertRanks;
use crate::ops::logits::{Logits, Sampling};
use crate::ops::weight::Weight;
use crate::ops::{self, Dispatch, Parameter};
use anyhow::{Context, Result, bail, ensure};
use candle_core::Tensor;
use std::collections::HashMap;
use std::sync::Arc;

/// `[in, out]` and a bias `[out]`, or one of each expert: `[E, in, out]` and `[E, out]`.
#[derive(Clone)]
pub struct Matrix {
    weight: Weight,
    bias: Option<Parameter>,
    adapter: Option<Adapter>,
}

/// The two factors of a matrix's low-rank correction: `scale · A · B`. They are never merged with the matrix.
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

    /// `x [T, in]` → `[T, out]`.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn matmul(&self, x: &Tensor) -> Result<Tensor> {
        self.adapted(self.weight.matmul(x, self.bias.as_ref())?, x, None)
    }

    /// [`Self::matmul`] with sums that stay f32 on every device, for what is decided by them: router scores and values.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn matmul_f32(&self, x: &Tensor) -> Result<Tensor> {
        self.adapted(self.weight.matmul_f32(x, self.bias.as_ref())?, x, None)
    }

    /// Each row by its expert's matrix: `x [T·K, in]`, sorted by `plan`, → `[T·K, out]`.
    ///
    /// # Errors
    /// When shapes disagree, or the experts have no bias.
    pub fn grouped_matmul(&self, x: &Tensor, plan: &Dispatch) -> Result<Tensor> {
        let bias = self.bias.as_ref().context("experts have biases")?;
        self.adapted(self.weight.grouped_matmul(x, bias, plan)?, x, Some(plan))
    }

    /// `y`, the product with `x`, with the adapter's correction.
    fn adapted(&self, y: Tensor, x: &Tensor, plan: Option<&Dispatch>) -> Result<Tensor> {
        Ok(match &self.adapter {
            None => y,
            Some(Adapter { a, b, scale }) => ops::add_low_rank(&y, x, [a, b], *scale, plan)?,
        })
    }

    /// Rows `ids` of an embedding `[V, H]`: `[T, H]`.
    ///
    /// # Errors
    /// When an id is not below `V`.
    pub fn rows(&self, ids: &Arc<Vec<u32>>) -> Result<Tensor> {
        Ok(self.plain()?.rows(ids)?)
    }

    /// Columns `ids` of a head `[H, V]` that is the embedding too, as rows: `[T, H]`.
    ///
    /// # Errors
    /// When an id is not below `V`.
    pub fn columns(&self, ids: &Arc<Vec<u32>>) -> Result<Tensor> {
        Ok(self.plain()?.columns(ids)?)
    }

    /// As a language model's head: log-probabilities and entropies of `targets` after `h [R, H]`, `[2, R]`.
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

    /// As a language model's head: the logits of `h [R, H]`, as a sampler reads them.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn logits(&self, h: &Tensor, sampling: &Sampling) -> Result<Logits> {
        Ok(ops::logits(h, self.plain()?, sampling)?)
    }

    /// The weight of a head or an embedding, which have neither bias nor adapter.
    fn plain(&self) -> Result<&Weight> {
        ensure!(self.bias.is_none() && self.adapter.is_none(), "a bias or an adapter of head or embedding");
        Ok(&self.weight)
    }
}

/// A model's tensors, found by name.
#[derive(Clone, Copy)]
pub struct Tensors<'a> {
    pub find: &'a dyn Fn(&str) -> Result<Weight>,
    /// By the name of the matrix.
    pub adapters: &'a HashMap<String, Adapter>,
    /// Where each rank has some of the experts.
    pub ranks: Option<&'a Arc<ExpertRanks>>,
}

impl Tensors<'_> {
    /// The small dense tensor `name`: a bias, a norm, sinks.
    ///
    /// # Errors
    /// When there is none, or it is packed.
    pub fn vector(&self, name: &str) -> Result<Parameter> {
        match (self.find)(name)? {
            Weight::Dense(parameter) => Ok(parameter),
            Weight::Packed(_) => bail!("{name} is packed, and a dense tensor belongs there"),
        }
    }

    /// The matrix `name` with the bias of that name, if it has one.
    ///
    /// # Errors
    /// When there is no such tensor.
    pub fn matrix(&self, name: &str, bias: Option<&str>) -> Result<Matrix> {
        let bias = bias.map(|bias| self.vector(bias)).transpose()?;
        Ok(Matrix { weight: (self.find)(name)?, bias, adapter: self.adapters.get(name).cloned() })
    }

    /// Those of layer `index`.
    pub fn layer(&self, index: usize) -> LayerTensors<'_> {
        LayerTensors { tensors: *self, prefix: format!("model.layers.{index}.") }
    }
}

/// The tensors of one layer, found by what follows the layer's prefix in their names.
pub struct LayerTensors<'a> {
    tensors: Tensors<'a>,
    prefix: String,
}

impl LayerTensors<'_> {
    /// As [`Tensors::vector`].
    ///
    /// # Errors
    /// As there.
    pub fn vector(&self, name: &str) -> Result<Parameter> {
        self.tensors.vector(&format!("{}{name}", self.prefix))
    }

    /// The matrix `STEM.weight`, with the bias `STEM.bias`.
    ///
    /// # Errors
    /// When there are no such tensors.
    pub fn linear(&self, stem: &str) -> Result<Matrix> {
        let stem = format!("{}{stem}", self.prefix);
        self.tensors.matrix(&format!("{stem}.weight"), Some(&format!("{stem}.bias")))
    }

    /// The matrix `STEM.weight`, which has no bias.
    ///
    /// # Errors
    /// When there is no such tensor.
    pub fn linear_without_bias(&self, stem: &str) -> Result<Matrix> {
        self.tensors.matrix(&format!("{}{stem}.weight", self.prefix), None)
    }

    /// The experts' matrices `STEM`, with their biases `STEM_bias`.
    ///
    /// # Errors
    /// When there are no such tensors.
    pub fn of_experts(&self, stem: &str) -> Result<Matrix> {
        let stem = format!("{}{stem}", self.prefix);
        self.tensors.matrix(&stem, Some(&format!("{stem}_bias")))
    }

    /// Where each rank has some of the experts.
    pub fn ranks(&self) -> Option<Arc<ExpertRanks>> {
        self.tensors.ranks.cloned()
    }
}
