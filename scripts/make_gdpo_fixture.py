#!/usr/bin/env python3
"""Writes tests/fixtures/gdpo.json: 100 random batches with the advantages of TRL 1.16 (normalize_then_sum).

TRL's formula in 64 bits, where TRL computes in 32. A reward that is null is left out, as None in TRL. A batch has no
response without any reward. Needs numpy.
"""

import json
import pathlib
import warnings

import numpy as np

warnings.simplefilter("ignore", RuntimeWarning)


def nan_std(values, axis):
    """Standard deviation with n - 1, of the values that are no NaN; NaN of fewer than two."""
    mean = np.nanmean(values, axis=axis, keepdims=True)
    variance = np.nanmean((values - mean) ** 2, axis=axis, keepdims=True)
    count = np.sum(~np.isnan(values), axis=axis, keepdims=True)
    return np.sqrt(variance * np.where(count > 1, count / (count - 1.0), np.nan))


def advantages(rewards, weights):
    """`rewards`: [groups, samples, functions]."""
    normal = (rewards - np.nanmean(rewards, axis=1, keepdims=True)) / (nan_std(rewards, 1) + 1e-4)
    sums = np.nansum(normal * weights, axis=2).ravel()
    return (sums - sums.mean()) / (sums.std(ddof=1) + 1e-4)


def main():
    rng = np.random.default_rng(84)
    batches = []
    for _ in range(100):
        groups, samples, functions = rng.integers(1, 5), rng.integers(2, 7), rng.integers(1, 4)
        kind = rng.integers(3)
        shape = (groups, samples, functions)
        rewards = rng.integers(0, 2, shape) * 1.0 if kind == 0 else rng.normal(size=shape)
        rewards = rewards.astype(np.float32).astype(np.float64)
        if kind == 2 and functions > 1:
            rewards[:, :, 1:][rng.random((groups, samples, functions - 1)) < 0.2] = np.nan
        weights = np.round(rng.uniform(0.1, 2, functions), 2).astype(np.float32).astype(np.float64)
        flat = rewards.reshape(-1, functions)
        names = [[None if np.isnan(v) else float(v) for v in column] for column in flat.T]
        batches.append(
            {
                "group_sizes": [int(samples)] * int(groups),
                "weights": [float(w) for w in weights],
                "rewards": names,
                "advantages": [float(f"{a:.9g}") for a in advantages(rewards, weights)],
            }
        )
    path = pathlib.Path(__file__).parent.parent / "tests/fixtures/gdpo.json"
    path.write_text("[\n" + ",\n".join(json.dumps(b) for b in batches) + "\n]\n")


if __name__ == "__main__":
    main()
