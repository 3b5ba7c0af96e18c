//! Adapters for a GGUF file whose blocks stay packed: training, resumes, a base that changes, older runs, and
//! the adapter in llama.cpp's form.

use super::adapter::LORA;
use super::*;
use rloss::checkpoint::gguf::GgufFile;
use rloss::checkpoint::tensor_file::TensorFile;
use rloss::integrity::Manifest;
use std::io::Read;

/// A run with an adapter for `file`.
fn run(file: &Path, out: &Path, sets: &[&str]) -> Command {
    let model = model_path(file);
    small(
        out,
        &LORA
            .iter()
            .copied()
            .chain([model.as_str(), "train.steps=3"])
            .chain(sets.iter().copied())
            .collect::<Vec<_>>(),
    )
}

/// A file of Q8_0 blocks in a folder of its own, and a run on it.
fn straight() -> (&'static Path, &'static Path) {
    static STRAIGHT: OnceLock<(TempDir, PathBuf, PathBuf)> = OnceLock::new();
    let (_, file, out) = STRAIGHT.get_or_init(|| {
        let (folder, [file, out]) = scratch(["q8.gguf", "run"]);
        let mut export = rloss();
        done(export.arg("export").arg(warm_model()).arg("--gguf").arg(&file).args(["--type", "q8_0"]));
        let kinds = GgufFile::open(&file).unwrap();
        assert!(kinds.tensors.values().filter(|tensor| tensor.dtype.name == "Q8_0").count() > 8);
        done(&mut run(&file, &out, &[]));
        (folder, file, out)
    });
    (file, out)
}

/// Copies the run with only its first checkpoint.
fn stopped_after_a_step(to: &Path) {
    let (_, straight) = straight();
    copy_folder_tree(straight, to);
    for step in 2..=3 {
        let _ = fs::remove_dir_all(to.join(format!("checkpoints/step-{step:06}")));
    }
}

fn copy_folder_tree(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let to = to.join(path.file_name().unwrap());
        match path.is_dir() {
            true => copy_folder_tree(&path, &to),
            false => {
                fs::copy(&path, to).unwrap();
            }
        }
    }
}

#[test]
fn a_run_on_packed_blocks_has_no_mismatch_and_resumes_to_the_same_bits() {
    let (file, straight) = straight();
    let rows = rows(straight);
    assert_eq!(phase(&rows, "rl").count(), 3);
    for row in phase(&rows, "rl") {
        assert_eq!(row["mismatch/logprob_abs_diff_max"], 0.0);
    }
    assert!(phase(&rows, "rl").any(|row| row["actor/grad_norm"].as_f64().unwrap() > 0.0));
    let (_folder, [out]) = scratch(["again"]);
    stopped_after_a_step(&out);
    done(run(file, &out, &[]).arg("--resume"));
    assert_same_results(&out, straight);
    let adapter =
        |run: &Path| fs::read(run.join("checkpoints/step-000003/adapter_model.safetensors")).unwrap();
    assert!(adapter(&out) == adapter(straight));
}

#[test]
fn bug_a_base_that_changed_beneath_a_run_was_not_noticed() {
    let (file, _) = straight();
    let (folder, [own, out]) = scratch(["own.gguf", "run"]);
    fs::copy(file, &own).unwrap();
    let changed = fs::read(&own).unwrap();
    let endless = ["train.steps=1000000", "checkpoint.every_steps=1"];
    let mut child = run(&own, &out, &endless).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = child.stderr.take().unwrap();
    let said = std::thread::spawn(move || {
        let mut text = String::new();
        said.read_to_string(&mut text).unwrap();
        text
    });
    let metrics = out.join("metrics.jsonl");
    assert!(wait_until(&mut child, || line_count(&metrics) >= 4), "{}", said.join().unwrap());
    // Equal content at another time is no change. A step that is under way has been checked before.
    fs::write(folder.path().join("new"), &changed).unwrap();
    fs::rename(folder.path().join("new"), &own).unwrap();
    let seen = line_count(&metrics);
    let goes_on = wait_until(&mut child, || line_count(&metrics) >= seen + 3);
    assert!(goes_on, "the same content is refused: {}", said.join().unwrap());
    fs::write(&own, &changed[..changed.len() / 2]).unwrap();
    let (ended, said) = (child.wait().unwrap(), said.join().unwrap());
    assert_eq!(ended.code(), Some(2), "{said}");
    assert!(said.contains("own.gguf"), "{said}");
    refused(run(&own, &out, &endless).arg("--resume"), &["own.gguf"]);
}

#[test]
fn a_run_of_an_older_version_keeps_its_rounded_weights() {
    let (_, straight) = straight();
    let (folder, [old]) = scratch(["old"]);
    copy_folder_tree(straight, &old);
    let checkpoint = old.join("checkpoints/step-000003");
    let base = checkpoint.join("base.json");
    let text = text_of(&base);
    assert!(text.contains("exact_blocks"), "{text}");
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    let value = serde_json::json!({"path": value["path"], "digest": value["digest"]});
    fs::write(&base, value.to_string()).unwrap();
    let mut manifest = Manifest::read(&checkpoint).unwrap().unwrap();
    manifest.record("base.json", blake3::hash(value.to_string().as_bytes()));
    manifest.write(&checkpoint).unwrap();
    let said = |run: &Path| {
        let mut command = rloss();
        command.args(["eval"]).arg(run).args(["--set", "eval.problems_max=2", "--out"]);
        done(command.arg(folder.path().join(run.file_name().unwrap()).with_extension("eval"))).stderr
    };
    assert!(said(&old).contains("rounded the weights of quantised GGUF files to bf16"), "{}", said(&old));
    assert!(!said(straight).contains("rounded the weights"));
}

#[test]
fn an_adapter_is_written_in_the_form_of_llama_cpp() {
    let (model, folder) = (straight().0, TempDir::new().unwrap());
    let file = folder.path().join("adapter.gguf");
    let of_experts = folder.path().join("experts");
    done(&mut run(model, &of_experts, &["adapter.targets=[\"*.experts.*\"]", "train.steps=1"]));
    let words = ["factors of experts", "--merged"];
    refused(rloss().arg("export").arg(&of_experts).arg("--gguf").arg(&file), &words);
    assert!(!file.exists());
    let out = folder.path().join("attention");
    done(&mut run(model, &out, &["adapter.targets=[\"*.q_proj.*\", \"*.o_proj.*\"]"]));
    done(rloss().arg("export").arg(&out).arg("--gguf").arg(&file));
    let found = GgufFile::open(&file).unwrap();
    let text = |key: &str| format!("{:?}", found.metadata[key]);
    assert!(text("adapter.type").contains("lora") && text("general.type").contains("adapter"));
    assert!(text("adapter.lora.alpha").contains("12"), "{}", text("adapter.lora.alpha"));
    let stored = TensorFile::open(&out.join("checkpoints/step-000003/adapter_model.safetensors")).unwrap();
    let names = stored.metadata.offset_keys();
    assert_eq!(names.len(), found.tensors.len());
    for (name, tensor) in &found.tensors {
        let (matrix, factor) = name.rsplit_once(".weight.").unwrap();
        let layer = matrix.split('.').nth(1).unwrap();
        let stem = if matrix.ends_with("attn_q") { "q_proj" } else { "o_proj" };
        let end = if factor == "lora_a" { "lora_A.weight" } else { "lora_B.weight" };
        let theirs = names
            .iter()
            .find(|theirs| {
                theirs.contains(&format!("layers.{layer}.self_attn.{stem}")) && theirs.ends_with(end)
            })
            .unwrap();
        let info = stored.metadata.info(theirs).unwrap();
        assert_eq!(tensor.shape, info.shape, "{name}");
        let mut bytes = vec![0; tensor.dtype.bytes_of(tensor.shape.iter().product())];
        found.read_at(tensor, 0, &mut bytes).unwrap();
        assert!(bytes == stored.read(info).unwrap(), "{name}");
    }
}

#[test]
fn init_gives_a_file_of_blocks_an_adapter_and_check_says_what_decoding_costs() {
    let (file, _) = straight();
    let folder = TempDir::new().unwrap();
    let mut init = rloss();
    init.current_dir(folder.path())
        .args(["init", "mine", "--from"])
        .arg(quickstart())
        .arg("--model")
        .arg(file);
    done(&mut init);
    assert_has(&text_of(folder.path().join("mine.toml")), &["[adapter]\nrank = 8"]);
    let check = |path: &Path| {
        let mut check = rloss();
        check.args(["check"]).arg(path).arg("--set").arg(model_path(file));
        done(&mut check).stdout
    };
    let text = check(&folder.path().join("mine.toml"));
    assert!(text.contains("The weights stay packed as in the file, in Q8_0: "), "{text}");
    let text = check(&quickstart());
    assert!(text.contains("Training decodes weights in Q8_0: "), "{text}");
}
