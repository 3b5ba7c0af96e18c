#!/usr/bin/env python3
"""A real GGUF file, compared with its Hugging Face folder, transformers' tokenizer and llama.cpp.

    scripts/gguf_parity.py MODEL.gguf FOLDER --data DATA [--rloss FILE] [--keep FOLDER]

FOLDER holds the decoded tensors of MODEL.gguf, with the decoded head in the embedding's place. DATA is the folder of data
sets (gsm8k, math, ifeval). The script writes what `tests/suite/gguf_parity.rs` reads and runs that test:

- `tied.gguf`: MODEL.gguf with its head as the embedding, and vectors rounded to bf16, as FOLDER has them
- `texts.jsonl`: 500 texts of GSM8K, MATH, IFEval and code with their ids by the folder's tokenizer
- `answers.jsonl`: 20 prompts and llama.cpp's likeliest answers, its cache in f32

Then runs of all families are exported as F32 and BF16, llama.cpp continues prompts with each, and
`rloss check-mismatch --against` must say that the sides agree or differ by rounding. Every tensor of these files is read back
by the `gguf` package and compared with the checkpoint.

Needs numpy, gguf, tokenizers, xllamacpp, and target/release/rloss (or --rloss).
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import gguf
import numpy as np
import xllamacpp
from tokenizers import Tokenizer

ROOT = Path(__file__).parent.parent
TEXTS, PROMPTS, ANSWER_TOKENS = 500, 20, 48
# Recipe and sets of a short run whose model is exported.
RUNS = [
    ("gpt_oss", "quickstart", ["cold_start.steps=20"]),
    ("qwen2", "quickstart_dense", ["cold_start.steps=20"]),
    ("qwen3", "quickstart_qwen3_moe", ["cold_start.steps=20", "model.architecture.model_type=qwen3",
                                       "cold_start.load_balance_coefficient=0"]),
    ("qwen3_moe", "quickstart_qwen3_moe", ["cold_start.steps=20"]),
]


def copy_tied(source, target):
    """Writes MODEL.gguf with its head in the embedding's place; F32 vectors are rounded to bf16."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(str(target), "qwen2")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), kind, sub_type=inner)
    for tensor in reader.tensors:
        if tensor.name == "token_embd.weight":
            continue
        name = "token_embd.weight" if tensor.name == "output.weight" else tensor.name
        if tensor.tensor_type == gguf.GGMLQuantizationType.F32:
            bits = np.ascontiguousarray(tensor.data).view(np.uint32)
            rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
            writer.add_tensor(name, rounded)
        else:
            writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def texts(data):
    """Texts of several kinds, an equal share of each."""
    rows = lambda path: [json.loads(line) for line in path.read_text().splitlines()]
    strings = lambda row: [value for value in row.values() if isinstance(value, str)]
    sources = [
        ["\n".join(strings(row)) for row in rows(data / "gsm8k" / "test.jsonl")],
        ["\n".join(strings(row)) for path in sorted((data / "math").rglob("*.jsonl")) for row in rows(path)],
        ["\n".join(strings(row)) for path in sorted((data / "ifeval").rglob("*.jsonl")) for row in rows(path)],
        [path.read_text()[:4000] for path in sorted((ROOT / "src").rglob("*.rs"))],
    ]
    # rloss never reads a control token from text, on purpose; tokenizers does.
    sources = [[text for text in source if "<|" not in text] for source in sources]
    share = TEXTS // len(sources)
    return [text for source in sources for text in source[:: max(1, len(source) // share)][:share]]


def read_tensors(path):
    """Returns the tensors of a safetensors file as f32; numpy has no bf16."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    values = {}
    for name, about in header.items():
        begin, end = (8 + size + offset for offset in about["data_offsets"])
        if about["dtype"] == "BF16":
            bits = np.frombuffer(data[begin:end], np.uint16).astype(np.uint32) << 16
            values[name] = bits.view(np.float32).reshape(about["shape"])
        elif about["dtype"] == "F32":
            values[name] = np.frombuffer(data[begin:end], np.float32).reshape(about["shape"])
    return values


def partial_tokens(path):
    """Returns the tokens that are no whole ASCII text: llama.cpp omits the log-prob of a part of a character."""
    field = gguf.GGUFReader(str(path)).get_field("tokenizer.ggml.tokens")
    whole = lambda text: all(" " < char < "\x7f" or char in "ĠĊ" for char in text) and not text.startswith("<|")
    return [token for token, text in enumerate(field.contents()) if not whole(text)]


class Server:
    """llama.cpp's server with its cache in f32."""

    def __init__(self, path, context):
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.warmup = context, 1, False
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        # More threads wait for one another in a loop, and are slow on a busy machine.
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        self.server = xllamacpp.Server(params)

    def complete(self, prompt, tokens, **more):
        body = dict(prompt=prompt, n_predict=tokens, n_probs=1, top_k=0, top_p=1.0, min_p=0.0, cache_prompt=False,
                    return_tokens=True, **more)
        request = urllib.request.Request(f"{self.server.listening_address}/completion", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            return answer.read().decode()


    def row(self, prompt, tokens, seed, banned):
        """Samples an answer without the tokens `banned`. Returns it as rloss's simplest row: llama.cpp reports a prompt's
        text, not its ids. Its log-probs are those before the ban."""
        bias = [[token, False] for token in banned]
        answer = json.loads(self.complete(prompt, tokens, temperature=1.0, seed=seed, logit_bias=bias))
        probs = answer["completion_probabilities"]
        assert [one["id"] for one in probs] == answer["tokens"], "a token without its log-prob"
        return dict(tokens=prompt + [one["id"] for one in probs], temperature=1.0,
                    logprobs=[None] * len(prompt) + [one["logprob"] for one in probs])


def rloss(binary, *arguments, codes=(0,)):
    run = subprocess.run([binary, *map(str, arguments)], capture_output=True, text=True)
    if run.returncode not in codes:
        sys.exit(f"{' '.join(map(str, arguments))}: {run.stderr}")
    return run.stdout


def exported_runs(binary, root):
    """Exports short runs, lets llama.cpp continue prompts with each file, and has the log-probs diagnosed."""
    wrong = 0
    for family, recipe, sets in RUNS:
        run = root / family
        sets = [word for one in [*sets, "train.steps=0", "eval.before_training=false"] for word in ("--set", one)]
        rloss(binary, "train", recipe, "--out", run, *sets)
        checkpoint = max((run / "checkpoints").iterdir())
        vocabulary = read_tensors(checkpoint / "model.safetensors")["model.embed_tokens.weight"].shape[0]
        for kind in ["f32", "bf16"]:
            path = root / f"{family}-{kind}.gguf"
            rloss(binary, "export", run, "--gguf", path, "--type", kind)
            compare_with_checkpoint(path, checkpoint)
            server = Server(path, 512)
            rng = np.random.default_rng(7)
            answers = root / f"{family}-{kind}.jsonl"
            prompts = [rng.integers(20, min(vocabulary, 250), 16).tolist() for _ in range(6)]
            banned = partial_tokens(path)
            rows = [server.row(prompt, 40, seed, banned) for seed, prompt in enumerate(prompts)]
            answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
            model = root / f"{family}-{kind}.toml"
            model.write_text(f"[model]\npath = {json.dumps(str(path))}\n")
            out = root / f"{family}-{kind}-mismatch"
            rloss(binary, "check-mismatch", model, "--against", answers, "--out", out, codes=(0, 3))
            found = json.loads((out / "mismatch.json").read_text())
            verdict = found["diagnosis"]["verdict"]
            wrong += verdict not in ("agrees", "agreement", "rounding")
            print(f"{family} as {kind}: {verdict}: {found['verdict']}", flush=True)
    return wrong


def gguf_tensors(stored):
    """Yields each tensor of a checkpoint under its name in GGUF and in GGUF's layout."""
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    layer_names = {"input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
                   "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
                   "self_attn.k_norm": "attn_k_norm", "mlp.router": "ffn_gate_inp", "mlp.gate": "ffn_gate_inp",
                   "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
    experts = {}
    for name, values in stored.items():
        stem, _, kind = name.rpartition(".")
        if stem in top:
            yield f"{top[stem]}.{kind}", values
            continue
        _, _, layer, rest = name.split(".", 3)
        block, part = f"blk.{layer}", rest.rpartition(".")[0]
        if rest == "self_attn.sinks":
            yield f"{block}.attn_sinks.weight", values
        elif part == "post_attention_layernorm":
            after_attention = "post_attention_norm" if "model.layers.0.self_attn.sinks" in stored else "ffn_norm"
            yield f"{block}.{after_attention}.weight", values
        elif part in layer_names:
            yield f"{block}.{layer_names[part]}.{kind}", values
        elif rest == "mlp.experts.gate_up_proj":
            yield f"{block}.ffn_gate_exps.weight", values[:, :, 0::2].transpose(0, 2, 1)
            yield f"{block}.ffn_up_exps.weight", values[:, :, 1::2].transpose(0, 2, 1)
        elif rest == "mlp.experts.gate_up_proj_bias":
            yield f"{block}.ffn_gate_exps.bias", values[:, 0::2]
            yield f"{block}.ffn_up_exps.bias", values[:, 1::2]
        elif rest == "mlp.experts.down_proj":
            yield f"{block}.ffn_down_exps.weight", values.transpose(0, 2, 1)
        elif rest == "mlp.experts.down_proj_bias":
            yield f"{block}.ffn_down_exps.bias", values
        elif match := re.fullmatch(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight", rest):
            experts.setdefault(f"{block}.ffn_{match[2]}_exps.weight", {})[int(match[1])] = values
        else:
            sys.exit(f"{name} has no name in GGUF here")
    for name, parts in experts.items():
        yield name, np.stack([parts[index] for index in range(len(parts))])


def compare_with_checkpoint(path, checkpoint):
    """Demands that the `gguf` package decodes the values of every tensor of the checkpoint, and finds no other tensor."""
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(str(path)).tensors}
    expected = dict(gguf_tensors(read_tensors(checkpoint / "model.safetensors")))
    if found.keys() != expected.keys():
        sys.exit(f"{path}: other tensors: {sorted(found.keys() ^ expected.keys())}")
    for name, stored in expected.items():
        tensor = found[name]
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.tensor_type == gguf.GGMLQuantizationType.BF16:
            bits = np.ascontiguousarray(stored).view(np.uint32)
            stored = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
        if not np.array_equal(values.reshape(stored.shape), stored):
            sys.exit(f"{path}: {name} differs")
    print(f"{path.name}: all {len(expected)} tensors decoded by gguf are the checkpoint's", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="folder of data sets")
    parser.add_argument("--rloss", type=Path, default=ROOT / "target" / "release" / "rloss", help="the binary")
    parser.add_argument("--keep", type=Path, help="leave the files in this folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = (arguments.keep or Path(temporary)).absolute()
        root.mkdir(parents=True, exist_ok=True)
        for name, target in [("model.gguf", arguments.model), ("folder", arguments.folder)]:
            if not (root / name).exists():
                (root / name).symlink_to(target.absolute())
        wrong = exported_runs(arguments.rloss, root)
        copy_tied(arguments.model, root / "tied.gguf")
        tokenizer = Tokenizer.from_file(str(arguments.folder / "tokenizer.json"))
        encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
        (root / "texts.jsonl").write_text(
            "".join(json.dumps(dict(text=text, ids=encode(text))) + "\n" for text in texts(arguments.data)))
        questions = [json.loads(line)["question"] for line in (arguments.data / "gsm8k" / "test.jsonl").read_text().splitlines()]
        server = Server(arguments.model, 1024)
        with open(root / "answers.jsonl", "w") as out:
            for question in questions[:PROMPTS]:
                prompt = encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
                answer = json.loads(server.complete(prompt, ANSWER_TOKENS, temperature=0.0))
                out.write(json.dumps(dict(prompt=prompt, answer=answer["tokens"])) + "\n")
        test = ["cargo", "test", "--release", "--test", "suite", "gguf_parity", "--", "--nocapture"]
        run = subprocess.run(test, cwd=ROOT, env=os.environ | dict(RLOSS_GGUF_PARITY=str(root)))
        return 1 if wrong or run.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
