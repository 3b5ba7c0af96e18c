//! Trainable parameters: all except those that patterns in the recipe or an ablation freeze.

use crate::model::config::Config;
use crate::model::names::{ParameterSpec, value_model_specs};
use crate::recipe::Plan;
use anyhow::Result;
use wildmatch::WildMatchPattern;

/// The pattern of the parameters that `arms.freeze_attention` freezes.
const ATTENTION: &str = "model.layers.*.self_attn.*";

/// Returns the trainable flags of the policy's parameters or of an adapter's factors, one per spec.
/// `train.freeze` and an ablation can freeze parameters. Patterns may also match parameters in `others`.
pub(super) fn policy_trainable_flags(
    plan: &Plan,
    specs: &[ParameterSpec],
    others: &[ParameterSpec],
) -> Result<Vec<bool>> {
    trainable_flags(plan, "train.freeze", &plan.recipe.train.freeze, ablation_pattern(plan), specs, others)
}

/// Returns the critic's trainable flags, from `critic.freeze`. `None` without a critic. The critic's own
/// parameters come first, then the `factors` of its adapter. With an adapter, only the head and the factors
/// are trainable.
pub(super) fn critic_trainable_flags(
    plan: &Plan,
    config: &Config,
    factors: Option<&[ParameterSpec]>,
) -> Result<Option<Vec<bool>>> {
    let Some(critic) = &plan.recipe.critic else { return Ok(None) };
    let critic_specs = value_model_specs(config);
    let specs = [&critic_specs[..], factors.unwrap_or_default()].concat();
    let mut trainable = trainable_flags(plan, "critic.freeze", &critic.freeze, None, &specs, &[])?;
    if factors.is_some() {
        let is_head = |spec: &ParameterSpec| spec.name.starts_with("score.");
        let flags = trainable.iter_mut().zip(&critic_specs);
        flags.for_each(|(is_trainable, spec)| *is_trainable &= is_head(spec));
    }
    Ok(Some(trainable))
}

/// Returns the pattern of the parameters that an ablation freezes, if any.
fn ablation_pattern(plan: &Plan) -> Option<&'static str> {
    plan.recipe.arms.freeze_attention.then_some(ATTENTION)
}

/// Returns a flag for each parameter of `specs`. The flag is false if the name matches one of the `patterns`
/// of `key`, or `ablation_pattern`. Each of the `patterns` must match a parameter of `specs` or `others`.
fn trainable_flags(
    plan: &Plan,
    key: &str,
    patterns: &[String],
    ablation_pattern: Option<&str>,
    specs: &[ParameterSpec],
    others: &[ParameterSpec],
) -> Result<Vec<bool>> {
    let is_used = plan.reads(key);
    for pattern in patterns {
        if is_used && !specs.iter().chain(others).any(|spec| matches(pattern, &spec.name)) {
            let reason = format!(
                "the pattern {pattern:?} matches no parameter; names look like {}",
                specs.get(1).map_or("", |spec| &spec.name)
            );
            return Err(plan.mistake(key, reason).into());
        }
    }
    let patterns: Vec<&str> = patterns.iter().map(String::as_str).chain(ablation_pattern).collect();
    let trainable: Vec<bool> =
        specs.iter().map(|spec| !patterns.iter().any(|pattern| matches(pattern, &spec.name))).collect();
    if is_used && !trainable.contains(&true) {
        let reason = "every parameter is frozen; leave at least one trainable".to_owned();
        return Err(plan.mistake(key, reason).into());
    }
    Ok(trainable)
}

/// Returns whether `pattern` matches the whole `name`. `*` matches any characters, including dots. All other
/// characters match themselves. The crate `wildmatch` also requires a wildcard for a single character. U+0000
/// is used for it, because no name contains this character.
pub(super) fn matches(pattern: &str, name: &str) -> bool {
    WildMatchPattern::<'*', '\0'>::new(pattern).matches(name)
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn a_star_stands_for_any_characters() {
        assert!(matches("*", "model.norm.weight"));
        assert!(matches("model.layers.*.self_attn.*", "model.layers.3.self_attn.q_proj.weight"));
        assert!(matches("*.sinks", "model.layers.3.self_attn.sinks"));
        assert!(matches("lm_head.weight", "lm_head.weight"));
        assert!(!matches("lm_head", "lm_head.weight"));
        assert!(!matches("*.sink", "model.layers.3.self_attn.sinks"));
        assert!(!matches("model.layers.*.mlp.*", "model.layers.3.self_attn.sinks"));
        // A match for `*weight` may be extended, so the search must backtrack.
        assert!(!matches("*weight*weight", "lm_head.weight"));
        assert!(matches("*.s*s", "model.layers.3.self_attn.sinks"));
        // No other character is special, and a suffix does not match a whole name.
        assert!(!matches("lm?head.weight", "lm_head.weight"));
        assert!(!matches("lm[_]head.{weight,bias}", "lm_head.weight"));
        assert!(!matches("head.weight", "lm_head.weight"));
    }
}
