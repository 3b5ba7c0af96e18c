//! Errors in the user's input, and the exit codes. The message of an input error names its location and the
//! remedy.

/// Success.
pub const EXIT_SUCCESS: u8 = 0;
/// Failure during the work.
pub const EXIT_FAILED: u8 = 1;
/// Bad input: a mistake in a recipe, in data, in a checkpoint or on the command line.
pub const EXIT_BAD_INPUT: u8 = 2;
/// A comparison ran to its end and found a difference.
pub const EXIT_DIFFERS: u8 = 3;
/// Stopped by a signal, after writing a checkpoint.
pub const EXIT_STOPPED: u8 = 130;

/// An error in the user's input: a recipe, a data file, a checkpoint, a command line.
///
/// The message is one paragraph with the location (file and line, key path, row) and the remedy. An error
/// with `BadInput` anywhere in its `anyhow` chain exits with code 2. Every other error exits with code 1.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BadInput(pub String);

/// The error of a process that must print nothing, because another rank prints the actual error. Both
/// processes exit with the same code.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("another rank reports the error")]
pub struct ErrorOnOtherRank {
    pub is_bad_input: bool,
}

/// Quotes `word` for a shell.
pub fn shell_quote(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=+:,@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Makes an [`anyhow::Error`] that carries [`BadInput`]: `bad_input!("{}: row {}: …", …)`.
#[macro_export]
macro_rules! bad_input {
    ($($arg:tt)*) => { ::anyhow::Error::new($crate::error::BadInput(format!($($arg)*))) };
}

#[cfg(test)]
mod tests {
    use super::shell_quote;

    #[test]
    fn a_word_is_quoted_where_a_shell_would_part_or_expand_it() {
        assert_eq!(shell_quote("runs/a-1"), "runs/a-1");
        assert_eq!(shell_quote("my run"), "'my run'");
        assert_eq!(shell_quote("it's $HOME"), r"'it'\''s $HOME'");
        assert_eq!(shell_quote(""), "''");
    }
}
