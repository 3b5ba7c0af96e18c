//! The mistakes known by name. Each is declared once: its name, its words, what decides, and how it is made.
//!
//! A file lists those of one part of the computation that a model has a place for, told by the model's
//! configuration, so that a new family has its causes without an entry here. [`variant`] holds what a mistake
//! may change.

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

/// One mistake, with its parameters. Two are equal when their words are.
#[derive(Clone)]
pub struct Cause {
    /// The name that all variants of the mistake share, as in the table of docs/MISMATCH.md.
    pub name: &'static str,
    /// The difference to the right computation.
    detail: String,
    /// The rows, or the run of the engine, that tell the mistake from others.
    pub decides: &'static str,
    change: Change,
}

/// Makes the change of every tensor from the weights as they are.
pub type WeightEdit = Arc<dyn Fn(&Parameters) -> Result<WeightChange> + Send + Sync>;

#[derive(Clone)]
enum Change {
    Forward(Arc<dyn Fn(&mut Variant) + Send + Sync>),
    Weights(WeightEdit),
    Head(HeadSettings),
}

impl Cause {
    fn new(name: &'static str, detail: impl Into<String>, decides: &'static str, change: Change) -> Self {
        Self { name, detail: detail.into(), decides, change }
    }

    /// A mistake in configuration, forward or batch.
    pub fn forward(
        name: &'static str,
        detail: impl Into<String>,
        decides: &'static str,
        change: impl Fn(&mut Variant) + Send + Sync + 'static,
    ) -> Self {
        Self::new(name, detail, decides, Change::Forward(Arc::new(change)))
    }

    /// A mistake in the values of the tensors for which `concerns` is true.
    pub fn values(
        name: &'static str,
        detail: impl Into<String>,
        decides: &'static str,
        concerns: impl Fn(&ParameterSpec) -> bool + Send + Sync + 'static,
        change: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Self {
        let changed: WeightChange = Arc::new(move |spec, weight| match concerns(spec) {
            true => Ok(Weight::dense(&change(&weight.decoded(&spec.working_shape())?)?)),
            false => Ok(weight),
        });
        Self::weights(name, detail, decides, Arc::new(move |_| Ok(changed.clone())))
    }

    /// A mistake in the weights.
    pub fn weights(
        name: &'static str,
        detail: impl Into<String>,
        decides: &'static str,
        edit: WeightEdit,
    ) -> Self {
        Self::new(name, detail, decides, Change::Weights(edit))
    }

    /// A mistake in how logits become log-probs.
    pub fn head(
        name: &'static str,
        detail: impl Into<String>,
        decides: &'static str,
        settings: HeadSettings,
    ) -> Self {
        Self::new(name, detail, decides, Change::Head(settings))
    }

    /// In words.
    pub fn words(&self) -> String {
        format!("{}: {}", self.name, self.detail)
    }

    /// The head's settings, where the mistake changes nothing before the head.
    pub fn head_settings(&self) -> Option<HeadSettings> {
        match self.change {
            Change::Head(settings) => Some(settings),
            _ => None,
        }
    }

    /// Whether the numbers of the whole computation are shorter.
    pub fn shortens_mantissas(&self) -> bool {
        self.name == precision::SHORT_MANTISSAS
    }

    /// Whether any noise of that size looks like it.
    pub fn is_rounding(&self) -> bool {
        self.shortens_mantissas() || self.name == precision::BF16_WEIGHTS
    }

    /// Makes the mistake.
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
        f.write_str(&self.words())
    }
}

/// The causes for a model of `config` whose parameters are known beforehand; temperature and filters are
/// fitted. `has_earlier`: the weights of the update before are at hand.
pub fn causes(config: &Config, has_earlier: bool) -> Vec<Cause> {
    let mut found = rope::causes(config);
    found.extend(attention::causes(config));
    found.extend(experts::causes(config));
    found.extend(reading::causes());
    found.extend(precision::causes(config));
    if has_earlier {
        let detail = "they are those of --earlier";
        found.push(Cause::forward("weights one update old", detail, WEIGHTS, |variant| {
            variant.earlier = true
        }));
    }
    found
}

const WEIGHTS: &str = "a run of the engine with the weights loaded anew in bf16";
const FORWARD: &str = "a run of the engine in f32, on more tokens";

/// A group of biases that go missing together.
fn missing_biases(name: &'static str, detail: &'static str, endings: &'static [&'static str]) -> Cause {
    let concerns = |spec: &ParameterSpec| endings.iter().any(|ending| spec.name.ends_with(ending));
    Cause::values(name, detail, WEIGHTS, concerns, |values| Ok(values.zeros_like()?))
}

/// Places `order` of the last axis.
fn taken(values: &Tensor, order: &[u32]) -> Result<Tensor> {
    Ok(values.index_select(&Tensor::new(order, values.device())?, values.rank() - 1)?)
}
