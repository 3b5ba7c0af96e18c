//! The report: what it shows of one run and of several, that no text of a run becomes markup, bad input.

mod browser;
mod compare;

use crate::cli::{assert_has, bad_input, text_of};
use crate::tiny;
use rloss::actor::micro_batch::Sequence;
use rloss::harmony::{Message, Role};
use rloss::metrics::{MetricsFile, Phase, Row, Warning, append_warning};
use rloss::report::write_report;
use rloss::trajectory::{CallOutcome, Trajectory, TrajectoryRow, Turn};
use std::path::{Path, PathBuf};

/// A run folder with the given rows.
fn run(parent: &Path, name: &str, rows: &[Row]) -> PathBuf {
    let folder = parent.join(name);
    std::fs::create_dir_all(&folder).unwrap();
    let mut file = MetricsFile::create(&folder.join("metrics.jsonl")).unwrap();
    rows.iter().for_each(|row| file.write(row).unwrap());
    folder
}

fn row(step: u64, phase: Phase, metrics: &[(&str, f64)]) -> Row {
    Row { step, phase, metrics: metrics.iter().copied().collect() }
}

/// 40 RL steps whose reward rises from -1 by `slope` a step.
fn rising(slope: f64) -> Vec<Row> {
    let reward = |step: u64| -1.0 + slope * (step - 1) as f64;
    let one =
        |step| row(step, Phase::Rl, &[("critic/rewards/mean", reward(step)), ("actor/pg_clipfrac", 0.0)]);
    (1..=40).map(one).collect()
}

fn page(runs: &[PathBuf]) -> String {
    let path = write_report(runs, None).unwrap();
    let name = path.strip_prefix(&runs[0]).unwrap().to_str().unwrap();
    let several = format!("report-{}-runs-", runs.len());
    assert!(if runs.len() == 1 { name == "report.html" } else { name.starts_with(&several) }, "{name}");
    text_of(path)
}

/// Bad input is told, by an error with `text` in it.
fn refused(written: anyhow::Result<PathBuf>, text: &str) {
    bad_input(written, &[text]);
}

/// The numbers that the page's script reads.
fn data(page: &str) -> serde_json::Value {
    let (_, rest) = page.split_once(r#"<script type="application/json" id="data">"#).unwrap();
    serde_json::from_str(rest.split_once("</script>").unwrap().0).unwrap()
}

/// They were folded away beside a gap of 0: a run that learned nothing looked calm.
#[test]
fn a_success_reward_or_gradient_of_0_is_not_folded_away() {
    let folder = tempfile::tempdir().unwrap();
    let learning = |step| {
        let names = ["critic/rewards/mean", "actor/grad_norm", "mismatch/log_ppl_abs_diff_max"];
        row(step, Phase::Rl, &names.map(|name| (name, 0.0)))
    };
    let held_out = |step| row(step, Phase::Eval, &[("val-core/arithmetic/acc/mean@1", 0.0)]);
    let rows: Vec<Row> = (1..=9).map(learning).chain([0, 9].map(held_out)).collect();
    let page = page(&[run(folder.path(), "nothing", &rows)]);
    let folded: Vec<&str> = page
        .split("<summary>Exactly 0 at every step: ")
        .skip(1)
        .filter_map(|rest| rest.split_once("</summary>"))
        .map(|(titles, _)| titles)
        .collect();
    assert!(folded.is_empty(), "{folded:?}");
    assert!(page.contains("<b>exactly 0 (9 steps)</b>"), "the result is on top");
}

/// A page of `rloss rollout` said "RL steps 1 of 100".
#[test]
fn samples_are_no_steps_of_a_run_and_several_runs_are_listed() {
    let folder = tempfile::tempdir().unwrap();
    let mut rows = rising(0.05);
    rows.truncate(1);
    let recipe = |seed: u64| format!("[train]\nsteps = 100\nseed = {seed}\n");
    let samples = run(folder.path(), "samples", &rows);
    std::fs::write(samples.join("recipe.toml"), recipe(1)).unwrap();
    assert!(page(std::slice::from_ref(&samples)).contains("1 of 100"), "a run's step");
    std::fs::write(samples.join("sampling.json"), r#"{"kind":"rollout","step":1,"model_files":[]}"#).unwrap();
    let page_of_samples = page(&[samples]);
    assert!(page_of_samples.contains("samples of step 1") && !page_of_samples.contains("1 of 100"));
    assert!(!page_of_samples.contains("<ol class=\"given\">"), "one folder is no list");
    let runs: Vec<PathBuf> = [1, 2]
        .map(|seed| {
            let run = run(folder.path(), &format!("seed-{seed}"), &rising(0.05));
            std::fs::write(run.join("recipe.toml"), recipe(seed)).unwrap();
            run
        })
        .into();
    let both = page(&runs);
    let list = both.split("<ol class=\"given\">").nth(1).unwrap().split("</ol>").next().unwrap();
    assert_eq!(list.matches("<li>").count(), 2, "{list}");
    assert!(list.contains("<b>seed-2</b>") && list.contains("seed 2, 40 of 100"), "{list}");
    // How curves are smoothed is a tooltip.
    assert!(both.contains("title=\"Faint: the values.") && !both.contains("Arrows go from"));
}

fn trajectory(phase: Phase, step: u64, sample: u64, reward: f32, answer: &str) -> TrajectoryRow {
    let sequence = Sequence { tokens: vec![1, 2, 3], mask: vec![false, true, true], kept_tokens: vec![] };
    let trajectory = Trajectory {
        step,
        sample,
        problem_id: "arithmetic/\"><b>7".into(),
        log_probs: vec![0.0, -0.1, -1.0 / 3.0],
        turns: vec![Turn { start: 1, end: 3, calls: vec![CallOutcome::MalformedCall] }],
        reward,
        success: reward > 0.0,
        tool_s: 0.25,
        ..tiny::trajectory(&sequence)
    };
    let messages = vec![
        Message::new(Role::System, "You are a model."),
        Message::user("7 boxes of 12, 5 sold. Left?"),
        Message::call("python", "commentary", "print(7*12-5)"),
        Message::tool("python", Some("commentary"), "79"),
        Message::assistant("final", answer),
    ];
    TrajectoryRow { phase, trajectory, messages, answer: "79".into(), token_stats: None }
}

fn write_trajectories(run: &Path, file: &str, rows: &[TrajectoryRow]) {
    let folder = run.join("trajectories");
    std::fs::create_dir_all(&folder).unwrap();
    let lines: Vec<String> = rows.iter().map(|row| serde_json::to_string(row).unwrap() + "\n").collect();
    std::fs::write(folder.join(file), lines.concat()).unwrap();
}

/// The page shows each named reward of a task as a chart and in the conversations.
#[test]
fn named_rewards_have_charts_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let named = |step| row(step, Phase::Rl, &[("critic/rewards/mean", 1.0), ("reward/format/mean", 0.0)]);
    let run = run(folder.path(), "named", &(1..=9).map(named).collect::<Vec<_>>());
    let mut sample = trajectory(Phase::Rl, 1, 0, 1.0, "79");
    sample.trajectory.rewards = [("format".to_owned(), 0.5)].into();
    let line = serde_json::to_string(&sample).unwrap();
    assert_eq!(TrajectoryRow::from_line(line.as_bytes()).unwrap(), sample);
    write_trajectories(&run, "step-000001.jsonl", &[sample]);
    let page = page(&[run]);
    assert_eq!(page.matches("<b>Reward format</b>").count(), 1, "one chart, which 0 does not hide");
    assert!(!page.contains("Exactly 0 at every step: Reward format"));
    assert!(page.contains("reward format 0.5"), "a fact of the conversation");
}

#[test]
fn a_trajectory_row_reads_back_as_written() {
    let row = trajectory(Phase::Eval, 80, 3, 0.1, "79");
    let line = serde_json::to_string(&row).unwrap();
    assert!(line.starts_with(r#"{"phase":"eval","step":80,"#), "{line}");
    assert_eq!(TrajectoryRow::from_line(line.as_bytes()).unwrap(), row);
}

#[test]
fn two_runs_share_their_charts() {
    let folder = tempfile::tempdir().unwrap();
    let mut first = rising(0.05);
    first.push(row(40, Phase::Eval, &[("val-core/arithmetic/acc/mean@8", 0.875)]));
    let runs = [run(folder.path(), "alpha", &first), run(folder.path(), "beta", &rising(-0.01))];
    std::fs::write(
        runs[0].join("recipe.toml"),
        "[train]\nsteps = 80\nseed = 17\n[task]\nname = \"arithmetic\"\n[model]\npath = \"quickstart\"\n",
    )
    .unwrap();
    let page = page(&runs);
    for text in
        ["<title>2 runs", "alpha", "beta", "40 of 80", "<b>0.95</b>", "<b>-1.39</b>", "<b>0.875</b>", ">17"]
    {
        assert!(page.contains(text), "{text}");
    }
    assert!(page.contains("Held-out arithmetic mean@8") && page.contains("alpha: exactly 0 at all 40 steps"));
    assert!(page.contains("Not recorded: ") && page.contains("Entropy"));

    let data = data(&page);
    let reward = &data[0]["series"];
    assert_eq!(reward.as_array().unwrap().len(), 2);
    assert_eq!(reward[0]["x"].as_array().unwrap().len(), 40);
    assert_eq!((&reward[0]["y"][0], &reward[0]["y"][39]), (&(-1.0).into(), &0.95.into()));
    assert_eq!(reward[1]["y"][39], -1.39);
}

#[test]
fn the_page_asks_nothing_of_a_network_and_is_the_same_each_time() {
    let folder = tempfile::tempdir().unwrap();
    let runs = [run(folder.path(), "alpha", &rising(0.01))];
    let first = page(&runs);
    let namespace = "http://www.w3.org/2000/svg"; // A name, never fetched.
    let first = first.replace(namespace, "");
    for outside in ["http://", "https://", "src=", "@import", "url("] {
        assert!(!first.contains(outside), "{outside}");
    }
    assert_eq!(first, page(&runs).replace(namespace, ""));
}

#[test]
fn no_text_of_a_run_becomes_markup() {
    let folder = tempfile::tempdir().unwrap();
    let hostile = "</script><script>alert(1)</script>";
    let metric = format!("{hostile}\" onload=\"alert(2)\u{1b}[2J");
    let mut rows = rising(0.02);
    rows.push(row(41, Phase::Rl, &[(&metric, 1.0), ("outcome/<i>", 2.0)]));
    rows.push(row(41, Phase::Eval, &[("val-core/<u>x</u>/acc/mean@1", 0.5)]));
    let path = run(folder.path(), "r\"><img src=x onerror=alert(3)>", &rows);
    std::fs::write(path.join("recipe.toml"), "[task]\nname = \"<em>task</em>\"\n").unwrap();
    std::fs::write(
        path.join("mismatch.json"),
        r#"{"rows":[{"name":"<s>arm</s>","<s>gap</s>":0.125}],"verdict":"<s>same</s>"}"#,
    )
    .unwrap();
    let answer = format!("{hostile}\u{1b}[31m\u{7}\u{202e} & <b>bold</b>\nsecond line");
    write_trajectories(&path, "step-000001.jsonl", &[trajectory(Phase::Rl, 1, 0, -1.0, &answer)]);
    let page = page(&[path]);

    assert_eq!(page.matches("<script").count(), 3, "the data, the trajectories and the script");
    assert_eq!(page.matches("</script>").count(), 3);
    for markup in ["<img", "<i>", "<u>", "<em>", "<s>", "<b>bold", "<b>7", "\" onload", "onerror=alert(3)>"] {
        assert!(!page.contains(markup), "{markup}");
    }
    assert!(!page.contains(|c: char| (c.is_control() && c != '\n') || c == '\u{202e}'));
    let words = [
        "&lt;script&gt;alert(1)",
        "␛[31m␇\\u{202e} &amp; &lt;b&gt;bold",
        "0.125",
        "&lt;s&gt;same",
        "\nsecond line",
    ];
    assert_has(&page, &words);
}

#[test]
fn the_mismatch_table_has_its_picture() {
    let folder = tempfile::tempdir().unwrap();
    let path = run(folder.path(), "alpha", &rising(0.02));
    let picture = |rows: serde_json::Value| {
        let file = serde_json::json!({ "rows": rows, "verdict": "v" }).to_string();
        std::fs::write(path.join("mismatch.json"), file).unwrap();
        let page = page(std::slice::from_ref(&path));
        let (_, rest) = page.split_once(r#"<figure class="chart bars">"#)?;
        Some(rest.split_once("</figure>").unwrap().0.to_owned())
    };
    let arm = |name: &str, max: f64, mean: f64, gap: Option<f64>| {
        serde_json::json!({
            "name": name,
            "mismatch/logprob_abs_diff_max": max,
            "mismatch/logprob_abs_diff_mean": mean,
            "mismatch/log_ppl_abs_diff_max": gap,
        })
    };
    let link = serde_json::json!({"name": "a link", "mismatch/logprob_abs_diff_max": 0.0});
    assert_eq!(picture(serde_json::json!([link])), None, "no arm, no picture");

    let same = arm("same", 0.0, 0.0, Some(0.0));
    let svg = picture(serde_json::json!([
        link,
        same,
        arm("<s>&\"arm", 1.0, 0.01, None),
        arm("c", 0.1, 0.1, Some(0.0))
    ]))
    .unwrap();
    assert!(svg.contains("<svg") && svg.contains("nats per token") && !svg.contains("a link"));
    assert!(svg.contains(">&lt;s&gt;&amp;&quot;arm<title>") && !svg.contains("<s>"), "{svg}");
    assert_eq!(svg.matches("0: same bits</text>").count(), 3, "not the gap that cancelled out");
    assert_eq!(svg.matches(r#"class="zero" r="3.6" cx="176.0""#).count(), 4);
    assert_eq!(svg.matches("<rect").count(), 4);
    // From 0.001 to 1 are three decades of 158 units each.
    for width in ["474.0", "158.0", "316.0"] {
        assert!(svg.contains(&format!(r#"width="{width}""#)), "{width}");
    }
    assert!(picture(serde_json::json!([same])).unwrap().contains("0: same bits"), "nothing above 0");
}

#[test]
fn the_best_and_the_worst_of_the_first_and_the_last_step_are_shown() {
    let folder = tempfile::tempdir().unwrap();
    let path = run(folder.path(), "alpha", &rising(0.01));
    for step in [1, 5, 40] {
        let rows: Vec<TrajectoryRow> = [0.5, -1.0, 1.0, -1.0, 1.0]
            .iter()
            .enumerate()
            .map(|(i, &reward)| trajectory(Phase::Rl, step, i as u64, reward, &format!("answer {step}.{i}.")))
            .collect();
        write_trajectories(&path, &format!("step-{step}.jsonl"), &rows);
    }
    write_trajectories(&path, "eval-40.jsonl", &[trajectory(Phase::Eval, 40, 0, 1.0, "held out")]);
    let page = page(&[path]);
    // The browser's data holds all of them.
    let page = page.split("<script").next().unwrap();
    let shown: Vec<&str> =
        page.match_indices("answer ").map(|(i, _)| page[i..].split('<').next().unwrap()).collect();
    assert_eq!(shown, ["answer 1.1.", "answer 1.2.", "answer 40.1.", "answer 40.2."]);
    assert!(page.contains("held out") && page.contains("Evaluation at step 40"));
    assert!(page.contains("call malformed call ×1") && page.contains("to python"));
}

#[test]
fn values_that_are_not_finite_and_long_runs_are_drawn_and_said() {
    let folder = tempfile::tempdir().unwrap();
    let spike = 7_777;
    let value = |step| match step {
        4_000 => f64::NAN,
        s if s == spike => 123.0,
        s => (s as f64 / 100.0).sin() + 2.0,
    };
    let rows: Vec<Row> = (1..=20_000).map(|s| row(s, Phase::Rl, &[("actor/grad_norm", value(s))])).collect();
    let page = page(&[run(folder.path(), "long", &rows)]);
    assert!(page.contains("not finite at 1 of 20000 steps") && page.contains("thinned"));
    let data = data(&page);
    let (steps, values) =
        (data[0]["series"][0]["x"].as_array().unwrap(), data[0]["series"][0]["y"].as_array().unwrap());
    assert!(steps.len() <= 601 && steps.len() == values.len());
    let at = |step: u64| &values[steps.iter().position(|s| *s == step).unwrap()];
    assert_eq!((at(spike), at(4_000)), (&123.0.into(), &"NaN".into()));
    assert!(page.contains(">log</i>"), "a range this wide is shown on a log axis");
}

/// Long labels lay over the unit beside them.
#[test]
fn long_labels_of_an_axis_make_room_for_its_unit() {
    let folder = tempfile::tempdir().unwrap();
    let at = |value: &dyn Fn(u64) -> f64| -> Vec<Row> {
        (1..=9).map(|step| row(step, Phase::Rl, &[("actor/entropy", value(step))])).collect()
    };
    let left = |name: &str, rows: &[Row]| {
        data(&page(&[run(folder.path(), name, rows)]))[0]["x"][2].as_f64().unwrap()
    };
    let short = left("short", &at(&|step| step as f64));
    let long = left("long", &at(&|step| 1.0 + 1e-6 * step as f64));
    assert!(short < 60.0 && long > short + 15.0, "{short} {long}");
}

/// A run that failed whole looked like one that learned nothing.
#[test]
fn a_run_most_of_which_failed_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let with = |share: f64| row(1, Phase::Rl, &[("trajectory/failed_fraction", share)]);
    let failed = page(&[run(folder.path(), "failed", &[with(1.0)])]);
    assert!(failed.contains("failed: 100% of the trajectories failed for reasons outside the policy"));
    assert!(!page(&[run(folder.path(), "fine", &[with(0.25)])]).contains("of the trajectories failed"));
}

/// Its task was called `command`.
#[test]
fn a_program_that_is_the_task_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = run(folder.path(), "mine", &rising(0.1));
    let recipe = "[task]\nname = \"command\"\ncommand = [\"python3\", \"-c\", \"/somewhere/shop.py\", \"one\\ntwo\"]\n";
    std::fs::write(path.join("recipe.toml"), recipe).unwrap();
    assert!(page(&[path]).contains(">python3 -c shop.py one …<"));
}

/// Regression test: the summary compared the reward of two single steps.
#[test]
fn the_summary_compares_the_mean_rewards_of_the_first_and_last_steps() {
    let folder = tempfile::tempdir().unwrap();
    let path = run(folder.path(), "rising", &rising(0.5));
    let means = "<small>first → last 10 RL steps</small> 1.25 → <b>16.25</b>";
    assert!(page(&[path]).contains(means));
    let three = run(folder.path(), "three", &rising(0.5)[..3]);
    assert!(page(&[three]).contains("<small>first → last RL step</small> -1 → <b>0</b>"));
}

/// Two figures stood in the head of a page without a word about what they are.
#[test]
fn figures_in_the_head_say_their_steps() {
    let folder = tempfile::tempdir().unwrap();
    let held_out = |step, value| row(step, Phase::Eval, &[("val-core/gsm8k/acc/mean@1", value)]);
    let page = page(&[run(folder.path(), "run", &[held_out(0, 0.25), held_out(20, 0.75)])]);
    assert!(page.contains("<small>gsm8k mean@1, step 0 → 20</small> 0.25 → <b>0.75</b>"));
}

#[test]
fn a_run_that_has_only_begun_is_shown() {
    let folder = tempfile::tempdir().unwrap();
    let empty = run(folder.path(), "empty", &[]);
    std::fs::write(empty.join("metrics.jsonl"), r#"{"step":1,"ph"#).unwrap();
    let nothing = page(std::slice::from_ref(&empty));
    assert!(nothing.contains("<h1>empty</h1>") && nothing.contains("empty has no measurements yet"));
    let one = run(folder.path(), "one", &rising(0.1)[..1]);
    assert!(page(&[one, empty]).contains("<b>-1</b>"));
}

#[test]
fn the_page_goes_where_it_is_asked_to_and_that_of_two_runs_leaves_the_first_ones() {
    let folder = tempfile::tempdir().unwrap();
    let runs = [run(folder.path(), "a", &rising(0.01)), run(folder.path(), "b", &rising(0.02))];
    let alone = page(&runs[..1]);
    page(&runs);
    assert_eq!(text_of(runs[0].join("report.html")), alone);
    assert!(!alone.contains("has no measurements yet"));
    let file = folder.path().join("page.html");
    assert_eq!(write_report(&runs, Some(&file)).unwrap(), file);
    assert_eq!(write_report(&runs, Some(folder.path())).unwrap(), folder.path().join("report.html"));
    // Folders are made; what stands in the way is named.
    for (asked, made) in [("new/", "new/report.html"), ("other/page.html", "other/page.html")] {
        assert_eq!(write_report(&runs, Some(&folder.path().join(asked))).unwrap(), folder.path().join(made));
    }
    refused(write_report(&runs, Some(&file.join("page.html"))), "page.html/page.html");
}

/// The page of two runs took the place of another two's, and a run beside itself was drawn twice.
#[test]
fn each_set_of_runs_has_its_page_and_no_run_is_given_twice() {
    let folder = tempfile::tempdir().unwrap();
    let [a, b, c] = ["a", "b", "c"].map(|name| run(folder.path(), name, &rising(0.01)));
    let path =
        |runs: &[&PathBuf]| write_report(&runs.iter().map(|run| (*run).clone()).collect::<Vec<_>>(), None);
    let first = path(&[&a, &b]).unwrap();
    assert_ne!(first, path(&[&a, &c]).unwrap());
    assert_eq!(first, path(&[&a, &b]).unwrap());
    refused(path(&[&a, &b, &a.join("../b")]), "given twice");
}

#[test]
fn bad_input_names_the_place() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let (no_metrics, line, recipe, mismatch, talk) =
        (at("no-metrics"), at("line"), at("recipe"), at("mismatch"), at("talk"));
    std::fs::create_dir(&no_metrics).unwrap();
    run(folder.path(), "line", &rising(0.1)[..2]);
    let text = text_of(line.join("metrics.jsonl")).replace("\"step\":2", "\"step\":two");
    std::fs::write(line.join("metrics.jsonl"), text).unwrap();
    run(folder.path(), "recipe", &[]);
    std::fs::write(recipe.join("recipe.toml"), "[train]\nsteps = 80\nseed = \n").unwrap();
    run(folder.path(), "mismatch", &[]);
    std::fs::write(mismatch.join("mismatch.json"), r#"{"rows":[1]}"#).unwrap();
    run(folder.path(), "talk", &[]);
    write_trajectories(&talk, "step-1.jsonl", &[trajectory(Phase::Rl, 1, 0, 1.0, "79")]);
    let file = talk.join("trajectories/step-1.jsonl");
    let good = text_of(&file);
    std::fs::write(&file, format!("{good}{{\"phase\":\"rl\"}}\n{good}")).unwrap();

    for (path, place) in [
        (at("nowhere"), "nowhere: no such run folder"),
        (no_metrics, "no-metrics: has no metrics.jsonl"),
        (line, "metrics.jsonl: line 2: "),
        (recipe, "recipe.toml: line 3: "),
        (mismatch, "mismatch.json: `rows` is not a list of objects"),
        (talk, "step-1.jsonl: line 2: not a trajectory"),
    ] {
        refused(write_report(std::slice::from_ref(&path), None), place);
        assert!(!path.join("report.html").exists());
    }
    refused(write_report(&[], None), "");
    std::fs::write(&file, good.clone() + &good[..50]).unwrap();
    assert!(
        page(&[folder.path().join("talk")]).contains("first of the step"),
        "a torn last line is left out"
    );
}

/// The console told them alone.
#[test]
fn warnings_stand_on_the_page_with_their_steps() {
    let folder = tempfile::tempdir().unwrap();
    let (one, other) = (run(folder.path(), "one", &rising(0.1)), run(folder.path(), "other", &rising(0.2)));
    assert!(!page(std::slice::from_ref(&one)).contains("<details class=\"warnings\""));
    let told = [
        Warning::for_run("weights <random>".to_owned()),
        Warning::for_step(Phase::Rl, 3, "16 of 16 trajectories were cut".to_owned()),
        Warning::for_step(Phase::Eval, 4, "0 of 4 trajectories called the tool".to_owned()),
    ];
    told.iter().for_each(|warning| append_warning(&one, warning).unwrap());
    let text = page(std::slice::from_ref(&one));
    let words = [
        "<summary>3 warnings</summary>",
        "<dt>start<dd>weights &lt;random&gt;",
        "<dt>step 3<dd>16 of 16 trajectories were cut",
        "<dt>evaluation after step 4<dd>0 of 4 trajectories called the tool",
    ];
    assert_has(&text, &words);
    let both = page(&[one.clone(), other]);
    assert!(
        both.contains("one: 3 warnings</summary>")
            && both.matches("<details class=\"warnings\"").count() == 1,
        "the run is named"
    );
    (0..120).for_each(|step| append_warning(&one, &Warning::for_step(Phase::Rl, step, "x".into())).unwrap());
    let text = page(std::slice::from_ref(&one));
    assert!(text.contains("The last 100; the first 23 are in") && text.contains("123 warnings</summary>"));
}

#[test]
fn alarm_levels_stand_beside_the_values() {
    let folder = tempfile::tempdir().unwrap();
    let kl = [0.01, -0.25, 0.05];
    let with = |step: u64, size: f64| {
        let kl = kl[step as usize - 1];
        row(step, Phase::Rl, &[("rollout_corr/kl", kl), ("rollout_corr/rollout_is_eff_sample_size", size)])
    };
    let sizes = [0.9, f64::NAN, 0.25];
    let alarmed: Vec<Row> = (1..=3).map(|step| with(step, sizes[step as usize - 1])).collect();
    let quiet: Vec<Row> = (1..=3).map(|step| row(step, Phase::Rl, &[("rollout_corr/kl", 0.0)])).collect();
    let runs = [run(folder.path(), "alarmed", &alarmed), run(folder.path(), "quiet", &quiet)];
    let page = page(&runs);
    let (_, section) = page.split_once("<h2>Alarm levels</h2>").unwrap();
    let section = section.split_once("</section>").unwrap().0;
    let rows: Vec<&str> = section.split("<tr>").skip(3).collect();
    assert_eq!(rows.len(), 2, "only metrics that a run recorded");
    let text = |markup: &str| {
        let text: String = markup.split('<').map(|part| part.split_once('>').map_or("", |p| p.1)).collect();
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let cells =
        |row: &str| row.split("<td").skip(1).map(|cell| text(&format!("<td{cell}"))).collect::<Vec<_>>();
    assert_eq!(cells(rows[0]), ["-0.1 to 0.1", "0.05", "-0.25 at 2", "1 of 3", "0", "0 at 3", "0 of 3"]);
    assert_eq!(cells(rows[1]), ["0.3 or more", "0.25", "NaN at 2", "2 of 3", "–", "–", "–"]);
    assert_eq!(section.matches("class=\"bad\"").count(), 3, "-0.25, 0.25 and NaN");

    // The chart of the metric shows the level that its axis reaches.
    let chart =
        page.split("<figure").find(|figure| figure.contains("<b>KL, rollout to training</b>")).unwrap();
    assert!(chart.contains("healthy: -0.1 to 0.1"));
    assert_eq!(chart.matches("class=\"level\"").count(), 1, "-0.1, for no value reaches 0.1");
    assert!(
        !page
            .split("<figure")
            .any(|figure| figure.contains("class=\"level\"") && !figure.contains("healthy:"))
    );
}
