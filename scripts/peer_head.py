#!/usr/bin/env python3
"""Times in PyTorch what `cargo bench --bench head` times: log-probabilities and entropies of 1,024 rows at the real vocabulary,
forward and backward, the logits whole. `scripts/peer_head.py [THREADS]` prints one JSON line."""

import json
import resource
import sys
import time

import torch

ROWS, HIDDEN, VOCABULARY, ROUNDS = 1024, 64, 201_088, 5


def main():
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
    torch.manual_seed(0)
    h = (2 * torch.rand(ROWS, HIDDEN) - 1).requires_grad_()
    w = ((2 * torch.rand(VOCABULARY, HIDDEN) - 1) / 4).requires_grad_()
    targets = (torch.arange(ROWS) * 193 % VOCABULARY)[:, None]
    seconds, begun = [], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for with_entropy in [False, True]:
        seconds.append([])
        for _ in range(ROUNDS + 1):
            start = time.perf_counter()
            log_p = torch.log_softmax(torch.nn.functional.linear(h, w), -1)
            if with_entropy:
                # A loss without an entropy bonus reads it without its gradient.
                with torch.no_grad():
                    -(log_p.exp() * log_p).sum(-1)
            h.grad = w.grad = None
            (-log_p.gather(-1, targets)).sum().backward()
            seconds[-1].append(round(time.perf_counter() - start, 4))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = {"peer": "torch", "head_s": seconds[0][1:], "head_and_entropy_s": seconds[1][1:]}
    print(json.dumps(found | {"start_bytes": begun * 1024, "peak_bytes": peak * 1024}))


if __name__ == "__main__":
    main()
