//! `[rollout]` and `[eval]`, and the plan of one rollout.

use crate::ops::logits::SamplingParameters;
use crate::random::Purpose;
use crate::settings::{above, from, table};

table! {
    /// Sampling of trajectories for training.
    pub struct RolloutSettings {
        /// Number of prompts per training step.
        pub prompts_per_step: usize = 8 => from(1.0).to(1e6),
        /// Number of samples per prompt (group size); at least 2 if the advantage compares groups.
        pub samples_per_prompt: usize = 8 => from(1.0).to(1e6),
        /// Dynamic sampling (DAPO): maximum number of extra sampling rounds. In each round, new prompts
        /// replace the groups whose rewards are all equal. 0 means no dynamic sampling. Refused with `gae`,
        /// `remax` and `reinforce_plus_plus`.
        pub resample_rounds_max: u64 = 0 => from(0.0).to(1000.0),
        /// Number of steps by which sampling runs ahead. Step t trains on what the weights after step
        /// t - 1 - `lag_steps` sampled. In a single process, sampling then runs beside the update. 0 means
        /// that each step trains on what the newest weights sampled. Above 0, refused with `agent` and
        /// `policy.old_logprob = "detach"` (the default).
        pub lag_steps: u64 = 0 => from(0.0).to(64.0),
        /// Partial trajectories: number of tokens of a trajectory that one step samples; more, if otherwise
        /// no group would end. A longer trajectory goes on in the next step, by the weights that sample then.
        /// A group is trained on in the step in which its last trajectory ends. 0 means that trajectories are
        /// sampled whole. Refused with the Python tool, `agent`, `remax`, dynamic sampling and
        /// `policy.old_logprob = "detach"` (the default).
        pub step_tokens_max: usize = 0 => from(0.0).to(16777216.0),
        /// Sampling temperature. Log-probabilities are those of the distribution at this temperature.
        pub temperature: f64 = 1.0 => above(0.0).to(100.0),
        /// Nucleus sampling: sample from the most likely tokens up to this cumulative probability; 1 means
        /// off. Training renormalises over the tokens that were kept at sampling, as with `top_k` and
        /// `min_p`; not on a GPU.
        pub top_p: f64 = 1.0 => above(0.0).to(1.0),
        /// Sample from the k most likely tokens; 0 means off.
        pub top_k: usize = 0,
        /// Sample from the tokens whose probability is at least this fraction of the most likely token's
        /// probability; 0 means off.
        pub min_p: f64 = 0.0 => from(0.0).to(1.0),
        /// Maximum number of assistant turns of a trajectory. A tool call in the last turn is not executed.
        pub turns_max: usize = 3 => from(1.0).to(1e6),
        /// Maximum number of tokens of a prompt. A longer prompt is an error.
        pub prompt_tokens_max: usize = 2048 => from(1.0).to(16777216.0),
        /// Maximum number of sampled tokens of a trajectory, over all turns.
        pub response_tokens_max: usize = 72 => from(1.0).to(16777216.0),
        /// Maximum number of sequences that one worker decodes together. A small model has one worker per
        /// thread, any other model has one worker.
        pub sequences_max: usize = 64 => from(1.0).to(65536.0),
        /// Number of tokens whose keys and values `serve`, `chat` and the task `agent` keep on a CPU; other
        /// rollouts keep up to 512 of them for what their prompts share. A later prompt that begins with the
        /// same tokens does not read them again. 0 keeps none. Does not change results.
        pub prefix_tokens_max: usize = 16384 => from(0.0).to(16777216.0),
        /// Maximum number of tool calls that run at the same time.
        pub tool_calls_concurrent_max: usize = 64 => from(1.0).to(65536.0),
        /// Whether the routed experts of each token are stored in the trajectory.
        pub keep_routes: bool = false,
        /// Whether decoding on a GPU uses CUDA graphs. They do not change the bits.
        pub cuda_graphs: bool = true,
    }
}

table! {
    /// Evaluation: the success rate on validation problems. `chat` and `serve` use its sampling parameters.
    pub struct EvalSettings {
        /// Number of training steps between evaluations; the last step is also evaluated. 0 means
        /// neither.
        pub every_steps: u64 = 10,
        /// Maximum number of problems of each validation set; the first ones are used.
        pub problems_max: usize = 512 => from(1.0),
        /// Number of samples per problem: the k of mean@k.
        pub samples: usize = 1 => from(1.0).to(1e6),
        /// Sampling temperature; 0 means greedy.
        pub temperature: f64 = 1.0 => from(0.0).to(100.0),
        /// Nucleus sampling: sample from the most likely tokens up to this cumulative probability; 1 means
        /// off.
        pub top_p: f64 = 1.0 => above(0.0).to(1.0),
        /// Sample from the k most likely tokens; 0 means off.
        pub top_k: usize = 0,
        /// Sample from the tokens whose probability is at least this fraction of the most likely token's
        /// probability; 0 means off.
        pub min_p: f64 = 0.0 => from(0.0).to(1.0),
        /// Whether an evaluation also runs before the first step of reinforcement learning.
        pub before_training: bool = true,
        /// The values of k for which pass@k is reported. Each k is at most `samples`.
        pub pass_at: Vec<usize> = Vec::new() => from(1.0),
    }
}

/// Plan of one rollout: its settings and the ids of its random streams.
#[derive(Debug, Clone, PartialEq)]
pub struct RolloutPlan {
    pub settings: RolloutSettings,
    /// The run's seed. It selects a random stream together with the purpose, step, prompt, sample and turn.
    pub seed: u64,
    pub purpose: Purpose,
    pub step: u64,
}

impl RolloutPlan {
    /// Returns the plan of training step `step`.
    pub fn for_training(settings: &RolloutSettings, seed: u64, step: u64) -> Self {
        Self { settings: settings.clone(), seed, purpose: Purpose::Sampling, step }
    }

    /// Returns the plan of the greedy samples of step `step`. Their rewards are baselines.
    pub fn for_greedy_baseline(settings: &RolloutSettings, seed: u64, step: u64) -> Self {
        let sampling = SamplingParameters::with_temperature(0.0);
        Self::for_training(&settings.with_sampling(sampling), seed, step)
    }

    /// Returns the plan of the evaluation after step `step`. The plan has the evaluation's sampling
    /// parameters and random streams, and the limits of training. Routed experts are not kept.
    pub fn for_evaluation(settings: &RolloutSettings, eval: &EvalSettings, seed: u64, step: u64) -> Self {
        let &EvalSettings { temperature, top_p, top_k, min_p, .. } = eval;
        let settings = settings.with_sampling(SamplingParameters { temperature, top_p, top_k, min_p });
        Self { purpose: Purpose::Evaluation, ..Self::for_training(&settings, seed, step) }
    }

    /// Returns whether each sampled token is stored with the tokens that it was drawn from. Training needs
    /// them.
    pub fn keeps_token_sets(&self) -> bool {
        self.purpose == Purpose::Sampling && self.settings.sampling().draws_truncated()
    }
}

impl RolloutSettings {
    /// Returns the sampling parameters.
    pub fn sampling(&self) -> SamplingParameters {
        let &Self { temperature, top_p, top_k, min_p, .. } = self;
        SamplingParameters { temperature, top_p, top_k, min_p }
    }

    /// Returns these settings with other sampling parameters, for samples that are not trained on. Routed
    /// experts are not kept.
    fn with_sampling(&self, sampling: SamplingParameters) -> Self {
        let SamplingParameters { temperature, top_p, top_k, min_p } = sampling;
        Self { temperature, top_p, top_k, min_p, keep_routes: false, ..self.clone() }
    }
}
