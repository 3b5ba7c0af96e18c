//! Damage is found where it matters, named, and led away from: flipped bits, cut and edited files of runs
//! and models.

use super::*;

/// A run of two steps with a checkpoint after each stage and step, and a frozen reference.
struct Run {
    folder: TempDir,
}

const SETS: [&str; 5] = [
    "train.steps=2",
    "checkpoint.every_steps=1",
    "checkpoint.keep=9",
    "policy.kl.place=loss",
    "policy.kl.coefficient=0.1",
];

impl Run {
    fn new() -> Self {
        let run = Self { folder: TempDir::new().unwrap() };
        done(&mut small(&run.path(), &SETS));
        run
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("run")
    }

    /// Goes on to step 3.
    fn resume(&self) -> Command {
        let mut command = resumed(&self.path(), &SETS);
        command.args(["--set", "train.steps=3"]);
        command
    }
}

/// Runs what must be refused, and expects each of `words` in its message, which it returns.
fn refused(command: &mut Command, words: &[&str]) -> String {
    let output = output(command);
    let text = format!("{}{}", output.stdout, output.stderr);
    assert_eq!(output.code, Some(2), "{text}");
    assert_has(&text, words);
    text
}

fn verify(arguments: &[&Path]) -> Command {
    let mut command = rloss();
    command.arg("verify").args(arguments);
    command
}

/// Flips one bit in the middle of a file; the second time restores it.
fn flip(file: &Path) {
    let mut bytes = fs::read(file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    fs::write(file, bytes).unwrap();
}

#[test]
fn a_flipped_bit_in_any_file_of_a_checkpoint_is_found_and_led_away_from() {
    let run = Run::new();
    let checkpoint = run.path().join("checkpoints/step-000002");
    let names: Vec<String> =
        fs::read_dir(&checkpoint).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    assert!(names.len() >= 8, "{names:?}");
    let (out, sound) = (run.path(), "checkpoints/step-000001");
    for name in &names {
        flip(&checkpoint.join(name));
        refused(&mut verify(&[&out]), &["DAMAGED", name, "step-000001: the newest intact checkpoint"]);
        if ["model.safetensors", "manifest.b3"].contains(&name.as_str()) {
            refused(&mut run.resume(), &[name, "newest intact checkpoint is step-000001", "mv "]);
            refused(rloss().arg("eval").arg(&out), &[name, "newest intact checkpoint is step-000001"]);
        }
        flip(&checkpoint.join(name));
    }
    done(&mut verify(&[&out]));
    assert_has(&done(&mut verify(&[&out.join(sound)])).stdout, &["intact"]);
    // The command that the error gives is the way on.
    flip(&checkpoint.join("trainer.safetensors"));
    let text = refused(&mut run.resume(), &["step-000002/trainer.safetensors"]);
    let (_, command) = text.trim().split_once("again: ").expect("a command");
    assert!(Command::new("sh").args(["-c", command]).status().unwrap().success());
    assert!(out.join("damaged/step-000002").is_dir() && !checkpoint.exists());
    done(&mut run.resume());
    let whole = run.folder.path().join("whole");
    let mut straight = small(&whole, &SETS);
    done(straight.args(["--set", "train.steps=3", "--set", "eval.every_steps=0"]));
}

#[test]
fn a_changed_step_is_found_not_followed() {
    let run = Run::new();
    let state = run.path().join("checkpoints/step-000001/trainer.json");
    // A state that would make an old checkpoint the newest.
    replace(&state, "\"step\": 1", "\"step\": 9");
    refused(&mut verify(&[&run.path()]), &["step-000001/trainer.json"]);
    done(&mut run.resume());
    // Without a manifest the name still tells.
    fs::remove_file(state.with_file_name("manifest.b3")).unwrap();
    refused(&mut verify(&[&run.path()]), &["step-000001/manifest.b3: is missing"]);
    replace(&state, "\"metrics_digest\"", "\"was\"");
    replace(&state, "\"reference_digest\"", "\"was_too\"");
    refused(&mut verify(&[&run.path()]), &["step-000001/trainer.json", "it belongs to step-000009"]);
}

#[test]
fn a_cut_or_edited_recipe_is_found_and_an_edit_can_be_accepted() {
    let run = Run::new();
    let recipe = run.path().join("recipe.toml");
    let whole = text_of(&recipe);
    let copy = run.path().join("checkpoints/step-000002/trainer.toml");
    assert_eq!(text_of(copy), whole);
    for cut in [0, 10, whole.len() / 2, whole.len() - 1] {
        fs::write(&recipe, &whole[..cut]).unwrap();
        refused(&mut run.resume(), &["recipe.toml", "truncated or changed", "rloss verify --accept"]);
        refused(rloss().arg("eval").arg(run.path()), &["recipe.toml", "truncated or changed"]);
        assert_eq!(text_of(&recipe), &whole[..cut], "left as it was");
    }
    // Its head and its seal taken off, as if it came from elsewhere.
    let bare: String = whole.lines().filter(|l| !l.starts_with('#')).map(|l| format!("{l}\n")).collect();
    fs::write(&recipe, bare).unwrap();
    refused(&mut run.resume(), &["recipe.toml", "truncated or changed"]);
    fs::write(&recipe, whole.replace("\nkeep = 9", "\nkeep = 8")).unwrap();
    refused(&mut verify(&[&run.path()]), &["recipe.toml: it was truncated or changed"]);
    done(&mut verify(&[Path::new("--accept"), &run.path()]));
    done(&mut verify(&[&run.path()]));
    done(&mut run.resume());
    // Only a recipe can be accepted.
    fs::write(&recipe, "[train\n").unwrap();
    refused(&mut verify(&[Path::new("--accept"), &run.path()]), &["recipe.toml:1", "not TOML"]);
}

#[test]
fn changed_metrics_are_found_up_to_the_checkpoint() {
    let run = Run::new();
    let metrics = run.path().join("metrics.jsonl");
    let whole = fs::read(&metrics).unwrap();
    // The last row follows the first checkpoint, so that one is sound.
    let mut changed = whole.clone();
    let at = whole.len() - 10;
    changed[at] ^= 1;
    fs::write(&metrics, &changed).unwrap();
    refused(&mut run.resume(), &["metrics.jsonl: damaged", "newest intact checkpoint is step-000001"]);
    changed[20] ^= 1;
    fs::write(&metrics, &changed).unwrap();
    refused(&mut run.resume(), &["metrics.jsonl: damaged", "All checkpoints of the run are damaged"]);
    fs::remove_file(&metrics).unwrap();
    refused(&mut run.resume(), &["metrics.jsonl: is missing", "Restore the file", "model.path="]);
    fs::write(&metrics, &whole).unwrap();
    done(&mut run.resume());
}

#[test]
fn a_changed_reference_is_found() {
    let run = Run::new();
    let reference = run.path().join("reference.safetensors");
    flip(&reference);
    refused(&mut run.resume(), &["reference.safetensors: damaged"]);
    refused(&mut verify(&[&run.path()]), &["DAMAGED", "reference.safetensors"]);
    fs::remove_file(&reference).unwrap();
    refused(&mut run.resume(), &["reference.safetensors: cannot be read"]);
}

#[test]
fn a_model_from_elsewhere_is_unverified_for_verify_alone_and_can_be_given_a_manifest() {
    let (folder, [model]) = scratch(["model"]);
    copy_model(&first_checkpoint(baseline()), &model);
    let path = model_path(&model);
    let sets = [path.as_str(), "cold_start.steps=1", "train.steps=0"];
    let said = done(&mut small(&folder.path().join("a"), &sets)).stderr;
    assert!(!said.contains("manifest"), "{said}");
    let found = done(&mut verify(&[&model]));
    assert!(found.stdout.contains("cannot be verified, because it has no manifest"));
    done(&mut verify(&[Path::new("--accept"), &model]));
    done(&mut small(&folder.path().join("b"), &sets));
    flip(&model.join("config.json"));
    refused(&mut small(&folder.path().join("c"), &sets), &["model/config.json: damaged"]);
    refused(&mut verify(&[folder.path()]), &["neither a run folder nor a model"]);
}

#[test]
fn a_number_that_is_none_in_the_optimizers_state_is_refused() {
    let (_folder, [out]) = scratch(["run"]);
    done(&mut small(&out, &["train.steps=2"]));
    let checkpoint = out.join("checkpoints/step-000002");
    let tensors = checkpoint.join("trainer.safetensors");
    let mut bytes = fs::read(&tensors).unwrap();
    let last = bytes.len() - 4;
    bytes[last..].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&tensors, bytes).unwrap();
    // Accepted, so that only the value itself can tell.
    done(&mut verify(&[Path::new("--accept"), &checkpoint]));
    refused(&mut resumed(&out, &[]), &["step-000002/trainer.safetensors", "NaN"]);
}

#[test]
fn what_a_removal_left_is_cleared_and_counts_as_nothing() {
    let run = Run::new();
    let old = run.path().join("checkpoints/.step-000003.old.partial");
    copy_folder(&run.path().join("checkpoints/step-000002"), &old);
    fs::remove_file(old.join("model.safetensors")).unwrap();
    done(&mut verify(&[&run.path()]));
    done(&mut run.resume());
    assert!(!old.exists());
}

#[test]
fn what_is_whole_goes_on_as_before() {
    let (_folder, [out, straight]) = scratch(["run", "straight"]);
    let constant = "train.optimizer.schedule=constant";
    done(&mut small(&straight, &[constant]));
    done(&mut small(&out, &[constant, "train.steps=2"]));
    done(&mut verify(&[&out]));
    done(&mut resumed(&out, &[constant]));
    done(&mut verify(&[&out]));
    assert_same_results(&out, &straight);
}
