//! The adapter of a run: the adapter in the model's folder, or a new one that the recipe requests.

use super::memory::AdapterInput;
use super::trainable_flags::{matches, policy_trainable_flags};
use crate::model::adapter::{HEAD, Lora, Owner, default_targets, is_adaptable, specs_with_head};
use crate::model::config::Config;
use crate::model::names::{ParameterSpec, parameter_specs};
use crate::model::parameters::Parameters;
use crate::model::settings::AdapterSettings;
use crate::recipe::Plan;
use crate::settings::closest_word;
use anyhow::Result;
use std::collections::BTreeSet;

/// An adapter that is trained, or that is part of the model in use.
#[derive(Debug, Clone)]
pub struct RunAdapter {
    pub lora: Lora,
    /// The factors, as the memory plan counts them.
    pub factors: AdapterInput,
}

impl RunAdapter {
    /// Returns the adapter of the run. It is `existing`, the adapter in the model's folder, if there is one.
    /// Otherwise it is the adapter that the recipe requests, if the command `trains`.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when both exist and differ, when a pattern of `adapter.targets` matches no
    /// matrix that can have an adapter, or when no factor would be trainable.
    pub(super) fn resolve(
        plan: &Plan,
        config: &Config,
        existing: Option<&Lora>,
        trains: bool,
    ) -> Result<Option<Self>> {
        let base = parameter_specs(config);
        let settings = plan.recipe.adapter.as_ref().filter(|_| trains);
        let settings = settings.map(|settings| requested_lora(plan, settings, config, &base)).transpose()?;
        if let (Some(existing), Some(settings)) = (existing, &settings)
            && existing != settings
        {
            let reason = format!(
                "the model has an adapter of {}, but the recipe requests {}; remove [adapter], or request the adapter that the model has",
                adapter_text(existing),
                adapter_text(settings)
            );
            return Err(plan.mistake("adapter", reason).into());
        }
        let Some(lora) = existing.cloned().or(settings) else { return Ok(None) };
        let adapts_head = lora.targets.iter().any(|target| target == HEAD);
        if adapts_head && trains && plan.recipe.critic.is_some() {
            let reason = "a critic shares the adapter's matrices, but has a value head instead of lm_head.weight; leave \
                          the head out of adapter.targets, or remove [critic]";
            return Err(plan.mistake("adapter.targets", reason.to_owned()).into());
        }
        let specs = lora.factor_specs(&base)?;
        let trains_base_first = plan.recipe.adapter.as_ref().is_some_and(|settings| !settings.cold_start)
            && plan.recipe.cold_start.steps > 0;
        let after_cold_start = existing.is_none() && trains_base_first;
        // The warm-up of a run that resumes after it also trained the base.
        let trainable = policy_trainable_flags(plan, &specs, if trains_base_first { &base } else { &[] })?;
        Ok(Some(Self { lora, factors: AdapterInput { specs, trainable, after_cold_start } }))
    }

    /// Adds newly initialized factors to `parameters`.
    ///
    /// # Errors
    /// When `parameters` already has an adapter.
    pub fn attach(&self, parameters: &mut Parameters, seed: u64) -> Result<()> {
        let start = self.lora.initial_values(&parameters.specs, seed, Owner::Policy)?;
        parameters.attach_adapter(self.lora.clone(), start)
    }

    /// Returns the trainable flags of all tensors: first the `base_tensors` tensors of the base, which are
    /// frozen, then the factors.
    pub fn trainable_flags(&self, base_tensors: usize) -> Vec<bool> {
        [&vec![false; base_tensors][..], &self.factors.trainable].concat()
    }
}

/// Returns whether a pattern of `adapter.targets` names the head. One for everything means the layers.
pub(super) fn names_head(pattern: &str) -> bool {
    pattern.contains("lm_head") && matches(pattern, HEAD)
}

/// Returns the adapter that the recipe requests.
fn requested_lora(
    plan: &Plan,
    settings: &AdapterSettings,
    config: &Config,
    base: &[ParameterSpec],
) -> Result<Lora> {
    let mistake = |reason: String| plan.mistake("adapter.targets", reason);
    let base = &specs_with_head(base);
    for pattern in &settings.targets {
        let mut named = base.iter().filter(|spec| matches(pattern, &spec.name)).peekable();
        if named.peek().is_none() {
            return Err(mistake(unmatched_pattern(pattern, &default_targets(config))).into());
        }
        if !named.any(is_adaptable) {
            let reason = format!(
                "the pattern {pattern:?} matches nothing that can have an adapter; only the matrices of attention, experts and \
                 MLP, and the head lm_head.weight, can have one"
            );
            return Err(mistake(reason).into());
        }
    }
    let targets = match settings.targets.as_slice() {
        [] => default_targets(config),
        patterns => {
            let names = |pattern: &String, spec: &ParameterSpec| {
                matches(pattern, &spec.name) && (spec.name != HEAD || names_head(pattern))
            };
            let named = |spec: &&ParameterSpec| patterns.iter().any(|pattern| names(pattern, spec));
            let specs = base.iter().filter(|spec| is_adaptable(spec)).filter(named);
            specs.map(|spec| spec.name.clone()).collect()
        }
    };
    Ok(Lora { rank: settings.rank, alpha: settings.alpha, rslora: settings.rslora, targets })
}

/// Returns the error message for a `pattern` that matches no parameter. For a name of PEFT, such as `q_proj`,
/// the message proposes the corresponding pattern. `known` has the names of all matrices that can have an
/// adapter.
fn unmatched_pattern(pattern: &str, known: &[String]) -> String {
    if pattern == "all-linear" {
        return "instead of PEFT's \"all-linear\", remove adapter.targets: every matrix that can have an adapter gets one"
            .to_owned();
    }
    let name = |full: &str| -> Option<String> {
        Some(full.strip_suffix(".weight").unwrap_or(full).rsplit('.').next()?.to_owned())
    };
    let names: BTreeSet<String> = known.iter().filter_map(|full| name(full)).collect();
    let suffix = pattern.rsplit('.').next().unwrap_or(pattern);
    match closest_word(suffix, names.iter().map(String::as_str)) {
        Some(near) => format!(
            "the pattern {pattern:?} matches no parameter, because a pattern must match a whole name; did you mean \"*.{near}.*\"?"
        ),
        None => format!(
            "the pattern {pattern:?} matches no parameter; names look like {}, and the matrices are {}",
            known.first().map_or("", String::as_str),
            names.into_iter().collect::<Vec<_>>().join(", ")
        ),
    }
}

fn adapter_text(lora: &Lora) -> String {
    let Lora { rank, alpha, rslora, targets } = lora;
    let scaled = if *rslora { ", rslora" } else { "" };
    format!("rank {rank}, alpha {alpha}{scaled} on {} matrices", targets.len())
}
