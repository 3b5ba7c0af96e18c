//! What a rollout is asked for.

use crate::harmony::Message;
use crate::ops::logits::Sampling;
use crate::random::Purpose;
use crate::recipe::Recipe;

/// Sampling, budgets and seeds of a rollout.
#[derive(Debug, Clone, PartialEq)]
pub struct RolloutSettings {
    pub sampling: Sampling,
    /// Stretches of sampled tokens in a trajectory: one more than its answered tool calls.
    pub turns_max: usize,
    /// Tokens sampled in a trajectory, all turns together.
    pub response_tokens_max: usize,
    /// Longest prompt, in tokens; a longer one is an error.
    pub prompt_tokens_max: usize,
    /// Sequences that an engine decodes together. Those that wait for a tool do not count.
    pub sequences_max: usize,
    /// Tool calls that run at the same time.
    pub tool_calls_concurrent_max: usize,
    /// Keep each token's chosen experts in the trajectory.
    pub keep_routes: bool,
    /// On a GPU: record the launches of decode.
    pub cuda_graphs: bool,
    /// The run's seed, what it is used for, and the step: with prompt, sample and turn they make a random stream.
    pub seed: u64,
    pub purpose: Purpose,
    pub step: u64,
    /// Messages put before every problem's own, as [`super::preamble`] makes them.
    pub preamble: Vec<Message>,
}

impl RolloutSettings {
    /// Training rollouts of step `step`.
    pub fn training(recipe: &Recipe, preamble: Vec<Message>, step: u64) -> Self {
        let rollout = &recipe.rollout;
        Self {
            sampling: Sampling {
                temperature: rollout.temperature,
                top_p: rollout.top_p,
                top_k: rollout.top_k,
                min_p: rollout.min_p,
            },
            turns_max: rollout.turns_max,
            response_tokens_max: rollout.response_tokens_max,
            prompt_tokens_max: rollout.prompt_tokens_max,
            sequences_max: rollout.sequences_max,
            tool_calls_concurrent_max: rollout.tool_calls_concurrent_max,
            keep_routes: rollout.keep_routes,
            cuda_graphs: rollout.cuda_graphs,
            seed: recipe.train.seed,
            purpose: Purpose::Sampling,
            step,
            preamble,
        }
    }

    /// The greedy sample of each prompt of step `step`, whose reward is a baseline; otherwise as in training.
    pub fn greedy(recipe: &Recipe, preamble: Vec<Message>, step: u64) -> Self {
        Self { sampling: Sampling::whole(0.0), keep_routes: false, ..Self::training(recipe, preamble, step) }
    }

    /// The evaluation after step `step`: its own sampling and seeds, the budgets of training, no arm.
    pub fn evaluation(recipe: &Recipe, preamble: Vec<Message>, step: u64) -> Self {
        let eval = &recipe.eval;
        let (temperature, top_p, top_k, min_p) = (eval.temperature, eval.top_p, eval.top_k, eval.min_p);
        Self {
            sampling: Sampling { temperature, top_p, top_k, min_p },
            keep_routes: false,
            purpose: Purpose::Evaluation,
            ..Self::training(recipe, preamble, step)
        }
    }
}
