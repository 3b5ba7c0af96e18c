//! Bad input: what the user gave is wrong, and the message says where and what to do, often a command. And the exit codes.

/// Done.
pub const EXIT_DONE: u8 = 0;
/// Failed while working.
pub const EXIT_FAILED: u8 = 1;
/// Bad input: a recipe, data, a checkpoint, the command line.
pub const EXIT_BAD_INPUT: u8 = 2;
/// Done, and what was compared differs.
pub const EXIT_DIFFERS: u8 = 3;
/// Stopped by a signal, after a checkpoint.
pub const EXIT_STOPPED: u8 = 130;

/// An error in something the user gave: a recipe, a data file, a checkpoint, a command line.
///
/// The text is one paragraph that names the place (file and line, key path, row) and the remedy.
/// Anywhere in an `anyhow` chain it turns the exit code into 2; every other error exits with 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadInput(pub String);

impl std::fmt::Display for BadInput {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for BadInput {}

/// The failure of a process whose neighbour has told why: it ends with the same exit code and says nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReportedElsewhere {
    pub is_bad_input: bool,
}

impl std::fmt::Display for ReportedElsewhere {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("another rank has told why")
    }
}

impl std::error::Error for ReportedElsewhere {}

/// `word` as a shell takes it.
pub fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=+:,@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// `bad_input!("{}: row {}: …", …)`: an [`anyhow::Error`] that carries [`BadInput`].
#[macro_export]
macro_rules! bad_input {
    ($($arg:tt)*) => { ::anyhow::Error::new($crate::error::BadInput(format!($($arg)*))) };
}

#[cfg(test)]
mod tests {
    use super::quoted;

    #[test]
    fn a_word_is_quoted_where_a_shell_would_part_or_expand_it() {
        assert_eq!(quoted("runs/a-1"), "runs/a-1");
        assert_eq!(quoted("my run"), "'my run'");
        assert_eq!(quoted("it's $HOME"), r"'it'\''s $HOME'");
        assert_eq!(quoted(""), "''");
    }
}
