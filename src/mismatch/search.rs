//! The search for a cause. It runs this model under each known cause and compares the log-probs with the
//! engine's.

use super::causes::variant::Variant;
use super::causes::{Cause, Change, causes};
use super::diagnose::{EVIDENCE_MIN, UnmodifiedModel};
use super::distance::{DifferenceStats, StudentTFit, log_prob_differences};
use super::engine_log_probs::{EngineBatch, EngineLogProbs};
use super::head::{FitRows, HeadSettings};
use crate::metrics::{Progress, format_number};
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

/// Maximum number of parameters of a small model. Copies of a small model's weights are cheap, so its causes
/// run in parallel, one per thread. Its rounding and its causes are computed on all rows.
pub const SMALL_PARAMETERS_MAX: u128 = 1 << 24;
/// For a larger model, rounding and causes are computed on a sample: about one target in this many.
const SAMPLE_DIVISOR: usize = 3;
/// Minimum number of targets of a sample.
const SAMPLE_TARGETS_MIN: usize = 512;
/// A cause has an effect if it changes a log-prob by more than this, in nats.
const EFFECT_MIN: f64 = 1e-6;

/// Number of targets of the subset on which all causes run first.
const SUBSET_TARGETS: usize = 256;
/// The subset is doubled until its mean difference is at least this fraction of the mean over all targets.
/// Otherwise the subset could miss a cause that affects only few rows, or only late positions.
const SUBSET_DIFFERENCE_SHARE_MIN: f64 = 0.5;
/// Maximum number of causes that run on all targets. They are the best causes on the subset.
const FULL_RUN_CAUSES_MAX: usize = 12;
/// A cause is dropped if the scale of its Student-t fit exceeds the smallest scale by more than this factor.
/// Rounding cannot explain such a factor. The smallest scale is that of all causes except rounding.
const SCALE_FACTOR_MAX: f64 = 8.0;
/// A cause is dropped after the run on the subset if its log-likelihood is lower than that of the unchanged
/// model by more than this, in nats.
const SUBSET_LOSS_MAX: f64 = 15.0;

/// The model's log-probs under one cause, compared with the engine's.
#[derive(Clone)]
pub struct CauseFit {
    /// The cause; `None` for the unchanged model.
    pub cause: Option<Cause>,
    pub log_probs: Vec<f32>,
    /// `engine − model`, in nats; 0 where the cause gives no value.
    pub differences: Vec<f64>,
    pub stats: DifferenceStats,
    pub student_t: StudentTFit,
    /// For each target, whether the cause gives a value.
    has_value: Vec<bool>,
}

/// Log-probs, and the router scores of the same forward pass.
pub struct LogProbTrace {
    pub log_probs: Vec<f32>,
    /// Router scores, `[layer][target][expert]`; empty for a model without experts.
    pub scores: Vec<Vec<Vec<f32>>>,
}

impl CauseFit {
    /// Compares `log_probs` with `engine`. Targets with `has_value` false are ignored.
    fn new(engine: &[f32], cause: Option<Cause>, log_probs: Vec<f32>, has_value: Vec<bool>) -> Self {
        let differences = log_prob_differences(engine, &log_probs, &has_value);
        Self {
            stats: DifferenceStats::from_differences(&differences),
            student_t: StudentTFit::from_differences(&differences),
            cause,
            log_probs,
            differences,
            has_value,
        }
    }

    /// Fits the differences between `engine` and `rounded`, the log-probs under this cause in another
    /// precision.
    pub fn fit_rounded(&self, engine: &[f32], rounded: &[f32]) -> StudentTFit {
        StudentTFit::from_differences(&log_prob_differences(engine, rounded, &self.has_value))
    }

    /// Returns the name of the cause.
    pub fn name(&self) -> Option<&'static str> {
        self.cause.as_ref().map(|cause| cause.name)
    }

    /// Returns the `count` fits with the highest likelihood, best first. Keeps at most two variants of each
    /// cause. Drops fits whose scale is much larger than the smallest scale ([`SCALE_FACTOR_MAX`]).
    pub fn select_best(mut fits: Vec<Self>, count: usize) -> Vec<Self> {
        let is_rounding = |fit: &Self| fit.cause.as_ref().is_some_and(Cause::is_rounding);
        let scales = fits.iter().filter(|fit| !is_rounding(fit)).map(|fit| fit.student_t.scale);
        let scale_min = scales.fold(f64::INFINITY, f64::min);
        fits.retain(|fit| fit.student_t.scale <= SCALE_FACTOR_MAX * scale_min);
        fits.sort_by(|a, b| b.student_t.log_likelihood.total_cmp(&a.student_t.log_likelihood));
        let mut seen = vec![];
        fits.retain(|fit| {
            seen.push(fit.name());
            seen.iter().filter(|name| **name == fit.name()).count() <= 2
        });
        fits.truncate(count);
        fits
    }
}

/// The result of a forward pass up to the head. Log-probs for any head settings can be computed from it.
struct HeadInput {
    model: Model,
    weights: Arc<Weights>,
    forward: ForwardOptions,
    /// The input of the forward pass: the engine's batches with the changes of the cause.
    batches: Vec<EngineBatch>,
    normed: Vec<Tensor>,
    has_value: Vec<bool>,
    /// Routed experts at the position that predicts each target, `[layer][target]`.
    routed_experts: Vec<Vec<Vec<u32>>>,
}

impl HeadInput {
    fn policy(&self) -> PolicyView<'_> {
        PolicyView { model: &self.model, weights: self.weights.clone(), forward: self.forward }
    }

    fn log_probs(&self, head: HeadSettings) -> Result<Vec<f32>> {
        let mut log_probs = vec![];
        for (batch, normed) in self.batches.iter().zip(&self.normed) {
            log_probs.extend(head.log_probs(&self.policy(), normed, batch)?);
        }
        Ok(log_probs)
    }
}

/// Settings of the search for a cause.
#[derive(Clone, Copy)]
pub struct SearchSettings<'a> {
    /// Time limit, measured from the verdict on; `None` means that all causes are tried.
    pub limit: Option<Duration>,
    /// Ends the search when it returns true, as the time limit does.
    pub is_stopped: fn() -> bool,
    /// Receives text for the user: first the verdict, then the number of causes and the expected time.
    pub announce: &'a dyn Fn(&str) -> Result<()>,
    /// Models with at most this number of parameters are searched on all rows, larger models on a sample.
    pub whole_rows_parameters_max: u128,
}

impl SearchSettings<'_> {
    /// Returns settings without a time limit and without text for the user.
    pub fn silent() -> Self {
        Self {
            limit: None,
            is_stopped: || false,
            announce: &|_| Ok(()),
            whole_rows_parameters_max: SMALL_PARAMETERS_MAX,
        }
    }
}

/// How many causes a search tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SearchCoverage {
    /// Number of causes to try.
    pub causes: usize,
    /// Number of causes that were tried.
    pub tried: usize,
    /// Whether the time limit or a signal ended the search.
    pub ended_by_limit: bool,
}

/// The engine's rows and the unchanged model's log-probs of the same tokens.
pub struct CauseSearch<'a> {
    unmodified_model: UnmodifiedModel<'a>,
    pub observed: Cow<'a, EngineLogProbs>,
    unmodified_input: HeadInput,
    /// The unchanged model's log-probs.
    pub unmodified_log_probs: Vec<f32>,
    /// Measured time of the unchanged model's forward pass, divided by the number of targets.
    seconds_per_target: f64,
    deadline: Option<Instant>,
    is_stopped: fn() -> bool,
}

impl<'a> CauseSearch<'a> {
    /// Computes the log-probs of the unchanged model.
    ///
    /// # Errors
    /// When a forward pass fails.
    pub fn new(unmodified_model: UnmodifiedModel<'a>, observed: &'a EngineLogProbs) -> Result<Self> {
        let start = Instant::now();
        let forward = || -> Result<_> {
            let stage = unmodified_model.console.start_pass("the model's log-probs", observed.tokens());
            let head_input = unmodified_model.run_forward(None, observed, &stage)?;
            stage.finish();
            let log_probs = head_input.log_probs(HeadSettings::default())?;
            Ok((head_input, log_probs))
        };
        let (unmodified_input, unmodified_log_probs) =
            unmodified_model.threads.run_on_all(forward).context("the unchanged model")?;
        let seconds_per_target = start.elapsed().as_secs_f64() / unmodified_log_probs.len().max(1) as f64;
        Ok(Self {
            unmodified_model,
            observed: Cow::Borrowed(observed),
            unmodified_input,
            unmodified_log_probs,
            seconds_per_target,
            deadline: None,
            is_stopped: || false,
        })
    }

    /// Returns the fit of the unchanged model.
    pub fn baseline(&self) -> CauseFit {
        let has_value = vec![true; self.unmodified_log_probs.len()];
        CauseFit::new(&self.observed.log_probs, None, self.unmodified_log_probs.clone(), has_value)
    }

    /// Returns the routed experts of the unchanged model, `[layer][target]`; empty for a model without
    /// experts.
    pub fn routed_experts(&self) -> &[Vec<Vec<u32>>] {
        &self.unmodified_input.routed_experts
    }

    /// Selects the rows on which rounding and causes are computed: all rows for a small model, else a sample.
    /// Also returns the indices of their targets.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn sample(&self, settings: &SearchSettings) -> Result<(CauseSearch<'a>, Vec<usize>)> {
        let count = self.unmodified_log_probs.len();
        let is_small =
            parameter_count(&self.unmodified_model.model.config) <= settings.whole_rows_parameters_max;
        let targets =
            if is_small { count } else { (count / SAMPLE_DIVISOR).max(SAMPLE_TARGETS_MIN).min(count) };
        self.representative_subset(targets)
    }

    /// Selects evenly spaced rows with about `targets` targets. Doubles `targets` until the mean difference
    /// of the subset is close to the mean over all rows. Also returns the indices of the subset's targets.
    fn representative_subset(&self, mut targets: usize) -> Result<(CauseSearch<'a>, Vec<usize>)> {
        let differences = elementwise_differences(&self.observed.log_probs, &self.unmodified_log_probs);
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

    /// Returns a search over `observed`, a subset whose targets have the indices `indices` in this search.
    /// Reuses the forward pass of this search.
    fn restrict_to(&self, observed: EngineLogProbs, indices: &[usize]) -> Result<CauseSearch<'a>> {
        let HeadInput { model, weights, forward, normed, .. } = &self.unmodified_input;
        let normed = Tensor::cat(normed, 0)?;
        let (mut normed_by_batch, mut first) = (vec![], 0);
        for batch in &observed.batches {
            let indices: Vec<u32> =
                indices[first..first + batch.sampled.len()].iter().map(|&index| index as u32).collect();
            first += indices.len();
            normed_by_batch.push(normed.index_select(&Tensor::new(indices, normed.device())?, 0)?);
        }
        let unmodified_input = HeadInput {
            model: model.clone(),
            weights: weights.clone(),
            forward: *forward,
            batches: observed.batches.clone(),
            normed: normed_by_batch,
            has_value: vec![true; indices.len()],
            routed_experts: vec![],
        };
        Ok(CauseSearch {
            observed: Cow::Owned(observed),
            unmodified_input,
            unmodified_log_probs: indices.iter().map(|&index| self.unmodified_log_probs[index]).collect(),
            ..*self
        })
    }

    /// Starts the time limit of the search.
    pub fn start_limit(&mut self, settings: &SearchSettings) {
        self.deadline = settings.limit.and_then(|limit| Instant::now().checked_add(limit));
        self.is_stopped = settings.is_stopped;
    }

    /// Returns whether the time limit has passed, or the search was stopped.
    pub fn is_over(&self) -> bool {
        (self.is_stopped)() || self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// Returns the number of experts per token; 0 for a model without experts.
    pub fn experts_per_token(&self) -> usize {
        let config = &self.unmodified_model.model.config;
        if config.family.has_experts { config.num_experts_per_tok } else { 0 }
    }

    /// Returns the model's log-probs under `cause`, and the router scores. `bits` holds the mantissa bits of
    /// the weights and of the activations.
    ///
    /// # Errors
    /// When a forward pass fails.
    pub fn trace_with_rounding(&self, cause: Option<&Cause>, bits: (u32, u32)) -> Result<LogProbTrace> {
        let UnmodifiedModel { model, parameters, earlier_weights, threads, .. } = self.unmodified_model;
        let mut variant = Variant::new(&model.config, cause);
        variant.set_rounding(bits.0, bits.1);
        let model = variant.model(self.observed.sequence_tokens_max());
        let policy = variant.policy(&model, parameters, earlier_weights)?;
        let mut trace = LogProbTrace { log_probs: vec![], scores: vec![] };
        let stage = self.start_pass("rounding");
        for batch in &self.observed.batches {
            let (micro_batch, _) = variant.change_batch(&batch.micro_batch);
            let batch = EngineBatch { micro_batch, ..batch.clone() };
            let keep = &mut |layer: usize, _: &Tensor, output: &LayerOutput| -> Result<()> {
                if let Some(routing) = &output.routing {
                    let scores = ops::select_rows(&routing.router_logits, &batch.micro_batch.rows)?;
                    trace.scores.resize(trace.scores.len().max(layer + 1), vec![]);
                    trace.scores[layer].extend(scores.to_vec2::<f32>()?);
                }
                Ok(())
            };
            let normed = threads.run_on_all(|| policy.head_input(&batch.micro_batch, keep))?;
            trace.log_probs.extend(threads.run_on_all(|| variant.head.log_probs(&policy, &normed, &batch))?);
            stage.advance_tokens(batch.micro_batch.tokens.len() as f64);
        }
        stage.finish();
        Ok(trace)
    }

    /// Returns `f(index)` for every index below `count`, in order. The calls run in parallel for a small
    /// model, and one after the other for a larger model.
    ///
    /// # Errors
    /// The first error of `f`.
    pub fn map_indices<R: Send>(
        &self,
        count: usize,
        f: impl Fn(usize) -> Result<R> + Sync + Send,
    ) -> Result<Vec<R>> {
        let threads = self.unmodified_model.threads;
        match parameter_count(&self.unmodified_model.model.config) <= SMALL_PARAMETERS_MAX {
            true => threads.map(count, f),
            false => threads.run_on_all(|| (0..count).map(f).collect()),
        }
    }

    /// Tries the known causes: all of them on a subset of the targets, then the best ones on all targets.
    /// Announces the number of causes and the expected time.
    ///
    /// # Errors
    /// When a forward pass fails.
    pub fn try_causes(&self, settings: &SearchSettings) -> Result<SearchResult> {
        let UnmodifiedModel { model, threads, earlier_weights, .. } = self.unmodified_model;
        let HeadInput { batches, normed, .. } = &self.unmodified_input;
        let engine = &self.observed.log_probs;
        let mut result = SearchResult::default();
        let mut declared_causes = causes(&model.config, earlier_weights.is_some());
        result.coverage.causes = declared_causes.len();
        if self.is_over() {
            return Ok(result);
        }
        let rows = threads
            .run_on_all(|| FitRows::select_rows(&self.unmodified_input.policy(), batches, normed, engine))?;
        // The causes in the sampler come first, because they are likely and need no forward pass.
        let mut causes_to_try = threads.run_on_all(|| rows.causes());
        causes_to_try.append(&mut declared_causes);
        result.coverage.causes = causes_to_try.len();
        let (subset, indices) = self.representative_subset(SUBSET_TARGETS)?;
        let targets = self.unmodified_log_probs.len();
        (settings.announce)(&format!(
            "Search: {} causes on {} tokens, {} each; then the best on {targets} tokens, {} each. Ctrl-C ends it \
             with what was found.",
            causes_to_try.len(),
            indices.len(),
            self.pass_time(indices.len()),
            self.pass_time(targets)
        ))?;
        if indices.len() < targets {
            let baseline = subset.baseline().student_t.log_likelihood;
            let (mut fits, fits_without_effect) = subset.fit_causes(&causes_to_try)?;
            result.coverage.tried = fits.len() + fits_without_effect.len();
            fits.retain(|fit| fit.student_t.log_likelihood >= baseline - SUBSET_LOSS_MAX);
            // A cause without effect on the subset may have an effect on other targets.
            let best = CauseFit::select_best(fits, FULL_RUN_CAUSES_MAX);
            causes_to_try =
                best.iter().chain(&fits_without_effect).filter_map(|fit| fit.cause.clone()).collect();
            let supported = best.iter().filter(|fit| fit.student_t.log_likelihood >= baseline + EVIDENCE_MIN);
            result.subset_causes = supported.filter_map(|fit| fit.cause.clone()).collect();
        }
        let fits_without_effect;
        (result.fits, fits_without_effect) = self.fit_causes(&causes_to_try)?;
        if indices.len() == targets {
            result.coverage.tried = result.fits.len() + fits_without_effect.len();
        }
        result.coverage.ended_by_limit = self.is_over();
        let fits = &result.fits;
        let is_without = |name: &&'static str| fits.iter().all(|other| other.name() != Some(name));
        result.without_effect =
            fits_without_effect.iter().filter_map(CauseFit::name).filter(is_without).collect();
        result.without_effect.dedup();
        Ok(result)
    }

    /// Starts a stage of a pass over all tokens.
    pub fn start_pass(&self, name: &str) -> Progress {
        self.unmodified_model.console.start_pass(name, self.observed.tokens())
    }

    /// Returns, as text, the expected time of a forward pass over `targets` targets.
    pub fn pass_time(&self, targets: usize) -> String {
        let seconds = self.seconds_per_target * targets as f64;
        match seconds < 100.0 {
            true => format!("{} s", format_number(seconds)),
            false => format!("{} min", format_number(seconds / 60.0)),
        }
    }

    /// Fits each of `causes` until the time limit. Returns the fits of causes that change a log-prob, and the
    /// fits of causes that change none.
    fn fit_causes(&self, causes: &[Cause]) -> Result<(Vec<CauseFit>, Vec<CauseFit>)> {
        let stage = self.unmodified_model.console.start_item_stage("causes tried", causes.len() as u64, 0);
        let fits = self.map_indices(causes.len(), |index| match self.is_over() {
            true => Ok(None),
            false => self.fit_cause(&causes[index]).inspect(|_| stage.advance(1, 0, &[])).map(Some),
        })?;
        stage.finish();
        Ok(fits.into_iter().flatten().partition(|fit| {
            elementwise_differences(&fit.log_probs, &self.unmodified_log_probs)
                .iter()
                .any(|change| change.abs() > EFFECT_MIN)
        }))
    }

    /// Computes the log-probs under `cause` and compares them with the engine's.
    ///
    /// # Errors
    /// When a forward pass fails.
    pub fn fit_cause(&self, cause: &Cause) -> Result<CauseFit> {
        let changed_input;
        let (head_input, head) = match cause.change {
            Change::Head(head) => (&self.unmodified_input, head),
            _ => {
                let stage = self.start_pass("with a cause");
                let head_input = self.unmodified_model.run_forward(Some(cause), &self.observed, &stage);
                stage.finish();
                changed_input = head_input.with_context(|| cause.description())?;
                (&changed_input, HeadSettings::default())
            }
        };
        let (log_probs, has_value) = (head_input.log_probs(head)?, head_input.has_value.clone());
        Ok(CauseFit::new(&self.observed.log_probs, Some(cause.clone()), log_probs, has_value))
    }
}

/// The result of a search.
#[derive(Default)]
pub struct SearchResult {
    /// Fits of the causes that ran on all targets and change a log-prob.
    pub fits: Vec<CauseFit>,
    /// Causes that fit the subset better than the unchanged model does, best first.
    pub subset_causes: Vec<Cause>,
    /// Names of causes that change no log-prob.
    pub without_effect: Vec<&'static str>,
    pub coverage: SearchCoverage,
}

/// Returns `a − b`, element by element.
pub fn elementwise_differences(a: &[f32], b: &[f32]) -> Vec<f64> {
    log_prob_differences(a, b, &vec![true; a.len()])
}

impl UnmodifiedModel<'_> {
    /// Runs the forward pass of `observed` under `cause`, up to the head.
    fn run_forward(
        &self,
        cause: Option<&Cause>,
        observed: &EngineLogProbs,
        stage: &Progress,
    ) -> Result<HeadInput> {
        let variant = Variant::new(&self.model.config, cause);
        let model = variant.model(observed.sequence_tokens_max());
        let (mut batches, mut has_value, mut normed) = (vec![], vec![], vec![]);
        let (mut routed_experts, top_k) = (vec![], self.model.config.num_experts_per_tok);
        let policy = variant.policy(&model, self.parameters, self.earlier_weights)?;
        for batch in &observed.batches {
            let (micro_batch, has_values) = variant.change_batch(&batch.micro_batch);
            let keep = &mut |layer: usize, _: &Tensor, output: &LayerOutput| -> Result<()> {
                if let (None, Some(experts)) = (cause, output.routed_experts()) {
                    let experts = experts.flatten_all()?.to_vec1::<u32>()?;
                    let row_experts = |&row: &u32| experts[row as usize * top_k..][..top_k].to_vec();
                    routed_experts.resize(routed_experts.len().max(layer + 1), vec![]);
                    routed_experts[layer].extend(micro_batch.rows.iter().map(row_experts));
                }
                Ok(())
            };
            normed.push(policy.head_input(&micro_batch, keep)?);
            stage.advance_tokens(micro_batch.tokens.len() as f64);
            batches.push(EngineBatch { micro_batch, ..batch.clone() });
            has_value.extend(has_values);
        }
        let (weights, forward) = (policy.weights, policy.forward);
        Ok(HeadInput { model, weights, forward, batches, normed, has_value, routed_experts })
    }
}
