//! Rejects recipe keys that the model's family does not support.

use crate::chat::{Chat, ChatFormat};
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
    let (ablations, init, chat_keys) = (&recipe.arms, &recipe.model.init, &recipe.chat);
    let default = Architecture::default();
    let architecture = recipe.model.architecture.as_ref().unwrap_or(&default);
    let is_harmony = family.chat == ChatFormat::Harmony;
    let mut keys = vec![];
    let mut refuse = |is_supported: bool, reason, is_set: &[(&'static str, bool)]| {
        let set = is_set.iter().filter(|(_, is_set)| *is_set && !is_supported);
        keys.extend(set.map(|(key, _)| (*key, reason)));
    };
    // Only random weights have an initial value.
    let has_initial_sink = init.sink != InitSettings::default().sink && recipe.model.path.is_none();
    refuse(
        family.has_sinks,
        "its attention has no sinks",
        &[
            ("arms.no_train_sinks", ablations.no_train_sinks),
            ("arms.no_sink_gradient", ablations.no_sink_gradient),
            ("model.init.sink", has_initial_sink),
        ],
    );
    let has_other_experts = architecture.num_local_experts != default.num_local_experts;
    let has_other_top_k = architecture.num_experts_per_tok != default.num_experts_per_tok;
    refuse(
        family.has_experts,
        "it has no experts and no router",
        &[
            ("model.architecture.num_local_experts", has_other_experts),
            ("model.architecture.num_experts_per_tok", has_other_top_k),
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
    );
    let window =
        [("model.architecture.sliding_window", architecture.sliding_window != default.sliding_window)];
    refuse(family.has_windows, "its layers have full attention", &window);
    let tied = [("model.architecture.tie_word_embeddings", architecture.tie_word_embeddings)];
    refuse(family.may_tie_embeddings, "its lm_head has separate weights", &tied);
    let limit = [("model.architecture.swiglu_limit", architecture.swiglu_limit != default.swiglu_limit)];
    refuse(family.has_swiglu_limit, "its SwiGLU has no clamp", &limit);
    let mxfp4 = [("checkpoint.dtype", recipe.checkpoint.dtype == WeightFormat::Mxfp4)];
    refuse(family.has_mxfp4, "its weights are not stored in MXFP4", &mxfp4);
    refuse(
        is_harmony,
        "its system message has no such line",
        &[
            ("chat.knowledge_cutoff", chat_keys.knowledge_cutoff.is_some()),
            ("chat.current_date", chat_keys.current_date.is_some()),
            ("chat.reasoning_effort", chat_keys.reasoning_effort.is_some()),
        ],
    );
    let has_no_place = chat_keys.system_message == Some(false) && chat_keys.developer_instructions.is_some();
    let reason =
        "its template writes these instructions into the system message; set chat.system_message = true";
    refuse(is_harmony, reason, &[("chat.developer_instructions", has_no_place)]);
    let thinks = family.chat == ChatFormat::ThinkingChatMl;
    let thoughts = [("chat.enable_thinking", chat_keys.enable_thinking.is_some())];
    refuse(thinks, "its template has no thoughts", &thoughts);
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
