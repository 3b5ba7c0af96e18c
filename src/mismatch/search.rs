//! Computes this model's log-probs under each known cause.

use super::causes::variant::Variant;
use super::causes::{Cause, causes};
use super::diagnose::{EVIDENCE_MIN, UnmodifiedModel};
use super::distance::{DifferenceStats, StudentTFit, log_prob_differences};
use super::engine_log_probs::{EngineBatch, EngineLogProbs};
use super::head::{FitRows, HeadSettings};
use crate::metrics::format_number;
use crate::model::forward::{ForwardOptions, Model};
use crate::model::layer::LayerOutput;
use crate::model::names::parameter_count;
use crate::model::policy_view::PolicyView;
use crate::model::weights::Weights;
use crate::ops;
use anyhow::{Context, Result};
use candle_core::Tensor;
use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum parameters of a small model. Its causes run in parallel, one a thread, since copies of its weights
/// are cheap, and its rounding and causes are computed on all rows.
pub const SMALL_PARAMETERS_MAX: u128 = 1 << 24;
/// The rounding and the causes of a larger model are computed on this share of the targets, but on no fewer
/// than this number.
const SAMPLE_DIVISOR: usize = 3;
const SAMPLE_TARGETS_MIN: usize = 512;
/// A cause has no effect if it moves no log-prob by more than this, in nats.
const NO_EFFECT: f64 = 1e-6;

/// Causes first run on about this many targets. The number doubles until the mean difference there is at
/// least this share of the mean over all: a mistake may affect only few rows, or only late positions.
const SUBSET_TARGETS: usize = 256;
const SUBSET_DIFFERENCE_SHARE_MIN: f64 = 0.5;
/// Number of best causes of the subset that then run on all targets.
const FULL_RUN_CAUSES_MAX: usize = 12;
/// A cause is dropped if it leaves more than this multiple of the spread that the best one leaves. Rounding
/// cannot make up for that.
const SPREAD_FACTOR_MAX: f64 = 8.0;
/// A cause is dropped after the subset run if its log-likelihood there is this far below that of no cause,
/// in nats.
const PART_LOSS_MAX: f64 = 15.0;

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
    /// Drops those that leave far more than the best one.
    pub fn select_best(mut candidates: Vec<Self>, count: usize) -> Vec<Self> {
        let is_rounding = |candidate: &Self| candidate.cause.as_ref().is_some_and(Cause::is_rounding);
        let spreads = candidates.iter().filter(|candidate| !is_rounding(candidate)).map(|c| c.fit.spread);
        let least = spreads.fold(f64::INFINITY, f64::min);
        candidates.retain(|candidate| candidate.fit.spread <= SPREAD_FACTOR_MAX * least);
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
    /// Routed experts of the position that predicts each target, `[layer][target]`.
    routed_experts: Vec<Vec<Vec<u32>>>,
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

/// The limit of a search for a cause, and the receiver of what is known before it.
#[derive(Clone, Copy)]
pub struct SearchSettings<'a> {
    /// The search ends this long after the verdict; `None`: it tries every cause.
    pub limit: Option<Duration>,
    /// Receives the verdict, and the search's causes and time.
    pub announce: &'a dyn Fn(&str) -> Result<()>,
    /// Maximum parameters of a model whose rounding and causes are computed on all rows.
    pub whole_rows_parameters_max: u128,
}

impl SearchSettings<'_> {
    /// Returns a search without a limit, which announces nothing.
    pub fn silent() -> Self {
        Self { limit: None, announce: &|_| Ok(()), whole_rows_parameters_max: SMALL_PARAMETERS_MAX }
    }
}

/// The extent of a search for a cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SearchExtent {
    /// Number of causes, and of those that were computed.
    pub causes: usize,
    pub tried: usize,
    /// Whether the time limit ended the search.
    pub ended_by_limit: bool,
}

/// Rows to compare, and the model's log-probs of them.
pub struct CauseSearch<'a> {
    reference: UnmodifiedModel<'a>,
    pub observed: Cow<'a, EngineLogProbs>,
    unmodified_input: HeadInput,
    /// The unchanged model's log-probs.
    pub computed: Vec<f32>,
    /// Time of the unchanged model's forward, for each target.
    seconds_per_target: f64,
    deadline: Option<Instant>,
}

impl<'a> CauseSearch<'a> {
    /// Computes the unchanged model's log-probs.
    ///
    /// # Errors
    /// When a forward fails.
    pub fn new(reference: UnmodifiedModel<'a>, observed: &'a EngineLogProbs) -> Result<Self> {
        let start = Instant::now();
        let computed = || -> Result<_> {
            let head_input = reference.run_forward(None, observed)?;
            let log_probs = head_input.log_probs(HeadSettings::default())?;
            Ok((head_input, log_probs))
        };
        let (unmodified_input, computed) =
            reference.threads.run_on_all(computed).context("the model as it is")?;
        let seconds_per_target = start.elapsed().as_secs_f64() / computed.len().max(1) as f64;
        let observed = Cow::Borrowed(observed);
        Ok(Self { reference, observed, unmodified_input, computed, seconds_per_target, deadline: None })
    }

    /// Returns the candidate of the unchanged model.
    pub fn baseline(&self) -> Candidate {
        let all = vec![true; self.computed.len()];
        Candidate::new(&self.observed.log_probs, None, self.computed.clone(), all)
    }

    /// Returns the routed experts of the unchanged model, `[layer][target]`; empty for a model without
    /// experts.
    pub fn routed_experts(&self) -> &[Vec<Vec<u32>>] {
        &self.unmodified_input.routed_experts
    }

    /// Selects the rows on which rounding and causes are computed. Also returns the indices of their targets.
    /// For a small model, that is all rows.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn sample(&self, settings: &SearchSettings) -> Result<(CauseSearch<'a>, Vec<usize>)> {
        let count = self.computed.len();
        let is_small = parameter_count(&self.reference.model.config) <= settings.whole_rows_parameters_max;
        let targets =
            if is_small { count } else { (count / SAMPLE_DIVISOR).max(SAMPLE_TARGETS_MIN).min(count) };
        self.representative_subset(targets)
    }

    /// Selects rows with differences like those of all rows. It doubles `targets`, the number of their
    /// targets, until they are.
    fn representative_subset(&self, mut targets: usize) -> Result<(CauseSearch<'a>, Vec<usize>)> {
        let differences = elementwise_differences(&self.observed.log_probs, &self.computed);
        let mean = DifferenceStats::from_differences(&differences).mean;
        loop {
            let (observed, indices) = self.observed.select_sequences(targets);
            let subset_differences: Vec<f64> = indices.iter().map(|&index| differences[index]).collect();
            let is_whole = indices.len() == differences.len();
            if is_whole
                || DifferenceStats::from_differences(&subset_differences).mean
                    >= SUBSET_DIFFERENCE_SHARE_MIN * mean
            {
                return Ok((self.restrict_to(observed, &indices)?, indices));
            }
            targets *= 2;
        }
    }

    /// Returns a search on a subset. `indices` are the positions of its targets in this search. It reuses
    /// this search's forward.
    fn restrict_to(&self, observed: EngineLogProbs, indices: &[usize]) -> Result<CauseSearch<'a>> {
        let HeadInput { model, weights, forward, normed, .. } = &self.unmodified_input;
        let normed = Tensor::cat(normed, 0)?;
        let (mut parts, mut first) = (vec![], 0);
        for batch in &observed.batches {
            let indices: Vec<u32> =
                indices[first..first + batch.sampled.len()].iter().map(|&index| index as u32).collect();
            first += indices.len();
            parts.push(normed.index_select(&Tensor::new(indices, normed.device())?, 0)?);
        }
        let unmodified_input = HeadInput {
            model: model.clone(),
            weights: weights.clone(),
            forward: *forward,
            batches: observed.batches.clone(),
            normed: parts,
            has_value: vec![true; indices.len()],
            routed_experts: vec![],
        };
        Ok(CauseSearch {
            reference: self.reference,
            observed: Cow::Owned(observed),
            unmodified_input,
            computed: indices.iter().map(|&index| self.computed[index]).collect(),
            seconds_per_target: self.seconds_per_target,
            deadline: self.deadline,
        })
    }

    /// Starts the time limit of the search.
    pub fn start_limit(&mut self, limit: Option<Duration>) {
        self.deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
    }

    /// Returns whether the time limit has passed.
    pub fn is_over(&self) -> bool {
        self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
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
        match parameter_count(&self.reference.model.config) <= SMALL_PARAMETERS_MAX {
            true => threads.map(count, f),
            false => threads.run_on_all(|| (0..count).map(f).collect()),
        }
    }

    /// Returns the candidates of all promising causes, the names of those without any effect on these rows,
    /// and the extent of the search. Announces the causes and their time.
    ///
    /// # Errors
    /// When a forward fails.
    pub fn candidates(&self, settings: &SearchSettings) -> Result<CandidateList> {
        let UnmodifiedModel { model, threads, earlier, .. } = self.reference;
        let HeadInput { batches, normed, .. } = &self.unmodified_input;
        let theirs = &self.observed.log_probs;
        let mut list = CandidateList::default();
        let mut known = causes(&model.config, earlier.is_some());
        list.extent.causes = known.len();
        if self.is_over() {
            return Ok(list);
        }
        let rows = threads
            .run_on_all(|| FitRows::select_rows(&self.unmodified_input.policy(), batches, normed, theirs))?;
        // The likely causes come first: those of the sampler cost no forward.
        let mut causes_to_try = threads.run_on_all(|| rows.causes());
        causes_to_try.append(&mut known);
        list.extent.causes = causes_to_try.len();
        let (subset, indices) = self.representative_subset(SUBSET_TARGETS)?;
        let targets = self.computed.len();
        (settings.announce)(&format!(
            "Search: {} causes on {} tokens, {} each; then the best on {targets} tokens, {} each.",
            causes_to_try.len(),
            indices.len(),
            self.pass_time(indices.len()),
            self.pass_time(targets)
        ))?;
        if indices.len() < targets {
            let null = subset.baseline().fit.log_likelihood;
            let (mut with_effect, without_effect_candidates) = subset.evaluate_causes(&causes_to_try)?;
            list.extent.tried = with_effect.len() + without_effect_candidates.len();
            with_effect.retain(|candidate| candidate.fit.log_likelihood >= null - PART_LOSS_MAX);
            // A cause without effect on the subset may have one on all targets.
            let best = Candidate::select_best(with_effect, FULL_RUN_CAUSES_MAX);
            causes_to_try = best
                .iter()
                .chain(&without_effect_candidates)
                .filter_map(|candidate| candidate.cause.clone())
                .collect();
            let supported = best.iter().filter(|c| c.fit.log_likelihood >= null + EVIDENCE_MIN);
            list.subset_causes = supported.filter_map(|candidate| candidate.cause.clone()).collect();
        }
        let without_effect_candidates;
        (list.candidates, without_effect_candidates) = self.evaluate_causes(&causes_to_try)?;
        if indices.len() == targets {
            list.extent.tried = list.candidates.len() + without_effect_candidates.len();
        }
        list.extent.ended_by_limit = self.is_over();
        let with_effect = &list.candidates;
        list.without_effect = without_effect_candidates
            .iter()
            .filter_map(Candidate::name)
            .filter(|name| with_effect.iter().all(|other| other.name() != Some(name)))
            .collect();
        list.without_effect.dedup();
        Ok(list)
    }

    /// Returns the time of a forward over `targets` of these rows, as text.
    pub fn pass_time(&self, targets: usize) -> String {
        let seconds = self.seconds_per_target * targets as f64;
        match seconds < 100.0 {
            true => format!("{} s", format_number(seconds)),
            false => format!("{} min", format_number(seconds / 60.0)),
        }
    }

    /// Computes each of the causes `causes_to_try`, until the time limit. Returns the causes that change a
    /// log-prob, and those that change none.
    fn evaluate_causes(&self, causes_to_try: &[Cause]) -> Result<(Vec<Candidate>, Vec<Candidate>)> {
        let stage = self.reference.console.work_stage("causes tried", causes_to_try.len() as u64, 0);
        let found = self.map_candidates(causes_to_try.len(), |index| match self.is_over() {
            true => Ok(None),
            false => self.evaluate(&causes_to_try[index]).inspect(|_| stage.advance(1, 0, &[])).map(Some),
        })?;
        stage.finish();
        Ok(found.into_iter().flatten().partition(|candidate| {
            elementwise_differences(&candidate.log_probs, &self.computed)
                .iter()
                .any(|step| step.abs() > NO_EFFECT)
        }))
    }

    /// Computes the log-probs under `cause`.
    ///
    /// # Errors
    /// When a forward fails.
    pub fn evaluate(&self, cause: &Cause) -> Result<Candidate> {
        let own;
        let (head_input, head) = match cause.head_settings() {
            Some(head) => (&self.unmodified_input, head),
            None => {
                let head_input = self.reference.run_forward(Some(cause), &self.observed);
                own = head_input.with_context(|| cause.description())?;
                (&own, HeadSettings::default())
            }
        };
        let (log_probs, has_value) = (head_input.log_probs(head)?, head_input.has_value.clone());
        Ok(Candidate::new(&self.observed.log_probs, Some(cause.clone()), log_probs, has_value))
    }
}

/// The causes of a search that were computed.
#[derive(Default)]
pub struct CandidateList {
    pub candidates: Vec<Candidate>,
    /// The causes that explain the subset better than none, best first.
    pub subset_causes: Vec<Cause>,
    /// Names of causes that change no log-prob.
    pub without_effect: Vec<&'static str>,
    pub extent: SearchExtent,
}

/// Returns `a − b`, element by element.
pub fn elementwise_differences(a: &[f32], b: &[f32]) -> Vec<f64> {
    log_prob_differences(a, b, &vec![true; a.len()])
}

impl UnmodifiedModel<'_> {
    fn run_forward(&self, cause: Option<&Cause>, observed: &EngineLogProbs) -> Result<HeadInput> {
        let variant = Variant::new(&self.model.config, cause);
        let model = variant.model(observed.sequence_tokens_max());
        let (mut batches, mut has_value, mut normed) = (vec![], vec![], vec![]);
        let (mut routed_experts, top_k) = (vec![], self.model.config.num_experts_per_tok);
        let policy = variant.policy(&model, self.parameters, self.earlier)?;
        for batch in &observed.batches {
            let (fed, has_values) = variant.batch(&batch.micro_batch);
            let keep = &mut |layer: usize, _: &Tensor, output: &LayerOutput| -> Result<()> {
                if let (None, Some(routes)) = (cause, output.routed_experts()) {
                    let routes = routes.flatten_all()?.to_vec1::<u32>()?;
                    let of_row = |&row: &u32| routes[row as usize * top_k..][..top_k].to_vec();
                    routed_experts.resize(routed_experts.len().max(layer + 1), vec![]);
                    routed_experts[layer].extend(fed.rows.iter().map(of_row));
                }
                Ok(())
            };
            normed.push(policy.head_input(&fed, keep)?);
            batches.push(EngineBatch { micro_batch: fed, ..batch.clone() });
            has_value.extend(has_values);
        }
        let (weights, forward) = (policy.weights, policy.forward);
        Ok(HeadInput { model, weights, forward, batches, normed, has_value, routed_experts })
    }
}
