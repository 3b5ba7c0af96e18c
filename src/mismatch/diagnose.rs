//! Which known mistake explains log-probabilities, if any: the decision.
//!
//! This model's log-probs of the same tokens are computed under each cause. [`Yardsticks`] say what rounding
//! makes of them. A cause is named when what is left after it is rounding by every figure of [`GapFigures`],
//! the regression slope on its step is 1, and no other cause does as well.

use super::causes::Cause;
use super::distance::{Fit, GapFigures, slope};
use super::observed::Observed;
use super::rounding::{F32_FLOOR, Yardsticks, within_f32};
use super::search::{Candidate, Search};
use super::ties::{TIE_BITS, without_ties};
use crate::metrics::Console;
use crate::model::forward::Model;
use crate::model::parameters::Parameters;
use crate::ops::threads::Threads;
use anyhow::Result;

/// A candidate that leaves more than so many times what could be rounding, and this share of the spread, is
/// not looked at closely.
const HOPELESS: (f64, f64) = (2.0, 0.5);
/// A cause must be so many nats of log-likelihood better than none, and leave at most this share of the
/// spread.
const EVIDENCE_MIN: f64 = 25.0;
const SPREAD_SHARE_MAX: f64 = 0.95;
/// Where what it explains may be rounding: one flip of routing moves many tokens together, so likelihood
/// proves little there.
const SPREAD_SHARE_OF_ROUNDING_MAX: f64 = 0.75;
/// Causes within so many nats of log-likelihood of the best, and this share of its spread, are not told
/// apart.
const TOLD_APART: f64 = 15.0;
const SPREAD_TOLD_APART: f64 = 1.02;
/// The slope of a right cause is 1, give or take this and four standard errors.
const SLOPE_ERROR: f64 = 0.12;
/// Causes that are looked at closely.
const CLOSE_MAX: usize = 8;
/// More causes than this that cannot be told apart are not named.
const SET_MAX: usize = 3;

/// The model as it should be.
#[derive(Clone, Copy)]
pub struct Reference<'a> {
    pub threads: &'a Threads,
    pub model: &'a Model,
    pub parameters: &'a Parameters,
    /// The weights of an update before, where they are at hand.
    pub earlier: Option<&'a Parameters>,
    /// Where progress is shown.
    pub console: &'a Console,
}

/// The answer.
#[derive(Debug, Clone, PartialEq)]
pub enum Verdict {
    /// No figure exceeds what rounding of f32 makes.
    Agrees,
    /// No figure exceeds what bf16 makes, and no cause shows.
    Rounding,
    /// One mistake; what is left is rounding.
    Named(Cause),
    /// One of these, each of which leaves only rounding.
    OneOf(Vec<Cause>),
    /// None of the known causes; up to two that explain a part.
    Unknown(Vec<Cause>),
}

impl Verdict {
    /// Its word in `mismatch.json`.
    pub fn kind(&self) -> &'static str {
        match self {
            Verdict::Agrees => "agrees",
            Verdict::Rounding => "rounding",
            Verdict::Named(_) => "named",
            Verdict::OneOf(_) => "one_of",
            Verdict::Unknown(_) => "unknown",
        }
    }

    /// Whether something is wrong: no agreement, and not rounding either.
    pub fn differs(&self) -> bool {
        !matches!(self, Verdict::Agrees | Verdict::Rounding)
    }

    /// The causes it lists: the one named, those not told apart, or the guesses.
    pub fn causes(&self) -> &[Cause] {
        match self {
            Verdict::Agrees | Verdict::Rounding => &[],
            Verdict::Named(cause) => std::slice::from_ref(cause),
            Verdict::OneOf(causes) | Verdict::Unknown(causes) => causes,
        }
    }

    /// In words.
    pub fn words(&self) -> String {
        match self {
            Verdict::Agrees => "agrees".into(),
            Verdict::Rounding => "rounding: no more than bf16 makes".into(),
            Verdict::Named(cause) => cause.words(),
            Verdict::OneOf(causes) => format!("one of: {}", listed(causes)),
            Verdict::Unknown(_) => "unknown: no known cause leaves only rounding".into(),
        }
    }
}

/// Causes that are not told apart, in words.
pub fn listed(causes: &[Cause]) -> String {
    causes.iter().map(Cause::words).collect::<Vec<_>>().join("; or ")
}

/// The answer with its figures.
pub struct Diagnosis {
    pub verdict: Verdict,
    /// `theirs − ours` of all targets.
    pub gaps: Vec<f64>,
    pub figures: GapFigures,
    /// Gaps under the verdict's first explanation, or under the model as it is where they agree; without
    /// [`Self::ties`].
    pub left: Option<GapFigures>,
    /// This model in slightly shortened f32 against itself.
    pub f32_yard: GapFigures,
    /// This model in bf16 against itself.
    pub bf16_yard: GapFigures,
    /// Whether no figure exceeds what bf16 makes, whatever else was found.
    pub within_bf16: bool,
    /// Causes that change no log-prob of these rows: nothing is said about them.
    pub without_effect: Vec<&'static str>,
    /// This model's own log-probs of the same targets.
    pub computed: Vec<f32>,
    /// Targets that moved because rounding of f32 decides which of two experts is chosen.
    pub ties: usize,
}

/// A candidate looked at closely.
struct Close {
    candidate: Candidate,
    /// Gaps under it without the targets whose choice of experts is a tie, and how many these are.
    settled: GapFigures,
    ties: usize,
    /// Under its causes and bf16, or f32, whichever fits better.
    fit: Fit,
    yardsticks: Yardsticks,
}

impl Close {
    /// One whose rounding is not computed.
    fn hopeless(candidate: Candidate) -> Self {
        let (fit, settled) = (candidate.fit, candidate.figures);
        Self { candidate, settled, ties: 0, fit, yardsticks: Yardsticks::none() }
    }

    fn leaves_f32(&self) -> bool {
        within_f32(&self.settled, &self.yardsticks.f32)
    }

    fn leaves_bf16(&self) -> bool {
        self.yardsticks.within_bf16(&self.candidate.gaps)
    }

    fn is_of_f32(&self) -> bool {
        self.yardsticks.is_of_f32(&self.settled)
    }

    /// Rounding as a cause is named only when it is computed to the last digits: else any noise would do.
    /// bf16 weights are a part of what computing in bf16 makes.
    fn is_rounding(&self) -> bool {
        self.candidate.cause.as_ref().is_some_and(Cause::is_rounding)
    }

    /// Whether `other` explains as well as this, the best.
    fn as_good(&self, other: &Close) -> bool {
        self.fit.log_likelihood - other.fit.log_likelihood < TOLD_APART
            || other.fit.spread < self.fit.spread * SPREAD_TOLD_APART
    }
}

impl Reference<'_> {
    /// Why `observed` differs from this model, if it does.
    ///
    /// # Errors
    /// When a forward fails.
    pub fn diagnose(&self, observed: &Observed) -> Result<Diagnosis> {
        let search = Search::new(*self, observed)?;
        let null = self.close(&search, search.unchanged())?;
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
            // bf16 moves every token: few that moved in a file of f32 are something else.
            None if found.within_bf16 && !null.is_of_f32() => Verdict::Rounding,
            None => {
                let explains = |close: &&Close| !close.is_rounding() && evident(&null, close);
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

    /// The best of `candidates` by their fit, each by the better of its fits in f32 and in bf16; best first.
    fn nearest(&self, search: &Search, candidates: Vec<Candidate>, null: &Close) -> Result<Vec<Close>> {
        let hopeless = |candidate: &Candidate| {
            candidate.fit.spread > HOPELESS.1 * null.fit.spread
                && !null.yardsticks.near_bf16(&candidate.figures, HOPELESS.0)
        };
        let candidates = Candidate::best(candidates, CLOSE_MAX);
        let mut close = search.each(candidates.len(), |index| {
            let candidate = candidates[index].clone();
            match hopeless(&candidate) {
                true => Ok(Close::hopeless(candidate)),
                false => self.close(search, candidate),
            }
        })?;
        // A yardstick never shrinks below that of the model as it is.
        close.iter_mut().for_each(|close| close.yardsticks.at_least(&null.yardsticks));
        close.sort_by(|a, b| b.fit.log_likelihood.total_cmp(&a.fit.log_likelihood));
        Ok(close)
    }

    fn close(&self, search: &Search, candidate: Candidate) -> Result<Close> {
        let cause = candidate.cause.as_ref();
        // Rounded once more it would be another explanation: the model's own yardsticks hold.
        if cause.is_some_and(Cause::shortens_mantissas) {
            return Ok(Close::hopeless(candidate));
        }
        let theirs = &search.observed.log_probs;
        let yardsticks = Yardsticks::of(search, cause, &candidate.log_probs)?;
        let in_bf16 = yardsticks.in_bf16.iter().map(|rounded| candidate.fit_of(theirs, rounded));
        let better = |a: Fit, b: Fit| if b.log_likelihood > a.log_likelihood { b } else { a };
        let fit = in_bf16.fold(candidate.fit, better);
        let (mut settled, mut ties) = (candidate.figures, 0);
        let may_have_ties = self.model.config.family.has_experts
            && yardsticks.is_of_f32(&candidate.figures)
            && !within_f32(&candidate.figures, &yardsticks.f32);
        if may_have_ties {
            let rounded = |bits| Ok(search.rounded(cause, (bits, bits))?.log_probs);
            let forwards = TIE_BITS.map(rounded).into_iter().collect::<Result<Vec<_>>>()?;
            let gaps;
            (gaps, ties) =
                without_ties(&candidate.gaps, theirs, &search.observed.rows(), &forwards, F32_FLOOR);
            settled = GapFigures::of(&gaps);
        }
        Ok(Close { fit, settled, ties, yardsticks, candidate })
    }
}

/// The verdict from explanations `close`, best first; `None` when none of them will do.
fn decide(null: &Close, close: &[Close]) -> Option<Verdict> {
    let exact: Vec<&Close> = close.iter().filter(|close| close.leaves_f32()).collect();
    let explains = |close: &&Close| {
        let (slope, error) = slope(&null.candidate.gaps, &close.candidate.gaps);
        !close.is_rounding()
            && close.leaves_bf16()
            // Where most tokens are equal to f32's digits, what moves them is no explanation.
            && (close.is_of_f32() || !null.is_of_f32())
            && evident(null, close)
            && (slope - 1.0).abs() <= SLOPE_ERROR + 4.0 * error
    };
    let fitting: Vec<&Close> =
        if exact.is_empty() { close.iter().filter(explains).collect() } else { exact.clone() };
    let best = fitting.first()?;
    // Whatever explains better, and fails on another count, forbids to be sure of this one.
    let overtaken = close.iter().any(|other| {
        best.fit.log_likelihood + TOLD_APART < other.fit.log_likelihood
            && !other.is_rounding()
            && other.candidate.name() != best.candidate.name()
    });
    if exact.is_empty() && overtaken {
        return None;
    }
    let mut causes: Vec<Cause> = vec![];
    for cause in fitting.iter().filter(|other| best.as_good(other)).filter_map(|c| c.candidate.cause.as_ref())
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

/// Whether the data speaks for `close` rather than for `null`, the model as it is: computed as it is, and not
/// only in a rounding that happens to fit.
fn evident(null: &Close, close: &Close) -> bool {
    let may_be_rounding = null.leaves_bf16() && !null.is_of_f32();
    let share = if may_be_rounding { SPREAD_SHARE_OF_ROUNDING_MAX } else { SPREAD_SHARE_MAX };
    let speaks = |null: &Fit, close: &Fit| {
        close.log_likelihood - null.log_likelihood >= EVIDENCE_MIN && close.spread <= share * null.spread
    };
    speaks(&null.fit, &close.fit) && speaks(&null.candidate.fit, &close.candidate.fit)
}
