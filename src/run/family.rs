//! Rejects recipe keys that the model's family does not support.

use crate::chat::{Chat, ChatFormat, SystemPromptSettings};
use crate::dist::{ExpertPlacement, RolloutWeightPlacement};
use crate::model::config::WeightFormat;
use crate::model::families::Family;
use crate::model::init::InitSettings;
use crate::model::settings::Architecture;
use crate::policy::RouterReplay;
use crate::recipe::Plan;
use crate::settings::Choice;

/// Returns an error message for each key of the recipe that the family does not support, with location and
/// remedy.
pub(super) fn unsupported_keys(plan: &Plan, family: Family, chat: &Chat) -> Vec<String> {
    let recipe = &plan.recipe;
    let mut keys = vec![];
    if !family.has_sinks {
        keys.extend(unsupported_sink_keys(plan));
    }
    if !family.has_experts {
        keys.extend(unsupported_expert_keys(plan));
    }
    let architecture = recipe.model.architecture.clone().unwrap_or_default();
    let has_other_window = architecture.sliding_window != Architecture::default().sliding_window;
    keys.extend(select_keys(
        [("model.architecture.sliding_window", has_other_window && !family.has_windows)],
        "its layers have full attention",
    ));
    keys.extend(select_keys(
        [(
            "model.architecture.tie_word_embeddings",
            architecture.tie_word_embeddings && !family.may_tie_embeddings,
        )],
        "its lm_head has separate weights",
    ));
    let limit = architecture.swiglu_limit != Architecture::default().swiglu_limit;
    keys.extend(select_keys(
        [("model.architecture.swiglu_limit", limit && !family.has_swiglu_limit)],
        "its SwiGLU has no clamp",
    ));
    let mxfp4 = recipe.checkpoint.dtype == WeightFormat::Mxfp4;
    keys.extend(select_keys(
        [("checkpoint.dtype", mxfp4 && !family.has_mxfp4)],
        "its weights are not stored in MXFP4",
    ));
    if family.chat != ChatFormat::Harmony {
        keys.extend(unsupported_harmony_keys(&recipe.chat));
    }
    let thinking = recipe.chat.enable_thinking.is_some() && family.chat != ChatFormat::ThinkingChatMl;
    keys.extend(select_keys([("chat.enable_thinking", thinking)], "its template has no thoughts"));
    let message = |(key, reason): (&str, &str)| {
        let text = format!("has no meaning for the family {:?}: {reason}; remove the key", family.name());
        plan.mistake(key, text).to_string()
    };
    // A model's own template may read what its family's does not.
    let reads = |key: &str| match key {
        "chat.current_date" => chat.template_reads("strftime_now"),
        key => key.strip_prefix("chat.").is_some_and(|name| chat.template_reads(name)),
    };
    let is_refused =
        |key: &str| plan.reads(key) && !reads(key) && !(has_no_effect(key) && plan.is_inherited(key));
    keys.into_iter().filter(|(key, _)| is_refused(key)).map(message).collect()
}

/// Returns whether `key`, which the family does not support, leaves the model's results unchanged. Such a key
/// is ignored if it comes from the recipe's base, which may be for another family. It is also ignored in the
/// resolved recipe of a run, which has the keys of its bases. Other unsupported keys, such as ablations, are
/// always refused.
fn has_no_effect(key: &str) -> bool {
    key.starts_with("chat.") || key.ends_with(".load_balance_coefficient") || key == "model.init.sink"
}

/// A key, and the reason why the family does not support it.
type UnsupportedKey = (&'static str, &'static str);

/// Returns the keys that are set, each with the same reason.
fn select_keys(
    keys: impl IntoIterator<Item = (&'static str, bool)>,
    reason: &'static str,
) -> Vec<UnsupportedKey> {
    keys.into_iter().filter(|(_, is_set)| *is_set).map(|(key, _)| (key, reason)).collect()
}

fn unsupported_sink_keys(plan: &Plan) -> Vec<UnsupportedKey> {
    let (ablations, init) = (&plan.recipe.arms, &plan.recipe.model.init);
    select_keys(
        [
            ("arms.no_train_sinks", ablations.no_train_sinks),
            ("arms.no_sink_gradient", ablations.no_sink_gradient),
            // Only random weights have an initial value.
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
    let (ablations, default) = (&recipe.arms, Architecture::default());
    let architecture = recipe.model.architecture.as_ref().unwrap_or(&default);
    select_keys(
        [
            (
                "model.architecture.num_local_experts",
                architecture.num_local_experts != default.num_local_experts,
            ),
            (
                "model.architecture.num_experts_per_tok",
                architecture.num_experts_per_tok != default.num_experts_per_tok,
            ),
            ("arms.router_noise", ablations.router_noise > 0.0),
            ("arms.router_noise_rollout", ablations.router_noise_rollout > 0.0),
            ("arms.router_noise_train", ablations.router_noise_train > 0.0),
            ("arms.rollout_mxfp4", ablations.rollout_mxfp4),
            ("parallel.rollout_weights", recipe.parallel.rollout_weights == RolloutWeightPlacement::ByExpert),
            ("parallel.experts", recipe.parallel.experts == ExpertPlacement::ByExpert),
            ("cold_start.load_balance_coefficient", recipe.cold_start.load_balance_coefficient > 0.0),
            ("train.load_balance_coefficient", recipe.train.load_balance_coefficient > 0.0),
            ("rollout.keep_routes", recipe.rollout.keep_routes),
            ("policy.router_replay", recipe.policy.router_replay != RouterReplay::None),
        ],
        "it has no experts and no router",
    )
}

fn unsupported_harmony_keys(chat: &SystemPromptSettings) -> Vec<UnsupportedKey> {
    let mut keys = select_keys(
        [
            ("chat.knowledge_cutoff", chat.knowledge_cutoff.is_some()),
            ("chat.current_date", chat.current_date.is_some()),
            ("chat.reasoning_effort", chat.reasoning_effort.is_some()),
        ],
        "its system message has no such line",
    );
    let has_no_place = chat.system_message == Some(false) && chat.developer_instructions.is_some();
    let reason =
        "its template writes these instructions into the system message; set chat.system_message = true";
    keys.extend(select_keys([("chat.developer_instructions", has_no_place)], reason));
    keys
}
