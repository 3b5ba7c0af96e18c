//! Computes this model's log-probs under each known cause.

use super::causes::variant::Variant;
use super::causes::{Cause, causes};
use super::diagnose::UnmodifiedModel;
use super::distance::{DifferenceStats, StudentTFit, log_prob_differences};
use super::engine_log_probs::{EngineBatch, EngineLogProbs};
use super::head::{FitRows, HeadSettings};
use crate::model::decoder_stack;
use crate::model::forward::{ForwardOptions, Model};
use crate::model::layer::LayerOutput;
use crate::model::names::parameter_count;
use crate::model::policy_view::PolicyView;
use crate::model::weights::Weights;
use crate::ops;
use anyhow::{Context, Result};
use candle_core::Tensor;
use std::sync::Arc;

/// Maximum parameters of a model that runs causes in parallel, one a thread; copies of its weights are cheap.
const PARALLEL_PARAMETERS_MAX: u128 = 1 << 24;
/// A cause has no effect if it moves no log-prob by more than this, in nats.
const NO_EFFECT: f64 = 1e-6;

/// Causes first run on about this many targets. The number doubles until the mean difference there is at
/// least this share of the mean over all: a mistake may affect only few rows, or only late positions.
const SUBSET_TARGETS: usize = 256;
const SUBSET_DIFFERENCE_SHARE_MIN: f64 = 0.5;
/// Number of best causes of the part that then run on all targets.
const FULL_RUN_CAUSES_MAX: usize = 12;

/// One explanation with its fit.
#[derive(Clone)]
pub struct Candidate {
    /// The cause; `None` for the unchanged model.
    pub cause: Option<Cause>,
    pub log_probs: Vec<f32>,
    /// `theirs − ours`, in nats; 0 where the explanation gives no value.
    pub differences: Vec<f64>,
    pub figures: DifferenceStats,
    pub fit: StudentTFit,
    /// Whether the explanation gives a value for each target.
    has_value: Vec<bool>,
}

/// Log-probs, and the router scores of the same forward.
pub struct LogProbTrace {
    pub log_probs: Vec<f32>,
    /// Router scores, `[layer][target][expert]`; empty for a model without experts.
    pub scores: Vec<Vec<Vec<f32>>>,
}

impl Candidate {
    /// Compares a cause's log-probs with `theirs`. Tokens with `has_value` false are ignored.
    fn new(theirs: &[f32], cause: Option<Cause>, log_probs: Vec<f32>, has_value: Vec<bool>) -> Self {
        let differences = log_prob_differences(theirs, &log_probs, &has_value);
        Self {
            figures: DifferenceStats::from_differences(&differences),
            fit: StudentTFit::from_differences(&differences),
            cause,
            log_probs,
            differences,
            has_value,
        }
    }

    /// Returns how well `rounded`, this explanation in another precision, fits `theirs`.
    pub fn fit_rounded(&self, theirs: &[f32], rounded: &[f32]) -> StudentTFit {
        StudentTFit::from_differences(&log_prob_differences(theirs, rounded, &self.has_value))
    }

    /// Returns the name of the cause.
    pub fn name(&self) -> Option<&'static str> {
        self.cause.as_ref().map(|cause| cause.name)
    }

    /// Returns the best `count` candidates by fit, best first, with at most two variants of one mistake.
    pub fn select_best(mut candidates: Vec<Self>, count: usize) -> Vec<Self> {
        candidates.sort_by(|a, b| b.fit.log_likelihood.total_cmp(&a.fit.log_likelihood));
        let mut seen = vec![];
        candidates.retain(|candidate| {
            seen.push(candidate.name());
            seen.iter().filter(|name| **name == candidate.name()).count() <= 2
        });
        candidates.truncate(count);
        candidates
    }
}

/// A forward pass up to the head; any head's log-probs follow from it.
struct HeadInput {
    model: Model,
    weights: Arc<Weights>,
    forward: ForwardOptions,
    /// The batches as they were fed to the model.
    batches: Vec<EngineBatch>,
    normed: Vec<Tensor>,
    has_value: Vec<bool>,
}

impl HeadInput {
    fn policy(&self) -> PolicyView<'_> {
        PolicyView { model: &self.model, weights: self.weights.clone(), forward: self.forward }
    }

    fn log_probs(&self, head: HeadSettings) -> Result<Vec<f32>> {
        let mut found = vec![];
        for (batch, normed) in self.batches.iter().zip(&self.normed) {
            found.extend(head.log_probs(&self.policy(), normed, batch)?);
        }
        Ok(found)
    }
}

/// The observed rows, and the model's log-probs of them.
pub struct CauseSearch<'a> {
    reference: UnmodifiedModel<'a>,
    pub observed: &'a EngineLogProbs,
    unmodified_input: HeadInput,
    /// The unchanged model's log-probs.
    pub computed: Vec<f32>,
}

impl<'a> CauseSearch<'a> {
    /// Computes the unchanged model's log-probs.
    ///
    /// # Errors
    /// When a forward fails.
    pub fn new(reference: UnmodifiedModel<'a>, observed: &'a EngineLogProbs) -> Result<Self> {
        let computed = || -> Result<_> {
            let head_input = reference.run_forward(None, observed)?;
            let log_probs = head_input.log_probs(HeadSettings::default())?;
            Ok((head_input, log_probs))
        };
        let (unmodified_input, computed) =
            reference.threads.run_on_all(computed).context("the model as it is")?;
        Ok(Self { reference, observed, unmodified_input, computed })
    }

    /// Returns the candidate of the unchanged model.
    pub fn baseline(&self) -> Candidate {
        let all = vec![true; self.computed.len()];
        Candidate::new(&self.observed.log_probs, None, self.computed.clone(), all)
    }

    /// Returns the number of experts of a token; 0 for a model without experts.
    pub fn experts_per_token(&self) -> usize {
        let config = &self.reference.model.config;
        if config.family.has_experts { config.num_experts_per_tok } else { 0 }
    }

    /// Returns the model's log-probs under `cause` and the router scores. `bits` are the mantissa bits of
    /// weights and of activations.
    ///
    /// # Errors
    /// When a forward fails.
    pub fn trace_with_rounding(&self, cause: Option<&Cause>, bits: (u32, u32)) -> Result<LogProbTrace> {
        let UnmodifiedModel { model, parameters, earlier, threads, .. } = self.reference;
        let mut variant = Variant::new(&model.config, cause);
        variant.set_rounding(bits.0, bits.1);
        let model = variant.model(self.observed.sequence_tokens_max());
        let policy = variant.policy(&model, parameters, earlier)?;
        let mut found = LogProbTrace { log_probs: vec![], scores: vec![] };
        for batch in &self.observed.batches {
            let (fed, _) = variant.batch(&batch.micro_batch);
            let batch = EngineBatch { micro_batch: fed, ..batch.clone() };
            let keep = &mut |layer: usize, _: &Tensor, output: &LayerOutput| -> Result<()> {
                if let Some(routing) = &output.routing {
                    let scores = ops::select_rows(&routing.router_logits, &batch.micro_batch.rows)?;
                    found.scores.resize(found.scores.len().max(layer + 1), vec![]);
                    found.scores[layer].extend(scores.to_vec2::<f32>()?);
                }
                Ok(())
            };
            let normed = threads.run_on_all(|| policy.head_input(&batch.micro_batch, keep))?;
            found.log_probs.extend(threads.run_on_all(|| variant.head.log_probs(&policy, &normed, &batch))?);
        }
        Ok(found)
    }

    /// Returns `f(index)` for every index below `count`, in order. Small models run the calls in parallel,
    /// others run one call at a time with all threads.
    ///
    /// # Errors
    /// The first error of `f`.
    pub fn map_candidates<R: Send>(
        &self,
        count: usize,
        f: impl Fn(usize) -> Result<R> + Sync + Send,
    ) -> Result<Vec<R>> {
        let threads = self.reference.threads;
        match parameter_count(&self.reference.model.config) <= PARALLEL_PARAMETERS_MAX {
            true => threads.map(count, f),
            false => threads.run_on_all(|| (0..count).map(f).collect()),
        }
    }

    /// Returns the candidates of all promising causes, and the names of those without any effect on these
    /// rows.
    ///
    /// # Errors
    /// When a forward fails.
    pub fn candidates(&self) -> Result<(Vec<Candidate>, Vec<&'static str>)> {
        let UnmodifiedModel { model, threads, earlier, .. } = self.reference;
        let HeadInput { batches, normed, .. } = &self.unmodified_input;
        let theirs = &self.observed.log_probs;
        let mut causes_to_try = causes(&model.config, earlier.is_some());
        let rows = threads
            .run_on_all(|| FitRows::select_rows(&self.unmodified_input.policy(), batches, normed, theirs))?;
        causes_to_try.extend(threads.run_on_all(|| rows.causes()));
        if let Some(subset) = representative_subset(self.observed, &self.computed) {
            let head_input = threads.run_on_all(|| self.reference.run_forward(None, &subset))?;
            let (with_effect, without_effect_candidates) =
                self.evaluate_causes(&subset, &head_input, &causes_to_try)?;
            // A cause without effect on the part may have one on the whole.
            let kept = Candidate::select_best(with_effect, FULL_RUN_CAUSES_MAX)
                .into_iter()
                .chain(without_effect_candidates);
            causes_to_try = kept.filter_map(|candidate| candidate.cause).collect();
        }
        let (with_effect, without_effect_candidates) =
            self.evaluate_causes(self.observed, &self.unmodified_input, &causes_to_try)?;
        let mut without_effect: Vec<&'static str> = without_effect_candidates
            .iter()
            .filter_map(Candidate::name)
            .filter(|name| with_effect.iter().all(|other| other.name() != Some(name)))
            .collect();
        without_effect.dedup();
        Ok((with_effect, without_effect))
    }

    /// Computes each of the causes `causes_to_try`; `base` is the unchanged forward over `observed`. Returns the
    /// causes that change a log-prob, and those that change none.
    fn evaluate_causes(
        &self,
        observed: &EngineLogProbs,
        base: &HeadInput,
        causes_to_try: &[Cause],
    ) -> Result<(Vec<Candidate>, Vec<Candidate>)> {
        let one = |cause: &Cause| -> Result<Candidate> {
            let own;
            let (head_input, head) = match cause.head_settings() {
                Some(head) => (base, head),
                None => {
                    own = self
                        .reference
                        .run_forward(Some(cause), observed)
                        .with_context(|| cause.description())?;
                    (&own, HeadSettings::default())
                }
            };
            let log_probs = head_input.log_probs(head)?;
            Ok(Candidate::new(
                &observed.log_probs,
                Some(cause.clone()),
                log_probs,
                head_input.has_value.clone(),
            ))
        };
        let stage = self.reference.console.work_stage("causes tried", causes_to_try.len() as u64, 0);
        let found = self.map_candidates(causes_to_try.len(), |index| {
            one(&causes_to_try[index]).inspect(|_| stage.advance(1, 0, &[]))
        })?;
        stage.finish();
        let unchanged = base.log_probs(HeadSettings::default())?;
        Ok(found.into_iter().partition(|candidate| {
            elementwise_differences(&candidate.log_probs, &unchanged)
                .iter()
                .any(|step| step.abs() > NO_EFFECT)
        }))
    }
}

/// Returns `a − b`, element by element.
pub fn elementwise_differences(a: &[f32], b: &[f32]) -> Vec<f64> {
    log_prob_differences(a, b, &vec![true; a.len()])
}

/// Returns the smallest part of the rows with differences like those of all rows; `None` if that is all rows.
fn representative_subset(observed: &EngineLogProbs, computed: &[f32]) -> Option<EngineLogProbs> {
    let differences = elementwise_differences(&observed.log_probs, computed);
    let mean = DifferenceStats::from_differences(&differences).mean;
    let mut targets = SUBSET_TARGETS;
    while targets < differences.len() {
        let (subset, indices) = observed.select_sequences(targets);
        let subset_differences: Vec<f64> = indices.iter().map(|&index| differences[index]).collect();
        if DifferenceStats::from_differences(&subset_differences).mean >= SUBSET_DIFFERENCE_SHARE_MIN * mean {
            return Some(subset);
        }
        targets *= 2;
    }
    None
}

impl UnmodifiedModel<'_> {
    fn run_forward(&self, cause: Option<&Cause>, observed: &EngineLogProbs) -> Result<HeadInput> {
        let variant = Variant::new(&self.model.config, cause);
        let model = variant.model(observed.sequence_tokens_max());
        let (mut batches, mut has_value, mut normed) = (vec![], vec![], vec![]);
        let policy = variant.policy(&model, self.parameters, self.earlier)?;
        for batch in &observed.batches {
            let (fed, has_values) = variant.batch(&batch.micro_batch);
            normed.push(policy.head_input(&fed, &mut decoder_stack::keep_nothing)?);
            batches.push(EngineBatch { micro_batch: fed, ..batch.clone() });
            has_value.extend(has_values);
        }
        let (weights, forward) = (policy.weights, policy.forward);
        Ok(HeadInput { model, weights, forward, batches, normed, has_value })
    }
}
