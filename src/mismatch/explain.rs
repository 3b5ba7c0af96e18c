//! Which known mistake explains log-probabilities best.
//!
//! This model's log-probs of the same tokens are computed under each hypothesis; the distance of one is the median of
//! |Δlogp|, which a few flips of routing do not move. The median between this model and itself rounded to bf16 is the
//! yardstick: what lies far below it is agreement, what a hypothesis at least halves is explained by it, and what is
//! neither but of the yardstick's size is rounding.

use crate::model::config::{LayerType, Rope};
use crate::model::forward::{ForwardOptions, Model};
use crate::model::parameters::Parameters;
use crate::model::policy_view::PolicyView;
use crate::ops::threads::Threads;
use crate::recipe::Arms;
use crate::train::batch::MicroBatch;
use anyhow::Result;
use candle_core::Tensor;

/// Agreement: a median below this share of bf16's.
const AGREES: f64 = 1.0 / 20.0;
/// Agreement whatever the yardstick: rounding of f32.
const AGREES_ALWAYS: f64 = 2e-6;
/// A hypothesis explains a gap when it leaves at most this share of it.
const EXPLAINS: f64 = 0.5;
/// A gap of up to so many yardsticks may be rounding.
const ROUNDING: f64 = 4.0;

/// What may be wrong with one side.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Cause {
    Agrees,
    NoSinks,
    /// Frequencies not stretched, factor left out: RoPE as if there were no YaRN.
    PlainRope,
    /// Stretched frequencies, but cosine and sine without YaRN's attention factor.
    NoYarnFactor,
    /// Sliding layers that see everything.
    NoWindow,
    /// Log-probs at this multiple of the temperature that they are said to be at.
    Temperature(f64),
    /// Expert matrices in MXFP4.
    Mxfp4,
    /// A mantissa of so many bits.
    Mantissa(u32),
    Bf16,
    Unexplained,
}

impl Cause {
    /// In words.
    pub fn words(self) -> String {
        match self {
            Cause::Agrees => "agrees".into(),
            Cause::NoSinks => "missing sinks: the attention leaves them out of the softmax".into(),
            Cause::PlainRope => "wrong RoPE: plain frequencies, as if there were no YaRN".into(),
            Cause::NoYarnFactor => "wrong RoPE: YaRN's factor on cosine and sine is missing".into(),
            Cause::NoWindow => "wrong mask: sliding layers see past their window".into(),
            Cause::Temperature(factor) => {
                format!(
                    "another temperature: log-probs are those of {factor:.3} times the temperature stated"
                )
            }
            Cause::Mxfp4 => "rounding: expert matrices in MXFP4".into(),
            Cause::Mantissa(bits) => format!("rounding: a mantissa of about {bits} bits"),
            Cause::Bf16 => "rounding: of the size that bf16 makes".into(),
            Cause::Unexplained => "no known cause explains it".into(),
        }
    }
}

/// What was found, and by what margin.
#[derive(Debug, Clone, PartialEq)]
pub struct Explanation {
    pub cause: Cause,
    /// Median |Δlogp| against the model as it is.
    pub gap: f64,
    /// What the named cause leaves of it.
    pub left: f64,
    /// Every hypothesis with its median, nearest first.
    pub hypotheses: Vec<(Cause, f64)>,
    /// Median |Δlogp| of this model in bf16 against itself.
    pub bf16_gap: f64,
    /// This model's own log-probs of the same targets.
    pub computed: Vec<f32>,
}

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
}

/// One forward's normed rows, from which any temperature's log-probs follow.
type Normed = Vec<Tensor>;

impl Reference<'_> {
    /// The likeliest cause of the gap between `observed` and this model.
    ///
    /// # Errors
    /// When a forward fails.
    pub fn explain(&self, observed: &Observed) -> Result<Explanation> {
        let plain = ForwardOptions::default();
        let arms = Arms::default();
        let as_is = self.normed(self.model, &arms, plain, observed)?;
        let base = self.log_probs(&as_is, &arms, observed, 1.0)?;
        let bf16 = Arms { rollout_bf16: true, ..arms.clone() };
        let rounded = self.computed(self.model, &bf16, rounded_forward(&bf16), observed)?;
        let (gap, bf16_gap) = (median_gap(&observed.log_probs, &base), median_gap(&rounded, &base));

        let mut hypotheses = vec![];
        let mut weigh = |cause, log_probs: Vec<f32>| {
            hypotheses.push((cause, median_gap(&observed.log_probs, &log_probs)));
        };
        if self.model.config.family.has_sinks() {
            let no_sinks = ForwardOptions { sinks: false, ..plain };
            weigh(Cause::NoSinks, self.computed(self.model, &arms, no_sinks, observed)?);
        }
        for (cause, model) in self.other_models() {
            weigh(cause, self.computed(&model, &arms, plain, observed)?);
        }
        for bits in [3, 5] {
            let short = Arms { rollout_mantissa_bits: bits, ..arms.clone() };
            let options = rounded_forward(&short);
            weigh(Cause::Mantissa(bits as u32), self.computed(self.model, &short, options, observed)?);
        }
        weigh(Cause::Bf16, rounded);
        let config = &self.model.config;
        let blocks = config.hidden_size.is_multiple_of(32) && config.intermediate_size.is_multiple_of(32);
        if config.family.has_experts() && blocks {
            let mxfp4 = Arms { rollout_mxfp4: true, ..arms.clone() };
            weigh(Cause::Mxfp4, self.computed(self.model, &mxfp4, plain, observed)?);
        }
        let factor = self.temperature(&as_is, observed)?;
        weigh(Cause::Temperature(factor), self.log_probs(&as_is, &arms, observed, factor)?);

        hypotheses.sort_by(|a, b| a.1.total_cmp(&b.1));
        let (cause, left) = decide(gap, bf16_gap, &hypotheses);
        Ok(Explanation { cause, gap, left, hypotheses, bf16_gap, computed: base })
    }

    /// Models with one piece of the configuration wrong, where that piece matters.
    fn other_models(&self) -> Vec<(Cause, Model)> {
        let config = &self.model.config;
        let context = self.model.context_tokens_max();
        let mut models = vec![];
        if config.rope.yarn.is_some() {
            let mut plain = config.clone();
            plain.rope = Rope { yarn: None, ..config.rope.clone() };
            models.push((Cause::PlainRope, Model::new(plain, context)));
            models.push((Cause::NoYarnFactor, Model::without_attention_factor(config.clone(), context)));
        }
        if config.layer_types.contains(&LayerType::Sliding) {
            let mut full = config.clone();
            full.layer_types.fill(LayerType::Full);
            models.push((Cause::NoWindow, Model::new(full, context)));
        }
        models
    }

    /// The multiple of the stated temperature that fits best: a grid over 0.1 to 10, then golden-section search.
    fn temperature(&self, as_is: &Normed, observed: &Observed) -> Result<f64> {
        let gap = |log: f64| -> Result<f64> {
            let log_probs = self.log_probs(as_is, &Arms::default(), observed, log.exp())?;
            Ok(median_gap(&observed.log_probs, &log_probs))
        };
        let step = 10f64.ln() / 12.0;
        let mut best = (0.0, f64::INFINITY);
        for i in -12..=12 {
            let log = f64::from(i) * step;
            let found = gap(log)?;
            if found < best.1 {
                best = (log, found);
            }
        }
        let (mut low, mut high) = (best.0 - step, best.0 + step);
        let golden = (5f64.sqrt() - 1.0) / 2.0;
        for _ in 0..24 {
            let (a, b) = (high - golden * (high - low), low + golden * (high - low));
            if gap(a)? < gap(b)? { high = b } else { low = a }
        }
        Ok(((low + high) / 2.0).exp())
    }

    fn computed(
        &self,
        model: &Model,
        arms: &Arms,
        forward: ForwardOptions,
        observed: &Observed,
    ) -> Result<Vec<f32>> {
        let normed = self.normed(model, arms, forward, observed)?;
        self.log_probs(&normed, arms, observed, 1.0)
    }

    fn normed(
        &self,
        model: &Model,
        arms: &Arms,
        forward: ForwardOptions,
        observed: &Observed,
    ) -> Result<Normed> {
        let policy = PolicyView { forward, ..PolicyView::rollout(model, self.parameters, arms, 0)? };
        let batches = observed.batches.iter();
        self.threads.wide(|| batches.map(|(batch, _)| policy.normed(batch)).collect())
    }

    fn log_probs(&self, normed: &Normed, arms: &Arms, observed: &Observed, factor: f64) -> Result<Vec<f32>> {
        let policy = PolicyView::rollout(self.model, self.parameters, arms, 0)?;
        self.threads.wide(|| {
            let mut log_probs = vec![];
            for (normed, (batch, temperature)) in normed.iter().zip(&observed.batches) {
                log_probs.extend(policy.log_probs(normed, batch, temperature * factor)?);
            }
            Ok(log_probs)
        })
    }
}

/// What the arms round in a forward.
fn rounded_forward(arms: &Arms) -> ForwardOptions {
    ForwardOptions { mantissa_bits: arms.rollout_bits(), ..ForwardOptions::default() }
}

/// The verdict from the medians; `hypotheses` nearest first.
fn decide(gap: f64, bf16_gap: f64, hypotheses: &[(Cause, f64)]) -> (Cause, f64) {
    if gap <= (bf16_gap * AGREES).max(AGREES_ALWAYS) {
        return (Cause::Agrees, gap);
    }
    match hypotheses.first() {
        Some(&(cause, left)) if left <= EXPLAINS * gap => (cause, left),
        _ if gap <= ROUNDING * bf16_gap => (Cause::Bf16, gap),
        _ => (Cause::Unexplained, gap),
    }
}

/// Median of |a − b|; infinite where it is no number, 0 of nothing.
fn median_gap(a: &[f32], b: &[f32]) -> f64 {
    let mut gaps: Vec<f64> = a.iter().zip(b).map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs()).collect();
    gaps.iter_mut().filter(|gap| gap.is_nan()).for_each(|gap| *gap = f64::INFINITY);
    let middle = gaps.len() / 2;
    if gaps.is_empty() {
        return 0.0;
    }
    *gaps.select_nth_unstable_by(middle, f64::total_cmp).1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_must_at_least_halve_the_gap() {
        let nearest = |left| [(Cause::NoSinks, left), (Cause::NoWindow, 0.2)];
        assert_eq!(decide(1e-6, 0.02, &nearest(0.1)).0, Cause::Agrees);
        assert_eq!(decide(0.1, 0.02, &nearest(0.01)), (Cause::NoSinks, 0.01));
        assert_eq!(decide(0.03, 0.02, &nearest(0.02)).0, Cause::Bf16);
        assert_eq!(decide(0.2, 0.02, &nearest(0.15)).0, Cause::Unexplained);
    }

    #[test]
    fn the_median_ignores_a_few_flips() {
        assert_eq!(median_gap(&[0.0, 0.0, 9.0], &[0.0, 0.0, 0.0]), 0.0);
        assert_eq!(median_gap(&[f32::NAN], &[0.0]), f64::INFINITY);
        assert_eq!(median_gap(&[], &[]), 0.0);
    }
}
