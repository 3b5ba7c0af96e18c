//! Causes in the rotary position embedding (RoPE).

use super::{Cause, select_columns};
use crate::model::config::{Config, Rope};
use crate::model::rope;

const BASES: [f64; 6] = [100.0, 10_000.0, 150_000.0, 500_000.0, 1e6, 1e7];
/// The experiment that decides between causes.
const LONGER_ROWS: &str = "longer rows: the angles differ more at larger distances";

pub(super) fn causes(config: &Config) -> Vec<Cause> {
    let head_dim = config.head_dim;
    // Half-split RoPE rotates dimension i together with i + half; interleaved RoPE rotates 2i together with
    // 2i + 1. So dimensions 2i and 2i + 1 must move to i and i + half.
    let source_dimension = move |o: usize| {
        let (head, i, half) = (o / head_dim * head_dim, o % head_dim, head_dim / 2);
        (head + if i < half { 2 * i } else { 2 * (i - half) + 1 }) as u32
    };
    let mut causes = vec![Cause::in_tensors(
        "RoPE interleaved",
        "neighbouring dimensions are rotated as pairs",
        LONGER_ROWS,
        |spec| ["q_proj", "k_proj"].iter().any(|part| spec.name.contains(part)),
        move |values| {
            let order: Vec<u32> = (0..values.dim(candle_core::D::Minus1)?).map(source_dimension).collect();
            select_columns(values, &order)
        },
    )];
    if config.rope.yarn.is_some() {
        causes.extend([
            Cause::in_forward(
                "RoPE without YaRN",
                "plain frequencies; cosine and sine without the attention factor",
                LONGER_ROWS,
                |variant| variant.config.rope.yarn = None,
            ),
            Cause::in_forward(
                "YaRN attention factor missing",
                "cosine and sine are not multiplied by it",
                LONGER_ROWS,
                move |variant| {
                    let frequencies = rope::frequencies(&variant.config.rope, head_dim);
                    variant.rope = Some((frequencies, 1.0));
                },
            ),
            Cause::in_forward(
                "other YaRN ramp",
                "its bounds are rounded as if `truncate` had the other value",
                LONGER_ROWS,
                |variant| {
                    if let Some(yarn) = &mut variant.config.rope.yarn {
                        yarn.truncate = !yarn.truncate;
                    }
                },
            ),
            Cause::in_forward(
                "other YaRN ramp",
                "all frequencies are divided by the factor",
                LONGER_ROWS,
                move |variant| {
                    let rope = &variant.config.rope;
                    let plain = Rope { yarn: None, ..rope.clone() };
                    let factor = rope.yarn.as_ref().map_or(1.0, |yarn| yarn.factor) as f32;
                    let frequencies = rope::frequencies(&plain, head_dim).into_iter().map(|f| f / factor);
                    variant.rope = Some((frequencies.collect(), rope::attention_factor(rope)));
                },
            ),
        ]);
    }
    causes.extend(other_values(&BASES, config.rope.theta).map(|theta| {
        let detail = format!("rope_theta is {theta} instead of {}", config.rope.theta);
        Cause::in_forward("other RoPE base", detail, LONGER_ROWS, move |variant| {
            variant.config.rope.theta = theta
        })
    }));
    causes
}

/// Returns `values` without the value `current`.
pub(super) fn other_values(values: &[f64], current: f64) -> impl Iterator<Item = f64> {
    values.iter().copied().filter(move |value| (value / current - 1.0).abs() > 1e-9)
}
