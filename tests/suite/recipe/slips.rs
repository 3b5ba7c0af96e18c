//! Slips of a new user, each with the answer that names the cure.

use super::refused::{mistake, mistakes};
use super::*;
use rloss::recipe::{KeyScope, resolve_run_recipe};

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
    assert_eq!(mistake(&text, &[]), format!("{told} of rows"));
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

#[test]
fn the_old_name_of_the_chat_table_is_read_in_files_overrides_and_run_folders_with_one_line() {
    let path = Path::new("r.toml");
    let text = "[harmony]\nsystem_message = false\ndeveloper_instructions = \"Be brief.\"\n";
    let new = resolve(path, &text.replace("harmony", "chat"), &[]).unwrap();
    let said = "this table is called [chat] now; the old name is read";
    for old in [
        resolve(path, text, &[]).unwrap(),
        resolve_run_recipe(KeyScope::Train, path, &format!("{text}[task]\non_failure = \"drop\""), &[])
            .unwrap(),
        resolve(
            path,
            "[harmony]\nsystem_message = false",
            &["chat.developer_instructions=Be brief.".to_owned()],
        )
        .unwrap(),
    ] {
        assert_eq!(old.recipe, new.recipe);
        assert_eq!(old.warnings[0], format!("r.toml:1: harmony: {said}"));
    }
    let set = resolve(
        path,
        "[chat]\nsystem_message = false",
        &["harmony.developer_instructions=Be brief.".to_owned()],
    )
    .unwrap();
    assert_eq!((set.recipe, &*set.warnings[0]), (new.recipe, &*format!("--set: harmony: {said}")));
    assert!(new.warnings.iter().all(|warning| !warning.contains("harmony")), "{:?}", new.warnings);
    let both = resolve(path, "[chat]\nsystem_message = false\n[harmony]\nsystem_message = true\n", &[]);
    let both = both.unwrap_err().to_string();
    assert_eq!(both, "r.toml:3: harmony: [chat] is written too; move these keys there");
    let inside = resolve(path, "[harmony]\nsystem_mesage = false", &[]).unwrap_err().to_string();
    assert!(
        inside.ends_with("chat.system_mesage: unknown key; did you mean chat.system_message?"),
        "{inside}"
    );
}
