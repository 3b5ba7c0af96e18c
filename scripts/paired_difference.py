#!/usr/bin/env python3
"""Compares evaluations of the same problems, paired by problem.

    scripts/paired_difference.py BEFORE AFTER...    folders of `rloss eval`, each with its eval.json

Prints the difference of success and of reward with its 95% interval over problems, how many problems were gained and
lost, and success where no sample was cut. With several AFTER, such as seeds, also that of their mean for each problem:
its interval does not count how seeds differ.
"""

import json
import math
import sys
from pathlib import Path


def problems(folder):
    """Returns, for each problem, its mean success and reward, its sampled tokens, and whether a sample was cut."""
    file = Path(folder) / "eval.json"
    if not file.is_file():
        sys.exit(f"{file}: missing; name a folder with the finished results of rloss eval")
    sets = json.loads(file.read_text())["sets"]
    found = {}
    for problem in (problem for one in sets for problem in one["problems"]):
        samples = problem["samples"]
        mean = lambda key: sum(float(sample[key]) for sample in samples) / len(samples)
        cut = any(sample["outcome"] == "truncated_length" for sample in samples)
        means = {"success": mean("right"), "reward": mean("reward"), "tokens": mean("sampled_tokens")}
        found[problem["id"]] = {**means, "cut": cut}
    return found


def paired(before, after, key):
    """Returns the means of both, and the difference with half of its 95% interval."""
    changes = [after[name][key] - before[name][key] for name in before]
    count = len(changes)
    mean = sum(changes) / count
    variance = sum((change - mean) ** 2 for change in changes) / max(1, count - 1)
    average = lambda one: sum(problem[key] for problem in one.values()) / count
    return average(before), average(after), mean, 1.96 * math.sqrt(variance / count)


def show(name, before, after):
    if before.keys() != after.keys():
        sys.exit(f"{name}: has other problems than the first evaluation; compare evaluations of one file")
    print(f"{name}: {len(before)} problems, {sum(one['cut'] for one in after.values())} cut")
    for key in ("success", "reward", "tokens"):
        print("  {}: {:.3f}, {:.3f}: {:+.3f} ± {:.3f}".format(key, *paired(before, after, key)))
    changes = [after[name]["success"] - before[name]["success"] for name in before]
    print(f"  gained {sum(change > 0 for change in changes)}, lost {sum(change < 0 for change in changes)}")
    whole = [name for name in before if not before[name]["cut"] and not after[name]["cut"]]
    if whole:
        means = [sum(one[name]["success"] for name in whole) / len(whole) for one in (before, after)]
        print("  where nothing was cut: {:.3f}, {:.3f} of {}".format(*means, len(whole)))


def main():
    if len(sys.argv) < 3 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    before, afters = problems(sys.argv[1]), [problems(folder) for folder in sys.argv[2:]]
    print(f"{sys.argv[1]}: {len(before)} problems, {sum(one['cut'] for one in before.values())} cut")
    for folder, after in zip(sys.argv[2:], afters):
        show(folder, before, after)
    if len(afters) > 1:
        middle = {}
        for name in before:
            same = [after[name] for after in afters]
            means = {key: sum(one[key] for one in same) / len(same) for key in ("success", "reward", "tokens")}
            middle[name] = {**means, "cut": any(one["cut"] for one in same)}
        show(f"mean of {len(afters)}", before, middle)


if __name__ == "__main__":
    main()
