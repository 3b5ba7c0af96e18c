//! Ablations (`[arms]`) on the command line: `a,b+c` is a row with `a` and a row with `b` and `c`.

use crate::model::arms::Arms;
use std::fmt::Write;

/// Standard deviation of router noise where none is given: an exaggeration that shows at once.
const ROUTER_NOISE: &str = "0.3";
/// Mantissa bits where none are given: those of FP8 E4M3, an exaggeration too.
const MANTISSA_BITS: &str = "3";

/// One row: its name, and the `key=value` settings that switch its ablations on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArmRow {
    pub name: String,
    pub sets: Vec<String>,
}

/// The rows that `text` asks for. Values are checked where the settings are read. `recipe` gives the strength
/// of an ablation that is written without one, if it has it switched on.
pub fn rows(text: &str, recipe: &Arms) -> Vec<ArmRow> {
    text.split(',')
        .map(|row| ArmRow {
            name: row.trim().to_owned(),
            sets: row.split('+').filter_map(|arm| setting(arm.trim(), recipe)).collect(),
        })
        .collect()
}

/// The setting of one ablation, `name` or `name=value`; `None` where the recipe's own value stays.
fn setting(arm: &str, recipe: &Arms) -> Option<String> {
    let value = match arm {
        _ if arm.contains('=') => return Some(format!("arms.{arm}")),
        _ if recipe.switched_on().iter().any(|(key, _)| key == arm) => return None,
        "router_noise" | "router_noise_rollout" | "router_noise_train" => ROUTER_NOISE,
        "rollout_mantissa_bits" => MANTISSA_BITS,
        _ => "true",
    };
    Some(format!("arms.{arm}={value}"))
}

/// The list of ablations for a help text.
pub fn help() -> String {
    let mut text = "Arms, each also a key of the recipe's [arms]:\n".to_owned();
    for (key, what) in Arms::all() {
        // Writing to a String cannot fail.
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
        let recipe = Arms { router_noise_train: 0.1, ..Arms::default() };
        let row = |name: &str, sets: &[&str]| ArmRow {
            name: name.into(),
            sets: sets.iter().map(|s| s.to_string()).collect(),
        };
        assert_eq!(
            rows(
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
