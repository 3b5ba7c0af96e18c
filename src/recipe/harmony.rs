//! `[harmony]`: the system and developer messages put before every prompt.

use super::table::table;
pub use crate::harmony::ReasoningEffort;

table! {
    /// The system and developer messages put before every prompt. Nothing here depends on the day of the run.
    pub struct Harmony {
        /// Whether prompts begin with a system message; without one the other keys of this table but the last have no effect.
        /// Default true, but false with the embedded vocabulary, where a byte is a token.
        pub system_message: Option<bool> = None,
        /// First line of the system message; absent means the family's own: `You are ChatGPT, a large language model trained by
        /// OpenAI.` of GPT-OSS, `You are Qwen, created by Alibaba Cloud. You are a helpful assistant.` of Qwen2.
        pub model_identity: Option<String> = None,
        /// Knowledge cutoff in the system message, as `YYYY-MM`; absent means `2024-06`. GPT-OSS only.
        pub knowledge_cutoff: Option<String> = None,
        /// Current date in the system message, as `YYYY-MM-DD`; absent means no such line. GPT-OSS only.
        pub current_date: Option<String> = None,
        /// Reasoning effort in the system message; absent means `medium`. GPT-OSS only.
        pub reasoning_effort: Option<ReasoningEffort> = None,
        /// Instructions in a developer message; absent means none. GPT-OSS only: ChatML has no such message.
        pub developer_instructions: Option<String> = None,
    }
}
