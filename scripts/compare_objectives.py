#!/usr/bin/env python3
"""Compares losses and advantages where nothing but the objective differs.

    scripts/compare_objectives.py [--rloss PATH] [--out FOLDER] [--jobs N] [--tasks ...] [--settings ...]
                                  [--objectives ...] [--seeds ...]

Every run starts from the SFT warm-up of its seed and has one thread. Runs that have ended are not run again, so the
comparison can be stopped and started again. Settings: `exact` is four updates a batch with one forward;
`lag1` and `lag2` sample that many steps ahead; `router_noise`, `no_sinks` and `short_mantissa` are the
failures of figures 2, 3 and 4. Before them, losses that must be equal while the ratio is 1 run with one
update a batch, and every metric but those of the loss itself must be equal to the bit. Writes FOLDER/table.md,
summary.md and figure.svg: success on held-out problems at the end, mean over the seeds. An objective separates
(an arrow) from the first of its kind if the ranges of their seeds do not overlap.
"""

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
from pathlib import Path

RECIPES = Path(__file__).resolve().parent.parent / "recipes/objectives"
COLD_STARTS = {"quickstart": "cold_start", "harder": "cold_start_harder"}
# The first of each kind is what the others are compared with.
FIRST = {"loss": "loss=ppo", "advantage": "advantage=grpo"}
LOSSES = {
    "ppo": [], "gspo": ["policy.clip_low=3e-4", "policy.clip_high=4e-4"], "cispo": [], "reinforce": [],
    "geo_mean": ["policy.clip_low=0.33", "policy.clip_high=0.49"], "dppo_tv": [], "dppo_kl": ["policy.clip_low=0.05",
    "policy.clip_high=0.05"], "sapo": [], "vespo": [], "clip_cov": [], "kl_cov": [],
}
ADVANTAGES = {
    "grpo": [], "dr_grpo": [], "grpo_batch_std": [], "rloo": [], "maxrl": [], "opo": [], "reinforce_plus_plus": [],
    "reinforce_plus_plus_baseline": [], "remax": [], "gae": [],
}
OBJECTIVES = {**{f"loss={name}": [f"policy.loss={name}", *sets] for name, sets in LOSSES.items()},
              **{f"advantage={name}": [f"policy.advantage={name}", *sets] for name, sets in ADVANTAGES.items()}}
SETTINGS = {
    "exact": [],
    "lag1": ["rollout.lag_steps=1", "policy.old_logprob=rollout"],
    "lag2": ["rollout.lag_steps=2", "policy.old_logprob=rollout"],
    "router_noise": ["arms.second_forward_old_logprobs=true", "arms.router_noise_train=0.3"],
    "no_sinks": ["arms.no_train_sinks=true"],
    "short_mantissa": ["arms.rollout_mantissa_bits=3", "policy.old_logprob=rollout"],
}
# With a ratio of 1 these are the plain policy gradient. clip_cov leaves tokens out; geo_mean is a mean over sequences.
EQUAL_AT_ONE_UPDATE = [f"loss={name}" for name in LOSSES if name not in ("clip_cov", "geo_mean")]


def train(a, recipe, out, sets):
    """Trains into `out` unless that run has ended. Returns an error's last line; None if all is well."""
    done = out / "done"
    if done.exists():
        return None
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [a.rloss, "train", str(recipe), "--out", str(out), "--set", "parallel.threads=1",
               "--set", "logging.tensorboard=false", "--set", "logging.console_every_steps=0"]
    command += [word for key in sets for word in ("--set", key)]
    command += ["--resume=auto"]
    run = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if run.returncode != 0:
        return run.stdout.strip().splitlines()[-1] if run.stdout.strip() else f"exit code {run.returncode}"
    done.touch()
    return None


def last_success(out):
    """Returns the last success on held-out problems, and the largest gradient norm."""
    success, norm = None, 0.0
    with open(out / "metrics.jsonl") as file:
        for row in map(json.loads, file):
            success = next((v for k, v in row.items() if k.startswith("val-core/") and "/acc/mean" in k), success)
            norm = max(norm, row.get("actor/grad_norm") or 0.0)
    return success, norm


def run_all(a):
    jobs = []
    for task in a.tasks:
        for seed in a.seeds:
            jobs.append((RECIPES / f"{COLD_STARTS[task]}.toml", a.out / COLD_STARTS[task] / f"seed-{seed}",
                         [f"train.seed={seed}"]))
    failed = execute(a, jobs)
    if failed:
        sys.exit("the SFT warm-up failed")
    if "quickstart" in a.tasks and 0 in a.seeds:
        check_equal(a)
    jobs = []
    for setting in a.settings:
        for task in a.tasks:
            for objective in a.objectives:
                for seed in a.seeds:
                    start = a.out / COLD_STARTS[task] / f"seed-{seed}"
                    sets = [f"train.seed={seed}", f"model.path={start}", *SETTINGS[setting], *OBJECTIVES[objective]]
                    jobs.append((RECIPES / f"{task}.toml", folder(a, task, setting, objective, seed), sets))
    return execute(a, jobs)


def rows_without_loss(out):
    """Returns the metrics of a run without times and those that the loss itself reports."""
    with open(out / "metrics.jsonl") as file:
        rows = [json.loads(line) for line in file]
    left_out = ("timing_s/", "perf/", "actor/pg_", "actor/selected_fraction")
    return [{k: v for k, v in row.items() if not k.startswith(left_out)} for row in rows]


def check_equal(a):
    """Runs five steps of one update a batch with each loss of EQUAL_AT_ONE_UPDATE, and compares their metrics."""
    start = a.out / "cold_start" / "seed-0"
    common = ["train.seed=0", f"model.path={start}", "train.minibatches=1", "train.steps=5", "eval.every_steps=0"]
    outs = {name: a.out / "one_update" / name for name in EQUAL_AT_ONE_UPDATE}
    execute(a, [(RECIPES / "quickstart.toml", out, [*common, *OBJECTIVES[name]]) for name, out in outs.items()])
    expected = rows_without_loss(outs["loss=ppo"])
    different = [name for name, out in outs.items() if rows_without_loss(out) != expected]
    if different:
        sys.exit(f"one update a batch: the metrics differ from those of loss=ppo: {', '.join(different)}")
    print(f"one update a batch: {len(outs)} losses have equal metrics in {len(expected)} rows")


def folder(a, task, setting, objective, seed):
    return a.out / task / setting / objective / f"seed-{seed}"


def execute(a, jobs):
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(a.jobs) as pool:
        tasks = {pool.submit(train, a, *job): job[1] for job in jobs}
        for number, task in enumerate(concurrent.futures.as_completed(tasks), 1):
            error = task.result()
            failed += error is not None
            print(f"{number}/{len(jobs)} {tasks[task].relative_to(a.out)}{': ' + error if error else ''}", flush=True)
    return failed


def results(a):
    """Returns for every cell the sorted successes of its seeds, and the largest gradient norm."""
    cells = {}
    for task in a.tasks:
        for setting in a.settings:
            for objective in a.objectives:
                runs = [folder(a, task, setting, objective, seed) for seed in a.seeds]
                values = [last_success(run) for run in runs if (run / "done").exists()]
                successes = sorted(success for success, _ in values if success is not None)
                if successes:
                    cells[task, setting, objective] = (successes, max(norm for _, norm in values))
    return cells


def separates(cells, task, setting, objective):
    kind = objective.split("=")[0]
    baseline = FIRST[kind]
    ours, other = cells.get((task, setting, objective)), cells.get((task, setting, baseline))
    if objective == baseline or ours is None or other is None:
        return ""
    if ours[0][0] > other[0][-1]:
        return " ↑"
    return " ↓" if ours[0][-1] < other[0][0] else ""


def table(a, cells):
    """Returns a table with mean, least and largest success of every cell."""
    lines = []
    for task in a.tasks:
        lines += [f"| {task} | " + " | ".join(a.settings) + " |", "| --- |" + " --- |" * len(a.settings)]
        for objective in a.objectives:
            row = []
            for setting in a.settings:
                cell = cells.get((task, setting, objective))
                text = f"{sum(cell[0]) / len(cell[0]):.2f} ({cell[0][0]:.2f}–{cell[0][-1]:.2f})" if cell else "–"
                row.append(text + separates(cells, task, setting, objective))
            lines.append(f"| `{objective.replace('=', ' = ')}` | " + " | ".join(row) + " |")
        lines.append("")
    return "\n".join(lines)


def summary(a, cells):
    """Returns a table of means, one for each task in a cell. The last column counts where an objective separates."""
    lines = ["|" + ", ".join(a.tasks) + "|" + "|".join(a.settings) + "|separates|", "|---|" + "---|" * (len(a.settings) + 1)]
    for objective in a.objectives:
        row, arrows = [], []
        for setting in a.settings:
            texts = []
            for task in a.tasks:
                cell = cells.get((task, setting, objective))
                arrow = separates(cells, task, setting, objective).strip()
                texts.append(f"{sum(cell[0]) / len(cell[0]):.2f}{arrow}" if cell else "–")
                arrows += [arrow] if arrow else []
            row.append(" ".join(texts))
        counts = [f"{arrows.count(arrow)}{arrow}" for arrow in "↑↓" if arrow in arrows]
        counted = "–" if objective in FIRST.values() else " ".join(counts) or "from none"
        lines.append(f"|`{objective}`|" + "|".join(row) + f"|{counted}|")
    return "\n".join(lines) + "\n"


def figure(a, cells):
    """Returns an SVG: a row of dots for each objective, a panel for each task and setting."""
    left, width, row, top = 250, 150, 16, 46
    panel_height = top + row * len(a.objectives) + 24
    size = f'width="{left + width * len(a.settings)}" height="{panel_height * len(a.tasks)}"'
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">',
           '<rect width="100%" height="100%" fill="white"/>']
    for t, task in enumerate(a.tasks):
        above, below = t * panel_height, (t + 1) * panel_height - 20
        for i, objective in enumerate(a.objectives):
            out.append(f'<text x="8" y="{above + top + row * i + 4}">{objective.replace("=", " = ")}</text>')
        for s, setting in enumerate(a.settings):
            x = left + s * width
            place = lambda value, x=x: x + 8 + value * (width - 24)
            out.append(f'<text x="{x + 8}" y="{above + 16}">{task}</text>'
                       f'<text x="{x + 8}" y="{above + 30}">{setting}</text>')
            for value in (0, 0.5, 1):
                out.append(f'<line x1="{place(value)}" x2="{place(value)}" y1="{above + top - 10}" y2="{below}" '
                           f'stroke="#ddd"/><text x="{place(value)}" y="{below + 13}" '
                           f'text-anchor="middle">{value}</text>')
            for i, objective in enumerate(a.objectives):
                for success in cells.get((task, setting, objective), ([], 0))[0]:
                    out.append(f'<circle cx="{place(success):.1f}" cy="{above + top + row * i}" r="3.5" '
                               'fill="#1f77b4" fill-opacity="0.6"/>')
    return "\n".join([*out, "</svg>\n"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rloss", default="target/release/rloss")
    parser.add_argument("--out", type=Path, default=Path("runs/objectives"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--tasks", nargs="+", default=list(COLD_STARTS), choices=COLD_STARTS)
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--objectives", nargs="+", default=list(OBJECTIVES), choices=OBJECTIVES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    a = parser.parse_args()
    a.out = a.out.resolve()
    failed = run_all(a)
    cells = results(a)
    (a.out / "table.md").write_text(table(a, cells))
    (a.out / "summary.md").write_text(summary(a, cells))
    (a.out / "figure.svg").write_text(figure(a, cells))
    print(table(a, cells))
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
