//! `warnings.jsonl`: the warnings of a run, for its report page.

use super::{Console, Phase, sanitize_line};
use crate::bounded_file::{self, ROWS_BYTES_MAX};
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// The file in a run's folder.
pub const WARNINGS_FILE: &str = "warnings.jsonl";

/// A warning. A warning without phase and step is about the whole run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Warning {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    pub text: String,
}

impl Warning {
    /// Returns a warning about a step, or about the evaluation after that step.
    pub fn for_step(phase: Phase, step: u64, text: String) -> Self {
        Self { phase: Some(phase), step: Some(step), text }
    }

    /// Returns a warning about the whole run.
    pub fn for_run(text: String) -> Self {
        Self { phase: None, step: None, text }
    }

    /// Returns the warning as one line for the console.
    pub fn line(&self) -> String {
        match self.step_text() {
            Some(place) => format!("warning: {place}: {}", self.text),
            None => format!("warning: {}", self.text),
        }
    }

    /// Returns the step in words; `None` for a warning about the whole run.
    pub fn step_text(&self) -> Option<String> {
        let step = self.step?;
        Some(match self.phase? {
            Phase::Rl => format!("step {step}"),
            Phase::Eval => format!("evaluation after step {step}"),
            Phase::SftWarmUp => format!("step {step} of the SFT warm-up"),
        })
    }

    /// Returns whether a run that resumes after step `last` of `phase` keeps the warning.
    pub fn precedes(&self, phase: Phase, last: u64) -> bool {
        match (self.phase, self.step) {
            (Some(Phase::SftWarmUp), Some(step)) => phase != Phase::SftWarmUp || step <= last,
            (Some(_), Some(step)) => phase != Phase::SftWarmUp && step <= last,
            // A resumed run reports such a warning again.
            _ => false,
        }
    }

    fn to_json(&self) -> Result<String> {
        Ok(serde_json::to_string(self)? + "\n")
    }
}

/// Number of failures that the console shows.
const FAILURES_SHOWN_MAX: u64 = 10;

/// The failures for which the policy is not responsible: those of the task's program, its tools and the
/// Python tool's workers.
#[derive(Default)]
pub(super) struct FailureCount {
    count: u64,
    /// The count in the last warning.
    warned: u64,
    last: String,
}

impl Console {
    /// Counts a failure for which the policy is not responsible, and prints the first ones. Returns whether
    /// the next one will be printed.
    pub fn report_failure(&self, text: &str) -> bool {
        self.report_failure_after("", text)
    }

    /// Counts a failure as [`Self::report_failure`] does. Prints `details`, such as a traceback, before it.
    pub fn report_failure_after(&self, details: &str, text: &str) -> bool {
        let text = sanitize_line(text).into_owned();
        let mut failures = self.failures();
        failures.count += 1;
        if failures.count <= FAILURES_SHOWN_MAX {
            details.lines().for_each(|line| self.print(&sanitize_line(line)));
            self.print(&format!("warning: {text}"));
        }
        if failures.count == FAILURES_SHOWN_MAX {
            self.print(
                "warning: further failures of the task's program, its tools and workers are only counted, as \
                 outcome/task_failed and tool/worker_died; their standard error is no longer shown",
            );
        }
        failures.last = text;
        failures.count < FAILURES_SHOWN_MAX
    }

    /// Returns the number of failures so far.
    pub fn failure_count(&self) -> u64 {
        self.failures().count
    }

    /// Returns a warning after the first failure, and again whenever their number has grown tenfold.
    pub fn take_failure_warning(&self) -> Option<String> {
        let mut failures = self.failures();
        let FailureCount { count, warned, last } = &mut *failures;
        if *count == 0 || *count < 10 * *warned {
            return None;
        }
        *warned = *count;
        Some(format!(
            "failures of the task's program, its tools or the Python tool's workers so far: {count}; the last one: {last}"
        ))
    }
}

/// Appends a warning to the file in `folder`.
///
/// # Errors
/// When the file cannot be written, or is a symbolic link.
pub fn append_warning(folder: &Path, warning: &Warning) -> Result<()> {
    let path = folder.join(WARNINGS_FILE);
    let file = OpenOptions::new().create(true).append(true).custom_flags(libc::O_NOFOLLOW).open(&path);
    file.map_err(anyhow::Error::from)
        .and_then(|mut file| Ok(file.write_all(warning.to_json()?.as_bytes())?))
        .with_context(|| format!("{}: cannot be written", path.display()))
}

/// Returns the text of a file with these `warnings`.
///
/// # Errors
/// None in practice.
pub fn warnings_text(warnings: &[Warning]) -> Result<String> {
    warnings.iter().map(Warning::to_json).collect()
}

/// Reads the warnings in `folder`; returns none if there is no file. Lines that cannot be read are skipped,
/// because the page is still useful without them.
pub fn read_warnings(folder: &Path) -> Vec<Warning> {
    let text = bounded_file::read(&folder.join(WARNINGS_FILE), ROWS_BYTES_MAX).unwrap_or_default();
    text.split(|&byte| byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_read_back_and_those_after_a_checkpoint_fall() {
        let folder = tempfile::TempDir::new().unwrap();
        let all = [
            Warning::for_run("memory".to_owned()),
            Warning::for_step(Phase::SftWarmUp, 3, "norm".to_owned()),
            Warning::for_step(Phase::Rl, 2, "all \"cut\"\n".to_owned()),
            Warning::for_step(Phase::Eval, 4, "no tool".to_owned()),
        ];
        all.iter().for_each(|warning| append_warning(folder.path(), warning).unwrap());
        assert_eq!(read_warnings(folder.path()), all);
        assert_eq!(
            std::fs::read_to_string(folder.path().join(WARNINGS_FILE)).unwrap(),
            warnings_text(&all).unwrap()
        );
        let kept = |phase, last| all.iter().map(|warning| warning.precedes(phase, last)).collect::<Vec<_>>();
        assert_eq!(kept(Phase::SftWarmUp, 2), [false; 4]);
        assert_eq!(kept(Phase::Rl, 2), [false, true, true, false]);
        assert_eq!(kept(Phase::Rl, 4), [false, true, true, true]);
        assert_eq!(all[3].line(), "warning: evaluation after step 4: no tool");
        assert!(read_warnings(&folder.path().join("none")).is_empty());
    }
}
