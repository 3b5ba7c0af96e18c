//! The keys that a command reads. Contradictions and missing files of all other keys are ignored.

/// A command. The command determines which keys are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyScope {
    /// Reads every key.
    Train,
    /// Continues a stored run: reads every key, but skips rules that were added after the run was started.
    TrainStoredRun,
    Rollout,
    Eval,
    /// A chat, which has no problems and no reward.
    Chat,
    CheckMismatch,
    /// `check-mismatch --against`: compares the tokens of a file, without sampling.
    CheckMismatchAgainst,
    /// Writes the model in a given format. Reads no problems and does not sample.
    Export,
}

/// The keys of `[rollout]` that every command with sampling reads.
const SAMPLING_KEYS: &str = "turns_max prompt_tokens_max response_tokens_max sequences_max \
    tool_calls_concurrent_max cuda_graphs";

impl KeyScope {
    /// Returns whether the command reads `key`, a dotted path.
    pub fn reads(self, key: &str) -> bool {
        let (table, name) = key.split_once('.').unwrap_or((key, ""));
        let samples_training_problems = matches!(self, KeyScope::Rollout | KeyScope::CheckMismatch);
        match table {
            _ if matches!(self, KeyScope::Train | KeyScope::TrainStoredRun) => true,
            "adapter" | "cold_start" | "critic" => false,
            "checkpoint" => self == KeyScope::Export && name == "dtype",
            "train" => ["seed", "micro_batch_tokens"].contains(&name),
            "policy" => self.is_check_mismatch() && name.starts_with("clip_"),
            "arms" => samples_training_problems || self.is_check_mismatch(),
            "rollout" => {
                samples_training_problems
                    || (self != KeyScope::Export && SAMPLING_KEYS.split(' ').any(|key| key == name))
            }
            "eval" => match self {
                KeyScope::Eval => !["every_steps", "before_training"].contains(&name),
                KeyScope::Chat => ["temperature", "top_p", "top_k", "min_p"].contains(&name),
                _ => false,
            },
            "task" if name.starts_with("train_") => samples_training_problems,
            "task" if name.starts_with("validation_") => self == KeyScope::Eval,
            _ => true,
        }
    }

    fn is_check_mismatch(self) -> bool {
        matches!(self, KeyScope::CheckMismatch | KeyScope::CheckMismatchAgainst)
    }
}
