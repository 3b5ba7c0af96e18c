//! Which parameters learn: all but those that a pattern of the recipe, or an arm, names.

use crate::model::config::Config;
use crate::model::names::{ParameterSpec, value_model_specs};
use crate::recipe::Plan;
use anyhow::Result;
use wildmatch::WildMatchPattern;

/// What `arms.freeze_attention` freezes.
const ATTENTION: &str = "model.layers.*.self_attn.*";

/// Which parameters learn: all but those that a `train.freeze` pattern or the arm names. Under an adapter its own are named so too.
pub(super) fn trainable(plan: &Plan, specs: &[ParameterSpec]) -> Result<Vec<bool>> {
    frozen_by(plan, "train.freeze", &plan.recipe.train.freeze, arm(plan), specs, &[])
}

/// Which of an adapter's factors learn; a pattern may name one of the `others`, too.
pub(super) fn not_frozen(
    plan: &Plan,
    factors: &[ParameterSpec],
    others: &[ParameterSpec],
) -> Result<Vec<bool>> {
    frozen_by(plan, "train.freeze", &plan.recipe.train.freeze, arm(plan), factors, others)
}

/// The same of the critic, if there is one, and `critic.freeze`: of its own tensors, or of its head and its adapter's factors where
/// the policy has an adapter.
pub(super) fn critic_trainable(
    plan: &Plan,
    config: &Config,
    factors: Option<&[ParameterSpec]>,
) -> Result<Option<Vec<bool>>> {
    let Some(critic) = &plan.recipe.critic else { return Ok(None) };
    let own = value_model_specs(config);
    let specs = [&own[..], factors.unwrap_or_default()].concat();
    let mut trainable = frozen_by(plan, "critic.freeze", &critic.freeze, None, &specs, &[])?;
    if factors.is_some() {
        let is_head = |spec: &ParameterSpec| spec.name.starts_with("score.");
        trainable.iter_mut().zip(&own).for_each(|(learns, spec)| *learns &= is_head(spec));
    }
    Ok(Some(trainable))
}

fn arm(plan: &Plan) -> Option<&'static str> {
    plan.recipe.arms.freeze_attention.then_some(ATTENTION)
}

/// The parameters of `specs` that neither a pattern of the key `key` nor the `arm`'s names. A pattern must name one of them or of
/// the `others`.
fn frozen_by(
    plan: &Plan,
    key: &str,
    patterns: &[String],
    arm: Option<&str>,
    specs: &[ParameterSpec],
    others: &[ParameterSpec],
) -> Result<Vec<bool>> {
    for pattern in patterns {
        if !specs.iter().chain(others).any(|spec| matches(pattern, &spec.name)) {
            let what = format!(
                "the pattern {pattern:?} matches no parameter; names look like {}",
                specs.get(1).map_or("", |spec| &spec.name)
            );
            return Err(plan.mistake(key, what).into());
        }
    }
    let patterns: Vec<&str> = patterns.iter().map(String::as_str).chain(arm).collect();
    let trainable: Vec<bool> =
        specs.iter().map(|spec| !patterns.iter().any(|pattern| matches(pattern, &spec.name))).collect();
    if !trainable.contains(&true) {
        let what = "every parameter is frozen; leave one that learns".to_owned();
        return Err(plan.mistake(key, what).into());
    }
    Ok(trainable)
}

/// Whether `pattern` names `name` as a whole: `*` stands for any characters, dots included, every other character for
/// itself. There is no wildcard of a single character, which the crate asks for: no name holds U+0000.
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
        // The end may not be taken for a part before it, and several stars may have to look again.
        assert!(!matches("*weight*weight", "lm_head.weight"));
        assert!(matches("*.s*s", "model.layers.3.self_attn.sinks"));
        // Nothing else is special, and no end is enough.
        assert!(!matches("lm?head.weight", "lm_head.weight"));
        assert!(!matches("lm[_]head.{weight,bias}", "lm_head.weight"));
        assert!(!matches("head.weight", "lm_head.weight"));
    }
}
