#!/usr/bin/env python3
"""Reference values of the head with a teacher, from PyTorch's autograd in f64.

    scripts/distill_parity.py --fixture      writes tests/fixtures/distill_head.json anew; needs torch
    scripts/distill_parity.py FOLDER         writes cases over Qwen2.5's vocabulary of 151,936 tokens as raw numbers

The divergence is `generalized_jsd_loss` with `beta = 1` and no reduction, of TRL's GKDTrainer, where TRL is installed: the
script compares the two. `just distill-parity` runs the second form and compares rloss with it.
"""

import json
import sys
from pathlib import Path

import torch

FIXTURE = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "distill_head.json"


def divergences(logits, teacher_logits):
    """KL(p || q) of each row; TRL's value is compared if it can be imported."""
    log_p, log_q = torch.log_softmax(logits, -1), torch.log_softmax(teacher_logits, -1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    try:
        from trl.experimental.gkd import GKDTrainer
    except ImportError:
        print("TRL is not installed: compared with torch alone", file=sys.stderr)
        return kl
    with torch.no_grad():
        trl = GKDTrainer.generalized_jsd_loss(logits, teacher_logits, beta=1, reduction="none").sum(-1)
    assert (kl - trl).abs().max() < 1e-12 * max(1.0, kl.abs().max()), "TRL's divergence differs"
    return kl


def case(generator, shape, temperature, scale, outputs):
    rows, width, teacher_width, vocabulary = shape

    def noise(*size):
        # f32 holds the inputs exactly.
        return torch.randn(size, generator=generator).double()

    h, w = noise(rows, width).requires_grad_(), (scale * noise(width, vocabulary)).float().double().requires_grad_()
    teacher_h = noise(rows, teacher_width)
    teacher_w = (scale * noise(teacher_width, vocabulary)).float().double()
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    # The upstream gradient of the log-probabilities, the entropies and the divergences.
    gradient = noise(3, rows) * torch.tensor(outputs)[:, None]
    logits, teacher_logits = h @ w / temperature, teacher_h @ teacher_w / temperature
    log_p = torch.log_softmax(logits, -1)
    chosen, entropies = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    values = torch.stack([chosen, entropies, divergences(logits, teacher_logits)])
    (gradient * values).sum().backward()
    return dict(
        targets=targets.double(), h=h, w=w, teacher_h=teacher_h, teacher_w=teacher_w, gradient=gradient, values=values,
        dh=h.grad, dw=w.grad,
    )


def main():
    generator = torch.Generator().manual_seed(50)
    if sys.argv[1] == "--fixture":
        cases = []
        for temperature in (1.0, 0.7, 1.6):
            tensors = case(generator, (5, 4, 3, 41), temperature, 1.0, [1, 1, 1])
            lists = {name: tensor.detach().flatten().tolist() for name, tensor in tensors.items()}
            lists["targets"] = [int(target) for target in lists["targets"]]
            cases.append(dict(temperature=temperature, **lists))
        FIXTURE.write_text(json.dumps(cases) + "\n")
        return
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for temperature in (1.0, 0.7):
        # Logits with a standard deviation of about 3, in three chunks of rows.
        tensors = case(generator, (256, 32, 48, 151_936), temperature, 0.5, [0, 0, 1])
        for name, tensor in tensors.items():
            values = tensor.detach().double() if name in ("values", "dh", "dw") else tensor.detach().float()
            (folder / f"at_{temperature}.{name}").write_bytes(values.numpy().tobytes())
        kl = tensors["values"][2]
        print(f"at {temperature}: divergences {kl.min():.3f} to {kl.max():.3f}")


if __name__ == "__main__":
    main()
