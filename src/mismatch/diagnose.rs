//! Which known mistake explains log-probabilities, if any: the decision.
//!
//! This model's log-probs of the same tokens are computed under each cause. Two yardsticks say what rounding makes: this
//! model with mantissas a little shorter than f32's, and with bf16's, against itself. A cause is named when what is left after it is
//! rounding by every figure of [`GapFigures`], the data takes the whole step to it, and no other cause does as well.

use super::causes::{self, Cause};
use super::distance::{Fit, GapFigures, slope};
use super::search::{Candidate, Search};
use crate::model::forward::Model;
use crate::model::parameters::Parameters;
use crate::ops::threads::Threads;
use crate::train::batch::MicroBatch;
use anyhow::Result;

/// Multiples of the yardstick that count as rounding: of the body's figures and of the tail's. An engine in bf16 rounds at
/// more places than the yardstick does: transformers' noise is 1.2 to 3 times it.
const F32_FACTORS: (f64, f64) = (4.0, 8.0);
const BF16_FACTORS: (f64, f64) = (4.0, 5.0);
/// Never told from rounding of f32, nats.
const F32_FLOOR: f64 = 2e-5;
/// Mantissa bits of the two yardsticks.
pub(super) const F32_BITS: u32 = 21;
pub(super) const BF16_BITS: u32 = 7;
/// A cause must be so many nats of log-likelihood better than none, and leave at most this share of the spread.
const EVIDENCE_MIN: f64 = 25.0;
const SPREAD_SHARE_MAX: f64 = 0.95;
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

/// Tokens with the log-probabilities that someone computed for them.
pub struct Observed {
    /// Each with the temperature that its log-probs are said to be at.
    pub batches: Vec<(MicroBatch, f64)>,
    /// Of all targets, batch after batch.
    pub log_probs: Vec<f32>,
}

/// The model as it should be.
#[derive(Clone, Copy)]
pub struct Reference<'a> {
    pub threads: &'a Threads,
    pub model: &'a Model,
    pub parameters: &'a Parameters,
    /// The weights of an update before, where they are at hand.
    pub earlier: Option<&'a Parameters>,
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
    /// What the verdict's first explanation leaves.
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
}

/// Whether `figures` are what rounding of f32 leaves, by `yard`.
pub fn within_f32(figures: &GapFigures, yard: &GapFigures) -> bool {
    figures.within(yard, F32_FACTORS, F32_FLOOR)
}

/// Whether `figures` are what bf16 leaves, by `yard`.
pub fn within_bf16(figures: &GapFigures, yard: &GapFigures) -> bool {
    figures.within(yard, BF16_FACTORS, F32_FLOOR)
}

/// A candidate looked at closely.
struct Close {
    candidate: Candidate,
    /// Under its causes and bf16, or f32, whichever fits better.
    fit: Fit,
    f32_yard: GapFigures,
    bf16_yard: GapFigures,
}

impl Close {
    fn leaves_f32(&self) -> bool {
        within_f32(&self.candidate.figures, &self.f32_yard)
    }

    fn leaves_bf16(&self) -> bool {
        within_bf16(&self.candidate.figures, &self.bf16_yard)
    }

    /// Rounding as a cause is named only when it is computed to the last digits: else any noise would do.
    fn is_rounding(&self) -> bool {
        is_rounding(&self.candidate.causes)
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
        let null = self.close(&search, Candidate::of(&search, vec![], search.computed().to_vec(), None))?;
        let mut found = Diagnosis {
            verdict: Verdict::Agrees,
            gaps: null.candidate.gaps.clone(),
            figures: null.candidate.figures,
            left: None,
            f32_yard: null.f32_yard,
            bf16_yard: null.bf16_yard,
            within_bf16: null.leaves_bf16(),
            without_effect: vec![],
            computed: search.computed().to_vec(),
        };
        if null.leaves_f32() {
            return Ok(found);
        }
        let (singles, without_effect) = search.on_top_of(&[])?;
        found.without_effect = without_effect;
        let close = self.nearest(&search, singles, &null)?;
        if let Some(verdict) = decide(&null, &close, &[]) {
            return Ok(found.with(verdict, &close));
        }
        if found.within_bf16 {
            found.verdict = Verdict::Rounding;
            return Ok(found);
        }
        let mut pairs = vec![];
        for first in firsts(&close) {
            pairs.extend(search.on_top_of(first)?.0);
        }
        let pairs = self.nearest(&search, pairs, &null)?;
        if let Some(verdict) = decide(&null, &pairs, &close) {
            return Ok(found.with(verdict, &pairs));
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
    fn nearest(&self, search: &Search, mut candidates: Vec<Candidate>, null: &Close) -> Result<Vec<Close>> {
        let better = |a: &Candidate, b: &Candidate| b.fit.log_likelihood.total_cmp(&a.fit.log_likelihood);
        candidates.sort_by(better);
        // Of one mistake's variants the best two suffice, and a pair is the same whichever came first.
        let mut seen: Vec<Vec<&str>> = vec![];
        candidates.retain(|candidate| {
            let names = candidate.names();
            let before = seen.iter().filter(|other| **other == names).count();
            seen.push(names);
            before < 2
        });
        candidates.truncate(CLOSE_MAX);
        let mut close = candidates
            .into_iter()
            .map(|candidate| self.close(search, candidate))
            .collect::<Result<Vec<_>>>()?;
        // A yardstick never shrinks below that of the model as it is.
        for close in &mut close {
            close.f32_yard = close.f32_yard.larger(&null.f32_yard);
            close.bf16_yard = close.bf16_yard.larger(&null.bf16_yard);
        }
        close.sort_by(|a, b| b.fit.log_likelihood.total_cmp(&a.fit.log_likelihood));
        Ok(close)
    }

    fn close(&self, search: &Search, candidate: Candidate) -> Result<Close> {
        // Rounded once more it would be another explanation: the model's own yardsticks hold.
        if is_rounding(&candidate.causes) {
            let (fit, nothing) = (candidate.fit, GapFigures::of(&[]));
            return Ok(Close { candidate, fit, f32_yard: nothing, bf16_yard: nothing });
        }
        let rounded = |bits| -> Result<Vec<f32>> {
            let mut causes = candidate.causes.clone();
            causes.push(Cause::Mantissa(bits));
            search.log_probs(&causes)
        };
        let (f32_rounded, bf16_rounded) = (rounded(F32_BITS)?, rounded(BF16_BITS)?);
        let against_itself =
            |other: &[f32]| GapFigures::of(&search.gaps_between(other, &candidate.log_probs));
        let in_bf16 = Fit::of(&search.gaps_between(&search.observed().log_probs, &bf16_rounded));
        let fit = if in_bf16.log_likelihood > candidate.fit.log_likelihood { in_bf16 } else { candidate.fit };
        Ok(Close {
            fit,
            f32_yard: against_itself(&f32_rounded),
            bf16_yard: against_itself(&bf16_rounded),
            candidate,
        })
    }
}

impl Diagnosis {
    fn with(mut self, verdict: Verdict, close: &[Close]) -> Self {
        let first = verdict.explanations().into_iter().next();
        let of = |causes| close.iter().find(|close| close.candidate.causes == causes);
        self.left = first.and_then(of).map(|close| close.candidate.figures);
        self.verdict = verdict;
        self
    }
}

fn is_rounding(causes: &[Cause]) -> bool {
    causes.iter().any(|cause| matches!(cause, Cause::Mantissa(_)))
}

/// Causes that a second one is tried on top of: the best, no two of one name.
fn firsts(close: &[Close]) -> Vec<&[Cause]> {
    let mut firsts: Vec<&Candidate> = vec![];
    for Close { candidate, .. } in close.iter().filter(|close| !close.is_rounding()) {
        if firsts.len() < PAIR_FIRST_MAX && firsts.iter().all(|other| other.names() != candidate.names()) {
            firsts.push(candidate);
        }
    }
    firsts.into_iter().map(|candidate| candidate.causes.as_slice()).collect()
}

/// The verdict from explanations `close`, best first; `None` when none of them will do. `parts` are the single causes of
/// which pairs consist.
fn decide(null: &Close, close: &[Close], parts: &[Close]) -> Option<Verdict> {
    let exact: Vec<&Close> = close.iter().filter(|close| close.leaves_f32()).collect();
    let explains = |close: &&Close| {
        !close.is_rounding()
            && close.leaves_bf16()
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

/// Whether the data speaks for `close` rather than for no mistake.
fn evident(null: &Close, close: &Close) -> bool {
    close.fit.log_likelihood - null.fit.log_likelihood >= EVIDENCE_MIN
        && close.fit.spread <= SPREAD_SHARE_MAX * null.fit.spread
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
