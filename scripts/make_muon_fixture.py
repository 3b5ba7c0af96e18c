#!/usr/bin/env python3
"""Ten steps of Muon by its author's reference, as a fixture of the optimizer's test.

    scripts/make_muon_fixture.py MUON_PY      writes tests/fixtures/muon.json anew

MUON_PY is muon.py of github.com/KellerJordan/Muon at 857d1ad. Its `muon_update` runs from its source, with two changes:
the iteration is in f64 instead of bf16, and the factor sqrt(max(1, rows / columns)) is replaced with that of Moonlight
(arXiv 2502.16982), 0.2 * sqrt(max(rows, columns)). Gradients are multiples of 2^-6, which f32 holds exactly.

Needs torch.
"""

import ast
import json
import sys
from pathlib import Path

import torch

FIXTURE = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "muon.json"
STEPS = 10
# Wide, tall, square, one row, and the matrices of three experts.
SHAPES = [[5, 12], [12, 5], [8, 8], [1, 6], [3, 6, 4]]


def reference(path):
    """The functions of the reference, in f64."""
    scope = {"torch": torch}
    for node in ast.parse(Path(path).read_text()).body:
        if getattr(node, "name", "") in ("zeropower_via_newtonschulz5", "muon_update"):
            source = ast.unparse(node)
            assert "bfloat16" not in source or source.count(".bfloat16()") == 1
            exec(source.replace(".bfloat16()", ".double()"), scope)
    return scope["muon_update"]


def main():
    update_of = reference(sys.argv[1])
    generator = torch.Generator().manual_seed(7)
    cases = []
    for number, shape in enumerate(SHAPES):
        lr, momentum, weight_decay = [(0.02, 0.95, 0.0), (4e-3, 0.95, 0.1), (0.01, 0.8, 0.01)][number % 3]
        rows, columns = shape[-2:]
        scale = 0.2 * max(rows, columns) ** 0.5 / max(1, rows / columns) ** 0.5
        weight = torch.randn(shape, generator=generator)
        weights, momenta = weight.double(), torch.zeros(shape, dtype=torch.float64)
        case = dict(shape=shape, settings=dict(lr=lr, momentum=momentum, weight_decay=weight_decay),
                    initial=weight.flatten().tolist(), gradients=[], weights=[])
        for _ in range(STEPS):
            gradient = (torch.randn(shape, generator=generator, dtype=torch.float64) * 64).round() / 64
            case["gradients"].append(gradient.flatten().tolist())
            update = update_of(gradient, momenta, beta=momentum) * scale
            weights = weights * (1 - lr * weight_decay) - lr * update
            case["weights"].append(weights.flatten().tolist())
        cases.append(case)
    FIXTURE.write_text(json.dumps(cases) + "\n")


if __name__ == "__main__":
    main()
