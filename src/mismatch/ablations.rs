//! Parses ablations (`[arms]`) from the command line. `a,b+c` gives two rows: one with the ablation `a`, one
//! with the ablations `b` and `c`.

use crate::model::ablations::Ablations;

/// Default standard deviation of router noise. It is larger than real noise, so that the effect is clear.
const ROUTER_NOISE: &str = "0.3";
/// Default number of mantissa bits: that of FP8 E4M3. Real rollouts keep more bits, with a smaller effect.
const MANTISSA_BITS: &str = "3";

/// One row: its name, and the `key=value` settings that enable its ablations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AblationRow {
    pub name: String,
    pub overrides: Vec<String>,
}

/// Parses the rows of `text`. Values are checked later, together with the recipe. An ablation without a value
/// keeps the value of `recipe` if the recipe enables it.
pub fn parse_rows(text: &str, recipe: &Ablations) -> Vec<AblationRow> {
    text.split(',')
        .map(|row| AblationRow {
            name: row.trim().to_owned(),
            overrides: row.split('+').filter_map(|ablation| setting(ablation.trim(), recipe)).collect(),
        })
        .collect()
}

/// Returns the setting of one ablation, which is written `name` or `name=value`. Returns `None` if the
/// recipe's value is kept.
fn setting(ablation: &str, recipe: &Ablations) -> Option<String> {
    let value = match ablation {
        _ if ablation.contains('=') => return Some(format!("arms.{ablation}")),
        _ if recipe.list_enabled().iter().any(|(key, _)| key == ablation) => return None,
        "router_noise" | "router_noise_rollout" | "router_noise_train" => ROUTER_NOISE,
        "rollout_mantissa_bits" => MANTISSA_BITS,
        _ => "true",
    };
    Some(format!("arms.{ablation}={value}"))
}

/// Returns the list of ablations for a help text.
pub fn help() -> String {
    let descriptions = Ablations::descriptions().into_iter();
    let lines: String = descriptions.map(|(key, what)| format!("  {key:<28} {what}\n")).collect();
    format!(
        "Ablations (each is also a key of the recipe's table [arms]):\n{lines}Strengths and their defaults: \
         router_noise=0.3 (standard deviation), rollout_mantissa_bits=3."
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comma_starts_a_row_and_a_plus_combines() {
        let recipe = Ablations { router_noise_train: 0.1, ..Ablations::default() };
        let row = |name: &str, overrides: &[&str]| AblationRow {
            name: name.into(),
            overrides: overrides.iter().map(|s| s.to_string()).collect(),
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
