//! A matrix with its bias and its adapter. Layers, the LM head and the embedding consist of such matrices.

use super::parallel::expert_parallel::ExpertParallel;
use crate::ops::head_adapter::{HeadAdapter, RowAdapter};
use crate::ops::log_prob::{HeadTargets, adapted_log_prob_and_entropy};
use crate::ops::logits::{Logits, SamplingParameters, adapted_logits};
use crate::ops::reverse_kl::TeacherRows;
use crate::ops::weight::Weight;
use crate::ops::{self, Dispatch, Parameter, TokenFactors};
use anyhow::{Result, bail, ensure};
use candle_core::Tensor;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// A matrix `[in, out]` with a bias `[out]`. For experts, a matrix `[E, in, out]` with a bias `[E, out]`.
#[derive(Clone)]
pub struct Matrix {
    weight: Weight,
    bias: Option<Parameter>,
    adapter: Option<Adapter>,
}

/// The low-rank adapter of a matrix. It is never merged into the matrix.
#[derive(Clone)]
pub enum Adapter {
    /// The factors for all tokens.
    Whole(LowRankFactors),
    /// The factors for some tokens of one pass, in the order of tokens. Other tokens have no adapter.
    ByTokens(Arc<[(Range<usize>, LowRankFactors)]>),
}

/// The factors of a low-rank adapter, `scale · A · B`.
#[derive(Clone)]
pub struct LowRankFactors {
    /// `[in, r]`, or `[E, in, r]`.
    pub a: Parameter,
    /// `[r, out]`, or `[E, r, out]`.
    pub b: Parameter,
    pub scale: f32,
}

impl Adapter {
    fn without_gradient(&self) -> Self {
        match self {
            Self::Whole(factors) => Self::Whole(factors.without_gradient()),
            Self::ByTokens(parts) => {
                let part = |(tokens, factors): &(Range<usize>, LowRankFactors)| {
                    (tokens.clone(), factors.without_gradient())
                };
                Self::ByTokens(parts.iter().map(part).collect())
            }
        }
    }

    /// Adds the output of the adapter for `x` to `y`. Rows of experts are sorted by `plan`.
    fn add_output(&self, y: &Tensor, x: &Tensor, plan: Option<&Dispatch>) -> Result<Tensor> {
        Ok(match self {
            Self::Whole(LowRankFactors { a, b, scale }) => ops::add_low_rank(y, x, [a, b], *scale, plan)?,
            Self::ByTokens(parts) => {
                let parts = parts.iter().map(|(tokens, LowRankFactors { a, b, scale })| TokenFactors {
                    tokens: tokens.clone(),
                    factors: [a, b],
                    scale: *scale,
                });
                ops::add_low_rank_by_tokens(y, x, &parts.collect::<Vec<_>>(), plan)?
            }
        })
    }
}

impl LowRankFactors {
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

    /// Returns the product `[T, out]` of `x [T, in]` and the matrix, plus the bias and the output of the
    /// adapter.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn matmul(&self, x: &Tensor) -> Result<Tensor> {
        self.add_adapter_output(self.weight.matmul(x, self.bias.as_ref())?, x, None)
    }

    /// Returns the products of [`Self::matmul`] by up to three matrices. Where no gradient is recorded, a GPU
    /// computes them in one launch.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn matmul_each<const N: usize>(matrices: [&Self; N], x: &Tensor) -> Result<[Tensor; N]> {
        let dense = matrices.map(|matrix| Some((matrix.weight.as_dense()?, matrix.bias.as_ref())));
        let dense = dense.into_iter().collect::<Option<Vec<_>>>();
        let joined = dense.map(|dense| ops::fused::joined_linear(x, &dense)).transpose()?;
        let products = match joined.flatten() {
            Some(joined) => {
                let products = joined.into_iter().zip(matrices);
                products.map(|(y, matrix)| matrix.add_adapter_output(y, x, None)).collect::<Result<Vec<_>>>()
            }
            None => matrices.iter().map(|matrix| matrix.matmul(x)).collect(),
        };
        <[Tensor; N]>::try_from(products?).or_else(|found| bail!("{} products of {N}", found.len()))
    }

    /// Returns `residual [T, out]` plus the product of [`Self::matmul`].
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn matmul_and_add(&self, x: &Tensor, residual: &Tensor) -> Result<Tensor> {
        Ok(match (&self.weight, &self.adapter) {
            (Weight::Dense(weight), None) => {
                ops::fused::linear_and_add(x, weight, self.bias.as_ref(), residual)?
            }
            _ => ops::graph::add(residual, &self.matmul(x)?)?,
        })
    }

    /// Returns the product as [`Self::matmul`] does, but computes it in f32 on every device. Router logits
    /// and values of a critic need this.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn matmul_f32(&self, x: &Tensor) -> Result<Tensor> {
        self.add_adapter_output(self.weight.matmul_f32(x, self.bias.as_ref())?, x, None)
    }

    /// Multiplies each row of `x [T·K, in]`, which is sorted by `plan`, by the matrix of its expert. Returns
    /// `[T·K, out]`.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn grouped_matmul(&self, x: &Tensor, plan: &Dispatch) -> Result<Tensor> {
        self.add_adapter_output(self.weight.grouped_matmul(x, self.bias.as_ref(), plan)?, x, Some(plan))
    }

    /// Returns the SwiGLU of the products of tokens `x [T, in]` by the matrices of their experts: `[T·K, out
    /// / 2]`, sorted by `plan`. `unit` has clamp and gain.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn dispatch_to_swiglu(&self, x: &Tensor, plan: &Dispatch, unit: (f64, f64)) -> Result<Tensor> {
        Ok(match self.adapter {
            None => ops::fused::expert_swiglu(x, &self.weight, self.bias.as_ref(), plan, unit)?,
            Some(_) => {
                let products = self.grouped_matmul(&ops::dispatch(x, plan)?, plan)?;
                ops::swiglu(&products, unit.0, unit.1)?
            }
        })
    }

    /// Adds the output of the adapter for `x` to `y`.
    fn add_adapter_output(&self, y: Tensor, x: &Tensor, plan: Option<&Dispatch>) -> Result<Tensor> {
        Ok(if let Some(adapter) = &self.adapter { adapter.add_output(&y, x, plan)? } else { y })
    }

    /// Returns the log-probabilities of `targets` and the entropies, `[2, R]`, for hidden states `h [R, H]`
    /// at `temperature`. A row with a set of kept tokens has the distribution over that set. The matrix must
    /// be an LM head.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn log_prob_and_entropy(&self, h: &Tensor, targets: HeadTargets, temperature: f64) -> Result<Tensor> {
        let (weight, adapter) = self.as_head()?;
        let HeadTargets { tokens, kept, skips_zero_gradients } = targets;
        Ok(match &adapter {
            None if !skips_zero_gradients => ops::log_prob_and_entropy(h, weight, tokens, kept, temperature)?,
            adapter => adapted_log_prob_and_entropy(h, (weight, adapter.as_ref()), targets, temperature)?,
        })
    }

    /// Returns the rows of [`Self::log_prob_and_entropy`] and the divergence of each distribution from the
    /// one of `teacher`, `[3, R]`. The matrix must be an LM head.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn log_prob_entropy_and_kl(
        &self,
        h: &Tensor,
        targets: &Arc<Vec<u32>>,
        teacher: &TeacherRows,
        temperature: f64,
    ) -> Result<Tensor> {
        let (weight, adapter) = self.as_head()?;
        Ok(ops::log_prob_entropy_and_kl(h, (weight, adapter.as_ref()), targets, teacher, temperature)?)
    }

    /// Returns the logits of `h [R, H]` for a sampler, with the adapters of the heads `of`: the first rows
    /// have the first one's. All have the weight of this matrix, which must be an LM head.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn logits(&self, h: &Tensor, of: &[(&Self, usize)], sampling: &SamplingParameters) -> Result<Logits> {
        let (weight, _) = self.as_head()?;
        let adapters = of.iter().map(|(head, _)| Ok(head.as_head()?.1)).collect::<Result<Vec<_>>>()?;
        let mut row = 0;
        let rows = of.iter().zip(&adapters).filter_map(|((_, count), adapter)| {
            let rows = row..row + count;
            row = rows.end;
            Some(RowAdapter { rows, adapter: adapter.as_ref()? })
        });
        let rows: Vec<_> = rows.collect();
        Ok(match rows.is_empty() {
            true => ops::logits(h, weight, sampling)?,
            false => adapted_logits(h, weight, &rows, sampling)?,
        })
    }

    /// Returns the weight of an LM head, and its adapter.
    pub(super) fn as_head(&self) -> Result<(&Weight, Option<HeadAdapter>)> {
        ensure!(self.bias.is_none(), "an LM head cannot have a bias");
        let adapter = match &self.adapter {
            None => None,
            Some(Adapter::Whole(LowRankFactors { a, b, scale })) => {
                Some(HeadAdapter { a: a.clone(), b: b.clone(), scale: *scale })
            }
            Some(Adapter::ByTokens(_)) => bail!("the head of one pass of several versions"),
        };
        Ok((&self.weight, adapter))
    }

    /// Returns the matrix with the adapter `adapter` in place of its own.
    pub(super) fn with_adapter(&self, adapter: Option<Adapter>) -> Self {
        Self { adapter, ..self.clone() }
    }

    /// Returns the weight of a matrix without bias and adapter, such as an embedding.
    pub(super) fn plain_weight(&self) -> Result<&Weight> {
        ensure!(
            self.bias.is_none() && self.adapter.is_none(),
            "an embedding cannot have a bias or an adapter"
        );
        Ok(&self.weight)
    }
}

/// Finds a model's tensors by name.
#[derive(Clone, Copy)]
pub struct ModelTensors<'a> {
    pub find: &'a dyn Fn(&str) -> Result<Weight>,
    /// The adapters by the names of the adapted matrices.
    pub adapters: &'a HashMap<String, Adapter>,
    /// The placement of experts on ranks; `None` without expert parallelism.
    pub expert_parallel: Option<&'a Arc<ExpertParallel>>,
}

impl ModelTensors<'_> {
    /// Returns the small dense tensor `name`: a bias, a norm or sinks.
    ///
    /// # Errors
    /// When the tensor is missing or packed.
    pub fn vector(&self, name: &str) -> Result<Parameter> {
        match (self.find)(name)? {
            Weight::Dense(parameter) => Ok(parameter),
            Weight::Packed(_) => bail!("{name} is packed, but must be dense"),
        }
    }

    /// Returns the matrix `name` with its bias `bias`, if given.
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

/// Finds the tensors of one layer by the part of their name after the prefix of the layer.
pub struct LayerTensors<'a> {
    tensors: ModelTensors<'a>,
    prefix: String,
}

impl LayerTensors<'_> {
    /// Returns the small dense tensor `name` of the layer: a bias, a norm or sinks.
    ///
    /// # Errors
    /// Errors of [`ModelTensors::vector`].
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

    /// Returns the expert matrices `STEM` with their biases `STEM_bias`.
    ///
    /// # Errors
    /// When there are no such tensors.
    pub fn expert_matrices(&self, stem: &str) -> Result<Matrix> {
        let stem = format!("{}{stem}", self.prefix);
        self.tensors.matrix(&stem, Some(&format!("{stem}_bias")))
    }

    /// Returns the placement of experts on ranks; `None` without expert parallelism.
    pub fn expert_parallel(&self) -> Option<Arc<ExpertParallel>> {
        self.tensors.expert_parallel.cloned()
    }
}
