//! Keys and values of other trainers, with the recipe keys that correspond to them. docs/POLICY.md explains
//! the differences.

use crate::settings::OtherTrainerName;

const fn same_meaning(names: &'static str, keys: &'static [&'static str]) -> OtherTrainerName {
    with_note(names, keys, "")
}

const fn with_note(
    names: &'static str,
    keys: &'static [&'static str],
    note: &'static str,
) -> OtherTrainerName {
    OtherTrainerName { names, keys, note }
}

const CLIP: &[&str] = &["policy.clip_low", "policy.clip_high"];
const KL: &[&str] = &["policy.kl.place", "policy.kl.coefficient"];

/// Keys of TRL, PEFT and verl.
const KEYS: &[OtherTrainerName] = &[
    // TRL, with the names of PEFT and verl for the same.
    same_meaning("num_generations n", &["rollout.samples_per_prompt"]),
    same_meaning("max_completion_length max_response_length", &["rollout.response_tokens_max"]),
    same_meaning("max_prompt_length", &["rollout.prompt_tokens_max"]),
    same_meaning("per_device_train_batch_size", &["rollout.prompts_per_step", "train.micro_batch_tokens"]),
    with_note(
        "gradient_accumulation_steps",
        &["train.micro_batch_tokens"],
        "; the gradients of a step are always summed",
    ),
    same_meaning("steps_per_generation", &["train.minibatches"]),
    same_meaning("num_iterations ppo_epochs", &["train.epochs"]),
    with_note("beta", KL, "; TRL adds it to the loss (place = \"loss\")"),
    same_meaning("epsilon clip_ratio", CLIP),
    same_meaning("epsilon_high clip_ratio_high", &["policy.clip_high"]),
    same_meaning("delta clip_ratio_c", &["policy.dual_clip"]),
    with_note("scale_rewards", &["policy.advantage"], ": \"grpo\", \"dr_grpo\" or \"grpo_batch_std\""),
    same_meaning("loss_type", &["policy.loss", "policy.aggregation"]),
    with_note("importance_sampling_level", &["policy.loss"], "; \"gspo\" has one ratio per sequence"),
    same_meaning("sapo_temperature_pos tau_pos", &["policy.sapo.temperature_positive"]),
    same_meaning("sapo_temperature_neg tau_neg", &["policy.sapo.temperature_negative"]),
    same_meaning("vespo_k_pos", &["policy.vespo.power_positive"]),
    same_meaning("vespo_lambda_pos", &["policy.vespo.decay_positive"]),
    same_meaning("vespo_k_neg", &["policy.vespo.power_negative"]),
    same_meaning("vespo_lambda_neg", &["policy.vespo.decay_negative"]),
    same_meaning("off_policy_mask_threshold", &["policy.correction.off_policy_mask"]),
    same_meaning("learning_rate lr", &["train.optimizer.lr"]),
    same_meaning("lr_scheduler_type warmup_style", &["train.optimizer.schedule"]),
    same_meaning("warmup_ratio lr_warmup_steps", &["train.optimizer.warmup_steps"]),
    same_meaning("max_grad_norm clip_grad", &["train.optimizer.grad_norm_max"]),
    same_meaning("steps max_steps total_training_steps", &["train.steps"]),
    same_meaning("num_train_epochs total_epochs", &["train.data_epochs"]),
    same_meaning("save_steps save_freq", &["checkpoint.every_steps"]),
    same_meaning("eval_steps test_freq", &["eval.every_steps"]),
    same_meaning("logging_steps", &["logging.console_every_steps"]),
    same_meaning("model_name_or_path", &["model.path"]),
    same_meaning("torch_dtype", &["model.dtype"]),
    same_meaning("max_new_tokens", &["rollout.response_tokens_max"]),
    with_note("eval_strategy", &["eval.every_steps"], "; 0 means none"),
    with_note(
        "batch_size",
        &["rollout.prompts_per_step"],
        ", with rollout.samples_per_prompt samples per prompt; in [cold_start] use batch_size",
    ),
    with_note(
        "use_vllm",
        &["rollout"],
        "; sampling and training use one forward pass, without a second engine",
    ),
    same_meaning("gradient_checkpointing", &["train.recompute_layers"]),
    same_meaning("bf16", &["model.dtype"]),
    with_note(
        "report_to",
        &["logging.tensorboard"],
        "; `rloss report` writes a page; for trackio, wandb and mlflow: examples/trackers/track.py",
    ),
    same_meaning("log_completions", &["logging.trajectories_per_step"]),
    with_note(
        "reward_funcs",
        &["task.file", "task.rewards"],
        ", with task.name = \"python\": the functions stay as they are",
    ),
    same_meaning("reward_weights", &["task.rewards"]),
    with_note("multi_objective_aggregation", &["policy.advantage"], "; \"normalize_then_sum\" is \"gdpo\""),
    same_meaning("save_total_limit max_actor_ckpt_to_keep max_critic_ckpt_to_keep", &["checkpoint.keep"]),
    with_note(
        "run_name output_dir project_name experiment_name default_local_dir",
        &["logging"],
        ": `rloss train --out FOLDER` names the folder",
    ),
    same_meaning("optim", &["train.optimizer.kind"]),
    same_meaning("generation_batch_size", &["rollout.prompts_per_step", "rollout.samples_per_prompt"]),
    with_note("mask_truncated_completions", &["policy.truncated"], " = \"mask\""),
    // PEFT, with the names of verl for the same.
    same_meaning("use_peft", &["adapter"]),
    same_meaning("r lora_r lora_rank", &["adapter.rank"]),
    same_meaning("use_rslora", &["adapter.rslora"]),
    same_meaning(
        "lora_target_parameters target_parameters target_modules lora_target_modules",
        &["adapter.targets"],
    ),
    with_note("exclude_modules", &["adapter.targets"], ", which names the matrices to adapt"),
    with_note("layers_to_transform", &["adapter.targets"], ", such as \"model.layers.3.*\""),
    with_note("modules_to_save", &["adapter"], ", which trains low-rank factors of matrices only"),
    with_note("init_lora_weights", &["adapter"], ", which always starts as PEFT does: A at random, B at 0"),
    with_note("use_dora", &["adapter"], ", which is LoRA, or rsLoRA with adapter.rslora"),
    same_meaning("lora_alpha", &["adapter.alpha"]),
    same_meaning("lora_dropout", &["adapter.dropout"]),
    same_meaning("system_prompt", &["chat.model_identity", "chat.developer_instructions"]),
    // verl
    same_meaning("coef", &["policy.kl.coefficient"]),
    with_note(
        "tensor_model_parallel_size n_gpus_per_node nnodes",
        &["parallel"],
        ": one process per GPU, started by torchrun, srun or mpirun",
    ),
    with_note("gpu_memory_utilization", &["rollout.sequences_max"], "; `rloss check` shows the memory plan"),
    with_note(
        "custom_reward_function",
        &["task.file"],
        ", with task.name = \"python\": its compute_score stays as it is",
    ),
    with_note("logger", &["logging.tensorboard"], "; `rloss report` writes a page"),
    with_note("filter_overlong_prompts", &["task.long_prompts"], ", by default \"drop\""),
    with_note("truncation", &["task.long_prompts"], "; \"error\" is \"refuse\", and no prompt is cut"),
    same_meaning("prompt_key", &["task.columns"]),
    with_note("lr_warmup_steps_ratio", &["train.optimizer.warmup_steps"], ", a number of steps"),
    same_meaning("min_lr_ratio", &["train.optimizer.lr_final_fraction"]),
    same_meaning("adam_beta1", &["train.optimizer.beta1"]),
    same_meaning("adam_beta2", &["train.optimizer.beta2"]),
    same_meaning("adam_epsilon", &["train.optimizer.eps"]),
    same_meaning("val_before_train", &["eval.before_training"]),
    with_note("resume_mode", &["checkpoint"], ": `rloss train RUN --resume`, or `--resume=auto`"),
    same_meaning("val_files", &["task.validation_file"]),
    same_meaning("adv_estimator", &["policy.advantage"]),
    with_note("norm_adv_by_std_in_grpo", &["policy.advantage"], "; false is \"dr_grpo\""),
    same_meaning("loss_agg_mode", &["policy.aggregation"]),
    same_meaning("loss_mode", &["policy.loss"]),
    same_meaning("clip_ratio_low", &["policy.clip_low"]),
    same_meaning("clip_cov_ratio", &["policy.clip_cov.fraction"]),
    same_meaning("clip_cov_lb", &["policy.clip_cov.covariance_min"]),
    same_meaning("clip_cov_ub", &["policy.clip_cov.covariance_max"]),
    same_meaning("kl_cov_ratio", &["policy.kl_cov.fraction"]),
    same_meaning("ppo_kl_coef", &["policy.kl_cov.coefficient"]),
    same_meaning("train_batch_size", &["rollout.prompts_per_step"]),
    with_note("ppo_mini_batch_size", &["train.minibatches"], ", the number of minibatches (not their size)"),
    same_meaning("ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu", &["train.micro_batch_tokens"]),
    with_note("use_kl_loss", &["policy.kl.place"], " = \"loss\""),
    with_note("use_kl_in_reward", &["policy.kl.place"], " = \"reward\""),
    with_note("kl_loss_coef", &["policy.kl.coefficient"], " with policy.kl.place = \"loss\""),
    with_note("kl_coef", &["policy.kl.coefficient"], " with policy.kl.place = \"reward\""),
    same_meaning("kl_loss_type kl_penalty", &["policy.kl.estimator"]),
    same_meaning("target_kl", &["policy.kl.target"]),
    same_meaning("entropy_coeff", &["policy.entropy_coefficient"]),
    same_meaning("rollout_is", &["policy.correction.is"]),
    same_meaning("rollout_is_threshold", &["policy.correction.threshold"]),
    same_meaning("rollout_rs", &["policy.correction.reject"]),
    same_meaning("rollout_rs_threshold", &["policy.correction.reject_bounds"]),
    with_note("filter_groups", &["rollout.resample_rounds_max"], "; 0 means off"),
    same_meaning("overlong_buffer", &["policy.overlong.buffer_tokens"]),
    same_meaning("penalty_factor", &["policy.overlong.penalty"]),
    same_meaning("train_files", &["task.train_file"]),
];

/// Tables of verl that no recipe has.
pub(super) const TABLES: [&str; 6] =
    ["trainer", "data", "algorithm", "actor_rollout_ref", "reward_model", "ray_kwargs"];

/// Values of other trainers that the recipe does not have.
const WORDS: &[OtherTrainerName] = &[
    with_note(
        "dapo",
        &[
            "policy.clip_high",
            "policy.aggregation",
            "rollout.resample_rounds_max",
            "policy.overlong.buffer_tokens",
        ],
        "; DAPO has clip_high = 0.28 and aggregation = \"token_mean\"",
    ),
    with_note("normalize_then_sum", &["policy.advantage"], " = \"gdpo\""),
    with_note("gpu", &["device"], " = \"cuda\""),
    with_note("all-linear", &["adapter.targets"], " = []: it adapts every matrix that can have an adapter"),
    with_note("bnpo", &["policy.aggregation"], " = \"token_mean\""),
    with_note("vanilla", &["policy.loss"], " = \"ppo\""),
    with_note("grpo", &["policy.advantage"], " = \"grpo\" with policy.loss = \"ppo\""),
    with_note("dr_grpo", &["policy.advantage"], " = \"dr_grpo\" with aggregation = \"constant\""),
    with_note("ppo", &["policy.advantage"], " = \"gae\", with a critic"),
    with_note("low_var_kl", &["policy.kl.estimator"], " = \"k3\""),
    with_note("kl", &["policy.kl.estimator"], " = \"k1\""),
    with_note("mse", &["policy.kl.estimator"], " = \"k2\""),
];

/// Returns the entry for the value `word` of another trainer or, without a `word`, for its key `name`.
pub(super) fn find_name(name: &str, word: Option<&str>) -> Option<&'static OtherTrainerName> {
    let find = |list: &'static [OtherTrainerName], name: &str| {
        list.iter().find(|entry| entry.names.split(' ').any(|known| known == name))
    };
    if let Some(word) = word { find(WORDS, word) } else { find(KEYS, name) }
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
        for foreign in KEYS.iter().chain(WORDS) {
            for key in foreign.keys {
                assert!(known.iter().any(|known| known == key), "{}: {key}", foreign.names);
            }
        }
    }

    #[test]
    fn bug_f6_names_of_other_trainers_are_answered_with_ours() {
        let refused = |text: &str| resolve(Path::new("r.toml"), text, &[]).unwrap_err().to_string();
        for (text, answer) in [
            (
                "[rollout]\nnum_generations = 8",
                "r.toml:2: rollout.num_generations: unknown key; use rollout.samples_per_prompt",
            ),
            ("steps = 3", "r.toml:1: steps: unknown key; use train.steps"),
            // Not train.optimizer.lr, which the warm-up does not read.
            (
                "[cold_start]\nlearning_rate = 1e-5",
                "r.toml:2: cold_start.learning_rate: unknown key; use cold_start.optimizer.lr",
            ),
            (
                "[cold_start]\nmax_steps = 5",
                "r.toml:2: cold_start.max_steps: unknown key; use cold_start.steps",
            ),
            (
                "[train]\nloss_type = \"dapo\"",
                "r.toml:2: train.loss_type: unknown key; use policy.loss and policy.aggregation",
            ),
            (
                "[algorithm]\nadv_estimator = \"grpo\"",
                "r.toml:2: algorithm.adv_estimator: unknown key; use policy.advantage",
            ),
            (
                "[actor_rollout_ref.rollout]\nn = 8",
                "r.toml:2: actor_rollout_ref.rollout.n: unknown key; use rollout.samples_per_prompt",
            ),
            (
                "[data]\nmax_response_length = 8",
                "r.toml:2: data.max_response_length: unknown key; use rollout.response_tokens_max",
            ),
            // [trainer] is similar to [train].
            (
                "[trainer]\nsave_freq = 8",
                "r.toml:2: trainer.save_freq: unknown key; use checkpoint.every_steps",
            ),
            // Nothing was said of such keys: "[trainer] has", and an empty list.
            (
                "[trainer]\nlogger = [\"console\"]",
                "r.toml:2: trainer.logger: unknown key; use logging.tensorboard; `rloss report` writes a page",
            ),
            (
                "[trainer]\nmax_actor_ckpt_to_keep = 2",
                "r.toml:2: trainer.max_actor_ckpt_to_keep: unknown key; use checkpoint.keep",
            ),
            (
                "[trainer]\nbalance_batch = true",
                "r.toml:2: trainer.balance_batch: unknown key; [trainer] is a table of verl, and this key has no counterpart; \
                 remove it",
            ),
            (
                "[train]\nsave_total_limit = 2",
                "r.toml:2: train.save_total_limit: unknown key; use checkpoint.keep",
            ),
            (
                "[data]\nfilter_overlong_prompts = true",
                "r.toml:2: data.filter_overlong_prompts: unknown key; use task.long_prompts, by default \"drop\"",
            ),
            (
                "[trainer]\ntotal_epochs = 3",
                "r.toml:2: trainer.total_epochs: unknown key; use train.data_epochs",
            ),
            (
                "[algorithm.filter_groups]\nenable = true",
                "r.toml:1: algorithm.filter_groups: unknown key; use rollout.resample_rounds_max; 0 means off",
            ),
            ("[adapter]\nr = 8", "r.toml:2: adapter.r: unknown key; use adapter.rank"),
            ("[lora]\nr = 8", "r.toml:2: lora.r: unknown key; use adapter.rank"),
            ("[adapter]\nlora_alpha = 8", "r.toml:2: adapter.lora_alpha: unknown key; use adapter.alpha"),
            (
                "[adapter]\ntarget_modules = \"all-linear\"",
                "r.toml:2: adapter.target_modules: unknown key; use adapter.targets",
            ),
            (
                "device = \"gpu\"",
                "r.toml:1: device: no such value \"gpu\"; give \"auto\", \"cpu\" or \"cuda\"; use device = \"cuda\"",
            ),
            (
                "[train]\nbatch_size = 8",
                "r.toml:2: train.batch_size: unknown key; use rollout.prompts_per_step, with \
                 rollout.samples_per_prompt samples per prompt; in [cold_start] use batch_size",
            ),
        ] {
            assert_eq!(refused(text), answer);
        }
        let all = refused("[adapter]\ntargets = \"all-linear\"");
        assert!(all.contains("; use adapter.targets = []: it adapts every matrix"), "{all}");
        let set = |set: &str| resolve(Path::new("r.toml"), "", &[set.to_owned()]).unwrap_err().to_string();
        assert!(set("device=gpu").ends_with("use device = \"cuda\""));
        assert!(set("trainer.logger=wandb").contains("trainer.logger: unknown key; use logging.tensorboard"));
        let dapo = refused("[policy]\nloss = \"dapo\"");
        assert!(dapo.starts_with("r.toml:2: policy.loss: no such value \"dapo\"; give \"ppo\""), "{dapo}");
        assert!(
            dapo.contains("; use policy.clip_high, policy.aggregation,") && dapo.contains("0.28"),
            "{dapo}"
        );
        assert_eq!(dapo.lines().count(), 1);
    }
}
