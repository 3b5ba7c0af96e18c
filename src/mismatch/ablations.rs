//! Parses ablations (`[arms]`) on the command line: `a,b+c` makes a row with `a` and a row with `b` and `c`.

use crate::model::ablations::Ablations;
use std::fmt::Write;

/// Default standard deviation of router noise; stronger than in practice, so that its effect is clear.
const ROUTER_NOISE: &str = "0.3";
/// Default mantissa bits: those of FP8 E4M3, also stronger than in practice.
const MANTISSA_BITS: &str = "3";

/// One row: its name, and the `key=value` settings that enable its ablations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AblationRow {
    pub name: String,
    pub sets: Vec<String>,
}

/// Parses the rows of `text`. The settings check the values later. An ablation without a value takes its
/// strength from `recipe`, if the recipe enables it.
pub fn parse_rows(text: &str, recipe: &Ablations) -> Vec<AblationRow> {
    text.split(',')
        .map(|row| AblationRow {
            name: row.trim().to_owned(),
            sets: row.split('+').filter_map(|arm| setting(arm.trim(), recipe)).collect(),
        })
        .collect()
}

/// Returns the setting of one ablation, `name` or `name=value`; `None` to keep the recipe's value.
fn setting(arm: &str, recipe: &Ablations) -> Option<String> {
    let value = match arm {
        _ if arm.contains('=') => return Some(format!("arms.{arm}")),
        _ if recipe.list_enabled().iter().any(|(key, _)| key == arm) => return None,
        "router_noise" | "router_noise_rollout" | "router_noise_train" => ROUTER_NOISE,
        "rollout_mantissa_bits" => MANTISSA_BITS,
        _ => "true",
    };
    Some(format!("arms.{arm}={value}"))
}

/// Returns the list of ablations for a help text.
pub fn help() -> String {
    let mut text = "Arms, each also a key of the recipe's [arms]:\n".to_owned();
    for (key, what) in Ablations::descriptions() {
        // A write to a String cannot fail.
        let _ = writeln!(text, "  {key:<28} {what}");
    }
    let _ = write!(
        text,
        "Strength: router_noise=0.3 (standard deviation), rollout_mantissa_bits=3; these values where none is given."
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comma_starts_a_row_and_a_plus_combines() {
        let recipe = Ablations { router_noise_train: 0.1, ..Ablations::default() };
        let row = |name: &str, sets: &[&str]| AblationRow {
            name: name.into(),
            sets: sets.iter().map(|s| s.to_string()).collect(),
        };
        assert_eq!(
            parse_rows(
                "no_train_sinks, no_train_sinks+router_noise,router_noise_train,rollout_mantissa_bits=5",
                &recipe
            ),
            [
                row("no_train_sinks", &["arms.no_train_sinks=true"]),
                row("no_train_sinks+router_noise", &["arms.no_train_sinks=true", "arms.router_noise=0.3"]),
                row("router_noise_train", &[]),
                row("rollout_mantissa_bits=5", &["arms.rollout_mantissa_bits=5"]),
            ]
        );
    }
}
