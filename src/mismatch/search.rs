//! Explanations, computed: this model's log-probs under one cause, or under one on top of others.

use super::causes::list::causes;
use super::causes::variant::Variant;
use super::causes::{Cause, words};
use super::diagnose::{Observed, Reference};
use super::distance::{Fit, GapFigures, gaps};
use super::head::FitRows;
use crate::model::forward::{ForwardOptions, Model};
use crate::model::names::parameter_count;
use crate::model::policy_view::PolicyView;
use crate::model::weights::WeightSource;
use crate::train::batch::MicroBatch;
use anyhow::{Context, Result};
use candle_core::Tensor;
use std::sync::Arc;

/// Models up to so many parameters are computed side by side, a cause a thread: copies of weights are then cheap.
const SIDE_BY_SIDE_PARAMETERS_MAX: u128 = 1 << 24;
/// A fitted temperature this near the stated one is the stated one.
const TEMPERATURE_ALIKE: f64 = 0.005;
/// A cause has no effect where it moves no log-prob by more, nats.
const NO_EFFECT: f64 = 1e-6;

/// One explanation.
pub struct Candidate {
    pub causes: Vec<Cause>,
    pub log_probs: Vec<f32>,
    /// `theirs − ours`, 0 where the explanation says nothing.
    pub gaps: Vec<f64>,
    pub figures: GapFigures,
    pub fit: Fit,
}

impl Candidate {
    /// From what the causes give; a token without a value in `has_value` is not looked at.
    pub fn of(search: &Search, causes: Vec<Cause>, log_probs: Vec<f32>, has_value: Option<&[bool]>) -> Self {
        let all = vec![true; log_probs.len()];
        let gaps = gaps(&search.observed.log_probs, &log_probs, has_value.unwrap_or(&all));
        Self { figures: GapFigures::of(&gaps), fit: Fit::of(&gaps), causes, log_probs, gaps }
    }

    /// Names of its causes, in order of the alphabet.
    pub fn names(&self) -> Vec<&'static str> {
        let mut names: Vec<_> = self.causes.iter().map(|cause| cause.name()).collect();
        names.sort_unstable();
        names
    }
}

/// A forward up to the head, from which any head's log-probs follow.
struct Walk {
    model: Model,
    weights: Arc<dyn WeightSource>,
    forward: ForwardOptions,
    /// As fed, with the stated temperature.
    batches: Vec<(MicroBatch, f64)>,
    normed: Vec<Tensor>,
    has_value: Vec<bool>,
}

impl Walk {
    fn policy(&self) -> PolicyView<'_> {
        PolicyView { model: &self.model, weights: self.weights.clone(), forward: self.forward }
    }

    fn log_probs(&self, variant: &Variant) -> Result<Vec<f32>> {
        let mut found = vec![];
        for ((batch, temperature), normed) in self.batches.iter().zip(&self.normed) {
            found.extend(variant.head.log_probs(&self.policy(), normed, batch, *temperature)?);
        }
        Ok(found)
    }

    /// The temperature, and the filters, that fit `theirs` best.
    fn fitted(&self, theirs: &[f32]) -> Result<Vec<Cause>> {
        let rows: Vec<_> = self
            .batches
            .iter()
            .zip(&self.normed)
            .map(|((batch, temperature), normed)| (normed.clone(), batch.targets.clone(), *temperature))
            .collect();
        let sample = FitRows::draw(&self.policy(), &rows, theirs)?;
        let mut found: Vec<Cause> = sample.filters().map(Cause::Filtered).to_vec();
        let factor = sample.temperature_factor();
        if (factor.ln()).abs() > TEMPERATURE_ALIKE {
            found.push(Cause::Temperature(factor));
        }
        Ok(found)
    }
}

/// The rows, and the model's own log-probs of them.
pub struct Search<'a> {
    reference: Reference<'a>,
    observed: &'a Observed,
    causes: Vec<Cause>,
    computed: Vec<f32>,
}

impl<'a> Search<'a> {
    /// Computes the model's own log-probs.
    ///
    /// # Errors
    /// When a forward fails.
    pub fn new(reference: Reference<'a>, observed: &'a Observed) -> Result<Self> {
        let causes = causes(&reference.model.config, reference.earlier.is_some());
        let mut search = Self { reference, observed, causes, computed: vec![] };
        search.computed = search.log_probs(&[])?;
        Ok(search)
    }

    pub fn observed(&self) -> &Observed {
        self.observed
    }

    /// The model's own log-probs.
    pub fn computed(&self) -> &[f32] {
        &self.computed
    }

    /// `a − b`.
    pub fn gaps_between(&self, a: &[f32], b: &[f32]) -> Vec<f64> {
        gaps(a, b, &vec![true; a.len()])
    }

    /// The model's log-probs under `causes`.
    ///
    /// # Errors
    /// When a forward fails.
    pub fn log_probs(&self, causes: &[Cause]) -> Result<Vec<f32>> {
        let variant = Variant::of(&self.reference.model.config, causes);
        let named = || if causes.is_empty() { "the model as it is".to_owned() } else { words(causes) };
        self.reference.threads.wide(|| self.walk(&variant)?.log_probs(&variant)).with_context(named)
    }

    /// Every cause on top of `before`, and the names of those without any effect on these rows.
    ///
    /// # Errors
    /// When a forward fails.
    pub fn on_top_of(&self, before: &[Cause]) -> Result<(Vec<Candidate>, Vec<&'static str>)> {
        let config = &self.reference.model.config;
        let theirs = &self.observed.log_probs;
        let base = Variant::of(config, before);
        let walk = self.reference.threads.wide(|| self.walk(&base))?;
        let fitted = self.reference.threads.wide(|| walk.fitted(theirs))?;
        let known = self.causes.iter().copied();
        let asked: Vec<Cause> = known
            .chain(fitted)
            .filter(|cause| before.iter().all(|other| other.name() != cause.name()))
            .collect();
        let one = |cause: Cause| -> Result<Candidate> {
            let causes: Vec<Cause> = before.iter().copied().chain([cause]).collect();
            let variant = Variant::of(config, &causes);
            if variant.trunk() == base.trunk() {
                let log_probs = walk.log_probs(&variant)?;
                return Ok(Candidate::of(self, causes, log_probs, Some(&walk.has_value)));
            }
            let walk = self.walk(&variant).with_context(|| cause.words())?;
            let log_probs = walk.log_probs(&variant)?;
            Ok(Candidate::of(self, causes, log_probs, Some(&walk.has_value)))
        };
        let threads = self.reference.threads;
        let found: Vec<Candidate> = if parameter_count(config) <= SIDE_BY_SIDE_PARAMETERS_MAX {
            threads.map(asked.len(), |index| one(asked[index]))?
        } else {
            threads.wide(|| asked.iter().map(|cause| one(*cause)).collect::<Result<_>>())?
        };
        let start = walk.log_probs(&base)?;
        let (shown, hidden): (Vec<_>, Vec<_>) = found.into_iter().partition(|candidate| {
            self.gaps_between(&candidate.log_probs, &start).iter().any(|step| step.abs() > NO_EFFECT)
        });
        let mut without_effect: Vec<&'static str> = hidden
            .iter()
            .filter_map(|candidate| candidate.causes.last())
            .map(|cause| cause.name())
            .filter(|name| shown.iter().all(|other| other.causes.last().is_none_or(|c| c.name() != *name)))
            .collect();
        without_effect.dedup();
        Ok((shown, without_effect))
    }

    fn walk(&self, variant: &Variant) -> Result<Walk> {
        let Reference { model, parameters, earlier, .. } = self.reference;
        let model = variant.model(model.context_tokens_max());
        let (mut batches, mut has_value, mut normed) = (vec![], vec![], vec![]);
        let policy = variant.policy(&model, parameters, earlier)?;
        for (batch, temperature) in &self.observed.batches {
            let (fed, valued) = variant.batch(batch);
            normed.push(policy.normed(&fed)?);
            batches.push((fed, *temperature));
            has_value.extend(valued);
        }
        let (weights, forward) = (policy.weights, policy.forward);
        Ok(Walk { model, weights, forward, batches, normed, has_value })
    }
}
