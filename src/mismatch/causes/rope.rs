//! Mistakes of the rotary position embedding (RoPE).

use super::{Cause, select_columns};
use crate::model::config::{Config, Rope};
use crate::model::rope;

const BASES: [f64; 6] = [100.0, 10_000.0, 150_000.0, 500_000.0, 1e6, 1e7];
const DECIDES: &str = "longer rows: the angles part with the distance";

pub(super) fn causes(config: &Config) -> Vec<Cause> {
    let head_dim = config.head_dim;
    // Half-split RoPE rotates dimension i with i + half, so the interleaved neighbours 2i and 2i + 1 go
    // there.
    let place = move |o: usize| {
        let (head, i, half) = (o / head_dim * head_dim, o % head_dim, head_dim / 2);
        (head + if i < half { 2 * i } else { 2 * (i - half) + 1 }) as u32
    };
    let mut found = vec![Cause::in_values(
        "RoPE interleaved",
        "neighbouring dimensions are turned as pairs",
        DECIDES,
        |spec| ["q_proj", "k_proj"].iter().any(|part| spec.name.contains(part)),
        move |values| {
            let order: Vec<u32> = (0..values.dim(candle_core::D::Minus1)?).map(place).collect();
            select_columns(values, &order)
        },
    )];
    if config.rope.yarn.is_some() {
        found.extend([
            Cause::in_forward(
                "RoPE without YaRN",
                "plain frequencies, cosine and sine without factor",
                DECIDES,
                |variant| variant.config.rope.yarn = None,
            ),
            Cause::in_forward(
                "YaRN attention factor missing",
                "cosine and sine are not multiplied with it",
                DECIDES,
                move |variant| {
                    let frequencies = rope::frequencies(&variant.config.rope, head_dim);
                    variant.rope = Some((frequencies, 1.0));
                },
            ),
            Cause::in_forward(
                "other YaRN ramp",
                "its bounds are rounded as `truncate` does not say",
                DECIDES,
                |variant| {
                    if let Some(yarn) = &mut variant.config.rope.yarn {
                        yarn.truncate = !yarn.truncate;
                    }
                },
            ),
            Cause::in_forward(
                "other YaRN ramp",
                "all frequencies are stretched alike",
                DECIDES,
                move |variant| {
                    let own = &variant.config.rope;
                    let plain = Rope { yarn: None, ..own.clone() };
                    let stretch = own.yarn.as_ref().map_or(1.0, |yarn| yarn.factor) as f32;
                    let frequencies = rope::frequencies(&plain, head_dim).into_iter().map(|f| f / stretch);
                    variant.rope = Some((frequencies.collect(), rope::attention_factor(own)));
                },
            ),
        ]);
    }
    found.extend(other_values(&BASES, config.rope.theta).map(|theta| {
        let detail = format!("rope_theta is {theta}");
        Cause::in_forward("other RoPE base", detail, DECIDES, move |variant| {
            variant.config.rope.theta = theta
        })
    }));
    found
}

/// Returns the values other than `own`.
pub(super) fn other_values(values: &[f64], own: f64) -> impl Iterator<Item = f64> {
    values.iter().copied().filter(move |value| (value / own - 1.0).abs() > 1e-9)
}
