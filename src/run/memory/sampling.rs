//! Memory of sampling: how many sequences are sampled at the same time, and what they need.

use super::{AvailableMemory, MemoryChoices, MemoryItem, MemoryPlanInput, ModelCommand, SecondWeights};
use crate::dist::RolloutWeightPlacement;
use crate::engine::{FORWARD_TOKENS_MAX, worker_count};
use crate::model::cache::SequenceCache;
use crate::model::rounding::WeightRounding;
use crate::ops::token_set::TokenSet;
use crate::serve::request_bytes_max;

/// Maximum bytes per sampled token of a set of kept tokens, in addition to the set itself: its allocation,
/// and references in the trajectory, the sequence and the micro-batches.
const TOKEN_SET_REFERENCES: usize = 96;

/// Number of kept tokens of a draw that the plan counts. Models keep 2 to 200 under `top_p` = 0.95. A step
/// that keeps more on average warns.
pub const KEPT_TOKENS_PLANNED: usize = 512;

/// Bytes of a token of a stored trajectory: its id, log-probability and mask, and about four characters of
/// its message.
const TRAJECTORY_TOKEN_BYTES: u64 = 16;

/// Maximum number of tokens that a rollout keeps of the text that its prompts share. A shared block is used
/// again and again, so the blocks of single prompts are removed first.
const SHARED_TOKENS_MAX: usize = 512;

impl MemoryPlanInput<'_> {
    /// Returns whether the command stores the kept tokens of each draw.
    fn keeps_token_sets(&self) -> bool {
        let samples = match self.command {
            ModelCommand::Train => self.recipe.train.steps > 0,
            ModelCommand::Rollout | ModelCommand::CheckMismatch(SecondWeights::Rounded(_)) => true,
            _ => false,
        };
        samples && self.recipe.rollout.sampling().draws_truncated()
    }

    /// Returns the bytes of the sets of kept tokens of a step's samples, of [`KEPT_TOKENS_PLANNED`] at most.
    /// Every process holds all of them.
    pub(super) fn token_set_bytes(&self) -> u64 {
        if !self.keeps_token_sets() {
            return 0;
        }
        let rollout = &self.recipe.rollout;
        let (prompts, samples) = self.rollout_size();
        let rounds = rollout.resample_rounds_max.saturating_add(1);
        let tokens = (prompts.saturating_mul(samples) as u64)
            .saturating_mul(rollout.response_tokens_max as u64)
            .saturating_mul(rounds)
            .saturating_mul(1 + self.steps_sampled_ahead());
        let top_k = if rollout.top_k > 0 { rollout.top_k } else { usize::MAX };
        let kept_max = top_k.min(KEPT_TOKENS_PLANNED);
        let set = TOKEN_SET_REFERENCES + TokenSet::bytes_max(self.config.vocab_size, kept_max);
        tokens.saturating_mul(set as u64)
    }

    /// Returns the number of prompts of a rollout, and the number of samples per prompt.
    pub fn rollout_size(&self) -> (usize, usize) {
        let recipe = self.recipe;
        match self.command {
            ModelCommand::Eval => (recipe.eval.problems_max, recipe.eval.samples),
            ModelCommand::Chat => (1, 1),
            ModelCommand::Serve => (recipe.rollout.sequences_max.saturating_mul(self.threads.max(1)), 1),
            _ => (recipe.rollout.prompts_per_step, recipe.rollout.samples_per_prompt),
        }
    }

    /// Returns the number of the engine's workers that decode in parallel.
    pub(super) fn engines(&self) -> usize {
        match self.effective_rollout_weights() {
            RolloutWeightPlacement::Whole => worker_count(self.weight_bytes(), self.threads),
            _ => 1,
        }
    }

    /// Returns the maximum number of sequences that this process samples at the same time, in a rollout or an
    /// evaluation.
    pub(super) fn concurrent_sequences(&self) -> usize {
        let (rollout, eval) = (&self.recipe.rollout, &self.recipe.eval);
        let local_sequences = |(prompts, samples): (usize, usize)| {
            prompts.div_ceil(self.placement.processes).saturating_mul(samples)
        };
        let evaluates = self.command.trains() && (eval.every_steps > 0 || eval.before_training);
        let evaluation = if evaluates { local_sequences((eval.problems_max, eval.samples)) } else { 0 };
        let sequences = local_sequences(self.rollout_size()).max(evaluation);
        // An agent's episode may have several requests at the same time.
        let sequences = if self.plays_agent() { usize::MAX } else { sequences };
        (rollout.sequences_max * self.engines()).min(sequences)
    }

    /// Returns the maximum number of prompts of a rollout or an evaluation in this process.
    pub(super) fn prompts_max(&self) -> usize {
        let eval = &self.recipe.eval;
        let evaluates = self.command.trains() && (eval.every_steps > 0 || eval.before_training);
        let problems = if evaluates { eval.problems_max } else { 0 };
        self.rollout_size().0.max(problems).div_ceil(self.placement.processes)
    }

    /// Returns whether sampling runs beside the update, with a copy of the trained weights.
    pub(super) fn samples_beside_the_update(&self) -> bool {
        let runs_ahead = self.command.trains() && self.recipe.rollout.lag_steps > 0;
        runs_ahead && self.placement.processes == 1
    }

    /// Returns whether two samplings may be in flight: on the CPU in one process, if no sampling continues
    /// the one before and the plan does not nearly fill the `available` memory.
    pub fn fits_two_samplings(&self, available: Option<&AvailableMemory>) -> bool {
        let choices = MemoryChoices { two_samplings: true, ..self.choices };
        let both = MemoryPlanInput { choices, ..self.clone() };
        let may_overlap = self.choices.gpu_sequences.is_none() && self.recipe.rollout.step_tokens_max == 0;
        self.samples_beside_the_update()
            && may_overlap
            && available.is_none_or(|memory| both.fits_without_warning(memory))
    }

    /// Returns the maximum number of samplings at the same time.
    pub(super) fn samplings_in_flight(&self) -> u64 {
        if self.choices.two_samplings { 2 } else { 1 }
    }

    /// Returns the bytes of the samples that are kept for later steps, and of partial trajectories.
    pub(super) fn sampled_ahead_bytes(&self) -> u64 {
        let (rollout, config) = (&self.recipe.rollout, self.config);
        let experts =
            if rollout.keep_routes { config.num_hidden_layers * config.num_experts_per_tok } else { 0 };
        let token_bytes = TRAJECTORY_TOKEN_BYTES + (experts * size_of::<u16>()) as u64;
        let steps = self.steps_sampled_ahead();
        let trajectories = rollout.prompts_per_step.saturating_mul(rollout.samples_per_prompt) as u64;
        steps.saturating_mul(trajectories).saturating_mul(self.longest_sequence() as u64 * token_bytes)
    }

    /// Returns the number of later steps whose samples training holds.
    fn steps_sampled_ahead(&self) -> u64 {
        let rollout = &self.recipe.rollout;
        if self.command.trains() { rollout.lag_steps + u64::from(rollout.step_tokens_max > 0) } else { 0 }
    }

    /// Returns the maximum number of tokens whose keys and values the command keeps for later requests.
    pub fn prefix_tokens_max(&self) -> usize {
        match self.command {
            _ if self.choices.gpu_sequences.is_some() => 0,
            ModelCommand::Chat | ModelCommand::Serve => self.recipe.rollout.prefix_tokens_max,
            _ if self.plays_agent() => self.recipe.rollout.prefix_tokens_max,
            _ => self.recipe.rollout.prefix_tokens_max.min(SHARED_TOKENS_MAX),
        }
    }

    /// Returns whether an agent's program plays the episodes of this command.
    pub(super) fn plays_agent(&self) -> bool {
        let samples =
            matches!(self.command, ModelCommand::Train | ModelCommand::Rollout | ModelCommand::Eval);
        samples && self.recipe.task.is_agent()
    }

    /// Returns the bytes of kept prefixes plus the bytes of the blocks that forward passes fill before they
    /// are kept.
    fn prefix_bytes(&self) -> u64 {
        match self.prefix_tokens_max() {
            0 => 0,
            kept => SequenceCache::block_bytes(self.config, kept + self.engines() * FORWARD_TOKENS_MAX),
        }
    }

    /// Returns the bytes of the requests to a server, and of its answers.
    fn request_bytes(&self) -> u64 {
        let has_server = self.command == ModelCommand::Serve || self.plays_agent();
        if has_server { request_bytes_max(self.longest_sequence()) as u64 } else { 0 }
    }

    /// Returns what sampling keeps in memory: KV caches at full length, kept prefixes, one forward pass per
    /// worker with its logits, and rounded or gathered weights.
    pub(super) fn sampling_items(&self) -> Vec<MemoryItem> {
        let (recipe, config) = (self.recipe, self.config);
        let is_sharded = self.shard_ranks() > 1 && self.command.trains();
        let gathered = is_sharded.then(|| self.sampling_gather_item());
        let is_distributed = self.effective_rollout_weights() != RolloutWeightPlacement::Whole;
        let rounded = match self.command {
            // With expert parallelism, weights are rounded when they are gathered, so no second set is
            // needed.
            ModelCommand::Train if is_distributed => 0,
            ModelCommand::Train | ModelCommand::Rollout => {
                self.rounded_weight_bytes(WeightRounding::from_ablations(&recipe.arms))
            }
            ModelCommand::Eval
            | ModelCommand::Chat
            | ModelCommand::Serve
            | ModelCommand::CheckMismatch(_) => 0,
        };
        let (engines, sequences) = (self.engines(), self.concurrent_sequences());
        let tokens = FORWARD_TOKENS_MAX.min(sequences * self.longest_sequence());
        // Each thread that samples has a copy of one row of logits.
        let mut row_copies = (self.threads * config.vocab_size * size_of::<f32>()) as u64;
        if self.keeps_token_sets() {
            // The ids of the row's tokens, and the kept logits.
            row_copies *= 3;
        }
        let forward = self.pass_shape(tokens, sequences.div_ceil(engines)).forward_bytes();
        let items = vec![
            MemoryItem::new(
                "keys and values",
                sequences as u64 * SequenceCache::bytes(config, self.longest_sequence()),
            ),
            MemoryItem::new("kept prefixes", self.prefix_bytes()),
            MemoryItem::new("requests and answers", self.request_bytes()),
            MemoryItem::new("one forward pass and its logits", engines as u64 * forward + row_copies),
            MemoryItem::new("weights, rounded", rounded),
            MemoryItem::new("weights in bf16, for decode", self.bf16_copy_bytes()),
        ];
        items.into_iter().chain(gathered).collect()
    }
}
