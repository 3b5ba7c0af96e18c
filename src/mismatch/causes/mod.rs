//! The known mistakes. Each is declared once: name, description, deciding experiment, and change.
//!
//! Each file lists the mistakes of one part of the computation. The model's configuration decides which of
//! them apply, so a new model family needs no entry here. [`variant`] holds the settings that a mistake may
//! change.

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

/// One mistake with its parameters. Two are equal if their descriptions are.
#[derive(Clone)]
pub struct Cause {
    /// The name that all variants of the mistake share, as in docs/MISMATCH.md.
    pub name: &'static str,
    /// The difference from the correct computation.
    detail: String,
    /// The rows, or the run of the engine, that distinguish this mistake from others.
    pub deciding_experiment: &'static str,
    change: Change,
}

/// Computes the change of every tensor from the original weights.
pub type WeightEdit = Arc<dyn Fn(&Parameters) -> Result<WeightChange> + Send + Sync>;

#[derive(Clone)]
enum Change {
    Forward(Arc<dyn Fn(&mut Variant) + Send + Sync>),
    Weights(WeightEdit),
    Head(HeadSettings),
}

impl Cause {
    fn new(
        name: &'static str,
        detail: impl Into<String>,
        deciding_experiment: &'static str,
        change: Change,
    ) -> Self {
        Self { name, detail: detail.into(), deciding_experiment, change }
    }

    /// Declares a mistake in configuration, forward or batch.
    pub fn in_forward(
        name: &'static str,
        detail: impl Into<String>,
        deciding_experiment: &'static str,
        change: impl Fn(&mut Variant) + Send + Sync + 'static,
    ) -> Self {
        Self::new(name, detail, deciding_experiment, Change::Forward(Arc::new(change)))
    }

    /// Declares a mistake in the values of the tensors for which `concerns` is true.
    pub fn in_values(
        name: &'static str,
        detail: impl Into<String>,
        deciding_experiment: &'static str,
        concerns: impl Fn(&ParameterSpec) -> bool + Send + Sync + 'static,
        change: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Self {
        let changed: WeightChange = Arc::new(move |spec, weight| match concerns(spec) {
            true => Ok(Weight::dense(&change(&weight.decode(&spec.working_shape())?)?)),
            false => Ok(weight),
        });
        Self::in_weights(name, detail, deciding_experiment, Arc::new(move |_| Ok(changed.clone())))
    }

    /// Declares a mistake in the weights.
    pub fn in_weights(
        name: &'static str,
        detail: impl Into<String>,
        deciding_experiment: &'static str,
        edit: WeightEdit,
    ) -> Self {
        Self::new(name, detail, deciding_experiment, Change::Weights(edit))
    }

    /// Declares a mistake in the computation of log-probs from logits.
    pub fn in_head(
        name: &'static str,
        detail: impl Into<String>,
        deciding_experiment: &'static str,
        settings: HeadSettings,
    ) -> Self {
        Self::new(name, detail, deciding_experiment, Change::Head(settings))
    }

    /// Returns the description.
    pub fn description(&self) -> String {
        format!("{}: {}", self.name, self.detail)
    }

    /// Returns the head's settings, if the mistake changes nothing before the head.
    pub fn head_settings(&self) -> Option<HeadSettings> {
        match self.change {
            Change::Head(settings) => Some(settings),
            _ => None,
        }
    }

    /// Returns whether the mistake shortens the mantissas of the whole computation.
    pub fn reduces_mantissa(&self) -> bool {
        self.name == precision::REDUCED_MANTISSA
    }

    /// Returns whether ordinary rounding noise can look like this mistake.
    pub fn is_rounding(&self) -> bool {
        self.reduces_mantissa() || self.name == precision::BF16_WEIGHTS
    }

    /// Applies the mistake to `variant`.
    pub fn apply(&self, variant: &mut Variant) {
        match &self.change {
            Change::Forward(change) => change(variant),
            Change::Weights(edit) => variant.weights.push(edit.clone()),
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

/// Returns the causes for a model of `config` with known parameters; temperature and filters are fitted
/// later. `has_earlier`: the weights before the last update are available.
pub fn causes(config: &Config, has_earlier: bool) -> Vec<Cause> {
    let mut found = rope::causes(config);
    found.extend(attention::causes(config));
    found.extend(experts::causes(config));
    found.extend(reading::causes());
    found.extend(precision::causes(config));
    if has_earlier {
        let detail = "they are those of --earlier";
        found.push(Cause::in_forward("weights one update old", detail, WEIGHTS, |variant| {
            variant.earlier = true
        }));
    }
    found
}

const WEIGHTS: &str = "a run of the engine with the weights loaded anew in bf16";
const FORWARD: &str = "a run of the engine in f32, on more tokens";

/// Declares that a group of biases is missing.
fn missing_biases(name: &'static str, detail: &'static str, endings: &'static [&'static str]) -> Cause {
    let concerns = |spec: &ParameterSpec| endings.iter().any(|ending| spec.name.ends_with(ending));
    Cause::in_values(name, detail, WEIGHTS, concerns, |values| Ok(values.zeros_like()?))
}

/// Selects the indices `order` of the last axis.
fn select_columns(values: &Tensor, order: &[u32]) -> Result<Tensor> {
    Ok(values.index_select(&Tensor::new(order, values.device())?, values.rank() - 1)?)
}
