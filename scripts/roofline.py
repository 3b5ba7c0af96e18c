#!/usr/bin/env python3
"""A roofline on paper: what each kernel moves, computes and issues for gpt-oss-20b, and the least time that leaves on an H100.

  scripts/roofline.py [FOLDER]   prints the tables that docs/GPU.md sums up; the kernels' machine code is kept in FOLDER if given

Nothing is measured. Bytes: every tensor that a kernel names read or written once, at the memory's full rate. Operations:
two a multiply-add of the tensor cores, at their full rate. Issue slots: warp instructions on the shortest way through the
machine code that passes the kernel's products or stores, one a clock and scheduler. The largest of the three is a kernel's
bound, and a step's is the sum over its launches, for they run one after the other.
"""

import heapq
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# H100 SXM5, its data sheet's: bytes and dense bf16 operations a second. The clock is the one that those operations imply, of
# 132 multiprocessors with 4,096 a clock each; 4 schedulers each issue one instruction a clock.
BANDWIDTH, TENSOR = 3.35e12, 989e12
CLOCK = TENSOR / (132 * 4096)
ISSUE = 132 * 4 * CLOCK

# gpt-oss-20b.
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, WINDOW = 2880, 24, 64, 8, 64, 128
EXPERTS, TOP_K, INTERMEDIATE, VOCABULARY, CONTEXT = 32, 4, 2880, 201_088, 4096
Q, KV = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
HEAD_CHUNK_VALUES, NARROW_ROWS_MAX = 1 << 27, 64  # src/ops/cuda/head.rs, src/ops/cuda/product.rs

# The inner loops of attention have ways for masked blocks too; these are counted by hand, docs/KERNELS.md: slots a warp for
# a block of 64 keys (or, of dkv, rows), where no key is hidden, and a chunk's end shared out over its eight steps.
ATTENTION = {"sink_attention_forward_hopper": 332 + 143 / 8, "sink_attention_dkv_hopper": 462, "sink_attention_dq_hopper": 296}


SMALL = 0.005  # of a step: told together
VECTOR_STORE = r"STG\S*\.128"


class Code:
    """One kernel's instructions, and the shortest ways through them."""

    def __init__(self, lines):
        self.text = [text for _, text in lines]
        at = {address: i for i, (address, _) in enumerate(lines)}
        self.next, self.back = [], []
        for i, text in enumerate(self.text):
            guarded = text.startswith("@")
            branch = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
            to = []
            if branch and (target := at[int(branch[1], 16)]) <= i:
                self.back.append((target, i))
            elif branch:
                to.append(target)
            ends = re.search(r"\b(EXIT|RET\S*|BRX)\b", text)
            if (not branch and not ends or guarded) and i + 1 < len(self.text):
                to.append(i + 1)
            self.next.append(to)

    def shortest(self, markers, first, ends):
        """The fewest instructions from `first` to one of `ends` that pass one of each marker."""
        found, queue = set(), [(1, first, frozenset())]
        while queue:
            count, at, passed = heapq.heappop(queue)
            passed |= {marker for marker in markers if re.search(marker, self.text[at])}
            if (at, passed) in found:
                continue
            found.add((at, passed))
            if len(passed) == len(markers) and at in ends:
                return count
            for to in self.next[at]:
                heapq.heappush(queue, (count + 1, to, passed))
        raise ValueError(f"no way past {markers}")

    def whole(self, *markers):
        """From the kernel's begin to its end."""
        return self.shortest(markers, 0, {i for i, text in enumerate(self.text) if "EXIT" in text})

    def loop(self, *markers):
        """Once around the smallest loop with all markers."""
        holds = lambda loop, marker: any(re.search(marker, text) for text in self.text[loop[0] : loop[1] + 1])
        loop = min((loop for loop in self.back if all(holds(loop, marker) for marker in markers)), key=lambda loop: loop[1] - loop[0])
        return self.shortest(markers, loop[0], {loop[1]})


def machine_code(folder):
    """Every kernel of kernels/ by name."""
    setup = subprocess.run([ROOT / "scripts" / "setup_cuda.sh"], capture_output=True, text=True, check=True).stdout
    codes = {}
    for source in sorted((ROOT / "kernels").glob("*.cu")):
        if source.stem == "primitive_checks":
            continue
        cubin = folder / f"{source.stem}.cubin"
        # The flags of build.rs.
        script = f'{setup}\nnvcc -gencode=arch=compute_90a,code=sm_90a -std=c++17 -O3 -cubin -o "{cubin}" "{source}" && cuobjdump --dump-sass "{cubin}"'
        listing = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
        for part in listing.split("Function : ")[1:]:
            lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", part, re.M)
            codes[part.split()[0]] = Code([(int(address, 16), text) for address, text in lines])
    return codes


@dataclass
class Launch:
    kernel: str
    what: str
    bytes: float
    operations: float = 0
    slots: float = 0
    times: int = 1  # in a step

    def seconds(self):
        return self.times * max(self.bytes / BANDWIDTH, self.operations / TENSOR, self.slots / ISSUE)

    def bound(self):
        parts = {"bytes": self.bytes / BANDWIDTH, "operations": self.operations / TENSOR, "issue": self.slots / ISSUE}
        return max(parts, key=parts.get)


def up(a, b):
    return -(-a // b)


class Step:
    """The launches of a step of the model over some tokens."""

    def __init__(self, codes, tokens):
        self.codes, self.tokens, self.launches = codes, tokens, []

    def add(self, kernel, what, moved, operations=0, slots=0, times=1):
        self.launches.append(Launch(kernel, what, moved, operations, slots, times))

    def elements(self, kernel, what, moved, count, each, marker, times=1):
        """A kernel without a loop, whose threads take `each` of `count` elements."""
        self.add(kernel, what, moved, 0, up(count, 32 * each) * self.codes[kernel].whole(marker), times)

    def product_slots(self, kernel, depth, tiles, warps):
        return tiles * warps * up(depth, 64) * self.codes[kernel].loop("HMMA", "LDGSTS")

    def forward(self, what, rows, k, n, groups=1, out=2, times=1, family="product_forward"):
        """`out`: bytes written for each of n columns."""
        weights = min(groups, rows) * k * n * 2
        narrow = rows <= NARROW_ROWS_MAX * groups
        kernel = family + ("_narrow" if narrow else "") + ("_f32" if out == 4 else "")
        # Each expert's rows are tiles of their own.
        tile_rows, tile_columns, warps = (16, 64, 4) if narrow else (128, 128, 8)
        tiles = groups * up(up(rows, groups), tile_rows) * up(n, tile_columns)
        slots = self.product_slots(kernel, k, tiles, warps)
        self.add(kernel, what, weights + rows * (2 * k + out * n), 2 * rows * k * n, slots, times)

    def backward(self, what, rows, k, n, groups=1, times=1):
        of_rows = groups * up(up(rows, groups), 128)
        slots = self.product_slots("product_input_gradient", n, of_rows * up(k, 128), 8)
        self.add("product_input_gradient", what, groups * k * n * 2 + rows * 2 * (n + k), 2 * rows * k * n, slots, times)
        slots = self.product_slots("product_weight_gradient", up(rows, groups), groups * up(k, 128) * up(n, 128), 8)
        self.add("product_weight_gradient", what, groups * k * n * 8 + rows * 2 * (n + k), 2 * rows * k * n, slots, times)

    def bias_gradient(self, what, rows, n, groups=1, times=1):
        self.add("product_bias_gradient", what, rows * n * 2 + groups * n * 8, times=times)

    def norm(self, times, backward):
        t = self.tokens
        self.add("rms_norm_forward", "norm", t * HIDDEN * 4, times=times)
        if backward:
            self.add("rms_norm_backward", "norm", t * HIDDEN * 6, times=times)
            self.add("rms_norm_weight", "norm", t * HIDDEN * 4 + up(t, 64) * HIDDEN * 4, times=times)
            self.add("rms_norm_weight_sum", "norm", up(t, 64) * HIDDEN * 4, times=times)

    def rope(self, directions):
        t = self.tokens
        self.elements("rope", "queries", t * Q * 4, t * Q // 2, 8, "STG", LAYERS * directions)
        self.elements("rope", "keys, values copied", t * KV * 8, t * KV // 2, 8, "STG", LAYERS * directions)

    def projections(self, pass_over):
        for what, k, n in [("queries", HIDDEN, Q), ("keys", HIDDEN, KV), ("values", HIDDEN, KV), ("attention's output", Q, HIDDEN)]:
            pass_over(what, self.tokens, k, n, times=LAYERS)

    def attention(self, keys_of):
        """Layers of both kinds. `keys_of(window)`: pairs of token and key, keys read, and blocks of 64 keys that tiles walk."""
        kernel = "sink_attention_forward_hopper"
        for what, window in [("all keys", None), (f"a window of {WINDOW}", WINDOW)]:
            pairs, read, blocks = keys_of(window)
            moved = read * 2 * KV * 2 + self.tokens * (2 * Q * 2 + HEADS * 4)
            self.add(kernel, what, moved, 4 * HEAD_DIM * HEADS * pairs, blocks * 8 * ATTENTION[kernel], LAYERS // 2)

    def experts_in_decode(self):
        t, rows = self.tokens, self.tokens * TOP_K
        self.forward("router", t, HIDDEN, EXPERTS, out=4, times=LAYERS)
        self.add("select_experts", "router", (t * EXPERTS + rows * 4) * 4, times=LAYERS)
        # SwiGLU leaves one bf16 of two columns.
        self.forward("gate and up", rows, HIDDEN, 2 * INTERMEDIATE, EXPERTS, out=1, times=LAYERS, family="expert_swiglu")
        self.forward("down", rows, INTERMEDIATE, HIDDEN, EXPERTS, times=LAYERS)
        self.add("combine_forward", "experts and residual", (2 * t + rows) * HIDDEN * 2, times=LAYERS)

    def experts(self):
        t, rows = self.tokens, self.tokens * TOP_K
        up_down = [("gate and up", HIDDEN, 2 * INTERMEDIATE), ("down", INTERMEDIATE, HIDDEN)]
        self.forward("router", t, HIDDEN, EXPERTS, out=4, times=LAYERS)
        self.add("route", "router", t * (EXPERTS + TOP_K) * 4, times=LAYERS)
        self.add("top_k_softmax_forward", "router", t * TOP_K * 12, times=LAYERS)
        for kernel, words in [("sort_count", 1), ("sort_place", 0), ("sort_scatter", 3)]:
            self.add(kernel, "routes", rows * words * 4 + up(rows, 256) * EXPERTS * 8, times=LAYERS)
        self.add("dispatch_forward", "experts", (t + rows) * HIDDEN * 2, times=LAYERS)
        for what, k, n in up_down:
            self.forward(what, rows, k, n, EXPERTS, times=LAYERS)
        self.elements("swiglu_forward", "experts", rows * INTERMEDIATE * 6, rows * INTERMEDIATE, 8, VECTOR_STORE, LAYERS)
        self.add("combine_forward", "experts", (t + rows) * HIDDEN * 2, times=LAYERS)
        self.add("combine_backward", "experts", (t + 2 * rows) * HIDDEN * 2, times=LAYERS)
        for what, k, n in up_down:
            self.backward(what, rows, k, n, EXPERTS, LAYERS)
            self.bias_gradient(what, rows, n, EXPERTS, LAYERS)
        self.elements("swiglu_backward", "experts", rows * INTERMEDIATE * 10, rows * INTERMEDIATE, 8, VECTOR_STORE, LAYERS)
        self.add("dispatch_backward", "experts", (t + rows) * HIDDEN * 2, times=LAYERS)
        self.backward("router", t, HIDDEN, EXPERTS, times=LAYERS)
        self.add("top_k_softmax_backward", "router", t * (TOP_K * 12 + EXPERTS * 4), times=LAYERS)

    def residuals(self, times):
        self.add("candle's sum", "residuals", self.tokens * HIDDEN * 6, times=times)

    def stats(self, rows, times=1):
        slots = rows * up(VOCABULARY, 256) * self.codes["log_prob_row_stats"].loop(VECTOR_STORE)
        self.add("log_prob_row_stats", "head", rows * VOCABULARY * 8, 0, slots, times)


def decode(codes, sequences):
    """One token of each sequence, at CONTEXT keys of its own."""
    step = Step(codes, sequences)
    step.add("take_rows", "embedding", sequences * HIDDEN * 4)
    step.norm(LAYERS + 1, False)
    step.forward("queries, keys and values", sequences, HIDDEN, Q + 2 * KV, times=LAYERS, family="product_joined")
    moved, pairs = sequences * (Q * 4 + KV * 8), sequences * (Q + KV) // 2
    step.elements("rope_append", "queries, keys and values", moved, pairs, 8, "STG", LAYERS)

    def keys_of(window):
        keys = min(window or CONTEXT, CONTEXT)
        # A window's first and last block are seen in part.
        return sequences * keys, sequences * keys, sequences * KV_HEADS * (up(keys, 64) + (1 if window else 0))

    # A tile of 128 rows has 8 of a token: all its warps walk.
    step.attention(keys_of)
    step.forward("attention's output", sequences, Q, HIDDEN, times=LAYERS)
    step.add("sum_norm", "residual and norm", sequences * HIDDEN * 10, times=LAYERS)
    step.experts_in_decode()
    step.forward("head", sequences, HIDDEN, VOCABULARY, out=4)
    step.stats(sequences)
    slots = sequences * up(VOCABULARY, 256) * codes["sampling_draw"].loop(r"LDG\S*\.128")
    step.add("sampling_draw", "head", sequences * VOCABULARY * 4, 0, slots)
    return step.launches


def training(codes, tokens, update):
    """Forward and backward over sequences of CONTEXT tokens, all activations kept; with AdamW in f32 if `update`."""
    step, sequences = Step(codes, tokens), up(tokens, CONTEXT)
    length = min(tokens, CONTEXT)
    step.add("take_rows", "embedding", tokens * HIDDEN * 4)
    step.norm(2 * LAYERS + 1, True)
    step.projections(step.forward)
    step.projections(step.backward)
    step.rope(2)
    for what, n in [("queries", Q), ("keys", KV), ("values", KV), ("attention's output", HIDDEN)]:
        step.bias_gradient(what, tokens, n, times=LAYERS)

    def keys_of(window):
        seen = min(window or length, length)
        pairs = sequences * (seen * (seen + 1) // 2 + (length - seen) * seen)
        # Blocks of 64 keys of the tiles of 128 rows, 16 tokens.
        blocks = sum(up(16 * i + 16, 64) - max(0, 16 * i + 1 - seen) // 64 for i in range(length // 16))
        return pairs, tokens, sequences * KV_HEADS * blocks

    step.attention(keys_of)
    of_heads = tokens * HEADS
    step.add("sink_attention_delta", "both kinds of layers", of_heads * HEAD_DIM * 4 + of_heads * 4, times=LAYERS)
    for what, window in [("all keys", None), (f"a window of {WINDOW}", WINDOW)]:
        pairs, read, blocks = keys_of(window)
        moved = read * 2 * KV * 2 + of_heads * (2 * HEAD_DIM * 2 + 8)
        # Four and three products of 64 by pair and head. A warp of dkv has 16 keys, of dq 16 rows; a step is 64 of the others.
        for kernel, products, written in [("sink_attention_dkv_hopper", 4, tokens * 2 * KV * 2), ("sink_attention_dq_hopper", 3, of_heads * HEAD_DIM * 2)]:
            slots = blocks * 8 * ATTENTION[kernel]
            step.add(kernel, what, moved + written, products * 2 * HEAD_DIM * HEADS * pairs, slots, LAYERS // 2)
    step.add("sink_attention_dsinks", "both kinds of layers", of_heads * 8, times=LAYERS)
    step.experts()
    # And gradients that meet: of the residuals, of what queries, keys and values share.
    step.residuals(2 * LAYERS + 4 * LAYERS)
    rows = HEAD_CHUNK_VALUES // VOCABULARY // 128 * 128
    chunks = up(tokens, rows)
    rows = tokens / chunks
    # In the backward once more.
    step.forward("head, a chunk of rows", rows, HIDDEN, VOCABULARY, out=4, times=2 * chunks)
    step.stats(rows, 2 * chunks)
    step.elements("log_prob_gradient", "head, a chunk", rows * VOCABULARY * 6, rows * VOCABULARY, 8, VECTOR_STORE, chunks)
    step.backward("head, a chunk", rows, HIDDEN, VOCABULARY, times=chunks)
    step.add("add_rows", "embedding", tokens * HIDDEN * 10)
    if update:
        count = parameters()
        for kernel, what, moved in [
            ("optimizer_squares", "all gradients", 4),
            ("optimizer_adamw", "all weights", 28),
            ("optimizer_round_to_bf16", "all weights", 6),
            ("optimizer_scale", "gradients cleared", 4),
        ]:
            step.add(kernel, what, count * moved)
    return step.launches


def parameters():
    of_layer = HIDDEN * (Q + 2 * KV) + Q * HIDDEN + HIDDEN * EXPERTS + EXPERTS * 3 * HIDDEN * INTERMEDIATE
    return LAYERS * of_layer + 2 * VOCABULARY * HIDDEN


def table(title, launches, tokens):
    total = sum(launch.seconds() for launch in launches)
    count = sum(launch.times for launch in launches)
    print(f"### {title}\n\nAt least {total * 1e3:.1f} ms in {count:,} launches: **at most {tokens / total:,.0f} tokens/s**.\n")
    columns = ["kernel", "of", "launches", "GB", "GFLOP", "10⁶ slots", "bound by", "µs each", "ms in all"]
    rows, small = [], []
    for launch in sorted(launches, key=lambda launch: -launch.seconds()):
        if launch.seconds() < SMALL * total:
            small.append(launch)
            continue
        slots = f"{launch.slots / 1e6:.1f}" if launch.slots else "not counted"
        moved, computed = f"{launch.bytes / 1e9:.4f}", f"{launch.operations / 1e9:.1f}"
        times = f"{launch.seconds() / launch.times * 1e6:.1f}", f"{launch.seconds() * 1e3:.2f}"
        rows.append([f"`{launch.kernel}`", launch.what, launch.times, moved, computed, slots, launch.bound(), *times])
    names = ", ".join(sorted({f"`{launch.kernel}`" for launch in small}))
    rows.append([names, "each below 0.5%", sum(launch.times for launch in small), *[""] * 5, f"{sum(launch.seconds() for launch in small) * 1e3:.2f}"])
    for row in [columns, ["---"] * len(columns), *rows]:
        print("| " + " | ".join(map(str, row)) + " |")
    print()


def main():
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else scratch)
        folder.mkdir(parents=True, exist_ok=True)
        codes = machine_code(folder)
    for sequences in (64, 1024):
        table(f"Decode of {sequences:,} sequences, {CONTEXT:,} keys each", decode(codes, sequences), sequences)
    for tokens in (4096, 16_384):
        for update in (False, True):
            title = f"Training of {tokens:,} tokens, {'with' if update else 'without'} an update of all weights"
            table(title, training(codes, tokens, update), tokens)


if __name__ == "__main__":
    main()
