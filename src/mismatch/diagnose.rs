//! Decides which known cause explains a log-prob mismatch, if any.
//!
//! [`CauseSearch`] computes this model's log-probs of the same tokens under each cause. [`RoundingBounds`]
//! bounds the mismatch that rounding alone can make. A cause is named if three conditions hold:
//!
//! - every statistic of the remaining mismatch ([`DifferenceStats`]) is within the rounding bounds;
//! - the regression slope is 1;
//! - no other cause fits as well.

use super::causes::Cause;
use super::distance::{DifferenceStats, StudentTFit, regression_slope};
use super::engine_log_probs::EngineLogProbs;
use super::rounding::{F32_FLOOR, RoundingBounds, is_within_f32};
use super::search::{CauseFit, CauseSearch, SearchCoverage, SearchSettings};
use super::ties::{TIE_BITS, clear_ties};
use crate::metrics::{Console, format_number};
use crate::model::forward::Model;
use crate::model::parameters::Parameters;
use crate::ops::threads::Threads;
use anyhow::Result;

/// The rounding bounds of a cause are not computed if two conditions hold: the cause's statistics exceed the
/// unchanged model's bf16 bound by more than this factor, and the scale of its [`StudentTFit`] exceeds
/// [`DROPPED_SCALE_SHARE`] of the unchanged model's scale.
const DROPPED_BOUND_FACTOR: f64 = 2.0;
/// Fraction of the unchanged model's scale; see [`DROPPED_BOUND_FACTOR`].
const DROPPED_SCALE_SHARE: f64 = 0.5;
/// Minimum gain in log-likelihood of a named cause over the unchanged model, in nats.
pub(super) const EVIDENCE_MIN: f64 = 25.0;
/// Maximum scale of a named cause's fit, as a fraction of the unchanged model's scale.
const SCALE_SHARE_MAX: f64 = 0.95;
/// Replaces [`SCALE_SHARE_MAX`] for a mismatch that could be rounding. For such a mismatch likelihood is weak
/// evidence, because one token with other experts changes many tokens after it.
const SCALE_SHARE_OF_ROUNDING_MAX: f64 = 0.75;
/// A cause fits as well as the best cause if its log-likelihood is less than this, in nats, below that of the
/// best cause.
const INDISTINGUISHABLE_NATS: f64 = 15.0;
/// A cause whose log-likelihood is lower than that still fits as well as the best cause if its scale is less
/// than this factor times the scale of the best cause.
const INDISTINGUISHABLE_SCALE_FACTOR: f64 = 1.02;
/// Tolerance of the regression slope, which is 1 for a correct cause. Four standard errors are added to the
/// tolerance.
const SLOPE_TOLERANCE: f64 = 0.12;
/// Number of best causes whose rounding bounds are computed.
const BOUNDED_CAUSES_MAX: usize = 8;
/// Maximum number of indistinguishable causes that are named.
const NAMED_CAUSES_MAX: usize = 3;

/// The model without any cause of mismatch, and the inputs of its forward pass.
#[derive(Clone, Copy)]
pub struct UnmodifiedModel<'a> {
    pub threads: &'a Threads,
    pub model: &'a Model,
    pub parameters: &'a Parameters,
    /// The weights before the last update, if available.
    pub earlier_weights: Option<&'a Parameters>,
    /// Shows progress.
    pub console: &'a Console,
}

/// The outcome of the diagnosis.
#[derive(Debug, Clone, PartialEq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Verdict {
    /// Every statistic is within f32 rounding.
    Agrees,
    /// Every statistic is within bf16 rounding, and there is no evidence for a cause.
    Rounding,
    /// This cause explains the mismatch; only rounding remains.
    #[strum(serialize = "named")]
    Explained(Cause),
    /// Each of these causes explains the mismatch, and they cannot be distinguished.
    OneOf(Vec<Cause>),
    /// No known cause explains the mismatch. Holds up to two causes that explain a part of it.
    Unknown(Vec<Cause>),
    /// The time limit or a signal ended the search. Holds up to two causes that explain at least a part of
    /// the mismatch.
    Unfinished(Vec<Cause>),
}

impl Verdict {
    /// Returns the verdict's name in `mismatch.json`.
    pub fn kind(&self) -> &'static str {
        self.into()
    }

    /// Returns whether the two sides differ by more than rounding.
    pub fn differs(&self) -> bool {
        !matches!(self, Verdict::Agrees | Verdict::Rounding)
    }

    /// Returns the causes of the verdict: the named cause, the indistinguishable causes, or those that
    /// explain a part.
    pub fn causes(&self) -> &[Cause] {
        match self {
            Verdict::Agrees | Verdict::Rounding => &[],
            Verdict::Explained(cause) => std::slice::from_ref(cause),
            Verdict::OneOf(causes) | Verdict::Unknown(causes) | Verdict::Unfinished(causes) => causes,
        }
    }

    /// Returns the verdict as text.
    pub fn to_text(&self) -> String {
        match self {
            Verdict::Agrees => "agrees".into(),
            Verdict::Rounding => "rounding: the mismatch has the size of bf16 rounding".into(),
            Verdict::Explained(cause) => cause.description(),
            Verdict::OneOf(causes) => format!("one of: {}", join_causes(causes)),
            Verdict::Unknown(_) => "unknown: no known cause explains the mismatch".into(),
            Verdict::Unfinished(_) => "differs: the search ended early".into(),
        }
    }
}

/// Joins indistinguishable causes into text.
pub fn join_causes(causes: &[Cause]) -> String {
    causes.iter().map(Cause::description).collect::<Vec<_>>().join("; or ")
}

/// The verdict with its statistics.
pub struct Diagnosis {
    pub verdict: Verdict,
    /// `engine − model` for all targets, in nats.
    pub differences: Vec<f64>,
    pub stats: DifferenceStats,
    /// Mismatch that remains under the verdict's first cause; for the verdict `Agrees`, the mismatch of the
    /// unchanged model. Excludes [`Self::ties`].
    pub remaining: Option<DifferenceStats>,
    /// Mismatch between this model in f32 and this model with slightly shorter mantissas.
    pub f32_bound: DifferenceStats,
    /// Mismatch between this model in f32 and this model in bf16.
    pub bf16_bound: DifferenceStats,
    /// Whether every statistic is within the bf16 bound, regardless of the verdict.
    pub within_bf16: bool,
    /// Causes that change no log-prob of these rows, so these rows can neither confirm nor exclude them.
    pub without_effect: Vec<&'static str>,
    /// The unchanged model's log-probs of the same targets.
    pub unmodified_log_probs: Vec<f32>,
    /// Number of targets that differ because f32 rounding chooses between two experts.
    pub ties: usize,
    /// This model's routed experts of each target, `[layer][target]`; empty for a model without experts.
    pub routed_experts: Vec<Vec<Vec<u32>>>,
    /// How many causes the search tried; `None` if there was no search, because the sides agree.
    pub search: Option<SearchCoverage>,
}

/// A fit with its rounding bounds.
struct BoundedFit {
    fit: CauseFit,
    /// Remaining mismatch without ties, which are targets where rounding chooses between two experts.
    stats_without_ties: DifferenceStats,
    /// Number of ties.
    ties: usize,
    /// The better of the fits in f32 and in bf16.
    student_t: StudentTFit,
    bounds: RoundingBounds,
}

impl BoundedFit {
    /// Wraps a fit whose rounding bounds are not computed. The bounds are then 0.
    fn without_bounds(fit: CauseFit) -> Self {
        let (student_t, stats_without_ties) = (fit.student_t, fit.stats);
        Self { fit, stats_without_ties, ties: 0, student_t, bounds: RoundingBounds::zero() }
    }

    fn remainder_is_within_f32(&self) -> bool {
        is_within_f32(&self.stats_without_ties, &self.bounds.f32)
    }

    fn remainder_is_within_bf16(&self) -> bool {
        self.bounds.is_within_bf16(&self.fit.differences)
    }

    fn is_f32_rounding(&self) -> bool {
        self.bounds.is_f32_rounding(&self.stats_without_ties)
    }

    /// Returns whether the cause is a form of rounding. Any noise of the same size resembles such a cause, so
    /// the cause must match to the last digits of f32.
    fn is_rounding(&self) -> bool {
        self.fit.cause.as_ref().is_some_and(Cause::is_rounding)
    }

    /// Returns whether `other` fits as well as `self`, the best fit.
    fn is_matched_by(&self, other: &BoundedFit) -> bool {
        self.student_t.log_likelihood - other.student_t.log_likelihood < INDISTINGUISHABLE_NATS
            || other.student_t.scale < self.student_t.scale * INDISTINGUISHABLE_SCALE_FACTOR
    }
}

impl UnmodifiedModel<'_> {
    /// Compares `observed` with this model and searches for the cause of a difference. Announces the verdict
    /// before the search.
    ///
    /// # Errors
    /// When a forward pass fails.
    pub fn diagnose(&self, observed: &EngineLogProbs, settings: &SearchSettings) -> Result<Diagnosis> {
        let full_search = CauseSearch::new(*self, observed)?;
        let all = full_search.baseline();
        let (mut search, sample_indices) = full_search.sample(settings)?;
        let is_complete = sample_indices.len() == all.differences.len();
        let baseline = self.bound_fit(&search, search.baseline())?;
        let (stats_without_ties, ties) = match is_complete {
            true => (baseline.stats_without_ties, baseline.ties),
            false => self.stats_without_ties(&full_search, &all, &baseline.bounds)?,
        };
        let mut diagnosis = Diagnosis {
            verdict: Verdict::Agrees,
            stats: all.stats,
            remaining: None,
            f32_bound: baseline.bounds.f32,
            bf16_bound: baseline.bounds.bf16,
            within_bf16: baseline.remainder_is_within_bf16() && baseline.bounds.is_near_bf16(&all.stats, 1.0),
            without_effect: vec![],
            differences: all.differences,
            unmodified_log_probs: full_search.unmodified_log_probs.clone(),
            ties,
            routed_experts: full_search.routed_experts().to_vec(),
            search: None,
        };
        if is_within_f32(&stats_without_ties, &baseline.bounds.f32) {
            diagnosis.remaining = Some(stats_without_ties);
            return Ok(diagnosis);
        }
        // bf16 changes every token. If most tokens agree to the digits of f32, bf16 is not the reason for the
        // few that differ.
        let is_rounding = diagnosis.within_bf16 && !baseline.bounds.is_f32_rounding(&stats_without_ties);
        (settings.announce)(&diagnosis.to_text_before_search(is_rounding))?;
        search.start_limit(settings);
        let result = search.try_causes(settings)?;
        let mut coverage = result.coverage;
        diagnosis.without_effect = result.without_effect;
        let bounded_fits = self.bound_best_fits(&search, result.fits, &baseline)?;
        coverage.ended_by_limit |= search.is_over();
        diagnosis.search = Some(coverage);
        let explains_a_part =
            |bounded: &&BoundedFit| !bounded.is_rounding() && is_supported(&baseline, bounded);
        let cause = |bounded: &BoundedFit| bounded.fit.cause.clone();
        let mut partial_causes: Vec<Cause> =
            bounded_fits.iter().filter(explains_a_part).take(2).filter_map(cause).collect();
        let verdict = match decide(&baseline, &bounded_fits) {
            _ if coverage.ended_by_limit && is_rounding => Verdict::Rounding,
            _ if coverage.ended_by_limit => {
                partial_causes.extend(result.subset_causes.into_iter().take(2 - partial_causes.len()));
                Verdict::Unfinished(partial_causes)
            }
            Some(verdict) => verdict,
            None if is_rounding => Verdict::Rounding,
            None => Verdict::Unknown(partial_causes),
        };
        diagnosis.verdict = verdict;
        if let Some(first) = diagnosis.verdict.causes().first().cloned()
            && let Some(bounded) =
                bounded_fits.iter().find(|bounded| bounded.fit.cause.as_ref() == Some(&first))
        {
            (diagnosis.remaining, diagnosis.ties) = (Some(bounded.stats_without_ties), bounded.ties);
            let is_named = matches!(diagnosis.verdict, Verdict::Explained(_) | Verdict::OneOf(_));
            if is_named && !is_complete && !self.explains_all_rows(&full_search, bounded, &mut diagnosis)? {
                diagnosis.verdict = Verdict::Unknown(vec![first]);
            }
        }
        Ok(diagnosis)
    }

    /// Returns whether the cause of `bounded`, which explains the sample, also explains all rows. Sets the
    /// diagnosis' remaining mismatch and ties to those of all rows.
    fn explains_all_rows(
        &self,
        full_search: &CauseSearch,
        bounded: &BoundedFit,
        diagnosis: &mut Diagnosis,
    ) -> Result<bool> {
        let Some(cause) = &bounded.fit.cause else { return Ok(true) };
        let all = full_search.fit_cause(cause)?;
        let (stats_without_ties, ties) = self.stats_without_ties(full_search, &all, &bounded.bounds)?;
        (diagnosis.remaining, diagnosis.ties) = (Some(stats_without_ties), ties);
        Ok(match bounded.remainder_is_within_f32() {
            true => is_within_f32(&stats_without_ties, &bounded.bounds.f32),
            false => bounded.bounds.is_near_bf16(&all.stats, 1.0),
        })
    }

    /// Selects the best few of `fits` and adds the rounding bounds of each. Returns the best fit first.
    fn bound_best_fits(
        &self,
        search: &CauseSearch,
        fits: Vec<CauseFit>,
        baseline: &BoundedFit,
    ) -> Result<Vec<BoundedFit>> {
        let is_far_off = |fit: &CauseFit| {
            fit.student_t.scale > DROPPED_SCALE_SHARE * baseline.student_t.scale
                && !baseline.bounds.is_near_bf16(&fit.stats, DROPPED_BOUND_FACTOR)
        };
        let best = CauseFit::select_best(fits, BOUNDED_CAUSES_MAX);
        let mut bounded_fits = search.map_indices(best.len(), |index| {
            let fit = best[index].clone();
            match is_far_off(&fit) || !may_explain(baseline, &fit) || search.is_over() {
                true => Ok(BoundedFit::without_bounds(fit)),
                false => self.bound_fit(search, fit),
            }
        })?;
        // The bounds must not be smaller than those of the unchanged model.
        bounded_fits.iter_mut().for_each(|bounded| bounded.bounds.raise_to(&baseline.bounds));
        bounded_fits.sort_by(|a, b| b.student_t.log_likelihood.total_cmp(&a.student_t.log_likelihood));
        Ok(bounded_fits)
    }

    /// Adds the rounding bounds to `fit`.
    fn bound_fit(&self, search: &CauseSearch, fit: CauseFit) -> Result<BoundedFit> {
        let cause = fit.cause.as_ref();
        // This cause itself rounds, so its own bounds have no meaning. The bounds of the unchanged model
        // apply.
        if cause.is_some_and(Cause::reduces_mantissa) {
            return Ok(BoundedFit::without_bounds(fit));
        }
        let engine = &search.observed.log_probs;
        let bounds = RoundingBounds::compute(search, cause, &fit.log_probs)?;
        let bf16_fits = bounds.bf16_log_probs.iter().map(|rounded| fit.fit_rounded(engine, rounded));
        let better_fit =
            |a: StudentTFit, b: StudentTFit| if b.log_likelihood > a.log_likelihood { b } else { a };
        let student_t = bf16_fits.fold(fit.student_t, better_fit);
        let (stats_without_ties, ties) = self.stats_without_ties(search, &fit, &bounds)?;
        Ok(BoundedFit { student_t, stats_without_ties, ties, bounds, fit })
    }

    /// Returns the statistics of `fit` without ties of routing, and the number of ties.
    fn stats_without_ties(
        &self,
        search: &CauseSearch,
        fit: &CauseFit,
        bounds: &RoundingBounds,
    ) -> Result<(DifferenceStats, usize)> {
        let may_have_ties = self.model.config.family.has_experts
            && bounds.is_f32_rounding(&fit.stats)
            && !is_within_f32(&fit.stats, &bounds.f32);
        if !may_have_ties {
            return Ok((fit.stats, 0));
        }
        let engine = &search.observed.log_probs;
        let rounded = |bits| Ok(search.trace_with_rounding(fit.cause.as_ref(), (bits, bits))?.log_probs);
        let forwards = TIE_BITS.map(rounded).into_iter().collect::<Result<Vec<_>>>()?;
        let (differences, ties) =
            clear_ties(&fit.differences, engine, &search.observed.target_ranges(), &forwards, F32_FLOOR);
        Ok((DifferenceStats::from_differences(&differences), ties))
    }
}

/// Returns the verdict from `bounded_fits`, best first; `None` if no fit explains the mismatch.
fn decide(baseline: &BoundedFit, bounded_fits: &[BoundedFit]) -> Option<Verdict> {
    let exact: Vec<&BoundedFit> =
        bounded_fits.iter().filter(|bounded| bounded.remainder_is_within_f32()).collect();
    let explains = |bounded: &&BoundedFit| {
        let (slope, error) = regression_slope(&baseline.fit.differences, &bounded.fit.differences);
        !bounded.is_rounding()
            && bounded.remainder_is_within_bf16()
            // If most tokens agree to the digits of f32 without the cause, they must also agree with the
            // cause.
            && (bounded.is_f32_rounding() || !baseline.is_f32_rounding())
            && is_supported(baseline, bounded)
            && (slope - 1.0).abs() <= SLOPE_TOLERANCE + 4.0 * error
    };
    let explanations: Vec<&BoundedFit> =
        if exact.is_empty() { bounded_fits.iter().filter(explains).collect() } else { exact.clone() };
    let best = explanations.first()?;
    // If a cause with a higher likelihood fails another condition, the best explanation is uncertain.
    let has_better_fit = bounded_fits.iter().any(|other| {
        best.student_t.log_likelihood + INDISTINGUISHABLE_NATS < other.student_t.log_likelihood
            && !other.is_rounding()
            && other.fit.name() != best.fit.name()
    });
    if exact.is_empty() && has_better_fit {
        return None;
    }
    let mut causes: Vec<Cause> = vec![];
    let indistinguishable = explanations.iter().filter(|other| best.is_matched_by(other));
    for cause in indistinguishable.filter_map(|bounded| bounded.fit.cause.as_ref()) {
        if causes.iter().all(|other| other.name != cause.name) {
            causes.push(cause.clone());
        }
    }
    match causes.len() {
        1 => causes.pop().map(Verdict::Explained),
        2..=NAMED_CAUSES_MAX => Some(Verdict::OneOf(causes)),
        _ => None,
    }
}

/// Returns whether `bounded` fits better than `baseline`, the unchanged model. Compares them in f32, and also
/// each in the precision in which it fits better. A cause that fits only in bf16 fits by chance.
fn is_supported(baseline: &BoundedFit, bounded: &BoundedFit) -> bool {
    is_better_fit(baseline, &baseline.student_t, &bounded.student_t)
        && is_better_fit(baseline, &baseline.fit.student_t, &bounded.fit.student_t)
}

/// Returns whether the cause of `fit` could still be named. Its rounding bounds then decide.
fn may_explain(baseline: &BoundedFit, fit: &CauseFit) -> bool {
    is_better_fit(baseline, &baseline.fit.student_t, &fit.student_t)
        || is_within_f32(&fit.stats, &baseline.bounds.f32.scaled_by(2.0))
}

/// Returns whether `with_cause` is a clearly better fit than `without`, one of the fits of `baseline`.
fn is_better_fit(baseline: &BoundedFit, without: &StudentTFit, with_cause: &StudentTFit) -> bool {
    let may_be_rounding = baseline.remainder_is_within_bf16() && !baseline.is_f32_rounding();
    let share = if may_be_rounding { SCALE_SHARE_OF_ROUNDING_MAX } else { SCALE_SHARE_MAX };
    with_cause.log_likelihood - without.log_likelihood >= EVIDENCE_MIN
        && with_cause.scale <= share * without.scale
}

impl Diagnosis {
    /// Returns the verdict before the search, as text.
    fn to_text_before_search(&self, is_rounding: bool) -> String {
        let verdict = match is_rounding {
            true => {
                "Verdict: rounding; bf16 makes a mismatch of this size in this model, up to a few times its figures."
            }
            false => "Verdict: differs.",
        };
        format!(
            "{verdict} |Δlogp| has median {}, mean {}, maximum {}; bf16 rounding of this model alone gives {} (median) and {} (maximum).",
            format_number(self.stats.median),
            format_number(self.stats.mean),
            format_number(self.stats.max),
            format_number(self.bf16_bound.median),
            format_number(self.bf16_bound.max)
        )
    }
}
