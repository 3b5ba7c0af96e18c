#!/usr/bin/env python3
"""Draws the figures of docs/FIGURES.md from the files of their runs.

    scripts/draw_figures.py FOLDER

FOLDER has figures.toml and, for each recipe that it names, the runs in <recipe>/seed-<n>. Writes FOLDER/<name>.svg for
each figure and FOLDER/figures.md: the figures, with a table of each seed's values. A curve is the mean over its seeds
(on a log axis, the geometric mean), and with 30 points or more it is smoothed over a centred window of 9 steps. Shaded:
the range over the seeds, not smoothed.
"""

import html
import json
import math
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

# Title and unit of a panel; whether its axis is logarithmic.
PANELS = {
    "critic/rewards/mean": ("Reward", "mean reward", False),
    "actor/grad_norm": ("Gradient norm", "norm before clipping", True),
    "actor/entropy": ("Entropy", "nats per token", False),
    "actor/pg_clipfrac": ("Clip fraction", "share of tokens", False),
    "rollout_corr/kl": ("KL, rollout to training", "nats per token", False),
    "rollout_corr/k3_kl": ("KL, rollout to training, k3 estimate", "nats per token", True),
    "mismatch/log_ppl_abs_diff_max": ("Max log-ppl mismatch", "nats per token", False),
    "staleness/steps/mean": ("Staleness of trained tokens", "training steps", False),
    "response_length/mean": ("Length of an answer", "sampled tokens, mean", False),
    "outcome/truncated_length": ("Cut answers", "number in a step", False),
    "mismatch/logprob_abs_diff_max": ("Mismatch of rollout and training", "nats per token, maximum", False),
    "engine/logprob_abs_diff_max": ("Mismatch of the same weights", "nats per token, maximum", False),
}
COLOURS = ["#1f66b3", "#d1540a", "#12866a", "#a8418f", "#b08405", "#2b93b8", "#5a4bb0", "#7a6552"]
WIDTH, HEIGHT, GAP = 460, 236, 20
LEFT, RIGHT, TOP, BOTTOM = 64, WIDTH - 12, 10, HEIGHT - 38
LEGEND_ROW = 18
# A log axis begins at the smallest value, but not below this share of the largest one or AXIS_MIN_CAP, whichever is
# smaller: without the limit, vanishing gradients would take up most of the axis.
FLOOR_SHARE, AXIS_MIN_CAP = 1e-4, 1e-3
# The 7 stored mantissa bits of bf16: rollout engines use no fewer.
MANTISSA_BITS_REAL = 7
STYLE = """.figure { font: 12px system-ui, "Segoe UI", Roboto, "Helvetica Neue", sans-serif }
.figure text { fill: #62656e; font-size: 11px }
.figure .title { fill: #1c1d21; font-size: 15px; font-weight: 600 }
.figure .name { fill: #1c1d21; font-size: 12.5px; font-weight: 600 }
.figure .entry { fill: #1c1d21; font-size: 12px }
.figure .tag { fill: #ad2e24; font-style: italic }
.figure .y { text-anchor: end; dominant-baseline: central }
.figure .x { text-anchor: middle }
.figure .grid { stroke: #e3e4e8; stroke-width: .8; fill: none }
.figure .axis { stroke: #62656e; stroke-width: .8; fill: none }
.figure .line { fill: none; stroke-linejoin: round; stroke-linecap: round; stroke-width: 1.7 }
.figure .band { stroke: none; opacity: .13 }"""


class Curve:
    """The runs of one recipe. `seeds` has the metrics' rows of each seed, in the order of the seeds."""

    def __init__(self, folder, entry, colour):
        self.label, self.colour = entry["label"], colour
        runs = {int(path.parent.name[5:]): path.parent
                for path in (folder / entry["recipe"]).glob("seed-*/metrics.jsonl")}
        self.seeds = {seed: read_rows(runs[seed] / "metrics.jsonl") for seed in sorted(runs)}
        self.exaggerated = any(has_strong_ablation(run) for run in runs.values())

    def values(self, metric):
        """Returns each seed's (step, value). Held-out success is of evaluations, all else of RL steps."""
        phase = "eval" if metric.startswith("val-core/") else "rl"
        return [[(row["step"], float(row[metric])) for row in rows if row["phase"] == phase and metric in row]
                for rows in self.seeds.values()]

    def by_step(self, metric, floor):
        """Returns the seeds' finite values of each step, raised to `floor` if there is one."""
        steps = defaultdict(list)
        for step, value in (point for points in self.values(metric) for point in points):
            if math.isfinite(value):
                steps[step].append(value if floor is None else max(value, floor))
        return dict(sorted(steps.items()))


def read_rows(file):
    with open(file, encoding="utf-8") as lines:
        try:
            return [json.loads(line) for line in lines]
        except ValueError as error:
            sys.exit(f"{file}: a line cannot be read ({error})")


def has_strong_ablation(run):
    """Returns whether the run has larger errors than rollout engines make: router noise, or short mantissas."""
    recipe = run / "recipe.toml"
    arms = tomllib.loads(recipe.read_text(encoding="utf-8")).get("arms", {}) if recipe.is_file() else {}
    noise = ("router_noise", "router_noise_rollout", "router_noise_train")
    return any(arms.get(key, 0) > 0 for key in noise) or 0 < arms.get("rollout_mantissa_bits", 0) < MANTISSA_BITS_REAL


def mean(values, log):
    return math.exp(sum(map(math.log, values)) / len(values)) if log else sum(values) / len(values)


def smooth(points, log):
    """Returns the means over a centred window of 9 points; fewer at both ends."""
    if len(points) < 30:
        return points
    window = lambda i: [value for _, value in points[max(i - 4, 0):i + 5]]
    return [(step, mean(window(i), log)) for i, (step, _) in enumerate(points)]


def number(value, digits=4):
    """Formats a finite value with so many significant digits, thousands separated."""
    rounded = float(f"{value:.{digits - 1}e}")
    return f"{rounded:,.0f}" if 1000 <= abs(rounded) < 1e9 else f"{rounded:g}"


class Axis:
    """Maps values in `low`..`high` to positions in `start`..`end`."""

    def __init__(self, low, high, start, end, log=False):
        self.low, self.high, self.start, self.end, self.log = low, high, start, end, log

    def at(self, value):
        scale = math.log10 if self.log else float
        share = (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low))
        return f"{self.start + share * (self.end - self.start):.1f}"

    def ticks(self, count):
        """Returns about `count` ticks: powers of ten, or multiples of 1, 2 or 5 times a power of ten."""
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            between = (1, 2, 5) if last - first <= 3 else (1,)
            powers = range(first, last + 1, (last - first) // 6 + 1)
            ticks = [factor * 10.0**power for power in powers for factor in between]
            return [(tick, number(tick)) for tick in ticks if self.low <= tick <= self.high]
        rough = (self.high - self.low) / count
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.7)
        decimals = max(0, -math.floor(math.log10(step)))
        ticks = [i * step for i in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        return [(tick, f"{tick:,.{decimals}f}") for tick in ticks]


def value_axis(values, metric, log):
    low, high = min(values), max(values)
    if log:
        return Axis(low / 1.15, high * 1.15, BOTTOM, TOP, log=True)
    if metric.startswith("val-core/") and low >= 0 and high <= 1:
        return Axis(0, 1, BOTTOM, TOP)
    spread = high - low or abs(high) or 1
    return Axis(0 if 0 <= low <= spread * 0.6 else low - spread * 0.05, high + spread * 0.05, BOTTOM, TOP)


def path(points, x, y):
    return "M" + "L".join(f"{x.at(step)} {y.at(value)}" for step, value in points)


def panel(metric, curves):
    """Returns the drawing of one metric with all curves. None if no run has a value."""
    title, unit, log = PANELS.get(metric, (metric, "", False))
    if metric.startswith("val-core/"):
        title, unit = f"Held-out {metric.removeprefix('val-core/').replace('/acc/', ' ')}", "success"
    everything = [value for curve in curves for points in curve.values(metric) for _, value in points]
    finite = [value for value in everything if math.isfinite(value)]
    if not finite:
        return None
    positive = [value for value in finite if value > 0]
    log = log and bool(positive)
    floor = max(min(positive), min(AXIS_MIN_CAP, FLOOR_SHARE * max(positive))) if log else None
    steps = [(curve, curve.by_step(metric, floor)) for curve in curves]
    every_step = [step for _, by_step in steps for step in by_step]
    x = Axis(min(every_step), max(max(every_step), min(every_step) + 1), LEFT, RIGHT)
    y = value_axis([value for _, by_step in steps for values in by_step.values() for value in values], metric, log)
    cut = floor is not None and any(value < floor for value in everything)
    title += (", log scale" if log else "") + (", cut off below" if cut else "")
    out = [f'<text class="name" x="{LEFT}" y="-4">{html.escape(title)}</text>']
    for value, label in y.ticks(5):
        out.append(f'<path class="grid" d="M{LEFT} {y.at(value)}H{RIGHT}"/>'
                   f'<text class="y" x="{LEFT - 7}" y="{y.at(value)}">{label}</text>')
    for step, label in x.ticks(min(6, x.high - x.low)):
        out.append(f'<path class="axis" d="M{x.at(step)} {BOTTOM}v4"/>'
                   f'<text class="x" x="{x.at(step)}" y="{BOTTOM + 16}">{label}</text>')
    out += [f'<path class="axis" d="M{LEFT} {BOTTOM}H{RIGHT}"/>',
            f'<text class="x" x="{(LEFT + RIGHT) / 2}" y="{HEIGHT - 5}">step</text>',
            f'<text class="x" transform="translate(11 {(TOP + BOTTOM) / 2}) rotate(-90)">{unit}</text>']
    for curve, by_step in steps:
        if len(curve.seeds) > 1 and len(by_step) > 1:
            lower = [(step, min(values)) for step, values in by_step.items()]
            upper = [(step, max(values)) for step, values in reversed(by_step.items())]
            area = path(lower, x, y) + path(upper, x, y).replace("M", "L", 1)
            out.append(f'<path class="band" fill="{curve.colour}" d="{area}Z"/>')
        if by_step:
            means = [(step, mean(values, log)) for step, values in by_step.items()]
            out.append(f'<path class="line" stroke="{curve.colour}" d="{path(smooth(means, log), x, y)}"/>')
    return "\n".join(out)


def draw(title, metrics, curves):
    """Returns a figure's SVG: a legend, and the panels below it, two in a row."""
    panels = [drawing for drawing in (panel(metric, curves) for metric in metrics) if drawing]
    columns = min(max(len(panels), 1), 2)
    legend_columns = columns if len(curves) > 3 else 1
    width = max(GAP + columns * (WIDTH + GAP), 2 * GAP + math.ceil(8.5 * len(title)))
    place = lambda index, of: GAP + index % of * (WIDTH + GAP)
    out = [f'<rect width="100%" height="100%" fill="#fff"/><text class="title" x="20" y="27">{html.escape(title)}</text>']
    for index, curve in enumerate(curves):
        x, y = place(index, legend_columns), 50 + index // legend_columns * LEGEND_ROW
        tag = '<tspan class="tag">  exaggerated</tspan>' if curve.exaggerated else ""
        out.append(f'<path class="line" stroke="{curve.colour}" d="M{x} {y - 4}h18"/>'
                   f'<text class="entry" x="{x + 26}" y="{y}">{html.escape(curve.label)}{tag}</text>')
    top = 50 + math.ceil(len(curves) / legend_columns) * LEGEND_ROW
    for index, drawing in enumerate(panels):
        y = top + index // columns * (24 + HEIGHT) + 24
        out.append(f'<g transform="translate({place(index, columns)} {y})">\n{drawing}\n</g>')
    height = top + math.ceil(len(panels) / columns) * (24 + HEIGHT) + GAP // 2
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" class="figure" role="img" '
            f'aria-label="{html.escape(title)}">\n<style>\n{STYLE}\n.figure {{ max-width: {width}px }}\n</style>\n'
            + "\n".join(out) + "\n</svg>\n")


def table(curves):
    """Returns a Markdown table: a row for each curve, in each cell a value for each seed."""
    names = {name for curve in curves for rows in curve.seeds.values() for row in rows for name in row}
    held_out = min((name for name in names if name.startswith("val-core/") and "/ci95_" not in name), default="")
    columns = [
        ("held-out success, last", held_out, lambda values: number(values[-1], 3)),
        ("gradient norm, largest", "actor/grad_norm", lambda values: number(max(values), 3)),
        ("clip fraction, mean", "actor/pg_clipfrac", lambda values: number(sum(values) / len(values), 2)),
        ("max log-ppl mismatch, largest", "mismatch/log_ppl_abs_diff_max", lambda values: number(max(values), 2)),
    ]
    lines = ["| | seeds |" + "|".join(f" {name} " for name, *_ in columns) + "|", "| --- " * (2 + len(columns)) + "|"]
    for curve in curves:
        cells = [curve.label + ("*" if curve.exaggerated else ""), " ".join(map(str, curve.seeds))]
        for _, metric, summary in columns:
            finite = [[value for _, value in points if math.isfinite(value)] for points in curve.values(metric)]
            cells.append(" ".join(summary(values) if values else "–" for values in finite))
        lines.append("|" + "|".join(f" {cell} " for cell in cells) + "|")
    return "\n".join(lines)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    try:
        figures = tomllib.loads((folder / "figures.toml").read_text(encoding="utf-8"))["figure"]
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"{folder}/figures.toml: cannot be read ({error!r}); recipes/figures/figures.toml is a valid example")
    page = ["# Figures", "A star: the ablation causes larger errors than occur in practice."]
    for figure in figures:
        curves = [Curve(folder, entry, COLOURS[index % 8]) for index, entry in enumerate(figure["curves"])]
        missing = [curve.label for curve in curves if not curve.seeds]
        curves = [curve for curve in curves if curve.seeds]
        if not curves:
            continue
        svg = draw(figure["title"], figure["panels"], curves)
        (folder / f"{figure['name']}.svg").write_text(svg, encoding="utf-8")
        page += [f"## {figure['title']}", figure["about"], f"![{figure['title']}]({figure['name']}.svg)", table(curves)]
        if missing:
            page.append(f"Not run: {'; '.join(missing)}.")
    if len(page) == 2:
        sys.exit(f"{folder}: has no run of any recipe of figures.toml; run scripts/reproduce_figures.sh first")
    (folder / "figures.md").write_text("\n\n".join(page) + "\n", encoding="utf-8")
    print(folder / "figures.md")


if __name__ == "__main__":
    main()
