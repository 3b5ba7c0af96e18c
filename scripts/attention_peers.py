#!/usr/bin/env python3
"""Times other implementations of attention on this machine's GPU, for `gpu_check speed --peers FILE`.

    scripts/attention_peers.py FILE [--seconds-max N]

Needs torch with CUDA. Measured as gpu_check measures: medians of several passes in a row, between events, the same
shapes. Of torch: its flash attention, with and without the deterministic backward, and cuDNN's, none of which knows
sinks; and flex attention with sinks. What does not run is written down with its reason.
"""

import argparse
import json
import sys
import time

TOKENS = 16_384
WARM_UPS, TIMES, PASSES = 3, 21, 5  # as in benches/gpu_check/speed/timing.rs
MODELS = [(32, 32, None), (64, 8, None), (64, 8, 128)]  # heads, key-value heads, window
LENGTHS = [16_384, 4096, 1024, 8192, 2048]  # the most telling first: time may run out
HEAD_DIM = 64


def flash(torch, q, k, v, sinks, window):
    return sdpa(torch, torch.nn.attention.SDPBackend.FLASH_ATTENTION, q, k, v, window)


def cudnn(torch, q, k, v, sinks, window):
    return sdpa(torch, torch.nn.attention.SDPBackend.CUDNN_ATTENTION, q, k, v, window)


def sdpa(torch, backend, q, k, v, window):
    if window is not None:
        raise NotImplementedError("it has no sliding window")
    grouped = q.shape[1] != k.shape[1]
    with torch.nn.attention.sdpa_kernel(backend):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


class FlexWithSinks:
    """The output without sinks, scaled by each row's share that the sink leaves."""

    def __init__(self):
        self.compiled = None
        self.masks = {}

    def __call__(self, torch, q, k, v, sinks, window):
        from torch.nn.attention import flex_attention as flex

        if self.compiled is None:
            self.compiled = torch.compile(self.forward, dynamic=False)
        length = q.shape[2]
        if (length, window) not in self.masks:

            def seen(batch, head, query, key):
                causal = query >= key
                return causal if window is None else causal & (query - key < window)

            self.masks[length, window] = flex.create_block_mask(seen, None, None, length, length, device="cuda")
        return self.compiled(torch, flex, q, k, v, sinks, self.masks[length, window])

    @staticmethod
    def forward(torch, flex, q, k, v, sinks, mask):
        grouped = q.shape[1] != k.shape[1]
        if hasattr(flex, "AuxRequest"):
            wanted = {"return_aux": flex.AuxRequest(lse=True)}
        else:
            wanted = {"return_lse": True}
        out, rest = flex.flex_attention(q, k, v, block_mask=mask, enable_gqa=grouped, **wanted)
        lse = rest.lse if hasattr(rest, "lse") else rest
        return out * torch.sigmoid(lse - sinks[None, :, None]).unsqueeze(-1).to(out.dtype)


def median_ms(torch, work):
    for _ in range(WARM_UPS):
        work()
    times = []
    for _ in range(TIMES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(PASSES):
            work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / PASSES)
    return sorted(times)[TIMES // 2]


def measure(torch, attention, heads, kv_heads, window, length, deterministic):
    """Milliseconds of forward and backward; the forward's is None where only the backward differs."""
    batch = TOKENS // length
    generator = torch.Generator(device="cuda").manual_seed(3)

    def numbers(heads):
        shape = (batch, heads, length, HEAD_DIM)
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    q, k, v = (numbers(n).requires_grad_() for n in (heads, kv_heads, kv_heads))
    sinks = torch.full((heads,), 0.5, device="cuda").requires_grad_()
    dout = numbers(heads)
    forward = None
    if not deterministic:
        with torch.no_grad():
            forward = median_ms(torch, lambda: attention(torch, q, k, v, sinks, window))
    out = attention(torch, q, k, v, sinks, window)
    inputs = [x for x in (q, k, v, sinks) if x is not sinks or isinstance(attention, FlexWithSinks)]
    torch.use_deterministic_algorithms(deterministic)
    try:
        backward = median_ms(torch, lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True))
    finally:
        torch.use_deterministic_algorithms(False)
    return forward, backward


def main():
    parser = argparse.ArgumentParser(description="Times other implementations of attention.")
    parser.add_argument("out", help="file for the times, JSON")
    parser.add_argument("--seconds-max", type=float, default=240, help="no new shape is begun after so long")
    arguments = parser.parse_args()
    try:
        import torch
    except ImportError as error:
        sys.exit(f"attention_peers: this Python has no torch ({error}); name one that has in PYTHON")
    if not torch.cuda.is_available():
        sys.exit("attention_peers: torch finds no GPU (torch.cuda.is_available() is False)")

    peers = [
        ("torch flash", flash, False),
        ("torch flash, deterministic", flash, True),
        ("cuDNN", cudnn, False),
        ("flex with sinks", FlexWithSinks(), False),
    ]
    end = time.monotonic() + arguments.seconds_max
    rows = []
    for length in LENGTHS:
        for heads, kv_heads, window in MODELS:
            for what, attention, deterministic in peers:
                forward = backward = trouble = None
                if time.monotonic() > end:
                    trouble = f"more than {arguments.seconds_max:.0f} seconds"
                else:
                    try:
                        forward, backward = measure(torch, attention, heads, kv_heads, window, length, deterministic)
                    except Exception as error:  # whatever a peer cannot do is its column's entry
                        trouble = f"{type(error).__name__}: {error}".split("\n")[0][:200]
                        torch.cuda.empty_cache()
                shape = {"what": what, "heads": heads, "kv_heads": kv_heads, "window": window, "length": length}
                for is_backward, milliseconds in ((False, forward), (True, backward)):
                    row = shape | {"backward": is_backward, "milliseconds": milliseconds, "trouble": trouble}
                    rows.append(row)
                print(f"{what}, {heads}/{kv_heads}, window {window}, {length}: {forward} {backward} {trouble or ''}",
                      file=sys.stderr, flush=True)
    result = {"library": f"torch {torch.__version__}", "device": torch.cuda.get_device_name(), "rows": rows}
    with open(arguments.out, "w", encoding="utf-8") as file:
        json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
