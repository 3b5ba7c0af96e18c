//! Settings in verl's own strings, which its vectors hold.

use anyhow::{Context, Result, bail};
use rloss::policy::correction::{
    ImportanceSampling, ImportanceSettings, RejectOption, RejectionRule, WeightBound,
};
use rloss::policy::divergence::KlEstimator;
use rloss::settings::Choice;

/// `k1`, `abs`, `k2`, `k3` or verl's `kl`, `mse` and `low_var_kl`, with `+` behind for the
/// straight-through gradient.
pub fn estimator(name: &str) -> Result<KlEstimator> {
    let (base, plus) = name.strip_suffix('+').map_or((name, ""), |base| (base, "+"));
    let word = match base {
        "kl" => "k1",
        "mse" => "k2",
        "low_var_kl" => "k3",
        other => other,
    };
    // The gradient of k2 is its own.
    let plus = if word == "k2" { "" } else { plus };
    KlEstimator::from_name(&format!("{word}{plus}")).with_context(|| format!("unknown divergence {name}"))
}

/// `is`: `none`, `token` or `sequence`; `threshold`: `c` or `low_high`.
pub fn importance(is: &str, threshold: &str, batch_normalize: bool) -> Result<Option<ImportanceSettings>> {
    let is =
        ImportanceSampling::from_name(is).with_context(|| format!("unknown importance sampling {is}"))?;
    let Some(level) = is.level() else { return Ok(None) };
    Ok(Some(ImportanceSettings { level, bound: WeightBound::new(&bounds(threshold)?)?, batch_normalize }))
}

/// Rules from comma-separated options and bounds, such as `token_k1,seq_max_k2` and `0.5_2.0,1.5`: one
/// bound for all options, or one for each distinct one. Bounds of k1 are on π_train/π_rollout.
pub fn rules(options: &str, thresholds: Option<&str>) -> Result<Vec<RejectionRule>> {
    each(options, thresholds, |_, bounds| bounds)
}

/// The same with verl's bounds, which are on π_rollout/π_train for k1.
pub fn verl_rules(options: &str, thresholds: Option<&str>) -> Result<Vec<RejectionRule>> {
    each(options, thresholds, |option, bounds| match *bounds {
        [low, high] if option.name().ends_with("k1") => vec![1.0 / high, 1.0 / low],
        _ => bounds,
    })
}

fn each(
    options: &str,
    thresholds: Option<&str>,
    convert: impl Fn(RejectOption, Vec<f64>) -> Vec<f64>,
) -> Result<Vec<RejectionRule>> {
    let mut names: Vec<&str> = Vec::new();
    for name in options.split(',').map(str::trim).filter(|name| !name.is_empty()) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let thresholds: Vec<&str> =
        thresholds.with_context(|| format!("{options} without bounds"))?.split(',').collect();
    if names.is_empty() || (thresholds.len() != 1 && thresholds.len() != names.len()) {
        bail!("{} bounds for the options {options:?}", thresholds.len());
    }
    let rule = |(i, name): (usize, &&str)| {
        let option = RejectOption::from_name(name).with_context(|| format!("unknown option {name}"))?;
        let threshold = thresholds[if thresholds.len() == 1 { 0 } else { i }];
        RejectionRule::new(option, &convert(option, bounds(threshold)?))
    };
    names.iter().enumerate().map(rule).collect()
}

fn bounds(text: &str) -> Result<Vec<f64>> {
    text.split('_')
        .map(|part| part.trim().parse().with_context(|| format!("{part} in the bound {text}")))
        .collect()
}
