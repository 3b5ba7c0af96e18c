//! Remedies: changes to the recipe that lower the peak memory, each with its saving. For each change, the
//! plan is computed again.

use super::{AdapterInput, MemoryPlanInput, ModelCommand, TrainableInput, WeightPlacement, gigabytes};
use crate::actor::OptimizerKind;
use crate::dist::{PackedWeightPlacement, RolloutWeightPlacement};
use crate::model::adapter::{Lora, default_targets};
use crate::model::names::{parameter_specs, value_model_specs};
use crate::model::settings::AdapterSettings;
use crate::recipe::Recipe;

/// A change of a recipe key, with its saving.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remedy {
    /// The change, such as `train.micro_batch_tokens = 512`.
    pub change: String,
    pub saved_bytes: u64,
}

impl std::fmt::Display for Remedy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({} less)", self.change, gigabytes(self.saved_bytes))
    }
}

/// A pattern that matches the expert weights, which are most of an MoE model's parameters.
const FROZEN_EXPERTS: &str = "*.mlp.experts.*";

/// A proposed limit of the number of tokens that a token is drawn from.
const KEPT_TOKENS: usize = 256;

/// Minimum of a proposed number of tokens.
const TOKENS_MIN: usize = 64;

/// A size of the recipe: its key, minimum and value, and a function that replaces the value.
type Size = (&'static str, usize, usize, fn(&mut Recipe, usize));

impl MemoryPlanInput<'_> {
    /// Returns each single change that lowers the peak, the largest saving first. A size is halved until the
    /// plan fits into `bytes`, or until a smaller value saves nothing more.
    pub fn remedies(&self, bytes: u64) -> Vec<Remedy> {
        let peak = self.peak_bytes();
        let remedy = |(change, peak_after)| Remedy { change, saved_bytes: peak.saturating_sub(peak_after) };
        let remedies = self.changes(bytes).into_iter().map(remedy);
        let mut remedies: Vec<Remedy> = remedies.filter(|remedy| remedy.saved_bytes > 0).collect();
        remedies.sort_by_key(|remedy| std::cmp::Reverse(remedy.saved_bytes));
        remedies
    }

    /// Returns each change with the peak memory of the changed plan.
    fn changes(&self, bytes: u64) -> Vec<(String, u64)> {
        let mut changes = vec![];
        let peak_of = |change: &dyn Fn(&mut Recipe)| {
            let mut recipe = self.recipe.clone();
            change(&mut recipe);
            MemoryPlanInput { recipe: &recipe, ..self.clone() }.peak_bytes()
        };
        let recipe = self.recipe;
        let computes_batches =
            !matches!(self.command, ModelCommand::Eval | ModelCommand::Chat | ModelCommand::Serve);
        let sizes: [Size; 4] = [
            ("rollout.sequences_max", 1, recipe.rollout.sequences_max, |r, value| {
                r.rollout.sequences_max = value
            }),
            ("rollout.response_tokens_max", TOKENS_MIN, recipe.rollout.response_tokens_max, |r, value| {
                r.rollout.response_tokens_max = value;
            }),
            ("rollout.prompt_tokens_max", TOKENS_MIN, recipe.rollout.prompt_tokens_max, |r, value| {
                r.rollout.prompt_tokens_max = value;
            }),
            ("train.micro_batch_tokens", TOKENS_MIN, recipe.train.micro_batch_tokens, |r, value| {
                r.train.micro_batch_tokens = value;
            }),
        ];
        for (key, min, mut value, set) in sizes.into_iter().take(if computes_batches { 4 } else { 3 }) {
            let mut best: Option<(usize, u64)> = None;
            while value / 2 >= min && best.is_none_or(|(_, peak)| peak > bytes) {
                value /= 2;
                let peak = peak_of(&|recipe| set(recipe, value));
                if best.is_some_and(|(_, before)| peak >= before) {
                    break;
                }
                best = Some((value, peak));
            }
            changes.extend(best.map(|(value, peak)| (format!("{key} = {value}"), peak)));
        }
        let mut add_recipe_change =
            |text: String, change: &dyn Fn(&mut Recipe)| changes.push((text, peak_of(change)));
        if self.token_set_bytes() > 0 {
            add_recipe_change(format!("rollout.top_k = {KEPT_TOKENS}"), &|r| {
                r.rollout.top_k =
                    if r.rollout.top_k == 0 { KEPT_TOKENS } else { r.rollout.top_k.min(KEPT_TOKENS) };
            });
        }
        if self.command.trains() {
            add_recipe_change("train.recompute_layers = true".into(), &|r| {
                r.train.recompute_layers = Some(true)
            });
            if self.shard_ranks() < self.placement.processes {
                add_recipe_change("parallel.shard_size = 0".into(), &|r| r.parallel.shard_size = 0);
            }
            if recipe.train.optimizer.kind == OptimizerKind::Sgd {
                add_recipe_change("train.optimizer.momentum = 0".into(), &|r| {
                    r.train.optimizer.momentum = 0.0
                });
            } else {
                for kind in [OptimizerKind::AdamW8Bit, OptimizerKind::Sgd] {
                    add_recipe_change(format!("train.optimizer.kind = \"{kind}\""), &|r| {
                        r.train.optimizer.kind = kind
                    });
                }
            }
            if self.trainable.adapter.is_none() {
                changes.push((
                    format!("[adapter] with rank = {}", AdapterSettings::default().rank),
                    self.peak_with_adapter(),
                ));
            }
            if let Some(peak) = self.peak_with_frozen_experts().filter(|_| self.trainable.adapter.is_none()) {
                changes.push((format!("train.freeze = [{FROZEN_EXPERTS:?}]"), peak));
            }
        }
        if self.shard_ranks() > 1 && self.placement.packed_weights != PackedWeightPlacement::Sharded {
            let packed_weights = PackedWeightPlacement::Sharded;
            let placement = WeightPlacement { packed_weights, ..self.placement };
            let change = format!("parallel.packed_weights = \"{packed_weights}\"");
            changes.push((change, MemoryPlanInput { placement, ..self.clone() }.peak_bytes()));
        }
        if self.shard_ranks() > 1
            && self.placement.rollout_weights == RolloutWeightPlacement::Whole
            && self.has_remote_experts()
        {
            let rollout_weights = RolloutWeightPlacement::ByExpert;
            let placement = WeightPlacement { rollout_weights, ..self.placement };
            let change = format!("parallel.rollout_weights = \"{rollout_weights}\"");
            changes.push((change, MemoryPlanInput { placement, ..self.clone() }.peak_bytes()));
        }
        changes
    }

    /// Returns the peak if an adapter of the default rank is trained instead of the full model.
    fn peak_with_adapter(&self) -> u64 {
        let base = parameter_specs(self.config);
        let AdapterSettings { rank, alpha, rslora, .. } = AdapterSettings::default();
        let lora = Lora { rank, alpha, rslora, targets: default_targets(self.config) };
        let specs = lora.factor_specs(&base).unwrap_or_default();
        let adapter = AdapterInput { trainable: vec![true; specs.len()], specs, after_cold_start: false };
        let critic = self.trainable.critic.as_ref().map(|_| {
            let specs = value_model_specs(self.config);
            let head = specs.iter().map(|spec| spec.name.starts_with("score."));
            head.chain(adapter.trainable.iter().copied()).collect()
        });
        let trainable = TrainableInput { policy: vec![false; base.len()], critic, adapter: Some(adapter) };
        MemoryPlanInput { trainable, ..self.clone() }.peak_bytes()
    }

    /// Returns the peak if all experts of the policy are frozen. `None` if nothing else is trainable.
    fn peak_with_frozen_experts(&self) -> Option<u64> {
        let policy: Vec<bool> = parameter_specs(self.config)
            .iter()
            .zip(&self.trainable.policy)
            .map(|(spec, is_trainable)| *is_trainable && !spec.name.contains(".mlp.experts."))
            .collect();
        if !policy.contains(&true) {
            return None;
        }
        let trainable = TrainableInput { policy, ..self.trainable.clone() };
        Some(MemoryPlanInput { trainable, ..self.clone() }.peak_bytes())
    }
}
