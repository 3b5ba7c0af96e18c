//! The checksum of a run's recipe. It is stored in comments before and after the text, so that one file holds
//! the recipe and the checksum, and one atomic write replaces both.
//!
//! The first line says that a last line follows. So a file that was truncated at either end can be
//! distinguished from a file that never had a checksum.

use super::MANIFEST_FILE;
use std::path::Path;

const HEAD: &str =
    "# A run's recipe, resolved and sealed. After a deliberate edit: rloss verify --accept FOLDER\n";
const TAIL: &str = "# seal: ";

/// Adds the checksum to `text`.
pub fn add_checksum(text: &str) -> String {
    let body = format!("{HEAD}{text}");
    let digest = blake3::hash(body.as_bytes());
    format!("{body}{TAIL}{digest}\n")
}

/// The state of a recipe's checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChecksumStatus {
    /// The text is unchanged.
    Valid,
    /// The text was truncated or changed.
    Invalid,
    /// The text has no checksum.
    Missing,
}

impl ChecksumStatus {
    /// Compares `text`, the recipe of the run folder `run`, with its checksum. If the checkpoints of the run
    /// have manifests, the recipe must have a checksum.
    pub fn check(text: &str, run: &Path) -> Self {
        let body = text.strip_suffix('\n').unwrap_or(text);
        let start = body.rfind('\n').map_or(0, |at| at + 1);
        let (lines, last) = text.split_at(start);
        let digest = blake3::hash(lines.as_bytes());
        if lines.starts_with(HEAD) && last == format!("{TAIL}{digest}\n") {
            return ChecksumStatus::Valid;
        }
        let has_part = text.contains(HEAD.trim_end()) || text.contains(TAIL);
        let must_have = || {
            let entries = std::fs::read_dir(run.join("checkpoints")).into_iter().flatten().flatten();
            entries.into_iter().any(|entry| entry.path().join(MANIFEST_FILE).exists())
        };
        // A resolved recipe has keys, so a text without `=` was truncated.
        if has_part || !text.contains('=') || must_have() {
            ChecksumStatus::Invalid
        } else {
            ChecksumStatus::Missing
        }
    }
}

/// Returns `text` without its checksum, valid or not.
pub fn remove_checksum(text: &str) -> String {
    let kept = text.split_inclusive('\n').filter(|line| *line != HEAD && !line.starts_with(TAIL));
    kept.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_change_makes_the_checksum_invalid() {
        let nowhere = Path::new("/nonexistent");
        let plain = "[train]\nsteps = 3\n";
        let text = add_checksum(plain);
        assert_eq!(ChecksumStatus::check(&text, nowhere), ChecksumStatus::Valid);
        assert_eq!(remove_checksum(&text), plain);
        assert_eq!(ChecksumStatus::check(plain, nowhere), ChecksumStatus::Missing);
        for cut in 0..text.len() {
            assert_eq!(ChecksumStatus::check(&text[..cut], nowhere), ChecksumStatus::Invalid, "cut at {cut}");
            if cut > 0 {
                assert_eq!(
                    ChecksumStatus::check(&text[cut..], nowhere),
                    ChecksumStatus::Invalid,
                    "begun at {cut}"
                );
            }
        }
        for bit in 0..text.len() * 8 {
            let mut bytes = text.clone().into_bytes();
            bytes[bit / 8] ^= 1 << (bit % 8);
            let changed = String::from_utf8_lossy(&bytes);
            assert_eq!(ChecksumStatus::check(&changed, nowhere), ChecksumStatus::Invalid, "bit {bit}");
        }
    }

    #[test]
    fn a_run_whose_checkpoints_have_manifests_has_a_checksum_in_its_recipe() {
        let run = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(run.path().join("checkpoints/step-000001")).unwrap();
        assert_eq!(ChecksumStatus::check("[train]\nsteps = 3\n", run.path()), ChecksumStatus::Missing);
        std::fs::write(run.path().join("checkpoints/step-000001").join(MANIFEST_FILE), "").unwrap();
        assert_eq!(ChecksumStatus::check("[train]\nsteps = 3\n", run.path()), ChecksumStatus::Invalid);
    }
}
