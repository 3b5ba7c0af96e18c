//! Decides which known mistake explains log-probabilities, if any.
//!
//! This model's log-probs of the same tokens are computed under each cause. [`RoundingBounds`] bound the
//! mismatch that rounding makes. A cause is named under three conditions: the remaining mismatch is within
//! rounding by every figure of [`DifferenceStats`], the regression slope is 1, and no other cause explains
//! the data as well.

use super::causes::Cause;
use super::distance::{DifferenceStats, Fit, slope};
use super::engine_log_probs::EngineLogProbs;
use super::rounding::{F32_FLOOR, RoundingBounds, is_within_f32};
use super::search::{Candidate, CauseSearch};
use super::ties::{TIE_BITS, without_ties};
use crate::metrics::Console;
use crate::model::forward::Model;
use crate::model::parameters::Parameters;
use crate::ops::threads::Threads;
use anyhow::Result;

/// A candidate is dropped early if it exceeds both thresholds: a multiple of the rounding bound, and a
/// fraction of the spread.
const HOPELESS: (f64, f64) = (2.0, 0.5);
/// A named cause improves the log-likelihood over no cause by at least this many nats. It leaves at most this
/// share of the spread.
const EVIDENCE_MIN: f64 = 25.0;
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
const CLOSE_MAX: usize = 8;
/// Maximum number of indistinguishable causes that are named.
const SET_MAX: usize = 3;

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
            Verdict::OneOf(causes) | Verdict::Unknown(causes) => causes,
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
    pub gaps: Vec<f64>,
    pub figures: DifferenceStats,
    /// Remaining mismatch under the verdict's first explanation, or under the unchanged model if the
    /// verdict is `Agrees`. It excludes [`Self::ties`].
    pub left: Option<DifferenceStats>,
    /// Mismatch of this model in slightly shortened f32 against itself.
    pub f32_yard: DifferenceStats,
    /// Mismatch of this model in bf16 against itself.
    pub bf16_yard: DifferenceStats,
    /// Whether no figure exceeds what bf16 makes, independent of the verdict.
    pub within_bf16: bool,
    /// Causes that change no log-prob of these rows; these rows cannot confirm or exclude them.
    pub without_effect: Vec<&'static str>,
    /// This model's log-probs of the same targets.
    pub computed: Vec<f32>,
    /// Number of targets that differ because f32 rounding decides between two experts.
    pub ties: usize,
}

/// A candidate with its rounding bounds.
struct BoundedCandidate {
    candidate: Candidate,
    /// Remaining mismatch without the targets whose choice of experts is a tie, and the number of those
    /// targets.
    settled: DifferenceStats,
    ties: usize,
    /// Fit with the candidate computed in bf16 or f32, whichever is better.
    fit: Fit,
    yardsticks: RoundingBounds,
}

impl BoundedCandidate {
    /// Wraps a candidate whose rounding is not computed.
    fn without_bounds(candidate: Candidate) -> Self {
        let (fit, settled) = (candidate.fit, candidate.figures);
        Self { candidate, settled, ties: 0, fit, yardsticks: RoundingBounds::exact() }
    }

    fn leaves_f32(&self) -> bool {
        is_within_f32(&self.settled, &self.yardsticks.f32)
    }

    fn leaves_bf16(&self) -> bool {
        self.yardsticks.is_within_bf16(&self.candidate.gaps)
    }

    fn is_f32_rounding(&self) -> bool {
        self.yardsticks.is_f32_rounding(&self.settled)
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
    /// Returns why `observed` differs from this model, if it does.
    ///
    /// # Errors
    /// When a forward fails.
    pub fn diagnose(&self, observed: &EngineLogProbs) -> Result<Diagnosis> {
        let search = CauseSearch::new(*self, observed)?;
        let null = self.close(&search, search.baseline())?;
        let mut found = Diagnosis {
            verdict: Verdict::Agrees,
            gaps: null.candidate.gaps.clone(),
            figures: null.candidate.figures,
            left: None,
            f32_yard: null.yardsticks.f32,
            bf16_yard: null.yardsticks.bf16,
            within_bf16: null.leaves_bf16(),
            without_effect: vec![],
            computed: search.computed.clone(),
            ties: null.ties,
        };
        if null.leaves_f32() {
            found.left = Some(null.settled);
            return Ok(found);
        }
        let candidates;
        (candidates, found.without_effect) = search.candidates()?;
        let close = self.nearest(&search, candidates, &null)?;
        let verdict = match decide(&null, &close) {
            Some(verdict) => verdict,
            // bf16 moves every token. If only a few tokens of an f32 file differ, the reason is another.
            None if found.within_bf16 && !null.is_f32_rounding() => Verdict::Rounding,
            None => {
                let explains = |close: &&BoundedCandidate| !close.is_rounding() && is_supported(&null, close);
                let guesses = close.iter().filter(explains).take(2);
                Verdict::Unknown(guesses.filter_map(|close| close.candidate.cause.clone()).collect())
            }
        };
        if let Some(first) = verdict.causes().first()
            && let Some(close) = close.iter().find(|close| close.candidate.cause.as_ref() == Some(first))
        {
            (found.left, found.ties) = (Some(close.settled), close.ties);
        }
        found.verdict = verdict;
        Ok(found)
    }

    /// Returns the best of `candidates`, best first. Each has the better of its fits in f32 and bf16.
    fn nearest(
        &self,
        search: &CauseSearch,
        candidates: Vec<Candidate>,
        null: &BoundedCandidate,
    ) -> Result<Vec<BoundedCandidate>> {
        let hopeless = |candidate: &Candidate| {
            candidate.fit.spread > HOPELESS.1 * null.fit.spread
                && !null.yardsticks.is_near_bf16(&candidate.figures, HOPELESS.0)
        };
        let candidates = Candidate::select_best(candidates, CLOSE_MAX);
        let mut close = search.map_candidates(candidates.len(), |index| {
            let candidate = candidates[index].clone();
            match hopeless(&candidate) {
                true => Ok(BoundedCandidate::without_bounds(candidate)),
                false => self.close(search, candidate),
            }
        })?;
        // The bounds are never smaller than those of the unchanged model.
        close.iter_mut().for_each(|close| close.yardsticks.raise_to(&null.yardsticks));
        close.sort_by(|a, b| b.fit.log_likelihood.total_cmp(&a.fit.log_likelihood));
        Ok(close)
    }

    fn close(&self, search: &CauseSearch, candidate: Candidate) -> Result<BoundedCandidate> {
        let cause = candidate.cause.as_ref();
        // Rounding it again would be another explanation, so the bounds of the unchanged model apply.
        if cause.is_some_and(Cause::shortens_mantissas) {
            return Ok(BoundedCandidate::without_bounds(candidate));
        }
        let theirs = &search.observed.log_probs;
        let yardsticks = RoundingBounds::compute(search, cause, &candidate.log_probs)?;
        let in_bf16 = yardsticks.in_bf16.iter().map(|rounded| candidate.refit(theirs, rounded));
        let better = |a: Fit, b: Fit| if b.log_likelihood > a.log_likelihood { b } else { a };
        let fit = in_bf16.fold(candidate.fit, better);
        let (mut settled, mut ties) = (candidate.figures, 0);
        let may_have_ties = self.model.config.family.has_experts
            && yardsticks.is_f32_rounding(&candidate.figures)
            && !is_within_f32(&candidate.figures, &yardsticks.f32);
        if may_have_ties {
            let rounded = |bits| Ok(search.trace_with_rounding(cause, (bits, bits))?.log_probs);
            let forwards = TIE_BITS.map(rounded).into_iter().collect::<Result<Vec<_>>>()?;
            let gaps;
            (gaps, ties) =
                without_ties(&candidate.gaps, theirs, &search.observed.target_ranges(), &forwards, F32_FLOOR);
            settled = DifferenceStats::from_differences(&gaps);
        }
        Ok(BoundedCandidate { fit, settled, ties, yardsticks, candidate })
    }
}

/// Returns the verdict from the candidates `close`, best first; `None` if none explains the data.
fn decide(null: &BoundedCandidate, close: &[BoundedCandidate]) -> Option<Verdict> {
    let exact: Vec<&BoundedCandidate> = close.iter().filter(|close| close.leaves_f32()).collect();
    let explains = |close: &&BoundedCandidate| {
        let (slope, error) = slope(&null.candidate.gaps, &close.candidate.gaps);
        !close.is_rounding()
            && close.leaves_bf16()
            // If most tokens agree to f32's digits, a cause that moves them is no explanation.
            && (close.is_f32_rounding() || !null.is_f32_rounding())
            && is_supported(null, close)
            && (slope - 1.0).abs() <= SLOPE_ERROR + 4.0 * error
    };
    let fitting: Vec<&BoundedCandidate> =
        if exact.is_empty() { close.iter().filter(explains).collect() } else { exact.clone() };
    let best = fitting.first()?;
    // A candidate that fits better but fails another test makes this one uncertain.
    let overtaken = close.iter().any(|other| {
        best.fit.log_likelihood + INDISTINGUISHABLE_NATS < other.fit.log_likelihood
            && !other.is_rounding()
            && other.candidate.name() != best.candidate.name()
    });
    if exact.is_empty() && overtaken {
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
        2..=SET_MAX => Some(Verdict::OneOf(causes)),
        _ => None,
    }
}

/// Returns whether the data favours `close` over `null`, the unchanged model. The unrounded computation must
/// show it; a rounding that happens to fit does not count.
fn is_supported(null: &BoundedCandidate, close: &BoundedCandidate) -> bool {
    let may_be_rounding = null.leaves_bf16() && !null.is_f32_rounding();
    let share = if may_be_rounding { SPREAD_SHARE_OF_ROUNDING_MAX } else { SPREAD_SHARE_MAX };
    let speaks = |null: &Fit, close: &Fit| {
        close.log_likelihood - null.log_likelihood >= EVIDENCE_MIN && close.spread <= share * null.spread
    };
    speaks(&null.fit, &close.fit) && speaks(&null.candidate.fit, &close.candidate.fit)
}
