//! Which known mistake explains log-probabilities, if any: the decision.
//!
//! This model's log-probs of the same tokens are computed under each cause. [`Yardsticks`] say what rounding makes of them. A
//! cause is named when what is left after it is rounding by every figure of [`GapFigures`], the data takes the whole step to
//! it, and no other cause does as well; alone, when no second one shows on top of it.

use super::causes::weights::Quantised;
use super::causes::{self, Cause};
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

/// A candidate that leaves more than so many times what could be rounding, and this share of the spread, is not looked at
/// closely.
const HOPELESS: (f64, f64) = (2.0, 0.5);
/// A cause must be so many nats of log-likelihood better than none, and leave at most this share of the spread.
const EVIDENCE_MIN: f64 = 25.0;
const SPREAD_SHARE_MAX: f64 = 0.95;
/// Where what it explains may be rounding: one flip of routing moves many tokens together, so likelihood proves little there.
const SPREAD_SHARE_OF_ROUNDING_MAX: f64 = 0.75;
/// Causes within so many nats of log-likelihood of the best, and this share of its spread, are not told apart.
const TOLD_APART: f64 = 15.0;
const SPREAD_TOLD_APART: f64 = 1.02;
/// The slope of a right cause is 1, give or take this and four standard errors.
const SLOPE_ERROR: f64 = 0.12;
/// Causes that are looked at closely, and that a second cause is tried on top of.
const CLOSE_MAX: usize = 8;
const PAIR_FIRST_MAX: usize = 3;
/// Of more causes than this that are not told apart, none is named.
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

/// What was found.
#[derive(Debug, Clone, PartialEq)]
pub enum Verdict {
    /// No figure exceeds what rounding of f32 makes.
    Agrees,
    /// No figure exceeds what bf16 makes, and no cause shows.
    Rounding,
    /// One mistake, or several at once; what is left is rounding.
    Named(Vec<Cause>),
    /// One of these, each of which leaves only rounding.
    OneOf(Vec<Vec<Cause>>),
    /// None of the known causes; up to two that explain a part.
    Unknown(Vec<Vec<Cause>>),
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

    /// The explanations it lists: the cause named, those not told apart, or the guesses.
    pub fn explanations(&self) -> Vec<Vec<Cause>> {
        match self {
            Verdict::Agrees | Verdict::Rounding => vec![],
            Verdict::Named(causes) => vec![causes.clone()],
            Verdict::OneOf(sets) | Verdict::Unknown(sets) => sets.clone(),
        }
    }

    /// In words.
    pub fn words(&self) -> String {
        let list = |sets: &[Vec<Cause>]| {
            sets.iter().map(|causes| causes::words(causes)).collect::<Vec<_>>().join("; or ")
        };
        match self {
            Verdict::Agrees => "agrees".into(),
            Verdict::Rounding => "rounding: no more than bf16 makes".into(),
            Verdict::Named(causes) => causes::words(causes),
            Verdict::OneOf(sets) => format!("one of: {}", list(sets)),
            Verdict::Unknown(_) => "unknown: no known cause leaves only rounding".into(),
        }
    }
}

/// What was found, and by what margin.
pub struct Diagnosis {
    pub verdict: Verdict,
    /// Of `theirs − ours`, all targets.
    pub gaps: Vec<f64>,
    pub figures: GapFigures,
    /// What the verdict's first explanation leaves, or where they agree the model as it is; without [`Self::ties`].
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
    /// What it leaves, without the targets whose choice of experts is a tie; and how many these are.
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

    /// Rounding as a cause is named only when it is computed to the last digits: else any noise would do. bf16 weights are a
    /// part of what computing in bf16 makes.
    fn is_rounding(&self) -> bool {
        let rounds = |cause: &Cause| matches!(cause, Cause::Mantissa(_) | Cause::Weights(Quantised::Bf16));
        self.candidate.causes.iter().any(rounds)
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
        let (computed, all) = (search.computed().to_vec(), vec![true; observed.log_probs.len()]);
        let unchanged = Candidate::of(&observed.log_probs, vec![], computed, all);
        let null = self.close(&search, unchanged)?;
        let mut found = Diagnosis {
            verdict: Verdict::Agrees,
            gaps: null.candidate.gaps.clone(),
            figures: null.candidate.figures,
            left: None,
            f32_yard: null.yardsticks.f32,
            bf16_yard: null.yardsticks.bf16,
            within_bf16: null.leaves_bf16(),
            without_effect: vec![],
            computed: search.computed().to_vec(),
            ties: null.ties,
        };
        if null.leaves_f32() {
            found.left = Some(null.settled);
            return Ok(found);
        }
        let (singles, without_effect) = search.on_top_of(&[])?;
        found.without_effect = without_effect;
        let close = self.nearest(&search, singles, &null)?;
        let single = decide(&null, &close, &[]);
        // What is left to the last digit has no second cause.
        if let Some(verdict) = &single
            && close.iter().any(Close::leaves_f32)
        {
            return Ok(found.with(verdict.clone(), &close));
        }
        // bf16 moves every token: few that moved in a file of f32 are something else.
        if single.is_none() && found.within_bf16 && !null.is_of_f32() {
            found.verdict = Verdict::Rounding;
            return Ok(found);
        }
        let named = single.as_ref().map(Verdict::explanations).unwrap_or_default();
        let mut pairs = vec![];
        for first in firsts(&null, &close, &named) {
            let better = |pair: &Candidate| pair.fit.log_likelihood > first.fit.log_likelihood;
            pairs.extend(search.on_top_of(&first.causes)?.0.into_iter().filter(better));
        }
        let pairs = self.nearest(&search, pairs, &null)?;
        if let Some(verdict) = decide(&null, &pairs, &close) {
            return Ok(found.with(verdict, &pairs));
        }
        if let Some(verdict) = single {
            return Ok(found.with(verdict, &close));
        }
        let guesses = close
            .iter()
            .filter(|close| !close.is_rounding() && evident(&null, close))
            .take(2)
            .map(|close| close.candidate.causes.clone())
            .collect();
        Ok(found.with(Verdict::Unknown(guesses), &close))
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
        // Rounded once more it would be another explanation: the model's own yardsticks hold.
        if candidate.causes.iter().any(|cause| matches!(cause, Cause::Mantissa(_))) {
            return Ok(Close::hopeless(candidate));
        }
        let theirs = &search.observed().log_probs;
        let yardsticks = Yardsticks::of(search, &candidate.causes, &candidate.log_probs)?;
        let in_bf16 = yardsticks.in_bf16.iter().map(|rounded| candidate.fit_of(theirs, rounded));
        let better = |a: Fit, b: Fit| if b.log_likelihood > a.log_likelihood { b } else { a };
        let fit = in_bf16.fold(candidate.fit, better);
        let (mut settled, mut ties) = (candidate.figures, 0);
        let may_have_ties = self.model.config.family.has_experts
            && yardsticks.is_of_f32(&candidate.figures)
            && !within_f32(&candidate.figures, &yardsticks.f32);
        if may_have_ties {
            let rounded =
                |bits| search.log_probs(&[&candidate.causes[..], &[Cause::Mantissa(bits)]].concat());
            let forwards = TIE_BITS.map(rounded).into_iter().collect::<Result<Vec<_>>>()?;
            let gaps;
            (gaps, ties) =
                without_ties(&candidate.gaps, theirs, &search.observed().rows(), &forwards, F32_FLOOR);
            settled = GapFigures::of(&gaps);
        }
        Ok(Close { fit, settled, ties, yardsticks, candidate })
    }
}

impl Diagnosis {
    fn with(mut self, verdict: Verdict, close: &[Close]) -> Self {
        let first = verdict.explanations().into_iter().next();
        let of = |causes| close.iter().find(|close| close.candidate.causes == causes);
        if let Some(close) = first.and_then(of) {
            (self.left, self.ties) = (Some(close.settled), close.ties);
        }
        self.verdict = verdict;
        self
    }
}

/// What a second cause is tried on top of: what is `named`, or else the best of those that explain something, no two of one
/// name.
fn firsts<'a>(null: &Close, close: &'a [Close], named: &[Vec<Cause>]) -> Vec<&'a Candidate> {
    let mut firsts: Vec<&Candidate> = vec![];
    for Close { candidate, .. } in close.iter().filter(|close| match named {
        [] => !close.is_rounding() && evident(null, close),
        named => named.contains(&close.candidate.causes),
    }) {
        if firsts.len() < PAIR_FIRST_MAX && firsts.iter().all(|other| other.names() != candidate.names()) {
            firsts.push(candidate);
        }
    }
    firsts
}

/// The verdict from explanations `close`, best first; `None` when none of them will do. `parts` are the single causes of
/// which pairs consist.
fn decide(null: &Close, close: &[Close], parts: &[Close]) -> Option<Verdict> {
    let exact: Vec<&Close> = close.iter().filter(|close| close.leaves_f32()).collect();
    let explains = |close: &&Close| {
        !close.is_rounding()
            && close.leaves_bf16()
            // Where most tokens are equal to f32's digits, what moves them is no explanation.
            && (close.is_of_f32() || !null.is_of_f32())
            && evident(null, close)
            && parts_evident(close, parts)
            && steps_fit(null, close, parts)
    };
    let fitting: Vec<&Close> =
        if exact.is_empty() { close.iter().filter(explains).collect() } else { exact.clone() };
    let best = fitting.first()?;
    // Whatever explains better, and fails on another count, forbids to be sure of this one.
    let overtaken = close.iter().any(|other| {
        best.fit.log_likelihood + TOLD_APART < other.fit.log_likelihood
            && !other.is_rounding()
            && other.candidate.names() != best.candidate.names()
    });
    if exact.is_empty() && overtaken {
        return None;
    }
    let mut sets: Vec<Vec<Cause>> = vec![];
    let mut names: Vec<Vec<&str>> = vec![];
    for other in fitting.iter().filter(|other| best.as_good(other)) {
        if !names.contains(&other.candidate.names()) {
            names.push(other.candidate.names());
            sets.push(other.candidate.causes.clone());
        }
    }
    match sets.len() {
        1 => sets.pop().map(Verdict::Named),
        2..=SET_MAX => Some(Verdict::OneOf(sets)),
        _ => None,
    }
}

/// Whether the data speaks for `close` rather than for `start`, which is no mistake or one of several: as it is, and not only in
/// a rounding that happens to fit.
fn evident(start: &Close, close: &Close) -> bool {
    let may_be_rounding = start.leaves_bf16() && !start.is_of_f32();
    let share = if may_be_rounding { SPREAD_SHARE_OF_ROUNDING_MAX } else { SPREAD_SHARE_MAX };
    let speaks = |start: &Fit, close: &Fit| {
        close.log_likelihood - start.log_likelihood >= EVIDENCE_MIN && close.spread <= share * start.spread
    };
    speaks(&start.fit, &close.fit) && speaks(&start.candidate.fit, &close.candidate.fit)
}

/// Whether both causes of a pair are needed.
fn parts_evident(close: &Close, parts: &[Close]) -> bool {
    close.candidate.causes.len() < 2
        || parts.iter().all(|part| {
            let within = part.candidate.causes.iter().all(|cause| close.candidate.causes.contains(cause));
            !within || evident(part, close)
        })
}

/// Whether the data takes the whole step to each cause.
fn steps_fit(null: &Close, close: &Close, parts: &[Close]) -> bool {
    let part_of = |part: &&Close| part.candidate.causes.iter().all(|c| close.candidate.causes.contains(c));
    let starts = parts.iter().filter(part_of).chain([null]);
    starts.into_iter().all(|start| {
        let (found, error) = slope(&start.candidate.gaps, &close.candidate.gaps);
        (found - 1.0).abs() <= SLOPE_ERROR + 4.0 * error
    })
}
