//! `[harmony]`: the system and developer messages put before every prompt.

use super::table::table;
pub use crate::harmony::ReasoningEffort;

table! {
    /// The system and developer messages put before every prompt. Nothing here depends on the day of the run.
    pub struct Harmony {
        /// Whether prompts begin with a system message; without one the other keys of this table but the last have no effect.
        /// Default true, but false with the embedded vocabulary, where a byte is a token.
        pub system_message: Option<bool> = None,
        /// First line of the system message.
        pub model_identity: String = "You are ChatGPT, a large language model trained by OpenAI.".to_owned(),
        /// Knowledge cutoff in the system message, as `YYYY-MM`.
        pub knowledge_cutoff: String = "2024-06".to_owned(),
        /// Current date in the system message, as `YYYY-MM-DD`; absent means no such line.
        pub current_date: Option<String> = None,
        /// Reasoning effort in the system message.
        pub reasoning_effort: ReasoningEffort = ReasoningEffort::Medium,
        /// Instructions in a developer message; absent means none.
        pub developer_instructions: Option<String> = None,
    }
}
