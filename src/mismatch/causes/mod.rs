//! The known causes of a mismatch. Each cause is declared once: name, description, deciding experiment, and
//! change.
//!
//! Each file lists the causes in one part of the computation. The model's configuration decides which causes
//! apply, so a new model family needs no entry here. [`variant`] holds the settings that a cause may change.

mod attention;
mod experts;
mod precision;
mod reading;
mod rope;
pub mod variant;

use super::head::HeadSettings;
use crate::model::config::Config;
use crate::model::layers_on_demand::WeightChange;
use crate::model::names::ParameterSpec;
use crate::model::parameters::Parameters;
use crate::ops::weight::Weight;
use anyhow::Result;
use candle_core::Tensor;
use std::sync::Arc;
use variant::Variant;

/// One cause with its parameters. Two causes are equal if their descriptions are equal.
#[derive(Clone)]
pub struct Cause {
    /// The name that all variants of the cause share, as in docs/MISMATCH.md.
    pub name: &'static str,
    /// How the cause's computation differs from the correct one.
    detail: String,
    /// The rows to compare, or the run of the engine, that would distinguish this cause from other causes.
    pub deciding_experiment: &'static str,
    pub change: Change,
}

/// Reads the original weights and returns the function that changes each tensor.
pub type WeightEdit = Arc<dyn Fn(&Parameters) -> Result<WeightChange> + Send + Sync>;

/// The part of the forward pass or of its input that a cause changes.
#[derive(Clone)]
pub enum Change {
    /// The configuration, the forward pass or the batch.
    Forward(Arc<dyn Fn(&mut Variant) + Send + Sync>),
    Weights(WeightEdit),
    /// The step from logits to log-probs.
    Head(HeadSettings),
}

impl Cause {
    pub fn new(
        name: &'static str,
        detail: impl Into<String>,
        deciding_experiment: &'static str,
        change: Change,
    ) -> Self {
        Self { name, detail: detail.into(), deciding_experiment, change }
    }

    /// Declares a cause in the configuration, the forward pass or the batch.
    pub fn in_forward(
        name: &'static str,
        detail: impl Into<String>,
        deciding_experiment: &'static str,
        change: impl Fn(&mut Variant) + Send + Sync + 'static,
    ) -> Self {
        Self::new(name, detail, deciding_experiment, Change::Forward(Arc::new(change)))
    }

    /// Declares a cause that changes the values of the tensors for which `selects` returns true.
    pub fn in_tensors(
        name: &'static str,
        detail: impl Into<String>,
        deciding_experiment: &'static str,
        selects: impl Fn(&ParameterSpec) -> bool + Send + Sync + 'static,
        change: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Self {
        let weight_change: WeightChange = Arc::new(move |spec, weight| match selects(spec) {
            true => Ok(Weight::dense(&change(&weight.decode(&spec.working_shape())?)?)),
            false => Ok(weight),
        });
        let edit: WeightEdit = Arc::new(move |_| Ok(weight_change.clone()));
        Self::new(name, detail, deciding_experiment, Change::Weights(edit))
    }

    /// Returns the description.
    pub fn description(&self) -> String {
        format!("{}: {}", self.name, self.detail)
    }

    /// Returns the remedy of docs/MISMATCH.md, the last column of the row that has the cause's name. It names
    /// the options of engines and trainers.
    pub fn remedy(&self) -> Option<&'static str> {
        let rows =
            include_str!("../../../docs/MISMATCH.md").lines().filter_map(|line| line.strip_prefix("| "));
        let mut rows = rows.filter_map(|row| row.trim_end_matches(" |").split_once(" | "));
        let (_, cells) = rows.find(|(names, _)| names.split(", ").any(|name| name == self.name))?;
        cells.rsplit(" | ").next()
    }

    /// Returns whether the cause shortens the mantissas of the whole computation.
    pub fn reduces_mantissa(&self) -> bool {
        self.name == precision::REDUCED_MANTISSA
    }

    /// Returns whether ordinary rounding noise can look like this cause.
    pub fn is_rounding(&self) -> bool {
        self.reduces_mantissa() || self.name == precision::BF16_WEIGHTS
    }

    /// Applies the cause to `variant`.
    pub fn apply(&self, variant: &mut Variant) {
        match &self.change {
            Change::Forward(change) => change(variant),
            Change::Weights(edit) => variant.weight_edits.push(edit.clone()),
            Change::Head(settings) => variant.head = *settings,
        }
    }
}

impl PartialEq for Cause {
    fn eq(&self, other: &Self) -> bool {
        (self.name, &self.detail) == (other.name, &other.detail)
    }
}

impl std::fmt::Debug for Cause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.description())
    }
}

/// Returns the causes that apply to a model of `config`. Causes of temperature and filters are not included,
/// because they are fitted to the data ([`super::head`]). `has_earlier_weights` says whether the weights
/// before the last update are available.
pub fn causes(config: &Config, has_earlier_weights: bool) -> Vec<Cause> {
    let mut causes = rope::causes(config);
    causes.extend(attention::causes(config));
    causes.extend(experts::causes(config));
    causes.extend(reading::causes());
    causes.extend(precision::causes(config));
    if has_earlier_weights {
        let detail = "the weights are those of --earlier";
        causes.push(Cause::in_forward("weights one update old", detail, RELOADED_WEIGHTS, |variant| {
            variant.use_earlier_weights = true
        }));
    }
    causes
}

/// Experiments that decide between causes.
const RELOADED_WEIGHTS: &str = "a run of the engine with the weights reloaded in bf16";
const F32_RUN: &str = "a run of the engine in f32, on more tokens";

/// Declares that a group of biases is missing.
fn missing_biases(name: &'static str, detail: &'static str, endings: &'static [&'static str]) -> Cause {
    let selects = |spec: &ParameterSpec| endings.iter().any(|ending| spec.name.ends_with(ending));
    Cause::in_tensors(name, detail, RELOADED_WEIGHTS, selects, |values| Ok(values.zeros_like()?))
}

/// Returns the columns of `values` in the order `order`.
fn select_columns(values: &Tensor, order: &[u32]) -> Result<Tensor> {
    Ok(values.index_select(&Tensor::new(order, values.device())?, values.rank() - 1)?)
}
