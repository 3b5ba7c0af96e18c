//! Which causes may matter to a model.

use super::Cause;
use super::weights::{BIASES, Quantised, SINK_RULES, Scope, SharedScale};
use crate::model::config::{Config, LayerType};
use crate::ops::mxfp4::BLOCK;

const ROPE_BASES: [f64; 6] = [100.0, 10_000.0, 150_000.0, 500_000.0, 1e6, 1e7];
const RMS_EPSILONS: [f64; 8] = [0.0, 1e-8, 1e-6, 5e-6, 1e-5, 5e-5, 1e-4, 1e-3];

/// All causes with parameters known beforehand; temperature and filters are fitted.
pub fn causes(config: &Config, has_earlier: bool) -> Vec<Cause> {
    let mut found = vec![Cause::RopeInterleaved, Cause::DoubleStart, Cause::Bf16Logits];
    if !config.tie_word_embeddings {
        found.push(Cause::TiedHead);
    }
    let (has_sinks, has_experts) = (config.family.has_sinks, config.family.has_experts);
    if has_experts {
        found.extend([Cause::NoSwigluLimit, Cause::NoSwigluAlpha, Cause::SoftmaxBeforeTopK]);
    }
    if has_sinks {
        found.extend([Cause::NoSinks, Cause::ZeroSinks]);
        found.extend((0..SINK_RULES.len()).map(Cause::SinksPerKvHead));
        let layers = config.num_hidden_layers;
        found.extend(
            [1, layers.saturating_sub(1)].into_iter().take(layers.saturating_sub(1)).map(Cause::SinksOfLayer),
        );
    }
    if config.rope.yarn.is_some() {
        found.extend([Cause::PlainRope, Cause::NoYarnFactor, Cause::YarnTruncate, Cause::YarnWithoutRamp]);
    }
    let others = |values: &[f64], own: f64| -> Vec<f64> {
        values.iter().copied().filter(|value| (value / own - 1.0).abs() > 1e-9).collect()
    };
    found.extend(others(&ROPE_BASES, config.rope.theta).into_iter().map(Cause::RopeBase));
    found.extend(others(&RMS_EPSILONS, config.rms_norm_eps).into_iter().map(Cause::RmsEpsilon));
    if config.layer_types.contains(&LayerType::Sliding) {
        found.extend([Cause::NoWindow, Cause::WindowBy(1)]);
        if config.sliding_window > 1 {
            found.push(Cause::WindowBy(-1));
        }
        if config.layer_types.contains(&LayerType::Full) {
            found.push(Cause::LayersSwapped);
        }
    }
    found.extend((0..BIASES.len()).map(Cause::NoBias));
    for by in [1, -1] {
        found.extend([true, false].map(|with_target| Cause::Shift { by, with_target }));
    }
    found.push(Cause::Weights(Quantised::Bf16));
    for scope in [Scope::Linear, Scope::Experts].into_iter().filter(|&s| has_experts || s == Scope::Linear) {
        found.extend(SharedScale::ALL.map(|scale| Cause::Weights(Quantised::Fp8(scope, scale))));
        found.extend(
            [SharedScale::Tensor, SharedScale::Channel]
                .map(|scale| Cause::Weights(Quantised::Int8(scope, scale))),
        );
    }
    if has_experts
        && config.hidden_size.is_multiple_of(BLOCK)
        && config.intermediate_size.is_multiple_of(BLOCK)
    {
        found.extend([true, false].map(|cuts_off| Cause::Weights(Quantised::Mxfp4 { cuts_off })));
    }
    if has_earlier {
        found.push(Cause::Earlier);
    }
    found.extend([3, 5, 7].map(Cause::Mantissa));
    found
}
