//! The rejection rules: a statistic of the log ratio, and the bounds it must keep.

use anyhow::Result;

use crate::bad_input;

/// The eleven statistics a rule may bound. The maximum of k1 is missing: k1 has a sign, and the largest value says
/// nothing about the ratios on the other side.
pub const REJECTION_OPTIONS: [&str; 11] = [
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
];

/// Over what a statistic is formed. The sequence scopes reject whole responses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scope {
    Token,
    SequenceSum,
    SequenceMean,
    SequenceMax,
}

/// With x = clamp(log ρ, ±20).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Statistic {
    /// −x.
    K1,
    /// ½·x².
    K2,
    /// eˣ − 1 − x.
    K3,
}

impl Statistic {
    pub(super) fn of(self, x: f64) -> f64 {
        match self {
            Statistic::K1 => -x,
            Statistic::K2 => 0.5 * x * x,
            // Never negative but for rounding.
            Statistic::K3 => (x.exp_m1() - x).max(0.0),
        }
    }
}

/// One condition that a token, or a response, must meet.
#[derive(Debug, Clone, PartialEq)]
pub struct RejectionRule {
    pub(super) option: &'static str,
    pub(super) scope: Scope,
    pub(super) statistic: Statistic,
    /// Bounds on the statistic, both inclusive.
    pub(super) low: f64,
    pub(super) high: f64,
}

impl RejectionRule {
    /// `option` is one of [`REJECTION_OPTIONS`].
    ///
    /// Bounds of k1 are on ρ = π_train/π_rollout: `[low, high]`, or `[u]` for `[1/u, u]`. Bounds of k2 and k3 are
    /// one upper limit on the statistic. Refused: an unknown option; bounds not positive or reversed; a single k1
    /// bound below 1; two bounds for k2 or k3.
    pub fn new(option: &str, bounds: &[f64]) -> Result<Self> {
        let (option, scope, statistic) = split(option)?;
        let positive = |bound: &f64| *bound > 0.0 && bound.is_finite();
        if !bounds.iter().all(positive) {
            return Err(bad_input!("the bounds of `{option}` are {bounds:?}: they must be positive"));
        }
        let (low, high) = match (statistic, bounds) {
            (Statistic::K1, &[bound]) if bound < 1.0 => {
                return Err(bad_input!(
                    "the single bound {bound} of `{option}` stands for [1/{bound}, {bound}], which is empty: \
                     use one of at least 1, or two bounds"
                ));
            }
            (Statistic::K1, &[bound]) => (-bound.ln(), bound.ln()),
            (Statistic::K1, &[low, high]) if low > high => {
                return Err(bad_input!("the bounds of `{option}` are reversed: {low} to {high}"));
            }
            (Statistic::K1, &[low, high]) => (-high.ln(), -low.ln()),
            (Statistic::K2 | Statistic::K3, &[max]) => (0.0, max),
            (Statistic::K1, _) => {
                return Err(bad_input!("`{option}` takes one bound or two, got {bounds:?}"));
            }
            _ => {
                return Err(bad_input!(
                    "`{option}` is never negative, so it takes one upper bound, got {bounds:?}"
                ));
            }
        };
        Ok(Self { option, scope, statistic, low, high })
    }

    /// The same with verl's convention, which puts the bounds of k1 on π_rollout/π_train.
    pub fn from_verl(option: &str, bounds: &[f64]) -> Result<Self> {
        match (split(option)?.2, bounds) {
            (Statistic::K1, &[low, high]) => Self::new(option, &[1.0 / high, 1.0 / low]),
            _ => Self::new(option, bounds),
        }
    }

    pub fn option(&self) -> &'static str {
        self.option
    }

    /// The bounds on the statistic, both inclusive: logs of the ratio's for k1, [0, limit] for k2 and k3.
    pub fn bounds(&self) -> (f64, f64) {
        (self.low, self.high)
    }

    pub(super) fn accepts(&self, statistic: f64) -> bool {
        self.low <= statistic && statistic <= self.high
    }
}

/// Rules from comma-separated options and bounds, such as `token_k1,seq_max_k2` and `0.5_2.0,1.5`.
///
/// One bound is shared by all options; otherwise there is one for each distinct option. k1 bounds are on
/// π_train/π_rollout.
pub fn parse_rules(options: &str, bounds: Option<&str>) -> Result<Vec<RejectionRule>> {
    parse_with(options, bounds, RejectionRule::new)
}

/// [`parse_rules`] for strings copied from verl: see [`RejectionRule::from_verl`].
pub fn parse_verl_rules(options: &str, bounds: Option<&str>) -> Result<Vec<RejectionRule>> {
    parse_with(options, bounds, RejectionRule::from_verl)
}

fn parse_with(
    options: &str,
    bounds: Option<&str>,
    rule: impl Fn(&str, &[f64]) -> Result<RejectionRule>,
) -> Result<Vec<RejectionRule>> {
    let mut names: Vec<&str> = Vec::new();
    for name in options.split(',').map(str::trim).filter(|name| !name.is_empty()) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    if names.is_empty() {
        return Err(bad_input!("rejection is asked for, but `{options}` names none of its options"));
    }
    let Some(bounds) = bounds else {
        return Err(bad_input!(
            "rejection by `{options}` needs bounds: one for all options, or one for each"
        ));
    };
    let bounds: Vec<&str> = bounds.split(',').collect();
    if bounds.len() != 1 && bounds.len() != names.len() {
        return Err(bad_input!(
            "{} bounds for the {} rejection options of `{options}`: give one for all, or one for each",
            bounds.len(),
            names.len()
        ));
    }
    let bound_of = |i: usize| if bounds.len() == 1 { bounds[0] } else { bounds[i] };
    names.iter().enumerate().map(|(i, name)| rule(name, &parse_bounds(bound_of(i))?)).collect()
}

/// `"c"` or `"low_high"`.
pub(super) fn parse_bounds(text: &str) -> Result<Vec<f64>> {
    text.split('_')
        .map(|part| {
            let part = part.trim();
            part.parse().map_err(|_| {
                bad_input!("`{part}` in the bound `{text}` is not a number: write `2.0` or `0.5_2.0`")
            })
        })
        .collect()
}

fn split(option: &str) -> Result<(&'static str, Scope, Statistic)> {
    let Some(known) = REJECTION_OPTIONS.iter().find(|known| **known == option) else {
        let why = if option == "seq_max_k1" {
            " (k1 has a sign, so its maximum leaves one side unbounded: take seq_max_k2 or seq_max_k3)"
        } else {
            ""
        };
        return Err(bad_input!(
            "unknown rejection option `{option}`{why}: use one of {}",
            REJECTION_OPTIONS.join(", ")
        ));
    };
    let scope = match known {
        name if name.starts_with("seq_sum") => Scope::SequenceSum,
        name if name.starts_with("seq_mean") => Scope::SequenceMean,
        name if name.starts_with("seq_max") => Scope::SequenceMax,
        _ => Scope::Token,
    };
    let statistic = match known {
        name if name.ends_with("k1") => Statistic::K1,
        name if name.ends_with("k2") => Statistic::K2,
        _ => Statistic::K3,
    };
    Ok((known, scope, statistic))
}
