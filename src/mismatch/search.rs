//! Explanations, computed: this model's log-probs under one cause, or under one on top of others.

use super::causes::list::causes;
use super::causes::variant::Variant;
use super::causes::{Cause, words};
use super::diagnose::Reference;
use super::distance::{Fit, GapFigures, gaps};
use super::head::FitRows;
use super::observed::{Observed, ObservedBatch};
use crate::model::forward::{ForwardOptions, Model};
use crate::model::names::parameter_count;
use crate::model::policy_view::PolicyView;
use crate::model::weights::Weights;
use anyhow::{Context, Result};
use candle_core::Tensor;
use std::sync::Arc;

/// Models up to so many parameters are computed side by side, a cause a thread: copies of weights are then cheap.
const SIDE_BY_SIDE_PARAMETERS_MAX: u128 = 1 << 24;
/// A fitted temperature this near the stated one is the stated one.
const TEMPERATURE_ALIKE: f64 = 0.005;
/// A cause has no effect where it moves no log-prob by more, nats.
const NO_EFFECT: f64 = 1e-6;

/// Causes are first computed on about so many targets. Twice as many, and so on, until the mean gap there is at least this
/// share of the whole's: a fault may live on few rows, or far into them.
const PART_TARGETS: usize = 256;
const PART_GAP_SHARE_MIN: f64 = 0.5;
/// Of the causes computed on a part, so many of the best are computed on all targets.
const COMPUTED_MAX: usize = 12;

/// One explanation.
#[derive(Clone)]
pub struct Candidate {
    pub causes: Vec<Cause>,
    pub log_probs: Vec<f32>,
    /// `theirs − ours`, 0 where the explanation says nothing.
    pub gaps: Vec<f64>,
    pub figures: GapFigures,
    pub fit: Fit,
    /// Of each target whether the explanation says something.
    pub has_value: Vec<bool>,
}

/// Log-probs, and what routers said on the way.
pub struct Traced {
    pub log_probs: Vec<f32>,
    /// Of each layer and target the experts' scores; no layers in a model without experts.
    pub scores: Vec<Vec<Vec<f32>>>,
}

impl Candidate {
    /// From what the causes give; a token without a value in `has_value` is not looked at.
    pub fn of(theirs: &[f32], causes: Vec<Cause>, log_probs: Vec<f32>, has_value: Vec<bool>) -> Self {
        let gaps = gaps(theirs, &log_probs, &has_value);
        Self { figures: GapFigures::of(&gaps), fit: Fit::of(&gaps), causes, log_probs, gaps, has_value }
    }

    /// How well `rounded`, the same explanation computed in another precision, fits `theirs`.
    pub fn fit_of(&self, theirs: &[f32], rounded: &[f32]) -> Fit {
        Fit::of(&gaps(theirs, rounded, &self.has_value))
    }

    /// Names of its causes, in order of the alphabet.
    pub fn names(&self) -> Vec<&'static str> {
        let mut names: Vec<_> = self.causes.iter().map(|cause| cause.name()).collect();
        names.sort_unstable();
        names
    }

    /// The best `count` by their fit, best first. Of one mistake's variants two suffice, and a pair is the same whichever
    /// came first.
    pub fn best(mut candidates: Vec<Self>, count: usize) -> Vec<Self> {
        candidates.sort_by(|a, b| b.fit.log_likelihood.total_cmp(&a.fit.log_likelihood));
        let mut seen: Vec<Vec<&str>> = vec![];
        candidates.retain(|candidate| {
            let names = candidate.names();
            let before = seen.iter().filter(|other| **other == names).count();
            seen.push(names);
            before < 2
        });
        candidates.truncate(count);
        candidates
    }
}

/// A forward up to the head, from which any head's log-probs follow.
struct Walk {
    model: Model,
    weights: Arc<Weights>,
    forward: ForwardOptions,
    /// As fed.
    batches: Vec<ObservedBatch>,
    normed: Vec<Tensor>,
    has_value: Vec<bool>,
}

impl Walk {
    fn policy(&self) -> PolicyView<'_> {
        PolicyView { model: &self.model, weights: self.weights.clone(), forward: self.forward }
    }

    fn log_probs(&self, variant: &Variant) -> Result<Vec<f32>> {
        let mut found = vec![];
        for (batch, normed) in self.batches.iter().zip(&self.normed) {
            found.extend(variant.head.log_probs(&self.policy(), normed, batch)?);
        }
        Ok(found)
    }

    /// The temperature, and the filters, that fit `theirs` best.
    fn fitted(&self, theirs: &[f32]) -> Result<Vec<Cause>> {
        let sample = FitRows::draw(&self.policy(), &self.batches, &self.normed, theirs)?;
        if sample.is_empty() {
            return Ok(vec![]);
        }
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
    /// On which causes are computed first, where that saves something.
    part: Option<Observed>,
    causes: Vec<Cause>,
    /// The model as it is, and its log-probs.
    as_it_is: Walk,
    computed: Vec<f32>,
}

impl<'a> Search<'a> {
    /// Computes the model's own log-probs.
    ///
    /// # Errors
    /// When a forward fails.
    pub fn new(reference: Reference<'a>, observed: &'a Observed) -> Result<Self> {
        let causes = causes(&reference.model.config, reference.earlier.is_some());
        let unchanged = Variant::of(&reference.model.config, &[]);
        let (as_it_is, computed) = reference
            .threads
            .wide(|| -> Result<_> {
                let walk = reference.walk(&unchanged, observed)?;
                let log_probs = walk.log_probs(&unchanged)?;
                Ok((walk, log_probs))
            })
            .context("the model as it is")?;
        let part = telling_part(observed, &computed);
        Ok(Self { reference, observed, part, causes, as_it_is, computed })
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
        let Self { reference, observed, .. } = self;
        let computed = || reference.walk(&variant, observed)?.log_probs(&variant);
        reference.threads.wide(computed).with_context(|| words(causes))
    }

    /// Experts that a token goes through; 0 in a model without.
    pub fn experts_chosen(&self) -> usize {
        let config = &self.reference.model.config;
        if config.family.has_experts { config.num_experts_per_tok } else { 0 }
    }

    /// The model's log-probs under `causes`, with the routers' scores.
    ///
    /// # Errors
    /// When a forward fails.
    pub fn traced(&self, causes: &[Cause]) -> Result<Traced> {
        let Reference { model, parameters, earlier, threads, .. } = self.reference;
        let variant = Variant::of(&model.config, causes);
        let model = variant.model(self.observed.row_tokens_max());
        let policy = variant.policy(&model, parameters, earlier)?;
        let mut found = Traced { log_probs: vec![], scores: vec![] };
        for batch in &self.observed.batches {
            let (fed, _) = variant.batch(&batch.tokens);
            let batch = ObservedBatch { tokens: fed, ..batch.clone() };
            let (normed, scores) = threads.wide(|| policy.normed_and_scores(&batch.tokens))?;
            found.scores.resize(scores.len(), vec![]);
            for (all, scores) in found.scores.iter_mut().zip(scores) {
                all.extend(scores.to_vec2::<f32>()?);
            }
            found.log_probs.extend(threads.wide(|| variant.head.log_probs(&policy, &normed, &batch))?);
        }
        Ok(found)
    }

    /// `f(index)` for every index below `count`, in order: side by side where the model is small, else one after the other
    /// with all threads.
    ///
    /// # Errors
    /// The first of `f`'s.
    pub fn each<R: Send>(
        &self,
        count: usize,
        f: impl Fn(usize) -> Result<R> + Sync + Send,
    ) -> Result<Vec<R>> {
        let threads = self.reference.threads;
        match parameter_count(&self.reference.model.config) <= SIDE_BY_SIDE_PARAMETERS_MAX {
            true => threads.map(count, f),
            false => threads.wide(|| (0..count).map(f).collect()),
        }
    }

    /// Every cause on top of `before`, the hopeless left out, and the names of those without any effect on these rows.
    ///
    /// # Errors
    /// When a forward fails.
    pub fn on_top_of(&self, before: &[Cause]) -> Result<(Vec<Candidate>, Vec<&'static str>)> {
        let threads = self.reference.threads;
        let base = Variant::of(&self.reference.model.config, before);
        let computed = match before {
            [] => None,
            _ => Some(threads.wide(|| self.reference.walk(&base, self.observed))?),
        };
        let walk = computed.as_ref().unwrap_or(&self.as_it_is);
        let fitted = threads.wide(|| walk.fitted(&self.observed.log_probs))?;
        let known = self.causes.iter().copied().chain(fitted);
        let mut asked: Vec<Cause> =
            known.filter(|cause| before.iter().all(|other| other.name() != cause.name())).collect();
        if let Some(part) = &self.part {
            let walk = threads.wide(|| self.reference.walk(&base, part))?;
            let (shown, hidden) = self.computed_on(part, &walk, before, &asked)?;
            let of = |candidate: Candidate| candidate.causes.last().copied();
            asked = Candidate::best(shown, COMPUTED_MAX).into_iter().filter_map(of).collect();
            // A cause that the part does not show may show in the whole.
            if before.is_empty() {
                asked.extend(hidden.into_iter().filter_map(of));
            }
        }
        let (shown, hidden) = self.computed_on(self.observed, walk, before, &asked)?;
        let mut without_effect: Vec<&'static str> = hidden
            .iter()
            .filter_map(|candidate| candidate.causes.last())
            .map(|cause| cause.name())
            .filter(|name| shown.iter().all(|other| other.causes.last().is_none_or(|c| c.name() != *name)))
            .collect();
        without_effect.dedup();
        Ok((shown, without_effect))
    }

    /// Each of `asked` on top of `before`, whose own walk over `observed` is `base`: those that change a log-prob, and those
    /// that change none.
    fn computed_on(
        &self,
        observed: &Observed,
        base: &Walk,
        before: &[Cause],
        asked: &[Cause],
    ) -> Result<(Vec<Candidate>, Vec<Candidate>)> {
        let config = &self.reference.model.config;
        let start = Variant::of(config, before);
        let one = |cause: Cause| -> Result<Candidate> {
            let causes: Vec<Cause> = before.iter().copied().chain([cause]).collect();
            let variant = Variant::of(config, &causes);
            let of = |walk: &Walk| -> Result<Candidate> {
                let log_probs = walk.log_probs(&variant)?;
                Ok(Candidate::of(&observed.log_probs, causes, log_probs, walk.has_value.clone()))
            };
            match variant.stack() == start.stack() {
                true => of(base),
                false => of(&self.reference.walk(&variant, observed).with_context(|| cause.words())?),
            }
        };
        let stage = self.reference.console.work("causes tried", asked.len() as u64, 0);
        let found =
            self.each(asked.len(), |index| one(asked[index]).inspect(|_| stage.advance(1, 0, &[])))?;
        stage.finish();
        let unchanged = base.log_probs(&start)?;
        Ok(found.into_iter().partition(|candidate| {
            self.gaps_between(&candidate.log_probs, &unchanged).iter().any(|step| step.abs() > NO_EFFECT)
        }))
    }
}

/// The smallest part of the rows whose gaps are like the whole's; `None` where that is the whole.
fn telling_part(observed: &Observed, computed: &[f32]) -> Option<Observed> {
    let gaps = gaps(&observed.log_probs, computed, &vec![true; computed.len()]);
    let mean = GapFigures::of(&gaps).mean;
    let mut targets = PART_TARGETS;
    while targets < gaps.len() {
        let (part, places) = observed.part(targets);
        let of_part: Vec<f64> = places.iter().map(|&place| gaps[place]).collect();
        if GapFigures::of(&of_part).mean >= PART_GAP_SHARE_MIN * mean {
            return Some(part);
        }
        targets *= 2;
    }
    None
}

impl Reference<'_> {
    fn walk(&self, variant: &Variant, observed: &Observed) -> Result<Walk> {
        let model = variant.model(observed.row_tokens_max());
        let (mut batches, mut has_value, mut normed) = (vec![], vec![], vec![]);
        let policy = variant.policy(&model, self.parameters, self.earlier)?;
        for batch in &observed.batches {
            let (fed, valued) = variant.batch(&batch.tokens);
            normed.push(policy.normed(&fed)?);
            batches.push(ObservedBatch { tokens: fed, ..batch.clone() });
            has_value.extend(valued);
        }
        let (weights, forward) = (policy.weights, policy.forward);
        Ok(Walk { model, weights, forward, batches, normed, has_value })
    }
}
