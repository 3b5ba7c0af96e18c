//! Sorting and filtering the trajectories of a page, in a browser.

use super::*;
use crate::skips;

/// Chooses in turn, and adds what the list then shows: the problem, the step and the reward of each line.
const SCRIPT: &str = r#"<script>
const choices = [{}, {order: "reward-down"}, {order: "length-up"}, {order: "change-down"}, {order: "change-up"},
  {order: "reward-up", low: "0.3", high: "0.7"}, {problem: "ALPHA"}, {text: "the Beta at 2"},
  {phase: "1", problem: "beta"}];
const shown = document.createElement("pre");
for (const choice of choices) {
  for (const [name, value] of Object.entries({order: "", low: "", high: "", problem: "", text: "", phase: "", ...choice})) {
    form.elements[name].value = value;
  }
  form.elements.order.dispatchEvent(new Event("input", {bubbles: true}));
  const lines = [...document.getElementById("list").children].map(line => {
    const of = name => line.querySelector(`[data-name="${name}"]`).textContent;
    return `${of("Problem")} ${of("Step")} ${of("Reward")} ${of("Change")}`;
  });
  shown.append(`{${lines.join(", ")}}`);
}
document.body.append(shown);
</script>"#;

/// What the page shows for each choice of [`SCRIPT`].
const EXPECTED: [&str; 9] = [
    "beta 2 1 –, beta 1 0.5 -0.5, alpha 1 0.25 +0.5, alpha 2 0.75 +0.5, beta 2 0 -0.5",
    "beta 2 1 –, alpha 2 0.75 +0.5, beta 1 0.5 -0.5, alpha 1 0.25 +0.5, beta 2 0 -0.5",
    "alpha 1 0.25 +0.5, beta 2 1 –, beta 1 0.5 -0.5, beta 2 0 -0.5, alpha 2 0.75 +0.5",
    "alpha 1 0.25 +0.5, alpha 2 0.75 +0.5, beta 1 0.5 -0.5, beta 2 0 -0.5, beta 2 1 –",
    "beta 1 0.5 -0.5, beta 2 0 -0.5, alpha 1 0.25 +0.5, alpha 2 0.75 +0.5, beta 2 1 –",
    "beta 1 0.5 -0.5",
    "alpha 1 0.25 +0.5, alpha 2 0.75 +0.5",
    "beta 2 1 –, beta 2 0 -0.5",
    "beta 1 0.5 -0.5, beta 2 0 -0.5",
];

/// A trajectory of `tokens` tokens.
fn of(problem: &str, phase: Phase, step: u64, reward: f32, tokens: usize) -> TrajectoryRow {
    let mut row = trajectory(phase, step, 0, reward, "79");
    row.trajectory.problem_id = problem.into();
    row.trajectory.tokens = (0..tokens as u32).collect();
    row.trajectory.mask = (0..tokens).map(|token| token > 0).collect();
    row.trajectory.log_probs = vec![-0.5; tokens];
    row.trajectory.turns[0].end = tokens;
    row.messages.push(Message::user(format!("The {problem} at {step}.")));
    row
}

/// The trajectory browser could neither sort nor find a problem.
#[test]
fn trajectories_are_sorted_and_found_by_problem_and_text() {
    if !skips::chromium() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let run = run(folder.path(), "run", &rising(0.01));
    let first = [of("beta", Phase::Rl, 1, 0.5, 4), of("alpha", Phase::Rl, 1, 0.25, 2)];
    let second = [of("alpha", Phase::Rl, 2, 0.75, 6), of("beta", Phase::Rl, 2, 0.0, 5)];
    write_trajectories(&run, "step-000001.jsonl", &first);
    write_trajectories(&run, "step-000002.jsonl", &second);
    write_trajectories(&run, "eval-000002.jsonl", &[of("beta", Phase::Eval, 2, 1.0, 3)]);
    let script = SCRIPT.replace("form.", "document.querySelector('#browser form').");
    let shown = shown(folder.path(), &page(&[run]), &script);
    let shown: Vec<&str> =
        shown.split('{').skip(1).filter_map(|rest| Some(rest.split_once('}')?.0)).collect();
    assert_eq!(shown, EXPECTED);
}

/// The settings of a hidden run stayed on the page.
#[test]
fn a_hidden_run_takes_its_settings_and_charts_along() {
    if !skips::chromium() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let runs: Vec<PathBuf> = [("a", 0.5, 1), ("b", 0.25, 2), ("c", 0.5, 2)]
        .map(|(name, lr, threads)| {
            let mut rows = rising(0.01);
            if name == "b" {
                rows.iter_mut().for_each(|row| row.metrics.set("actor/entropy", 0.5));
            }
            let run = run(folder.path(), name, &rows);
            let recipe = format!("[train.optimizer]\nlr = {lr}\n[parallel]\nthreads = {threads}\n");
            std::fs::write(run.join("recipe.toml"), recipe).unwrap();
            run
        })
        .to_vec();
    let script = r#"<script>
        const there = () => ["[data-settings] code", "[data-chart] figcaption code"].map(kind =>
            [...document.querySelectorAll(kind)].filter(code => !code.closest("[hidden]")).map(code => code.textContent));
        const before = there();
        document.querySelector("[data-toggle='1']").click();
        const shown = document.createElement("pre");
        shown.append(JSON.stringify([before, there()]));
        document.body.append(shown);
    </script>"#;
    let shown: [[Vec<String>; 2]; 2] =
        serde_json::from_str(&shown(folder.path(), &page(&runs), script)).unwrap();
    let [[settings, charts], [settings_left, charts_left]] = shown;
    assert_eq!(settings, ["train.optimizer.lr", "parallel.threads"]);
    assert_eq!(settings_left, ["parallel.threads"]);
    let gone: Vec<&String> = charts.iter().filter(|chart| !charts_left.contains(chart)).collect();
    assert_eq!(gone, ["actor/entropy"]);
}

/// What `script` adds to `page`, in a `<pre>`. The page runs no script but its own.
fn shown(folder: &Path, page: &str, script: &str) -> String {
    let file = folder.join("tried.html");
    std::fs::write(&file, page.replace("Content-Security-Policy", "no-policy") + script).unwrap();
    let out =
        skips::browser(&folder.join("profile")).arg(format!("file://{}", file.display())).output().unwrap();
    let document = String::from_utf8(out.stdout).unwrap();
    let (_, shown) = document.rsplit_once("<pre>").unwrap_or_else(|| panic!("the script failed: {document}"));
    shown.split_once("</pre>").unwrap().0.to_owned()
}
