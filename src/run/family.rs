//! Refuses recipe keys that the model's family does not have, instead of ignoring them.

use crate::chat::Format;
use crate::dist::RolloutWeightPlacement;
use crate::model::config::WeightFormat;
use crate::model::families::Family;
use crate::model::init::InitSettings;
use crate::model::settings::Architecture;
use crate::policy::RouterReplay;
use crate::recipe::Plan;
use crate::rollout::SystemPromptSettings;
use crate::settings::Choice;

/// Returns a mistake for each such key, with place and remedy.
pub(super) fn unsupported_keys(plan: &Plan, family: Family) -> Vec<String> {
    let recipe = &plan.recipe;
    let mut found = vec![];
    if !family.has_sinks {
        found.extend(unsupported_sink_keys(plan));
    }
    if !family.has_experts {
        found.extend(unsupported_expert_keys(plan));
    }
    let shape = recipe.model.architecture.clone().unwrap_or_default();
    let window = shape.sliding_window != Architecture::default().sliding_window;
    found.extend(select_keys(
        [("model.architecture.sliding_window", window && !family.has_windows)],
        "its layers have full attention",
    ));
    found.extend(select_keys(
        [("model.architecture.tie_word_embeddings", shape.tie_word_embeddings && !family.may_tie_embeddings)],
        "its lm_head has weights of its own",
    ));
    let limit = shape.swiglu_limit != Architecture::default().swiglu_limit;
    found.extend(select_keys(
        [("model.architecture.swiglu_limit", limit && !family.has_swiglu_limit)],
        "its SwiGLU has no clamp",
    ));
    let mxfp4 = recipe.checkpoint.dtype == WeightFormat::Mxfp4;
    found.extend(select_keys(
        [("checkpoint.dtype", mxfp4 && !family.has_mxfp4)],
        "its weights are not stored in MXFP4",
    ));
    if family.chat != Format::Harmony {
        found.extend(unsupported_harmony_keys(&recipe.harmony));
    }
    let thinking = recipe.harmony.enable_thinking.is_some() && family.chat != Format::ThinkingChatMl;
    found.extend(select_keys([("harmony.enable_thinking", thinking)], "its template has no thoughts"));
    let to_mistake = |(key, why): (&str, &str)| {
        let what = format!("means nothing to the family {:?}: {why}; remove the key", family.name());
        plan.mistake(key, what).to_string()
    };
    found.into_iter().filter(|(key, _)| plan.reads(key)).map(to_mistake).collect()
}

/// A key, and the reason why the family does not have it.
type UnsupportedKey = (&'static str, &'static str);

fn select_keys(
    keys: impl IntoIterator<Item = (&'static str, bool)>,
    why: &'static str,
) -> Vec<UnsupportedKey> {
    keys.into_iter().filter(|(_, set)| *set).map(|(key, _)| (key, why)).collect()
}

fn unsupported_sink_keys(plan: &Plan) -> Vec<UnsupportedKey> {
    let (arms, init) = (&plan.recipe.arms, &plan.recipe.model.init);
    select_keys(
        [
            ("arms.no_train_sinks", arms.no_train_sinks),
            ("arms.no_sink_gradient", arms.no_sink_gradient),
            // A folder's weights are not drawn.
            (
                "model.init.sink",
                init.sink != InitSettings::default().sink && plan.recipe.model.path.is_none(),
            ),
        ],
        "its attention has no sinks",
    )
}

fn unsupported_expert_keys(plan: &Plan) -> Vec<UnsupportedKey> {
    let recipe = &plan.recipe;
    let (arms, usual) = (&recipe.arms, Architecture::default());
    let shape = recipe.model.architecture.as_ref().unwrap_or(&usual);
    select_keys(
        [
            ("model.architecture.num_local_experts", shape.num_local_experts != usual.num_local_experts),
            (
                "model.architecture.num_experts_per_tok",
                shape.num_experts_per_tok != usual.num_experts_per_tok,
            ),
            ("arms.router_noise", arms.router_noise > 0.0),
            ("arms.router_noise_rollout", arms.router_noise_rollout > 0.0),
            ("arms.router_noise_train", arms.router_noise_train > 0.0),
            ("arms.rollout_mxfp4", arms.rollout_mxfp4),
            ("parallel.rollout_weights", recipe.parallel.rollout_weights == RolloutWeightPlacement::ByExpert),
            ("cold_start.load_balance_coefficient", recipe.cold_start.load_balance_coefficient > 0.0),
            ("train.load_balance_coefficient", recipe.train.load_balance_coefficient > 0.0),
            ("rollout.keep_routes", recipe.rollout.keep_routes),
            ("policy.router_replay", recipe.policy.router_replay != RouterReplay::None),
        ],
        "it has no experts and no router",
    )
}

fn unsupported_harmony_keys(harmony: &SystemPromptSettings) -> Vec<UnsupportedKey> {
    let mut found = select_keys(
        [
            ("harmony.knowledge_cutoff", harmony.knowledge_cutoff.is_some()),
            ("harmony.current_date", harmony.current_date.is_some()),
            ("harmony.reasoning_effort", harmony.reasoning_effort.is_some()),
        ],
        "its system message has no such line",
    );
    let silent = harmony.system_message == Some(false) && harmony.developer_instructions.is_some();
    let why =
        "without a system message there is no place for them (harmony.system_message = true brings one)";
    found.extend(select_keys([("harmony.developer_instructions", silent)], why));
    found
}
