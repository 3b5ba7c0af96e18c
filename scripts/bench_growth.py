#!/usr/bin/env python3
"""Shows how the seconds of a GRPO step grow with one size at a time: tokens, experts, vocabulary, samples of a prompt, context.

    scripts/bench_growth.py [--rounds N] [--threads N]

Runs `cargo bench --bench step` on the tiny shape with one size multiplied by 1 to 16 and prints a table, medians over steps and
interleaved rounds. "Per token" is against the first line, tokens being those that are sampled; linear growth stays at 1.
"""

import argparse
import json
import statistics
import subprocess
from pathlib import Path

FACTORS = [1, 2, 4, 8, 16]
# What grows: its flag, its size at 1, and whether the sampled tokens grow with it.
GROWTHS = [
    ("tokens, by prompts", "--prompts", 4, True),
    ("samples of a prompt", "--samples", 4, True),
    ("context, by sampled tokens", "--response-tokens", 64, True),
    ("experts", "--experts", 8, False),
    ("vocabulary", "--vocab", 320, False),
]
STAGES = ["rollout_s", "update_s"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    a = parser.parse_args()
    root = Path(__file__).resolve().parent.parent
    found = {}
    for _ in range(a.rounds):
        for name, flag, size, _ in GROWTHS:
            for factor in FACTORS:
                shape = [flag, str(size * factor), "--steps", "3", "--threads", str(a.threads)]
                command = ["cargo", "bench", "--quiet", "--bench", "step", "--", *shape]
                line = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
                step = json.loads(line)
                for stage in STAGES:
                    found.setdefault((name, factor, stage), []).extend(step[stage])
    print("| what grows | factor | size | rollout, s | update, s | rollout per token | update per token |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, _, size, more_tokens in GROWTHS:
        first = [statistics.median(found[name, 1, stage]) for stage in STAGES]
        for factor in FACTORS:
            seconds = [statistics.median(found[name, factor, stage]) for stage in STAGES]
            tokens = factor if more_tokens else 1
            cells = [f"{s:.4f}" for s in seconds] + [f"{s / b / tokens:.2f}" for s, b in zip(seconds, first)]
            print(f"| {name} | {factor} | {size * factor:,} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
