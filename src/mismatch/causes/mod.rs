//! The mistakes known by name: what each changes in the forward, and what it is called.
//!
//! [`Cause::apply`] makes a [`variant::Variant`] of the right computation, so that two causes combine; [`list`] says which
//! may matter to a model, [`weights`] holds those that lie in the weights.

pub mod list;
pub mod variant;
pub mod weights;

use super::head::Filter;
use crate::model::config::{LayerType, SWIGLU_ALPHA};
use variant::{RopeChange, Variant};
use weights::{Quantised, WeightEdit};

/// One mistake, with its parameters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Cause {
    /// Sinks are left out of the softmax.
    NoSinks,
    /// Sinks are 0, a term of the softmax all the same.
    ZeroSinks,
    /// Query heads take the sink of another head of their group, by the rule `0..`[`weights::SINK_RULES`].
    SinksPerKvHead(usize),
    /// Layer i takes the sinks of layer i + n, around.
    SinksOfLayer(usize),
    /// Frequencies not stretched, factor left out: RoPE as if there were no YaRN.
    PlainRope,
    /// Stretched frequencies, but cosine and sine without YaRN's attention factor.
    NoYarnFactor,
    /// The bounds of YaRN's ramp rounded where they should not be, or not where they should.
    YarnTruncate,
    /// All frequencies stretched alike, without a ramp.
    YarnWithoutRamp,
    RopeBase(f64),
    /// Neighbouring dimensions turned as pairs, not the two halves.
    RopeInterleaved,
    /// Sliding layers that see everything.
    NoWindow,
    /// A window of so many keys more.
    WindowBy(i32),
    /// Sliding layers are full and full layers slide.
    LayersSwapped,
    NoSwigluLimit,
    /// The sigmoid's gain is 1.
    NoSwigluAlpha,
    SoftmaxBeforeTopK,
    RmsEpsilon(f64),
    /// Biases that are 0, by the group of [`weights::BIASES`].
    NoBias(usize),
    /// The head is the embedding.
    TiedHead,
    /// The first token stands twice.
    DoubleStart,
    /// Each token has the log-prob that the row `by` later gives; of its own target, or of that row's.
    Shift {
        by: i32,
        with_target: bool,
    },
    /// Log-probs at this multiple of the temperature that they are said to be at.
    Temperature(f64),
    /// Log-probs of what a filter kept.
    Filtered(Filter),
    /// Logits rounded to bf16.
    Bf16Logits,
    Weights(Quantised),
    /// The weights of `--earlier`.
    Earlier,
    /// Weights, residual stream and norms' outputs with a mantissa of so many bits.
    Mantissa(u32),
    /// Residual stream and norms' outputs alone with a mantissa of so many bits.
    ShortActivations(u32),
}

impl Cause {
    /// The name under which variants of one mistake count as one, as in the table of docs/MISMATCH.md.
    pub fn name(self) -> &'static str {
        match self {
            Cause::NoSinks => "sinks missing",
            Cause::ZeroSinks => "sinks loaded as 0",
            Cause::SinksPerKvHead(_) => "sinks per KV head",
            Cause::SinksOfLayer(_) => "sinks of another layer",
            Cause::PlainRope => "RoPE without YaRN",
            Cause::NoYarnFactor => "YaRN attention factor missing",
            Cause::YarnTruncate | Cause::YarnWithoutRamp => "other YaRN ramp",
            Cause::RopeBase(_) => "other RoPE base",
            Cause::RopeInterleaved => "RoPE interleaved",
            Cause::NoWindow => "full attention everywhere",
            Cause::WindowBy(_) => "window off by one",
            Cause::LayersSwapped => "sliding and full layers swapped",
            Cause::NoSwigluLimit => "SwiGLU limit missing",
            Cause::NoSwigluAlpha => "SwiGLU alpha missing",
            Cause::SoftmaxBeforeTopK => "softmax before top-k",
            Cause::RmsEpsilon(_) => "other RMS epsilon",
            Cause::NoBias(group) => weights::BIASES[group].name,
            Cause::TiedHead => "tied head",
            Cause::DoubleStart => "double start token",
            Cause::Shift { .. } => "off by one",
            Cause::Temperature(_) => "another temperature",
            Cause::Filtered(Filter::TopP(_)) => "log-probs after top-p",
            Cause::Filtered(Filter::TopK(_)) => "log-probs after top-k",
            Cause::Filtered(Filter::MinP(_)) => "log-probs after min-p",
            Cause::Bf16Logits => "bf16 logits",
            Cause::Weights(quantised) => quantised.name(),
            Cause::Earlier => "weights one update old",
            Cause::Mantissa(_) | Cause::ShortActivations(_) => "short mantissas",
        }
    }

    /// In words.
    pub fn words(self) -> String {
        let detail = match self {
            Cause::NoSinks => "the attention leaves them out of the softmax".into(),
            Cause::ZeroSinks => "they count in the softmax as e^0".into(),
            Cause::SinksPerKvHead(rule) => weights::SINK_RULES[rule].words.into(),
            Cause::SinksOfLayer(by) => format!("layer i has those of layer i + {by}, around"),
            Cause::PlainRope => "plain frequencies, cosine and sine without factor".into(),
            Cause::NoYarnFactor => "cosine and sine are not multiplied with it".into(),
            Cause::YarnTruncate => "its bounds are rounded as `truncate` does not say".into(),
            Cause::YarnWithoutRamp => "all frequencies are stretched alike".into(),
            Cause::RopeBase(theta) => format!("rope_theta is {theta}"),
            Cause::RopeInterleaved => "neighbouring dimensions are turned as pairs".into(),
            Cause::NoWindow => "sliding layers see past their window".into(),
            Cause::WindowBy(by) => format!("sliding layers see {by:+} keys"),
            Cause::LayersSwapped => "sliding layers are full and full ones slide".into(),
            Cause::NoSwigluLimit => "gate and up are not clamped".into(),
            Cause::NoSwigluAlpha => format!("the sigmoid's gain is 1, not {SWIGLU_ALPHA}"),
            Cause::SoftmaxBeforeTopK => "experts are weighed by a softmax over all of them".into(),
            Cause::RmsEpsilon(epsilon) => format!("rms_norm_eps is {epsilon:e}"),
            Cause::NoBias(group) => weights::BIASES[group].words.into(),
            Cause::TiedHead => "the embedding stands in for lm_head".into(),
            Cause::DoubleStart => "the row's first token was fed twice".into(),
            Cause::Shift { by, with_target: true } => format!("each token has the value of the token {by:+}"),
            Cause::Shift { by, with_target: false } => {
                format!(
                    "each token is looked up in the row {by:+}: {}",
                    match by {
                        1 => "logits that have seen it",
                        _ => "logits that have not seen the token before it",
                    }
                )
            }
            Cause::Temperature(factor) => {
                format!("log-probs are those of {factor:.3} times the temperature stated")
            }
            Cause::Filtered(Filter::TopP(p)) => format!("renormalised over what top_p = {p:.3} keeps"),
            Cause::Filtered(Filter::TopK(k)) => format!("renormalised over what top_k = {k} keeps"),
            Cause::Filtered(Filter::MinP(p)) => format!("renormalised over what min_p = {p:.3} keeps"),
            Cause::Bf16Logits => "the head's output is rounded before the softmax".into(),
            Cause::Weights(quantised) => quantised.words(),
            Cause::Earlier => "they are those of --earlier".into(),
            Cause::Mantissa(bits) => format!("weights and activations of {bits} bits"),
            Cause::ShortActivations(bits) => format!("activations of {bits} bits"),
        };
        format!("{}: {detail}", self.name())
    }

    /// What tells the mistake from others when the rows do not: where it shows.
    pub fn decides(self) -> &'static str {
        match self {
            Cause::NoWindow | Cause::WindowBy(_) | Cause::LayersSwapped => {
                "rows longer than the sliding window"
            }
            Cause::PlainRope
            | Cause::NoYarnFactor
            | Cause::YarnTruncate
            | Cause::YarnWithoutRamp
            | Cause::RopeBase(_)
            | Cause::RopeInterleaved => "longer rows: the angles part with the distance",
            Cause::NoSinks | Cause::ZeroSinks | Cause::SinksPerKvHead(_) | Cause::SinksOfLayer(_) => {
                "the first tokens of rows, where sinks take the largest share"
            }
            Cause::DoubleStart => "the first tokens of rows",
            Cause::Shift { .. } => "a row of known, sure tokens",
            Cause::Temperature(_) | Cause::Filtered(_) | Cause::Bf16Logits => {
                "the log-probs of several tokens at one place (top_logprobs)"
            }
            Cause::Weights(_) | Cause::Earlier | Cause::NoBias(_) | Cause::TiedHead => {
                "a run of the engine with the weights loaded anew in bf16"
            }
            _ => "a run of the engine in f32, on more tokens",
        }
    }

    /// Makes the mistake.
    pub fn apply(self, variant: &mut Variant) {
        let config = &mut variant.config;
        match self {
            Cause::NoSinks => variant.forward.sinks = false,
            Cause::ZeroSinks => variant.weights.push(WeightEdit::ZeroSinks),
            Cause::SinksPerKvHead(rule) => variant.weights.push(WeightEdit::SinksPerKvHead(rule)),
            Cause::SinksOfLayer(by) => variant.weights.push(WeightEdit::SinksOfLayer(by)),
            Cause::PlainRope => config.rope.yarn = None,
            Cause::NoYarnFactor => variant.rope = RopeChange::NoFactor,
            Cause::YarnWithoutRamp => variant.rope = RopeChange::NoRamp,
            Cause::YarnTruncate => {
                if let Some(yarn) = &mut config.rope.yarn {
                    yarn.truncate = !yarn.truncate;
                }
            }
            Cause::RopeBase(theta) => config.rope.theta = theta,
            Cause::RopeInterleaved => variant.weights.push(WeightEdit::InterleavedHeads),
            Cause::NoWindow => config.layer_types.fill(LayerType::Full),
            Cause::WindowBy(by) => {
                config.sliding_window = config.sliding_window.saturating_add_signed(by as isize).max(1);
            }
            Cause::LayersSwapped => config.layer_types.iter_mut().for_each(|layer| {
                *layer = match layer {
                    LayerType::Sliding => LayerType::Full,
                    LayerType::Full => LayerType::Sliding,
                };
            }),
            Cause::NoSwigluLimit => config.swiglu_limit = f64::from(f32::MAX),
            Cause::NoSwigluAlpha => variant.forward.swiglu_alpha = 1.0,
            Cause::SoftmaxBeforeTopK => variant.forward.softmax_before_top_k = true,
            Cause::RmsEpsilon(epsilon) => config.rms_norm_eps = epsilon,
            Cause::NoBias(group) => variant.weights.push(WeightEdit::NoBias(group)),
            Cause::TiedHead => variant.weights.push(WeightEdit::TiedHead),
            Cause::DoubleStart => variant.double_start = true,
            Cause::Shift { by, with_target } => variant.shift = Some((by, with_target)),
            Cause::Temperature(factor) => variant.head.temperature_factor = factor,
            Cause::Filtered(filter) => variant.head.filter = Some(filter),
            Cause::Bf16Logits => variant.head.bf16_logits = true,
            Cause::Weights(quantised) => variant.weights.push(WeightEdit::Quantised(quantised)),
            Cause::Earlier => variant.earlier = true,
            Cause::Mantissa(bits) => {
                variant.weights.push(WeightEdit::Mantissa(bits));
                variant.forward.mantissa_bits = Some(bits);
            }
            Cause::ShortActivations(bits) => variant.forward.mantissa_bits = Some(bits),
        }
    }
}

/// Several causes in words.
pub fn words(causes: &[Cause]) -> String {
    causes.iter().map(|cause| cause.words()).collect::<Vec<_>>().join("; and ")
}
