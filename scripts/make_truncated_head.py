#!/usr/bin/env python3
"""Reference values of the head over kept tokens, from PyTorch's autograd in f64.

    scripts/make_truncated_head.py        writes tests/fixtures/truncated_head.json anew; needs torch

Logits of tokens that are not kept are set to -inf before log_softmax, as trainers with a mask of kept tokens do.
Inputs are multiples of 2^-6, so that f32 holds them exactly.
"""

import json
import random
from pathlib import Path

import torch

OUT = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "truncated_head.json"
ROWS, WIDTH, VOCABULARY = 7, 6, 41


def grid(rng, *shape):
    values = torch.tensor([rng.randint(-128, 128) / 64 for _ in range(torch.Size(shape).numel())], dtype=torch.float64)
    return values.reshape(shape)


def case(rng, temperature):
    h, w = grid(rng, ROWS, WIDTH).requires_grad_(), grid(rng, WIDTH, VOCABULARY).requires_grad_()
    kept, targets = [], []
    # One token, few, most, all; None is a row without a set.
    for count in [1, 2, 5, 20, VOCABULARY - 1, VOCABULARY, None]:
        ids = sorted(rng.sample(range(VOCABULARY), VOCABULARY if count is None else count))
        kept.append(None if count is None else ids)
        targets.append(rng.choice(ids))
    mask = torch.zeros(ROWS, VOCABULARY, dtype=torch.bool)
    for row, ids in enumerate(kept):
        mask[row, range(VOCABULARY) if ids is None else ids] = True
    log_probs = torch.log_softmax((h @ w / temperature).masked_fill(~mask, float("-inf")), -1)
    chosen = log_probs.gather(1, torch.tensor(targets)[:, None])[:, 0]
    entropies = -(log_probs.exp() * log_probs.masked_fill(~mask, 0.0)).sum(-1)
    weights = grid(rng, 2, ROWS)
    (weights[0] @ chosen + weights[1] @ entropies).backward()
    lists = dict(h=h, w=w, log_probs=chosen, entropies=entropies, dh=h.grad, dw=w.grad, gradient=weights)
    lists = {name: tensor.detach().flatten().tolist() for name, tensor in lists.items()}
    return dict(temperature=temperature, targets=targets, kept=kept, **lists)


def main():
    rng = random.Random(46)
    cases = [case(rng, temperature) for temperature in (1.0, 0.7, 1.6)]
    OUT.write_text(json.dumps(dict(torch=torch.__version__, rows=ROWS, width=WIDTH, cases=cases)) + "\n")


if __name__ == "__main__":
    main()
