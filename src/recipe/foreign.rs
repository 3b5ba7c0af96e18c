//! Names of other trainers, answered with the recipe's. docs/POLICY.md explains the differences.

use crate::settings::ForeignName;

const fn is(name: &'static str, keys: &'static [&'static str]) -> ForeignName {
    with(name, keys, "")
}

const fn with(name: &'static str, keys: &'static [&'static str], note: &'static str) -> ForeignName {
    ForeignName { name, keys, note }
}

const CLIP: &[&str] = &["policy.clip_low", "policy.clip_high"];
const KL: &[&str] = &["policy.kl.place", "policy.kl.coefficient"];

/// Keys of TRL and verl.
const KEYS: [ForeignName; 66] = [
    // TRL
    is("num_generations", &["rollout.samples_per_prompt"]),
    is("max_completion_length", &["rollout.response_tokens_max"]),
    is("max_prompt_length", &["rollout.prompt_tokens_max"]),
    is("per_device_train_batch_size", &["rollout.prompts_per_step", "train.micro_batch_tokens"]),
    with(
        "gradient_accumulation_steps",
        &["train.micro_batch_tokens"],
        "; a step's gradients are always summed",
    ),
    is("steps_per_generation", &["train.minibatches"]),
    is("num_iterations", &["train.epochs"]),
    with("beta", KL, "; TRL's is place = \"loss\""),
    is("epsilon", CLIP),
    is("epsilon_high", &["policy.clip_high"]),
    is("delta", &["policy.dual_clip"]),
    with("scale_rewards", &["policy.advantage"], ": \"grpo\", \"dr_grpo\" or \"grpo_batch_std\""),
    is("loss_type", &["policy.loss", "policy.aggregation"]),
    with("importance_sampling_level", &["policy.loss"], "; \"gspo\" has one ratio a sequence"),
    is("learning_rate", &["train.optimizer.lr"]),
    is("lr_scheduler_type", &["train.optimizer.schedule"]),
    is("warmup_ratio", &["train.optimizer.warmup_steps"]),
    is("max_grad_norm", &["train.optimizer.grad_norm_max"]),
    is("steps", &["train.steps"]),
    is("max_steps", &["train.steps"]),
    is("num_train_epochs", &["train.steps"]),
    is("save_steps", &["checkpoint.every_steps"]),
    is("eval_steps", &["eval.every_steps"]),
    is("logging_steps", &["logging.console_every_steps"]),
    is("model_name_or_path", &["model.path"]),
    is("use_peft", &["adapter"]),
    is("lora_r", &["adapter.rank"]),
    is("lora_alpha", &["adapter.alpha"]),
    is("lora_dropout", &["adapter.dropout"]),
    is("target_modules", &["adapter.targets"]),
    is("lora_target_modules", &["adapter.targets"]),
    is("system_prompt", &["harmony.model_identity", "harmony.developer_instructions"]),
    // verl
    is("adv_estimator", &["policy.advantage"]),
    with("norm_adv_by_std_in_grpo", &["policy.advantage"], "; false is \"dr_grpo\""),
    is("loss_agg_mode", &["policy.aggregation"]),
    is("loss_mode", &["policy.loss"]),
    is("clip_ratio", CLIP),
    is("clip_ratio_low", &["policy.clip_low"]),
    is("clip_ratio_high", &["policy.clip_high"]),
    is("clip_ratio_c", &["policy.dual_clip"]),
    is("train_batch_size", &["rollout.prompts_per_step"]),
    is("n", &["rollout.samples_per_prompt"]),
    with("ppo_mini_batch_size", &["train.minibatches"], ": how many, not how large"),
    is("ppo_epochs", &["train.epochs"]),
    is("ppo_micro_batch_size_per_gpu", &["train.micro_batch_tokens"]),
    is("ppo_max_token_len_per_gpu", &["train.micro_batch_tokens"]),
    with("use_kl_loss", &["policy.kl.place"], " = \"loss\""),
    with("use_kl_in_reward", &["policy.kl.place"], " = \"reward\""),
    is("kl_loss_coef", &["policy.kl.coefficient"]),
    is("kl_coef", &["policy.kl.coefficient"]),
    is("kl_loss_type", &["policy.kl.estimator"]),
    is("kl_penalty", &["policy.kl.estimator"]),
    is("target_kl", &["policy.kl.target"]),
    is("entropy_coeff", &["policy.entropy_coefficient"]),
    is("rollout_is", &["policy.correction.is"]),
    is("rollout_is_threshold", &["policy.correction.threshold"]),
    is("rollout_rs", &["policy.correction.reject"]),
    is("rollout_rs_threshold", &["policy.correction.reject_bounds"]),
    with("filter_groups", &["rollout.resample_rounds_max"], "; 0 means none"),
    is("overlong_buffer", &["policy.overlong.buffer_tokens"]),
    is("penalty_factor", &["policy.overlong.penalty"]),
    is("total_training_steps", &["train.steps"]),
    is("total_epochs", &["train.steps"]),
    is("test_freq", &["eval.every_steps"]),
    is("save_freq", &["checkpoint.every_steps"]),
    is("train_files", &["task.train_file"]),
];

/// Words of TRL and verl that are no value here.
const WORDS: [ForeignName; 9] = [
    with(
        "dapo",
        &[
            "policy.clip_high",
            "policy.aggregation",
            "rollout.resample_rounds_max",
            "policy.overlong.buffer_tokens",
        ],
        "; DAPO has clip_high = 0.28 and aggregation = \"token_mean\"",
    ),
    with("bnpo", &["policy.aggregation"], " = \"token_mean\""),
    with("vanilla", &["policy.loss"], " = \"ppo\""),
    with("grpo", &["policy.advantage"], " = \"grpo\", whose loss is \"ppo\""),
    with("dr_grpo", &["policy.advantage"], " = \"dr_grpo\" with aggregation = \"constant\""),
    with("ppo", &["policy.advantage"], " = \"gae\", with a critic"),
    with("low_var_kl", &["policy.kl.estimator"], " = \"k3\""),
    with("kl", &["policy.kl.estimator"], " = \"k1\""),
    with("mse", &["policy.kl.estimator"], " = \"k2\""),
];

/// Returns what the `word` of another trainer is here, or else its key `name`.
pub(super) fn foreign_name(name: &str, word: Option<&str>) -> Option<&'static ForeignName> {
    let named = |list: &'static [ForeignName], wanted: &str| list.iter().find(|known| known.name == wanted);
    match word {
        Some(word) => named(&WORDS, word),
        None => named(&KEYS, name),
    }
}

#[cfg(test)]
mod tests {
    use super::{KEYS, WORDS};
    use crate::recipe::{Recipe, resolve};
    use std::path::Path;

    #[test]
    fn every_name_of_another_trainer_leads_to_a_key_that_exists() {
        let known: Vec<String> =
            Recipe::default().entries().iter().map(|entry| entry.path().to_owned()).collect();
        for foreign in KEYS.iter().chain(&WORDS) {
            for key in foreign.keys {
                assert!(known.iter().any(|known| known == key), "{}: {key}", foreign.name);
            }
        }
    }

    #[test]
    fn names_of_other_trainers_are_answered_with_ours() {
        let refused = |text: &str| resolve(Path::new("r.toml"), text, &[]).unwrap_err().to_string();
        for (text, answer) in [
            (
                "[rollout]\nnum_generations = 8",
                "r.toml:2: rollout.num_generations: unknown key; here it is rollout.samples_per_prompt",
            ),
            ("steps = 3", "r.toml:1: steps: unknown key; here it is train.steps"),
            (
                "[train]\nloss_type = \"dapo\"",
                "r.toml:2: train.loss_type: unknown key; here it is policy.loss and policy.aggregation",
            ),
            (
                "[algorithm]\nadv_estimator = \"grpo\"",
                "r.toml:2: algorithm.adv_estimator: unknown key; here it is policy.advantage",
            ),
            (
                "[actor_rollout_ref.rollout]\nn = 8",
                "r.toml:2: actor_rollout_ref.rollout.n: unknown key; here it is rollout.samples_per_prompt",
            ),
        ] {
            assert_eq!(refused(text), answer);
        }
        let dapo = refused("[policy]\nloss = \"dapo\"");
        assert!(dapo.starts_with("r.toml:2: policy.loss: no such value \"dapo\"; give \"ppo\""), "{dapo}");
        assert!(
            dapo.contains("; here it is policy.clip_high, policy.aggregation,") && dapo.contains("0.28"),
            "{dapo}"
        );
        assert_eq!(dapo.lines().count(), 1);
    }
}
