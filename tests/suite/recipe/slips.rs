//! Slips of a new user, each with the answer that names the cure.

use super::refused::{mistake, mistakes};

/// Only the second line was told, and not which key.
#[test]
fn a_duplicate_key_is_named_with_both_lines() {
    for (text, told) in [
        (
            "[train]\nsteps = 3\n\nsteps = 4",
            "r.toml:4: not TOML: duplicate key steps, already on line 2; remove one of them",
        ),
        (
            "[train]\nsteps = 3\n[eval] # last\nsamples = 1\n[train]\nseed = 1",
            "r.toml:5: not TOML: duplicate key [train], already on line 1; remove one of them",
        ),
        (
            "[eval]\nsamples = 1\n[train]\nsteps = 1\noptimizer.lr = 1.0\noptimizer.lr = 2.0",
            "r.toml:6: not TOML: duplicate key optimizer.lr, already on line 5; remove one of them",
        ),
    ] {
        assert_eq!(mistakes(text, &[])[0], told, "{text}");
    }
}

/// "no file at FOLDER; fetch the data" was said of a folder that holds it.
#[test]
fn a_folder_in_place_of_a_file_is_told_with_the_files_in_it() {
    let folder = tempfile::TempDir::new().unwrap();
    let shown = folder.path().display();
    let text =
        format!("[task]\nname = \"gsm8k\"\nvalidation_file = \"Cargo.toml\"\ntrain_file = \"{shown}\"");
    let told = format!("r.toml:4: task.train_file: {shown} is a folder; name a file");
    assert_eq!(mistake(&text, &[]), format!("{told} of JSON lines"));
    for name in ["train.jsonl", "test.jsonl.gz", "notes.txt"] {
        std::fs::write(folder.path().join(name), "").unwrap();
    }
    assert_eq!(mistake(&text, &[]), format!("{told} in that folder: test.jsonl.gz, train.jsonl"));
}

#[test]
fn a_misspelt_base_is_answered_with_the_recipes_that_are_like_it() {
    let told = mistake("base = \"gsm8k_qwen_lra\"", &[]);
    assert!(told.contains("did you mean gsm8k_qwen_lora or gsm8k_qwen? give the path"), "{told}");
}
