#!/usr/bin/env python3
"""Writes tests/fixtures/sum_losses.json: values and gradients of the Tinker API's losses, by torch in f64.

    scripts/make_sum_losses.py [--out FILE]

Needs torch and numpy. The inputs come from a generator that the test has too, so the file holds results alone.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch

BATCHES = 100
OUT = Path(__file__).resolve().parent.parent / "tests/fixtures/sum_losses.json"


def noise(count: int, seed: int) -> np.ndarray:
    """Numbers in [-1, 1), exact in f32."""
    state, values = (seed * 2_654_435_761 + 1) % 2**32, []
    for _ in range(count):
        state = (state * 1_664_525 + 1_013_904_223) % 2**32
        values.append((state >> 8) / 2**23 - 1)
    return np.array(values, np.float32)


def loss(name: str, l, q, a, w, mask):
    ratio = torch.exp(l - q)
    if name == "cross_entropy":
        return -(l * w).sum()
    if name == "importance_sampling":
        return -(ratio * a).sum()
    if name == "ppo":
        return -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).sum()
    if name == "cispo":
        return -(ratio.clamp(0.0, 4.0).detach() * l * a).sum()
    if name == "dro":
        return -(l * a - 0.5 * 0.05 * (l - q) ** 2).sum()
    kept = mask != 0
    sequence = torch.exp((l.detach() - q)[kept].mean() + l - l.detach())
    return -torch.minimum(sequence * a, sequence.clamp(0.8, 1.2) * a).sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    out = parser.parse_args().out
    results = {}
    for name in ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"]:
        rows = []
        for batch in range(BATCHES):
            count = 1 + batch % 7
            values = noise(4 * count, batch + 1).reshape(4, count)
            l = np.float32(2) * values[0] - np.float32(2)
            q = l + values[1]
            mask = np.array([1.0 if index % 3 != 2 else 0.0 for index in range(count)])
            tensor = lambda x: torch.tensor(x.astype(np.float64))
            own = tensor(l).requires_grad_(True)
            value = loss(name, own, tensor(q), tensor(np.float32(2) * values[2]), tensor(values[3]), tensor(mask))
            value.backward()
            rows.append([value.item(), *own.grad.tolist()])
        results[name] = rows
    out.write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
