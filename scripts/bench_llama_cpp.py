#!/usr/bin/env python3
"""A folder of scripts/random_checkpoint.py decoded and prefilled by rloss and by llama.cpp, side by side on the CPU.

    scripts/bench_llama_cpp.py FOLDER [--rloss FILE] [--rounds N] [--threads N]

FOLDER becomes model.gguf in it, the same bytes: experts in MXFP4, other matrices in bf16. Rounds are interleaved, the
medians printed. A decode step is the difference of two runs of `rloss rollout` with more and fewer tokens, over those
tokens, for llama.cpp what its server reports; the prefill is the difference of two prompts, and what the server reports.
llama.cpp rounds what enters a product with MXFP4 to 8 bits and with bf16 to bf16; rloss multiplies in f32.

Needs target/release/rloss (or --rloss), numpy, gguf, xllamacpp (llama.cpp's server as a package).
"""

import argparse
import concurrent.futures
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import gguf
import numpy

from check_llama_cpp import add_metadata, names_of

ROOT = Path(__file__).parent.parent
MXFP4, BF16 = gguf.GGMLQuantizationType.MXFP4, gguf.GGMLQuantizationType.BF16
SEQUENCES = [1, 4, 16]
FEW, MANY = 4, 20
PROMPT, LONG_PROMPT = 128, 640
# The task, in a file of its own: it starts at once, without this one's imports.
TASK = """
import json, sys
replies = {"describe": {"version": 2, "name": "bench"}, "problem": {"prompt": "x" * int(sys.argv[1])}, "reward": {"reward": 0.0}}
for line in sys.stdin:
    ask = json.loads(line)
    print(json.dumps({"request_id": ask["request_id"], **replies[ask["request"]]}), flush=True)
"""


def stored(folder):
    """Name to dtype and values of every tensor, as bytes on disk."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            start = file.tell()
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            values = numpy.memmap(path, numpy.uint8, "r", start + begin, (end - begin,))
            found[name] = (entry["dtype"], entry["shape"], values)
    return found


def f32(entry):
    """bf16 as f32."""
    _, shape, values = entry
    return (values.view(numpy.uint16).astype(numpy.uint32) << 16).view(numpy.float32).reshape(shape)


def mxfp4(blocks, scales, rows):
    """Blocks and scales as GGUF has them: a scale before its block, whose bytes pair values 16 apart, not neighbours."""
    shape = blocks[1]
    values = blocks[2].reshape(shape)[:, rows]
    values = numpy.stack([values & 15, values >> 4], -1).reshape(*values.shape[:-1], 32)
    paired = values[..., :16] | values[..., 16:] << 4
    scale = scales[2].reshape(scales[1])[:, rows, :, None]
    return numpy.concatenate([scale, paired], -1).reshape(*paired.shape[:2], -1)


def write_gguf(folder, path):
    sizes = json.loads((folder / "config.json").read_text())
    sizes["rope_parameters"] = sizes["rope_scaling"] | dict(rope_theta=sizes["rope_theta"])
    entries = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = dict(entries["model"]["vocab"]) | {token["content"]: token["id"] for token in entries["added_tokens"]}
    names = {index: name for name, index in vocabulary.items()}
    names = [names.get(index, f"<|unused_{index}|>") for index in range(sizes["vocab_size"])]
    writer = gguf.GGUFWriter(str(path), "gpt-oss")
    add_metadata(writer, sizes, names, [gguf.TokenType.NORMAL] * len(names), eos=names.index("<|return|>"), bos=0)
    tensors = stored(folder)
    for name, entry in tensors.items():
        stem = name.split("mlp.experts")[0].replace("model.layers.", "blk.")
        if name.endswith("_blocks"):
            scales = tensors[name.replace("_blocks", "_scales")]
            parts = [("ffn_down", slice(None))]
            if "gate_up" in name:
                parts = [("ffn_gate", slice(0, None, 2)), ("ffn_up", slice(1, None, 2))]
            for part, rows in parts:
                writer.add_tensor(f"{stem}{part}_exps.weight", mxfp4(entry, scales, rows), raw_dtype=MXFP4)
        elif name.endswith("gate_up_proj_bias"):
            for part, first in [("gate", 0), ("up", 1)]:
                values = numpy.ascontiguousarray(f32(entry)[:, first::2])
                writer.add_tensor(f"{stem}ffn_{part}_exps.bias", values)
        elif name.endswith("down_proj_bias"):
            writer.add_tensor(f"{stem}ffn_down_exps.bias", f32(entry))
        elif name.endswith("_scales"):
            pass
        elif len(entry[1]) == 2 and "router" not in name:
            writer.add_tensor(names_of(name), entry[2].reshape(entry[1][0], -1), raw_dtype=BF16)
        else:
            writer.add_tensor(names_of(name), f32(entry))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rloss_seconds(arguments, folder, sequences, prompt, tokens):
    """Of a whole rollout, loading included."""
    task = [sys.executable, str(folder / "task.py"), str(prompt)]
    recipe = folder / "recipe.toml"
    recipe.write_text(
        f"[task]\nname = \"command\"\ncommand = {json.dumps(task)}\n[model]\npath = {json.dumps(str(arguments.folder))}\n"
        f"[chat]\nsystem_message = false\n[train]\nsteps = 0\n[rollout]\nprompts_per_step = 1\n"
        f"samples_per_prompt = {sequences}\nprompt_tokens_max = 2048\nresponse_tokens_max = {tokens}\n"
        f"[parallel]\nthreads = {arguments.threads}\n")
    begun = time.perf_counter()
    out = folder / f"out-{begun}"
    subprocess.run([arguments.rloss, "rollout", recipe, "--out", out], check=True, capture_output=True)
    return time.perf_counter() - begun


def llama_cpp_times(server, sequences, prompt):
    """Seconds a decode step and of the prefill of one prompt, as the server reports them."""
    def ask(index):
        body = dict(prompt=[(7 * k + index) % 90 + 32 for k in range(prompt)], n_predict=MANY, temperature=1.0, top_k=0,
                    seed=index, ignore_eos=True, cache_prompt=False)
        request = urllib.request.Request(
            f"{server.listening_address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["timings"]
    with concurrent.futures.ThreadPoolExecutor(sequences) as pool:
        found = list(pool.map(ask, range(sequences)))
    # While others are still prefilled a step takes longer; the shortest is free of it.
    return min(t["predicted_ms"] / t["predicted_n"] for t in found) / 1e3, found[0]["prompt_ms"] / 1e3


def serve(path, threads):
    import xllamacpp
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_parallel, params.n_ctx, params.warmup = max(SEQUENCES), 1024 * max(SEQUENCES), True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    return xllamacpp.Server(params)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--rloss", type=Path, default=ROOT / "target" / "release" / "rloss", help="the binary")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    arguments.folder = arguments.folder.absolute()
    path = arguments.folder / "model.gguf"
    if not path.exists():
        write_gguf(arguments.folder, path)
    rows = {}
    note = lambda row, side, value: rows.setdefault(row, {}).setdefault(side, []).append(value)
    with tempfile.TemporaryDirectory() as temporary:
        (Path(temporary) / "task.py").write_text(TASK)
        for _ in range(arguments.rounds):
            seconds = lambda *what: rloss_seconds(arguments, Path(temporary), *what)
            for n in SEQUENCES:
                step = (seconds(n, PROMPT, MANY) - seconds(n, PROMPT, FEW)) / (MANY - FEW)
                note(f"decode, {n} sequences, ms a step", "rloss", 1e3 * step)
            long = seconds(1, LONG_PROMPT, 1) - seconds(1, PROMPT, 1)
            note(f"prefill of {LONG_PROMPT - PROMPT} tokens, ms", "rloss", 1e3 * long)
            # A server of its own a round, so that both models are never in memory at once for long.
            server = serve(path, arguments.threads)
            for n in SEQUENCES:
                note(f"decode, {n} sequences, ms a step", "llama.cpp", 1e3 * llama_cpp_times(server, n, PROMPT)[0])
            long = llama_cpp_times(server, 1, LONG_PROMPT)[1] - llama_cpp_times(server, 1, PROMPT)[1]
            note(f"prefill of {LONG_PROMPT - PROMPT} tokens, ms", "llama.cpp", 1e3 * long)
            del server
    print("| | rloss | llama.cpp | llama.cpp / rloss |\n| --- | --- | --- | --- |")
    for row, sides in rows.items():
        ours, theirs = (statistics.median(sides[side]) for side in ("rloss", "llama.cpp"))
        print(f"| {row} | {ours:,.0f} | {theirs:,.0f} | {theirs / ours:.2f} |")


if __name__ == "__main__":
    main()
