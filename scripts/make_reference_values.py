#!/usr/bin/env python3
"""Reference values of tests, by numpy or PyTorch's autograd in f64.

    scripts/make_reference_values.py gdpo            advantages of TRL 1.16 (normalize_then_sum); needs numpy
    scripts/make_reference_values.py sum_losses      losses of the Tinker API with their gradients; needs numpy, torch
    scripts/make_reference_values.py truncated_head  log-probs over kept tokens with their gradients; needs torch
    scripts/make_reference_values.py muon MUON_PY    ten steps of Muon by its author's reference; needs torch

Each writes tests/fixtures/NAME.json anew. MUON_PY is muon.py of github.com/KellerJordan/Muon at 857d1ad.
"""

import ast
import json
import random
import sys
import warnings
from pathlib import Path

FIXTURES = Path(__file__).resolve().parent.parent / "tests" / "fixtures"


def gdpo():
    """100 random batches in 64 bits, where TRL computes in 32. A reward that is null is left out, as None in TRL."""
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
        columns = [[None if np.isnan(v) else float(v) for v in column] for column in rewards.reshape(-1, functions).T]
        batches.append(dict(
            group_sizes=[int(samples)] * int(groups), weights=[float(w) for w in weights], rewards=columns,
            advantages=[float(f"{a:.9g}") for a in advantages(rewards, weights)],
        ))
    return "[\n" + ",\n".join(json.dumps(b) for b in batches) + "\n]\n"


def sum_losses():
    """The inputs come from a generator that the test has too, so the file holds results alone."""
    import numpy as np
    import torch

    def noise(count, seed):
        """Numbers in [-1, 1), exact in f32."""
        state, values = (seed * 2_654_435_761 + 1) % 2**32, []
        for _ in range(count):
            state = (state * 1_664_525 + 1_013_904_223) % 2**32
            values.append((state >> 8) / 2**23 - 1)
        return np.array(values, np.float32)

    def loss(name, l, q, a, w, mask):
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

    results = {}
    for name in ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"]:
        rows = []
        for batch in range(100):
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
    return json.dumps(results) + "\n"


def truncated_head():
    """Logits of tokens that are not kept are -inf before log_softmax, as in trainers with a mask of kept tokens. Inputs are
    multiples of 2^-6, so that f32 holds them exactly."""
    import torch

    rows, width, vocabulary = 7, 6, 41
    rng = random.Random(46)

    def grid(*shape):
        values = [rng.randint(-128, 128) / 64 for _ in range(torch.Size(shape).numel())]
        return torch.tensor(values, dtype=torch.float64).reshape(shape)

    def case(temperature):
        h, w = grid(rows, width).requires_grad_(), grid(width, vocabulary).requires_grad_()
        kept, targets = [], []
        # One token, few, most, all; None is a row without a set.
        for count in [1, 2, 5, 20, vocabulary - 1, vocabulary, None]:
            ids = sorted(rng.sample(range(vocabulary), vocabulary if count is None else count))
            kept.append(None if count is None else ids)
            targets.append(rng.choice(ids))
        mask = torch.zeros(rows, vocabulary, dtype=torch.bool)
        for row, ids in enumerate(kept):
            mask[row, range(vocabulary) if ids is None else ids] = True
        log_probs = torch.log_softmax((h @ w / temperature).masked_fill(~mask, float("-inf")), -1)
        chosen = log_probs.gather(1, torch.tensor(targets)[:, None])[:, 0]
        entropies = -(log_probs.exp() * log_probs.masked_fill(~mask, 0.0)).sum(-1)
        weights = grid(2, rows)
        (weights[0] @ chosen + weights[1] @ entropies).backward()
        lists = dict(h=h, w=w, log_probs=chosen, entropies=entropies, dh=h.grad, dw=w.grad, gradient=weights)
        lists = {name: tensor.detach().flatten().tolist() for name, tensor in lists.items()}
        return dict(temperature=temperature, targets=targets, kept=kept, **lists)

    cases = [case(temperature) for temperature in (1.0, 0.7, 1.6)]
    return json.dumps(dict(torch=torch.__version__, rows=rows, width=width, cases=cases)) + "\n"


def muon(path):
    """`muon_update` runs from its source, with two changes: the iteration is in f64 instead of bf16, and the factor
    sqrt(max(1, rows / columns)) is replaced with that of Moonlight (arXiv 2502.16982), 0.2 * sqrt(max(rows, columns)).
    Gradients are multiples of 2^-6, which f32 holds exactly."""
    import torch

    scope = {"torch": torch}
    for node in ast.parse(Path(path).read_text()).body:
        if getattr(node, "name", "") in ("zeropower_via_newtonschulz5", "muon_update"):
            source = ast.unparse(node)
            assert "bfloat16" not in source or source.count(".bfloat16()") == 1
            exec(source.replace(".bfloat16()", ".double()"), scope)
    generator = torch.Generator().manual_seed(7)
    cases = []
    # Wide, tall, square, one row, and the matrices of three experts.
    for number, shape in enumerate([[5, 12], [12, 5], [8, 8], [1, 6], [3, 6, 4]]):
        lr, momentum, weight_decay = [(0.02, 0.95, 0.0), (4e-3, 0.95, 0.1), (0.01, 0.8, 0.01)][number % 3]
        rows, columns = shape[-2:]
        scale = 0.2 * max(rows, columns) ** 0.5 / max(1, rows / columns) ** 0.5
        weight = torch.randn(shape, generator=generator)
        weights, momenta = weight.double(), torch.zeros(shape, dtype=torch.float64)
        case = dict(shape=shape, settings=dict(lr=lr, momentum=momentum, weight_decay=weight_decay),
                    initial=weight.flatten().tolist(), gradients=[], weights=[])
        for _ in range(10):
            gradient = (torch.randn(shape, generator=generator, dtype=torch.float64) * 64).round() / 64
            case["gradients"].append(gradient.flatten().tolist())
            update = scope["muon_update"](gradient, momenta, beta=momentum) * scale
            weights = weights * (1 - lr * weight_decay) - lr * update
            case["weights"].append(weights.flatten().tolist())
        cases.append(case)
    return json.dumps(cases) + "\n"


MAKERS = dict(gdpo=gdpo, sum_losses=sum_losses, truncated_head=truncated_head, muon=muon)

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in MAKERS or (sys.argv[1] == "muon") != (len(sys.argv) == 3):
        sys.exit(__doc__)
    (FIXTURES / f"{sys.argv[1]}.json").write_text(MAKERS[sys.argv[1]](*sys.argv[2:]))
