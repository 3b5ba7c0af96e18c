//! `[rollout]`, `[eval]` and `[harmony]`, and the plan of one rollout.

use crate::harmony::ReasoningEffort;
use crate::ops::logits::SamplingParameters;
use crate::random::Purpose;
use crate::settings::{above, from, table};

table! {
    /// Sampling of trajectories for training.
    pub struct RolloutSettings {
        /// Prompts of a training step.
        pub prompts_per_step: usize = 8 => from(1.0).to(1e6),
        /// Samples of a prompt: the group over which advantages are computed.
        pub samples_per_prompt: usize = 8 => from(1.0).to(1e6),
        /// Dynamic sampling (DAPO): maximum number of rounds that replace groups whose rewards are all
        /// equal by groups of new prompts; 0 means none.
        pub resample_rounds_max: u64 = 0 => from(0.0).to(1000.0),
        /// Sampling temperature; log-probabilities are those of the distribution sampled from.
        pub temperature: f64 = 1.0 => above(0.0).to(100.0),
        /// Nucleus sampling: only 1 (off) in training.
        pub top_p: f64 = 1.0 => above(0.0).to(1.0),
        /// Keep the k likeliest tokens: only 0 (off) in training.
        pub top_k: usize = 0,
        /// Keep tokens with at least this share of the likeliest one's probability: only 0 (off) in training.
        pub min_p: f64 = 0.0 => from(0.0).to(1.0),
        /// Assistant turns of a trajectory, so one more than its answered tool calls.
        pub turns_max: usize = 3 => from(1.0).to(1e6),
        /// Longest prompt, in tokens; a longer one is an error.
        pub prompt_tokens_max: usize = 2048 => from(1.0).to(16777216.0),
        /// Tokens sampled in a trajectory, all turns together.
        pub response_tokens_max: usize = 72 => from(1.0).to(16777216.0),
        /// Sequences that a worker decodes together.
        pub sequences_max: usize = 64 => from(1.0).to(65536.0),
        /// Tool calls that run at the same time.
        pub tool_calls_concurrent_max: usize = 64 => from(1.0).to(65536.0),
        /// Keep each token's routed experts in the trajectory.
        pub keep_routes: bool = false,
        /// Decode with CUDA graphs on a GPU. The bits are the same.
        pub cuda_graphs: bool = true,
    }
}

table! {
    /// Success on held-out problems.
    pub struct EvalSettings {
        /// Training steps between evaluations, the last step always included; 0 means never during training.
        pub every_steps: u64 = 10,
        /// Number of held-out problems to evaluate, from the first on.
        pub problems_max: usize = 512 => from(1.0),
        /// Samples of a problem: the k of mean@k.
        pub samples: usize = 1 => from(1.0).to(1e6),
        /// Sampling temperature; 0 means greedy.
        pub temperature: f64 = 1.0 => from(0.0).to(100.0),
        /// Nucleus sampling: keep the likeliest tokens up to this probability; 1 means off.
        pub top_p: f64 = 1.0 => above(0.0).to(1.0),
        /// Keep the k likeliest tokens; 0 means off.
        pub top_k: usize = 0,
        /// Keep tokens with at least this share of the likeliest one's probability; 0 means off.
        pub min_p: f64 = 0.0 => from(0.0).to(1.0),
        /// Also evaluate before the first step of reinforcement learning.
        pub before_training: bool = true,
        /// The k of each pass@k that is reported; none above `samples`.
        pub pass_at: Vec<usize> = Vec::new() => from(1.0),
    }
}

table! {
    /// The system and developer messages put before every prompt. Nothing here depends on the day of the run.
    pub struct SystemPromptSettings {
        /// Whether prompts begin with a system message. If false, only `developer_instructions` has an
        /// effect among the other keys. Default true, but false with the embedded vocabulary, where each
        /// byte is a token.
        pub system_message: Option<bool> = None,
        /// First line of the system message; absent means the family's own: `You are ChatGPT, a large
        /// language model trained by OpenAI.` of GPT-OSS, `You are Qwen, created by Alibaba Cloud. You are
        /// a helpful assistant.` of Qwen2, none of Qwen3.
        pub model_identity: Option<String> = None,
        /// Knowledge cutoff in the system message, as `YYYY-MM`; absent means `2024-06`. GPT-OSS only.
        pub knowledge_cutoff: Option<String> = None,
        /// Current date in the system message, as `YYYY-MM-DD`; absent means no such line. GPT-OSS only.
        pub current_date: Option<String> = None,
        /// Reasoning effort in the system message; absent means `medium`. GPT-OSS only.
        pub reasoning_effort: Option<ReasoningEffort> = None,
        /// Whether Qwen3 thinks before it answers. If false, each of its turns begins with an empty thought,
        /// which it does not sample. Absent means true. Qwen3 only.
        pub enable_thinking: Option<bool> = None,
        /// Instructions in GPT-OSS's developer message, or at the end of ChatML's system message; absent
        /// means none.
        pub developer_instructions: Option<String> = None,
    }
}

/// Plan of one rollout: its settings and the ids of its random streams.
#[derive(Debug, Clone, PartialEq)]
pub struct RolloutPlan {
    pub settings: RolloutSettings,
    /// The run's seed, the purpose and the step. With prompt, sample and turn they select a random stream.
    pub seed: u64,
    pub purpose: Purpose,
    pub step: u64,
}

impl RolloutPlan {
    /// Returns the plan of training step `step`.
    pub fn for_training(settings: &RolloutSettings, seed: u64, step: u64) -> Self {
        Self { settings: settings.clone(), seed, purpose: Purpose::Sampling, step }
    }

    /// Returns the plan of step `step`'s greedy samples, whose rewards are baselines.
    pub fn for_greedy_baseline(settings: &RolloutSettings, seed: u64, step: u64) -> Self {
        let sampling = SamplingParameters::with_temperature(0.0);
        Self::for_training(&settings.with_sampling(sampling), seed, step)
    }

    /// Returns the plan of the evaluation after step `step`. It has its own sampling and seeds, the budgets
    /// of training, and no ablation.
    pub fn for_evaluation(settings: &RolloutSettings, eval: &EvalSettings, seed: u64, step: u64) -> Self {
        let &EvalSettings { temperature, top_p, top_k, min_p, .. } = eval;
        let settings = settings.with_sampling(SamplingParameters { temperature, top_p, top_k, min_p });
        Self { purpose: Purpose::Evaluation, ..Self::for_training(&settings, seed, step) }
    }
}

impl RolloutSettings {
    /// Returns the sampling parameters.
    pub fn sampling(&self) -> SamplingParameters {
        let &Self { temperature, top_p, top_k, min_p, .. } = self;
        SamplingParameters { temperature, top_p, top_k, min_p }
    }

    /// Returns these settings with other sampling, for samples that are not trained on. Routed experts are
    /// not kept.
    fn with_sampling(&self, sampling: SamplingParameters) -> Self {
        let SamplingParameters { temperature, top_p, top_k, min_p } = sampling;
        Self { temperature, top_p, top_k, min_p, keep_routes: false, ..self.clone() }
    }
}
