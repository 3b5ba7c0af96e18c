//! What a user sees of a run.

use super::*;
use rloss::metrics::Warning;

#[test]
fn plain_lines_name_both_stages_and_the_end() {
    let (_folder, [out]) = scratch(["run"]);
    let output = done(&mut small(&out, &[]));
    assert!(output.stdout.is_empty());
    let text = output.stderr;
    let last: Vec<&str> = text.lines().collect();
    assert!(text.contains("SFT warm-up 4/4  loss "), "{text}");
    assert_has(&text, &["rl 4/4  reward ", "step 4: val-core/arithmetic/acc/mean@1 "]);
    let words = [
        "model    ",
        "gpt_oss, 4 layers, 286,048 parameters, all trainable",
        "task     arithmetic, with the embedded Python tool",
    ];
    assert_has(&text, &words);
    assert!(text.contains(&format!("folder   {}\n", out.display())), "{text}");
    let program = rloss::error::shell_quote(env!("CARGO_BIN_EXE_rloss"));
    let report = format!(
        "to see the results: {program} report {}",
        rloss::error::shell_quote(&out.display().to_string())
    );
    assert_eq!(last[last.len() - 2..], [format!("done: {}", out.display()), report]);
    assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{text:?}");
}

/// The page told none of them.
#[test]
fn the_warnings_of_the_console_are_kept_for_the_page() {
    let (_folder, [out]) = scratch(["run"]);
    // Every answer is cut, so no group has two rewards.
    let sets = ["rollout.response_tokens_max=2", "cold_start.steps=0", "train.on_bad_step=skip"];
    let told = done(&mut small(&out, &[&sets[..], &["train.steps=2"]].concat())).stderr;
    let of = |text: &str| -> Vec<String> {
        text.lines().filter(|line| line.starts_with("warning: ")).map(str::to_owned).collect()
    };
    let kept = || rloss::metrics::read_warnings(&out).iter().map(Warning::line).collect::<Vec<_>>();
    assert_eq!(kept(), of(&told));
    assert!(told.contains("warning: step 1: 8 of 8 trajectories reached response_tokens_max = 2"), "{told}");
    assert!(told.contains("warning: evaluation after step 0: 16 of 16 trajectories reached"), "{told}");
    let page = done(rloss().arg("report").arg(&out)).stdout;
    let page = text_of(page.trim());
    assert!(page.contains("<dt>step 1<dd>8 of 8 trajectories reached response_tokens_max = 2"));
    // A run that goes on keeps those before its checkpoint, once.
    let before = kept();
    let told = done(&mut resumed(&out, &[&sets[..], &["train.steps=3"]].concat())).stderr;
    let mut all = before.clone();
    all.extend(of(&told));
    assert_eq!(kept(), all);
    assert!(told.contains("warning: step 3: "), "{told}");
    // Samplings keep theirs, too.
    let told = done(rloss().args(["rollout", "--set", "rollout.response_tokens_max=2"]).arg(&out)).stderr;
    assert!(told.contains("warning: 8 of 8 trajectories reached"), "{told}");
    let sampled = fs::read_dir(out.join("rollout")).unwrap().next().unwrap().unwrap().path();
    assert_eq!(rloss::metrics::read_warnings(&sampled).len(), of(&told).len(), "{told}");
}

/// No row of a run had its time of day, so rows could not be set beside another program's log.
#[test]
fn rows_have_the_time_of_day_in_order() {
    let times: Vec<f64> =
        super::rows(baseline()).iter().map(|row| row["timing_s/clock"].as_f64().unwrap()).collect();
    // After the run, which this test may be the first to ask for.
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64();
    assert!(times.is_sorted() && times[0] > now - 7200.0 && *times.last().unwrap() <= now, "{times:?}");
}

#[test]
fn one_of_a_thing_is_no_plural() {
    let (_folder, [out]) = scratch(["run"]);
    let one = ["rollout.prompts_per_step=1", "eval.problems_max=1", "train.steps=1", "cold_start.steps=1"];
    let words = ["1 of SFT warm-up, then 1 of reinforcement learning, 1 prompt × 4 samples"];
    assert_has(&done(&mut small(&out, &one)).stderr, &words);
    assert_has(&done(&mut resumed(&out, &one)).stderr, &["the one step is done"]);
    let told = output(rloss().args(["eval", "--set", "eval.problems_max=1"]).arg(&out));
    assert!(told.stderr.contains("sampled  1 held-out problem × 1\n"), "{}", told.stderr);
    let tables = told.stdout;
    assert!(tables.starts_with("arithmetic: 1 problem, 1 trajectory; "), "{tables}");
}

#[test]
fn console_every_steps_spaces_the_lines() {
    let folder = TempDir::new().unwrap();
    for (every, lines) in [("0", 0), ("100", 1)] {
        let out = folder.path().join(every);
        let text = done(&mut small(&out, &[&format!("logging.console_every_steps={every}")])).stderr;
        assert_eq!(text.lines().filter(|line| line.starts_with("rl ")).count(), lines, "{text}");
        assert!(text.contains("step 4: val-core"), "evaluations are always said: {text}");
    }
}

#[test]
fn a_closed_stderr_and_stdout_end_nothing() {
    let (_folder, [out]) = scratch(["run"]);
    let closed = |command: &mut std::process::Command| {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop((child.stdout.take(), child.stderr.take()));
        child.wait().unwrap().code()
    };
    assert_eq!(closed(&mut small(&out, &[])), Some(0));
    assert_same_results(&out, baseline());
    assert_eq!(closed(&mut small(&out, &[])), Some(2));
    assert_eq!(closed(rloss().arg("report").arg(&out)), Some(0));
}

#[test]
fn a_report_of_two_runs_names_both() {
    let (_folder, [first, second]) = scratch(["first-run", "second-run"]);
    done(&mut small(&first, &["train.steps=2"]));
    done(&mut small(&second, &["train.steps=2", "train.seed=1"]));
    let printed = done(rloss().arg("report").args([&first, &second]));
    let page = std::path::PathBuf::from(printed.stdout.trim());
    assert!(page.starts_with(&first), "{page:?}");
    let html = text_of(page);
    assert!(html.contains("first-run") && html.contains("second-run"));
    assert!(!second.join("report.html").exists());
}

#[test]
fn help_and_version_go_to_stdout_with_exit_code_0() {
    for argument in ["--help", "--version"] {
        let output = done(rloss().arg(argument));
        assert!(output.stderr.is_empty() && output.stdout.contains("rloss"));
    }
}

#[test]
fn a_model_without_weights_is_warned_of() {
    let (_folder, [model, out]) = scratch(["model\u{7}", "run"]);
    copy_model(&first_checkpoint(warm_model()), &model);
    for name in ["model.safetensors", "model.safetensors.index.json"] {
        fs::remove_file(model.join(name)).unwrap();
    }
    let sets = [&model_path(&model), "cold_start.steps=1", "train.steps=0"];
    let text = done(&mut small(&out, &sets)).stderr;
    assert!(text.contains("warning: ") && text.contains("model␇ has no weights"), "{text:?}");
}
