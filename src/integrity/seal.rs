//! The seal of a run's recipe: comments around the text, so that one file, replaced as a whole, holds both.
//!
//! A first line says that a last one follows, so that a file that was cut, at either end, is told from one that never had
//! a seal.

use super::MANIFEST_FILE;
use std::path::Path;

const HEAD: &str =
    "# A run's recipe, resolved and sealed. After a deliberate edit: rloss verify --accept FOLDER\n";
const TAIL: &str = "# seal: ";

/// `text` with its seal.
pub fn sealed(text: &str) -> String {
    let body = format!("{HEAD}{text}");
    let digest = blake3::hash(body.as_bytes());
    format!("{body}{TAIL}{digest}\n")
}

/// What the seal of a text says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seal {
    /// The text is what was sealed.
    Whole,
    /// The text was cut or changed since.
    Broken,
    /// The text has no seal.
    None,
}

impl Seal {
    /// The seal of `text`, the recipe of the run folder `run`. Where checkpoints have manifests, recipes have seals.
    pub fn of(text: &str, run: &Path) -> Self {
        let body = text.strip_suffix('\n').unwrap_or(text);
        let start = body.rfind('\n').map_or(0, |at| at + 1);
        let (lines, last) = text.split_at(start);
        let digest = blake3::hash(lines.as_bytes());
        if lines.starts_with(HEAD) && last == format!("{TAIL}{digest}\n") {
            return Seal::Whole;
        }
        let has_part = text.contains(HEAD.trim_end()) || text.contains(TAIL);
        let must_have = || {
            let entries = std::fs::read_dir(run.join("checkpoints")).into_iter().flatten().flatten();
            entries.into_iter().any(|entry| entry.path().join(MANIFEST_FILE).exists())
        };
        // A resolved recipe has keys.
        if has_part || !text.contains('=') || must_have() { Seal::Broken } else { Seal::None }
    }
}

/// `text` without its seal, whole or broken.
pub fn unsealed(text: &str) -> String {
    let kept = text.split_inclusive('\n').filter(|line| *line != HEAD && !line.starts_with(TAIL));
    kept.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seal_breaks_at_any_change() {
        let nowhere = Path::new("/nonexistent");
        let plain = "[train]\nsteps = 3\n";
        let text = sealed(plain);
        assert_eq!(Seal::of(&text, nowhere), Seal::Whole);
        assert_eq!(unsealed(&text), plain);
        assert_eq!(Seal::of(plain, nowhere), Seal::None);
        for cut in 0..text.len() {
            assert_eq!(Seal::of(&text[..cut], nowhere), Seal::Broken, "cut at {cut}");
            if cut > 0 {
                assert_eq!(Seal::of(&text[cut..], nowhere), Seal::Broken, "begun at {cut}");
            }
        }
        for bit in 0..text.len() * 8 {
            let mut bytes = text.clone().into_bytes();
            bytes[bit / 8] ^= 1 << (bit % 8);
            let changed = String::from_utf8_lossy(&bytes);
            assert_eq!(Seal::of(&changed, nowhere), Seal::Broken, "bit {bit}");
        }
    }

    #[test]
    fn a_run_whose_checkpoints_have_manifests_has_a_sealed_recipe() {
        let run = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(run.path().join("checkpoints/step-000001")).unwrap();
        assert_eq!(Seal::of("[train]\nsteps = 3\n", run.path()), Seal::None);
        std::fs::write(run.path().join("checkpoints/step-000001").join(MANIFEST_FILE), "").unwrap();
        assert_eq!(Seal::of("[train]\nsteps = 3\n", run.path()), Seal::Broken);
    }
}
