//! Keys and values of other trainers, with the recipe keys that correspond to them. docs/POLICY.md explains
//! the differences.

use crate::settings::OtherTrainerName;

/// Keys of TRL, PEFT and verl: their names, the keys of the recipe, and after `|` a note.
const KEYS: &str = "\
# TRL, with the names of PEFT and verl for the same.
num_generations n -> rollout.samples_per_prompt
max_completion_length max_response_length -> rollout.response_tokens_max
max_prompt_length -> rollout.prompt_tokens_max
per_device_train_batch_size -> rollout.prompts_per_step train.micro_batch_tokens
gradient_accumulation_steps -> train.micro_batch_tokens |; the gradients of a step are always summed
steps_per_generation -> train.minibatches
num_iterations ppo_epochs -> train.epochs
beta -> policy.kl.place policy.kl.coefficient |; TRL adds it to the loss (place = \"loss\")
epsilon clip_ratio -> policy.clip_low policy.clip_high
epsilon_high clip_ratio_high -> policy.clip_high
delta clip_ratio_c -> policy.dual_clip
scale_rewards -> policy.advantage |: \"grpo\", \"dr_grpo\" or \"grpo_batch_std\"
loss_type -> policy.loss policy.aggregation
importance_sampling_level -> policy.loss |; \"gspo\" has one ratio per sequence
sapo_temperature_pos tau_pos -> policy.sapo.temperature_positive
sapo_temperature_neg tau_neg -> policy.sapo.temperature_negative
vespo_k_pos -> policy.vespo.power_positive
vespo_lambda_pos -> policy.vespo.decay_positive
vespo_k_neg -> policy.vespo.power_negative
vespo_lambda_neg -> policy.vespo.decay_negative
off_policy_mask_threshold -> policy.correction.off_policy_mask
learning_rate lr -> train.optimizer.lr
lr_scheduler_type warmup_style -> train.optimizer.schedule
warmup_ratio lr_warmup_steps -> train.optimizer.warmup_steps
max_grad_norm clip_grad -> train.optimizer.grad_norm_max
steps max_steps total_training_steps -> train.steps
num_train_epochs total_epochs -> train.data_epochs
save_steps save_freq -> checkpoint.every_steps
eval_steps test_freq -> eval.every_steps
logging_steps -> logging.console_every_steps
model_name_or_path -> model.path
torch_dtype -> model.dtype
max_new_tokens -> rollout.response_tokens_max
eval_strategy -> eval.every_steps |; 0 means none
batch_size -> rollout.prompts_per_step |, with rollout.samples_per_prompt samples per prompt; in \
    [cold_start] use batch_size
use_vllm -> rollout |; sampling and training use one forward pass, without a second engine
gradient_checkpointing -> train.recompute_layers
bf16 -> model.dtype
report_to -> logging.tensorboard |; `rloss report` writes a page; for trackio, wandb and mlflow: \
    examples/trackers/track.py
log_completions -> logging.trajectories_per_step
reward_funcs -> task.file task.rewards |, with task.name = \"python\": the functions stay as they are
reward_weights -> task.rewards
multi_objective_aggregation -> policy.advantage |; \"normalize_then_sum\" is \"gdpo\"
save_total_limit max_actor_ckpt_to_keep max_critic_ckpt_to_keep -> checkpoint.keep
run_name output_dir project_name experiment_name default_local_dir -> logging |: `rloss train --out FOLDER` \
    names the folder
optim -> train.optimizer.kind
generation_batch_size -> rollout.prompts_per_step rollout.samples_per_prompt
mask_truncated_completions -> policy.truncated | = \"mask\"
# PEFT, with the names of verl for the same.
use_peft -> adapter
r lora_r lora_rank -> adapter.rank
use_rslora -> adapter.rslora
lora_target_parameters target_parameters target_modules lora_target_modules -> adapter.targets
exclude_modules -> adapter.targets |, which names the matrices to adapt
layers_to_transform -> adapter.targets |, such as \"model.layers.3.*\"
modules_to_save -> adapter |, which trains low-rank factors of matrices only
init_lora_weights -> adapter |, which always starts as PEFT does: A at random, B at 0
use_dora -> adapter |, which is LoRA, or rsLoRA with adapter.rslora
lora_alpha -> adapter.alpha
lora_dropout -> adapter.dropout
system_prompt -> chat.model_identity chat.developer_instructions
# verl
coef -> policy.kl.coefficient
tensor_model_parallel_size n_gpus_per_node nnodes -> parallel |: one process per GPU, started by torchrun, \
    srun or mpirun
gpu_memory_utilization -> rollout.sequences_max |; `rloss check` shows the memory plan
custom_reward_function -> task.file |, with task.name = \"python\": its compute_score stays as it is
logger -> logging.tensorboard |; `rloss report` writes a page
filter_overlong_prompts -> task.long_prompts |, by default \"drop\"
truncation -> task.long_prompts |; \"error\" is \"refuse\", and no prompt is cut
prompt_key -> task.columns
lr_warmup_steps_ratio -> train.optimizer.warmup_steps |, a number of steps
min_lr_ratio -> train.optimizer.lr_final_fraction
adam_beta1 -> train.optimizer.beta1
adam_beta2 -> train.optimizer.beta2
adam_epsilon -> train.optimizer.eps
val_before_train -> eval.before_training
resume_mode -> checkpoint |: `rloss train RUN --resume`, or `--resume=auto`
val_files -> task.validation_file
adv_estimator -> policy.advantage
norm_adv_by_std_in_grpo -> policy.advantage |; false is \"dr_grpo\"
loss_agg_mode -> policy.aggregation
loss_mode -> policy.loss
clip_ratio_low -> policy.clip_low
clip_cov_ratio -> policy.clip_cov.fraction
clip_cov_lb -> policy.clip_cov.covariance_min
clip_cov_ub -> policy.clip_cov.covariance_max
kl_cov_ratio -> policy.kl_cov.fraction
ppo_kl_coef -> policy.kl_cov.coefficient
train_batch_size -> rollout.prompts_per_step
ppo_mini_batch_size -> train.minibatches |, the number of minibatches (not their size)
ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu -> train.micro_batch_tokens
use_kl_loss -> policy.kl.place | = \"loss\"
use_kl_in_reward -> policy.kl.place | = \"reward\"
kl_loss_coef -> policy.kl.coefficient | with policy.kl.place = \"loss\"
kl_coef -> policy.kl.coefficient | with policy.kl.place = \"reward\"
kl_loss_type kl_penalty -> policy.kl.estimator
target_kl -> policy.kl.target
entropy_coeff -> policy.entropy_coefficient
rollout_is -> policy.correction.is
rollout_is_threshold -> policy.correction.threshold
rollout_rs -> policy.correction.reject
rollout_rs_threshold -> policy.correction.reject_bounds
filter_groups -> rollout.resample_rounds_max |; 0 means off
overlong_buffer -> policy.overlong.buffer_tokens
penalty_factor -> policy.overlong.penalty
train_files -> task.train_file";

/// Tables of verl that no recipe has.
pub(super) const TABLES: [&str; 6] =
    ["trainer", "data", "algorithm", "actor_rollout_ref", "reward_model", "ray_kwargs"];

/// Values of other trainers that the recipe does not have.
const WORDS: &str = "\
dapo -> policy.clip_high policy.aggregation rollout.resample_rounds_max policy.overlong.buffer_tokens |; \
    DAPO has clip_high = 0.28 and aggregation = \"token_mean\"
normalize_then_sum -> policy.advantage | = \"gdpo\"
gpu -> device | = \"cuda\"
all-linear -> adapter.targets | = []: it adapts every matrix that can have an adapter
bnpo -> policy.aggregation | = \"token_mean\"
vanilla -> policy.loss | = \"ppo\"
grpo -> policy.advantage | = \"grpo\" with policy.loss = \"ppo\"
dr_grpo -> policy.advantage | = \"dr_grpo\" with aggregation = \"constant\"
ppo -> policy.advantage | = \"gae\", with a critic
low_var_kl -> policy.kl.estimator | = \"k3\"
kl -> policy.kl.estimator | = \"k1\"
mse -> policy.kl.estimator | = \"k2\"";

/// Returns the entry for the value `word` of another trainer or, without a `word`, for its key `name`.
pub(super) fn find_name(name: &str, word: Option<&str>) -> Option<OtherTrainerName> {
    let (table, name) = word.map_or((KEYS, name), |word| (WORDS, word));
    entries(table).find(|entry| entry.names.split(' ').any(|known| known == name))
}

fn entries(table: &'static str) -> impl Iterator<Item = OtherTrainerName> {
    table.lines().filter_map(|line| {
        let (names, meaning) = line.split_once(" -> ")?;
        let (keys, note) = meaning.split_once(" |").unwrap_or((meaning, ""));
        Some(OtherTrainerName { names, keys, note })
    })
}

#[cfg(test)]
mod tests {
    use super::{KEYS, WORDS, entries};
    use crate::recipe::{Recipe, resolve};
    use std::path::Path;

    #[test]
    fn every_name_of_another_trainer_leads_to_a_key_that_exists() {
        let known: Vec<String> =
            Recipe::default().entries().iter().map(|entry| entry.path().to_owned()).collect();
        for foreign in entries(KEYS).chain(entries(WORDS)) {
            for key in foreign.keys.split(' ') {
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
