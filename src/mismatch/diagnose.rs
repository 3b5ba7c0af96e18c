//! Decides which known mistake explains log-probabilities, if any.
//!
//! This model's log-probs of the same tokens are computed under each cause. [`RoundingBounds`] bound the
//! mismatch that rounding makes. A cause is named under three conditions: the remaining mismatch is within
//! rounding by every figure of [`DifferenceStats`], the regression slope is 1, and no other cause explains
//! the data as well.

use super::causes::Cause;
use super::distance::{DifferenceStats, StudentTFit, regression_slope};
use super::engine_log_probs::EngineLogProbs;
use super::rounding::{F32_FLOOR, RoundingBounds, is_within_f32};
use super::search::{Candidate, CandidateList, CauseSearch, SearchExtent, SearchSettings};
use super::ties::{TIE_BITS, clear_ties};
use crate::metrics::{Console, format_number};
use crate::model::forward::Model;
use crate::model::parameters::Parameters;
use crate::ops::threads::Threads;
use anyhow::Result;

/// A candidate is dropped early if it exceeds both thresholds: a multiple of the rounding bound, and a
/// fraction of the spread.
const DROP_THRESHOLDS: (f64, f64) = (2.0, 0.5);
/// A named cause improves the log-likelihood over no cause by at least this many nats. It leaves at most this
/// share of the spread.
pub(super) const EVIDENCE_MIN: f64 = 25.0;
const SPREAD_SHARE_MAX: f64 = 0.95;
/// Maximum share of the spread that a cause may leave if rounding could explain the mismatch too. There,
/// likelihood proves little: one change of routing moves many tokens together.
const SPREAD_SHARE_OF_ROUNDING_MAX: f64 = 0.75;
/// A cause is not distinguishable from the best one within this many nats of log-likelihood and this factor
/// of its spread.
const INDISTINGUISHABLE_NATS: f64 = 15.0;
const INDISTINGUISHABLE_SPREAD_FACTOR: f64 = 1.02;
/// The slope of a correct cause is 1, within this tolerance plus four standard errors.
const SLOPE_ERROR: f64 = 0.12;
/// Number of candidates whose rounding is computed.
const CANDIDATES_MAX: usize = 8;
/// Maximum number of indistinguishable causes that are named.
const NAMED_CAUSES_MAX: usize = 3;

/// The model without any mistake, and the means to compute it.
#[derive(Clone, Copy)]
pub struct UnmodifiedModel<'a> {
    pub threads: &'a Threads,
    pub model: &'a Model,
    pub parameters: &'a Parameters,
    /// The weights before the last update, if available.
    pub earlier: Option<&'a Parameters>,
    /// Shows progress.
    pub console: &'a Console,
}

/// The outcome of the diagnosis.
#[derive(Debug, Clone, PartialEq)]
pub enum Verdict {
    /// No figure exceeds what f32 rounding makes.
    Agrees,
    /// No figure exceeds what bf16 rounding makes, and no cause is evident.
    Rounding,
    /// This mistake explains the mismatch; only rounding remains.
    Named(Cause),
    /// Each of these mistakes alone leaves only rounding.
    OneOf(Vec<Cause>),
    /// No known cause explains the mismatch. Lists up to two causes that explain a part.
    Unknown(Vec<Cause>),
    /// The time limit ended the search. Lists up to two causes that explain at least a part.
    Unfinished(Vec<Cause>),
}

impl Verdict {
    /// Returns the verdict's name in `mismatch.json`.
    pub fn kind(&self) -> &'static str {
        match self {
            Verdict::Agrees => "agrees",
            Verdict::Rounding => "rounding",
            Verdict::Named(_) => "named",
            Verdict::OneOf(_) => "one_of",
            Verdict::Unknown(_) => "unknown",
            Verdict::Unfinished(_) => "unfinished",
        }
    }

    /// Returns whether there is a mistake: neither agreement nor rounding.
    pub fn has_mistake(&self) -> bool {
        !matches!(self, Verdict::Agrees | Verdict::Rounding)
    }

    /// Returns the causes of the verdict: the named one, the indistinguishable ones, or the partial
    /// explanations.
    pub fn causes(&self) -> &[Cause] {
        match self {
            Verdict::Agrees | Verdict::Rounding => &[],
            Verdict::Named(cause) => std::slice::from_ref(cause),
            Verdict::OneOf(causes) | Verdict::Unknown(causes) | Verdict::Unfinished(causes) => causes,
        }
    }

    /// Returns the verdict as text.
    pub fn to_text(&self) -> String {
        match self {
            Verdict::Agrees => "agrees".into(),
            Verdict::Rounding => "rounding: no more than bf16 makes".into(),
            Verdict::Named(cause) => cause.description(),
            Verdict::OneOf(causes) => format!("one of: {}", join_causes(causes)),
            Verdict::Unknown(_) => "unknown: no known cause leaves only rounding".into(),
            Verdict::Unfinished(_) => "unknown: the time limit ended the search".into(),
        }
    }
}

/// Joins indistinguishable causes into text.
pub fn join_causes(causes: &[Cause]) -> String {
    causes.iter().map(Cause::description).collect::<Vec<_>>().join("; or ")
}

/// The verdict with its figures.
pub struct Diagnosis {
    pub verdict: Verdict,
    /// `theirs − ours` for all targets, in nats.
    pub differences: Vec<f64>,
    pub figures: DifferenceStats,
    /// Remaining mismatch under the verdict's first explanation, or under the unchanged model if the
    /// verdict is `Agrees`. It excludes [`Self::ties`].
    pub remaining: Option<DifferenceStats>,
    /// Mismatch of this model in slightly shortened f32 against itself.
    pub f32_bound: DifferenceStats,
    /// Mismatch of this model in bf16 against itself.
    pub bf16_bound: DifferenceStats,
    /// Whether no figure exceeds what bf16 makes, independent of the verdict.
    pub within_bf16: bool,
    /// Causes that change no log-prob of these rows; these rows cannot confirm or exclude them.
    pub without_effect: Vec<&'static str>,
    /// This model's log-probs of the same targets.
    pub computed: Vec<f32>,
    /// Number of targets that differ because f32 rounding decides between two experts.
    pub ties: usize,
    /// This model's routed experts of each target, `[layer][target]`; empty for a model without experts.
    pub routed_experts: Vec<Vec<Vec<u32>>>,
    /// The extent of the search for a cause; `None` if the sides agree.
    pub search: Option<SearchExtent>,
}

/// A candidate with its rounding bounds.
struct BoundedCandidate {
    candidate: Candidate,
    /// Remaining mismatch without the targets whose choice of experts is a tie, and the number of those
    /// targets.
    figures_without_ties: DifferenceStats,
    ties: usize,
    /// Fit with the candidate computed in bf16 or f32, whichever is better.
    fit: StudentTFit,
    bounds: RoundingBounds,
}

impl BoundedCandidate {
    /// Wraps a candidate whose rounding is not computed.
    fn without_bounds(candidate: Candidate) -> Self {
        let (fit, figures_without_ties) = (candidate.fit, candidate.figures);
        Self { candidate, figures_without_ties, ties: 0, fit, bounds: RoundingBounds::exact() }
    }

    fn remainder_is_within_f32(&self) -> bool {
        is_within_f32(&self.figures_without_ties, &self.bounds.f32)
    }

    fn remainder_is_within_bf16(&self) -> bool {
        self.bounds.is_within_bf16(&self.candidate.differences)
    }

    fn is_f32_rounding(&self) -> bool {
        self.bounds.is_f32_rounding(&self.figures_without_ties)
    }

    /// Returns whether the cause is a form of rounding. Such a cause must match to the last digits, since any
    /// noise of its size resembles it. Rounding to bf16 weights is part of bf16 computation.
    fn is_rounding(&self) -> bool {
        self.candidate.cause.as_ref().is_some_and(Cause::is_rounding)
    }

    /// Returns whether `other` explains the data as well as `self`, the best candidate.
    fn fits_as_well(&self, other: &BoundedCandidate) -> bool {
        self.fit.log_likelihood - other.fit.log_likelihood < INDISTINGUISHABLE_NATS
            || other.fit.spread < self.fit.spread * INDISTINGUISHABLE_SPREAD_FACTOR
    }
}

impl UnmodifiedModel<'_> {
    /// Returns why `observed` differs from this model, if it does. Announces the verdict before the search
    /// for the cause.
    ///
    /// # Errors
    /// When a forward fails.
    pub fn diagnose(&self, observed: &EngineLogProbs, settings: &SearchSettings) -> Result<Diagnosis> {
        let search_of_all = CauseSearch::new(*self, observed)?;
        let all = search_of_all.baseline();
        let (mut search, places) = search_of_all.sample(settings)?;
        let is_complete = places.len() == all.differences.len();
        let baseline = self.bound_candidate(&search, search.baseline())?;
        let (figures_without_ties, ties) = match is_complete {
            true => (baseline.figures_without_ties, baseline.ties),
            false => self.figures_without_ties(&search_of_all, &all, &baseline.bounds)?,
        };
        let mut found = Diagnosis {
            verdict: Verdict::Agrees,
            figures: all.figures,
            remaining: None,
            f32_bound: baseline.bounds.f32,
            bf16_bound: baseline.bounds.bf16,
            within_bf16: baseline.remainder_is_within_bf16()
                && baseline.bounds.is_near_bf16(&all.figures, 1.0),
            without_effect: vec![],
            differences: all.differences,
            computed: search_of_all.computed.clone(),
            ties,
            routed_experts: search_of_all.routed_experts().to_vec(),
            search: None,
        };
        if is_within_f32(&figures_without_ties, &baseline.bounds.f32) {
            found.remaining = Some(figures_without_ties);
            return Ok(found);
        }
        // bf16 moves every token. If only a few tokens of an f32 file differ, the reason is another.
        let is_rounding = found.within_bf16 && !baseline.bounds.is_f32_rounding(&figures_without_ties);
        (settings.announce)(&found.to_text_before_search(is_rounding))?;
        search.start_limit(settings.limit);
        let list = search.candidates(settings)?;
        let mut extent = list.extent;
        let (bounded_candidates, subset_causes) =
            self.bound_candidates(&search, list, &baseline, &mut found)?;
        extent.ended_by_limit |= search.is_over();
        found.search = Some(extent);
        let explains =
            |bounded: &&BoundedCandidate| !bounded.is_rounding() && is_supported(&baseline, bounded);
        let cause = |bounded: &BoundedCandidate| bounded.candidate.cause.clone();
        let mut guesses: Vec<Cause> =
            bounded_candidates.iter().filter(explains).take(2).filter_map(cause).collect();
        let verdict = match decide(&baseline, &bounded_candidates) {
            _ if extent.ended_by_limit && is_rounding => Verdict::Rounding,
            _ if extent.ended_by_limit => {
                guesses.extend(subset_causes.into_iter().take(2 - guesses.len()));
                Verdict::Unfinished(guesses)
            }
            Some(verdict) => verdict,
            None if is_rounding => Verdict::Rounding,
            None => Verdict::Unknown(guesses),
        };
        found.verdict = verdict;
        if let Some(first) = found.verdict.causes().first().cloned()
            && let Some(bounded) =
                bounded_candidates.iter().find(|bounded| bounded.candidate.cause.as_ref() == Some(&first))
        {
            (found.remaining, found.ties) = (Some(bounded.figures_without_ties), bounded.ties);
            let has_name = matches!(found.verdict, Verdict::Named(_) | Verdict::OneOf(_));
            if has_name && !is_complete && !self.holds_on_all(&search_of_all, bounded, &mut found)? {
                found.verdict = Verdict::Unknown(vec![first]);
            }
        }
        Ok(found)
    }

    /// Returns whether `bounded`, a cause that explains the sample, leaves only rounding on all rows. Sets
    /// what it leaves.
    fn holds_on_all(
        &self,
        search_of_all: &CauseSearch,
        bounded: &BoundedCandidate,
        found: &mut Diagnosis,
    ) -> Result<bool> {
        let Some(cause) = &bounded.candidate.cause else { return Ok(true) };
        let all = search_of_all.evaluate(cause)?;
        let (figures_without_ties, ties) = self.figures_without_ties(search_of_all, &all, &bounded.bounds)?;
        (found.remaining, found.ties) = (Some(figures_without_ties), ties);
        Ok(match bounded.remainder_is_within_f32() {
            true => is_within_f32(&figures_without_ties, &bounded.bounds.f32),
            false => bounded.bounds.is_near_bf16(&all.figures, 1.0),
        })
    }

    /// Returns the best candidates of `list`, best first, and the supported causes of its part. Each has the
    /// better of its fits in f32 and bf16. Sets the causes without effect.
    fn bound_candidates(
        &self,
        search: &CauseSearch,
        list: CandidateList,
        baseline: &BoundedCandidate,
        found: &mut Diagnosis,
    ) -> Result<(Vec<BoundedCandidate>, Vec<Cause>)> {
        found.without_effect = list.without_effect;
        let hopeless = |candidate: &Candidate| {
            candidate.fit.spread > DROP_THRESHOLDS.1 * baseline.fit.spread
                && !baseline.bounds.is_near_bf16(&candidate.figures, DROP_THRESHOLDS.0)
        };
        let candidates = Candidate::select_best(list.candidates, CANDIDATES_MAX);
        let mut bounded_candidates = search.map_candidates(candidates.len(), |index| {
            let candidate = candidates[index].clone();
            match hopeless(&candidate) || !may_explain(baseline, &candidate) || search.is_over() {
                true => Ok(BoundedCandidate::without_bounds(candidate)),
                false => self.bound_candidate(search, candidate),
            }
        })?;
        // The bounds are never smaller than those of the unchanged model.
        bounded_candidates.iter_mut().for_each(|bounded| bounded.bounds.raise_to(&baseline.bounds));
        bounded_candidates.sort_by(|a, b| b.fit.log_likelihood.total_cmp(&a.fit.log_likelihood));
        Ok((bounded_candidates, list.subset_causes))
    }

    fn bound_candidate(&self, search: &CauseSearch, candidate: Candidate) -> Result<BoundedCandidate> {
        let cause = candidate.cause.as_ref();
        // Rounding it again would be another explanation, so the bounds of the unchanged model apply.
        if cause.is_some_and(Cause::reduces_mantissa) {
            return Ok(BoundedCandidate::without_bounds(candidate));
        }
        let theirs = &search.observed.log_probs;
        let bounds = RoundingBounds::compute(search, cause, &candidate.log_probs)?;
        let in_bf16 = bounds.in_bf16.iter().map(|rounded| candidate.fit_rounded(theirs, rounded));
        let better_fit =
            |a: StudentTFit, b: StudentTFit| if b.log_likelihood > a.log_likelihood { b } else { a };
        let fit = in_bf16.fold(candidate.fit, better_fit);
        let (figures_without_ties, ties) = self.figures_without_ties(search, &candidate, &bounds)?;
        Ok(BoundedCandidate { fit, figures_without_ties, ties, bounds, candidate })
    }

    /// Returns what `candidate` leaves without the targets whose experts are a tie, and their number.
    fn figures_without_ties(
        &self,
        search: &CauseSearch,
        candidate: &Candidate,
        bounds: &RoundingBounds,
    ) -> Result<(DifferenceStats, usize)> {
        let may_have_ties = self.model.config.family.has_experts
            && bounds.is_f32_rounding(&candidate.figures)
            && !is_within_f32(&candidate.figures, &bounds.f32);
        if !may_have_ties {
            return Ok((candidate.figures, 0));
        }
        let theirs = &search.observed.log_probs;
        let rounded =
            |bits| Ok(search.trace_with_rounding(candidate.cause.as_ref(), (bits, bits))?.log_probs);
        let forwards = TIE_BITS.map(rounded).into_iter().collect::<Result<Vec<_>>>()?;
        let (differences, ties) = clear_ties(
            &candidate.differences,
            theirs,
            &search.observed.target_ranges(),
            &forwards,
            F32_FLOOR,
        );
        Ok((DifferenceStats::from_differences(&differences), ties))
    }
}

/// Returns the verdict from the `bounded_candidates`, best first; `None` if none explains the data.
fn decide(baseline: &BoundedCandidate, bounded_candidates: &[BoundedCandidate]) -> Option<Verdict> {
    let exact: Vec<&BoundedCandidate> =
        bounded_candidates.iter().filter(|bounded| bounded.remainder_is_within_f32()).collect();
    let explains = |bounded: &&BoundedCandidate| {
        let (slope, error) =
            regression_slope(&baseline.candidate.differences, &bounded.candidate.differences);
        !bounded.is_rounding()
            && bounded.remainder_is_within_bf16()
            // If most tokens agree to f32's digits, a cause that moves them is no explanation.
            && (bounded.is_f32_rounding() || !baseline.is_f32_rounding())
            && is_supported(baseline, bounded)
            && (slope - 1.0).abs() <= SLOPE_ERROR + 4.0 * error
    };
    let fitting: Vec<&BoundedCandidate> =
        if exact.is_empty() { bounded_candidates.iter().filter(explains).collect() } else { exact.clone() };
    let best = fitting.first()?;
    // A candidate that fits better but fails another test makes this one uncertain.
    let has_better_fit = bounded_candidates.iter().any(|other| {
        best.fit.log_likelihood + INDISTINGUISHABLE_NATS < other.fit.log_likelihood
            && !other.is_rounding()
            && other.candidate.name() != best.candidate.name()
    });
    if exact.is_empty() && has_better_fit {
        return None;
    }
    let mut causes: Vec<Cause> = vec![];
    for cause in
        fitting.iter().filter(|other| best.fits_as_well(other)).filter_map(|c| c.candidate.cause.as_ref())
    {
        if causes.iter().all(|other| other.name != cause.name) {
            causes.push(cause.clone());
        }
    }
    match causes.len() {
        1 => causes.pop().map(Verdict::Named),
        2..=NAMED_CAUSES_MAX => Some(Verdict::OneOf(causes)),
        _ => None,
    }
}

/// Returns whether the data favours `bounded` over `baseline`, the unchanged model. The unrounded
/// computation must show it; a rounding that happens to fit does not count.
fn is_supported(baseline: &BoundedCandidate, bounded: &BoundedCandidate) -> bool {
    favours(baseline, &baseline.fit, &bounded.fit)
        && favours(baseline, &baseline.candidate.fit, &bounded.candidate.fit)
}

/// Returns whether `candidate` may be named once its rounding is known.
fn may_explain(baseline: &BoundedCandidate, candidate: &Candidate) -> bool {
    favours(baseline, &baseline.candidate.fit, &candidate.fit)
        || is_within_f32(&candidate.figures, &baseline.bounds.f32.scale(2.0))
}

/// Returns whether the fit `bounded` is better than `before`, the fit of `baseline`, by enough evidence.
fn favours(baseline: &BoundedCandidate, before: &StudentTFit, bounded: &StudentTFit) -> bool {
    let may_be_rounding = baseline.remainder_is_within_bf16() && !baseline.is_f32_rounding();
    let share = if may_be_rounding { SPREAD_SHARE_OF_ROUNDING_MAX } else { SPREAD_SHARE_MAX };
    bounded.log_likelihood - before.log_likelihood >= EVIDENCE_MIN && bounded.spread <= share * before.spread
}

impl Diagnosis {
    /// Returns the verdict before the search, as text.
    fn to_text_before_search(&self, is_rounding: bool) -> String {
        let verdict = match is_rounding {
            true => "Verdict: rounding, no larger than what bf16 makes of this model.",
            false => "Verdict: differs.",
        };
        format!(
            "{verdict} |Δlogp| has median {}, mean {}, maximum {}; this model in bf16 is {} (median) and {} (maximum) from itself.",
            format_number(self.figures.median),
            format_number(self.figures.mean),
            format_number(self.figures.max),
            format_number(self.bf16_bound.median),
            format_number(self.bf16_bound.max)
        )
    }
}
