#!/usr/bin/env python3
"""llama.cpp's own server beside rloss: diagnosed, measured, with a LoRA file, with a real GGUF file.

    scripts/llama_cpp.py check [--seed S] [--rloss FILE] [--keep FOLDER]
    scripts/llama_cpp.py bench FOLDER [--rloss FILE] [--rounds N] [--threads N]
    scripts/llama_cpp.py lora --gguf BASE.gguf --lora adapter.gguf --run RUN [--rloss FILE]
    scripts/llama_cpp.py file MODEL.gguf FOLDER --data DATA [--rloss FILE] [--keep FOLDER]

The server is the one inside the package xllamacpp, which is built from llama.cpp's tools/server and listens
on HTTP.

`check` writes a small random GPT-OSS as a GGUF, anew for each case, as it is or with a mistake, lets the
server continue a few prompts by /completion with n_probs, and prints what `rloss check-mismatch --against`
finds. Ends with status 1 when a verdict is not the one expected. Needs torch, transformers 5.

`bench` has FOLDER, of scripts/random_checkpoint.py, decoded and prefilled by both, side by side on the CPU.
FOLDER becomes model.gguf in it, the same bytes: experts in MXFP4, other matrices in bf16. Rounds are
interleaved, the medians printed. A decode step is the difference of two runs of `rloss rollout` with more and
fewer tokens, over those tokens, for llama.cpp what its server reports; the prefill is the difference of two
prompts, and what the server reports. llama.cpp rounds what enters a product with MXFP4 to 8 bits and with
bf16 to bf16; rloss multiplies in f32.

`lora` compares greedy answers of llama.cpp with a LoRA file and of `rloss serve` with the run that `rloss
export RUN --gguf adapter.gguf` took the file from. Prompts are questions of the task `calculator` in ChatML.
Ends with status 1 if the two differ where rloss' two best log-probs are more than --gap apart.

`file` compares a real GGUF file with its Hugging Face folder, transformers' tokenizer and llama.cpp. FOLDER
holds the decoded tensors of MODEL.gguf, with the decoded head in the embedding's place. DATA is the folder of
data sets (gsm8k, math, ifeval). The script writes what `tests/suite/gguf_parity.rs` reads and runs that test:

- `tied.gguf`: MODEL.gguf with its head as the embedding, and vectors rounded to bf16, as FOLDER has them
- `texts.jsonl`: 500 texts of GSM8K, MATH, IFEval and code with their ids by the folder's tokenizer
- `answers.jsonl`: 20 prompts and llama.cpp's likeliest answers, its cache in f32

Then runs of all families are exported as F32 and BF16, llama.cpp continues prompts with each, and `rloss
check-mismatch --against` must say that the sides agree or differ by rounding. Every tensor of these files is
read back by the `gguf` package and compared with the checkpoint. Needs tokenizers.

All need numpy, gguf, xllamacpp, and target/release/rloss (or --rloss).
"""

import argparse
import concurrent.futures
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import gguf
import numpy as np
import xllamacpp

import gguf_files

ROOT = Path(__file__).resolve().parent.parent


def post(url, body):
    """Returns the text of the answer."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=3600) as answer:
        return answer.read().decode()


class Server:
    """llama.cpp's server of a file, with `settings` of its parameters."""

    def __init__(self, path, threads=None, **settings):
        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(path)
        for name, value in settings.items():
            setattr(parameters, name, value)
        if threads:
            parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
        self.server = xllamacpp.Server(parameters)

    def post(self, path, **body):
        return post(f"{self.server.listening_address}/{path}", body)

    def complete(self, prompt, tokens, **more):
        """An answer with its log-probs, as the server wrote it."""
        return self.post("completion", prompt=prompt, n_predict=tokens, n_probs=1, top_k=0, top_p=1.0, min_p=0.0,
                         cache_prompt=False, return_tokens=True, **more)


def quiet_server(path, context, **settings):
    """One sequence at a time. More threads wait for one another in a loop, and are slow on a busy machine."""
    return Server(path, threads=1, n_ctx=context, n_parallel=1, warmup=False, **settings)


def server_with_f32_cache(path, context):
    f32 = xllamacpp.ggml_type.GGML_TYPE_F32
    return quiet_server(path, context, cache_type_k=f32, cache_type_v=f32)


def rloss(binary, *arguments, codes=(0,)):
    run = subprocess.run([binary, *map(str, arguments)], capture_output=True, text=True)
    if run.returncode not in codes:
        sys.exit(f"{' '.join(map(str, arguments))}: {run.stderr}")
    return run.stdout


def diagnosed(binary, model, answers, out, recipe):
    """Returns what `rloss check-mismatch` finds in `answers` of the model or file `model`."""
    recipe.write_text(f"[model]\npath = {json.dumps(str(model))}\n")
    rloss(binary, "check-mismatch", recipe, "--against", answers, "--out", out, codes=(0, 3))
    return json.loads((out / "mismatch.json").read_text())


# ---- check ------------------------------------------------------------------------------------------------------------

PROMPTS, RESPONSE_TOKENS = 6, 90
# llama.cpp has GPT-OSS's clamp and gain built in, and bounds of the YaRN ramp that are rounded, as `truncate` says.
SIZES = dict(
    vocab_size=272, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    intermediate_size=64, num_local_experts=4, num_experts_per_tok=2, sliding_window=16, max_position_embeddings=512,
    rms_norm_eps=1e-5, swiglu_limit=7.0, layer_types=["sliding_attention", "full_attention"] * 2,
    rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=8.0, truncate=True, beta_fast=32.0, beta_slow=1.0,
                         original_max_position_embeddings=64),
)
# Name, what differs in the model's YaRN, in the GGUF; verdict, cause. Keys and values are cached in f16.
CASES = [
    ("no mistake", {}, {}, "rounding", None),
    ("truncate is false", dict(truncate=False), {}, "named", "other YaRN ramp"),
    ("sinks written as 0", {}, dict(sinks=0.0), "named", "sinks loaded as 0"),
    ("rope.freq_base of another model", {}, dict(freq_base=150000.0), "named", "other RoPE base"),
    ("window one longer", {}, dict(window=17), "named", "window off by one"),
]


def write_random_gguf(path, model, sizes, sinks=None, freq_base=None, window=None):
    from mismatch_campaign import VOCABULARY, tokenizer_json

    rope = sizes["rope_parameters"]
    written = sizes | dict(
        sliding_window=window or sizes["sliding_window"],
        rope_parameters=rope | dict(rope_theta=freq_base or rope["rope_theta"]))
    entries = list(tokenizer_json("gpt_oss")["model"]["vocab"])
    special = VOCABULARY["gpt_oss"][0]
    kinds = [gguf.TokenType.CONTROL if entry in special else gguf.TokenType.NORMAL for entry in entries]
    eos, bos = special.index("<|return|>"), special.index("<|start|>")
    tensors = []
    for name, values in gguf_files.gguf_tensors({key: tensor.float().numpy() for key, tensor in model.state_dict().items()}):
        if name.endswith("attn_sinks.weight") and sinks is not None:
            values = np.full_like(values, sinks)
        tensors.append((name, np.ascontiguousarray(values, dtype=np.float32), None))
    metadata = lambda writer: gguf_files.add_metadata_of_server(writer, written, entries, kinds, eos, bos)
    gguf_files.write(path, "gpt-oss", metadata, tensors)


def check(arguments):
    import torch

    from make_fixtures import random_model
    from mismatch_campaign import BYTES, tokenizer_json

    torch.set_num_threads(1)
    rng = random.Random(arguments.seed)
    prompts = [[1, *(BYTES + rng.randrange(32, 127) for _ in range(rng.randint(4, 30)))] for _ in range(PROMPTS)]
    wrong = 0
    with tempfile.TemporaryDirectory() as temporary:
        root = (arguments.keep or Path(temporary) / "llama.cpp").absolute()
        for name, rope, written, verdict, cause in CASES:
            sizes = SIZES | dict(rope_parameters=SIZES["rope_parameters"] | rope)
            model = random_model(sizes, torch.Generator().manual_seed(arguments.seed))
            folder = root / name.replace(" ", "-")
            model.save_pretrained(folder / "model")
            (folder / "model" / "tokenizer.json").write_text(json.dumps(tokenizer_json("gpt_oss")))
            write_random_gguf(folder / "model.gguf", model, sizes, **written)
            server, answers = quiet_server(folder / "model.gguf", 512), folder / "answers.jsonl"
            complete = lambda seed, prompt: server.complete(prompt, RESPONSE_TOKENS, temperature=1.0, seed=seed, ignore_eos=True)
            answers.write_text("\n".join(complete(seed, prompt) for seed, prompt in enumerate(prompts)) + "\n")
            found = diagnosed(arguments.rloss, folder / "model", answers, folder / "out", folder / "recipe.toml")
            of = found["diagnosis"]
            causes = [explanation["causes"] for explanation in of["explanations"]]
            right = of["verdict"] == verdict and (cause is None or causes == [[cause]])
            wrong += not right
            print(f"{name}: {'' if right else 'NOT AS EXPECTED: '}{found['verdict']}\n", flush=True)
    print(f"{len(CASES) - wrong} of {len(CASES)} verdicts as expected; llama.cpp in xllamacpp {xllamacpp.__version__}")
    return 1 if wrong else 0


# ---- bench ------------------------------------------------------------------------------------------------------------

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


def mxfp4(blocks, scales, rows):
    """Blocks and scales as GGUF has them: a scale before its block, whose bytes pair values 16 apart, not neighbours."""
    shape = blocks[1]
    values = blocks[2].reshape(shape)[:, rows]
    values = np.stack([values & 15, values >> 4], -1).reshape(*values.shape[:-1], 32)
    paired = values[..., :16] | values[..., 16:] << 4
    scale = scales[2].reshape(scales[1])[:, rows, :, None]
    return np.concatenate([scale, paired], -1).reshape(*paired.shape[:2], -1)


def write_packed_gguf(folder, path):
    sizes = json.loads((folder / "config.json").read_text())
    sizes["rope_parameters"] = sizes["rope_scaling"] | dict(rope_theta=sizes["rope_theta"])
    entries = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = dict(entries["model"]["vocab"]) | {token["content"]: token["id"] for token in entries["added_tokens"]}
    names = {index: name for name, index in vocabulary.items()}
    names = [names.get(index, f"<|unused_{index}|>") for index in range(sizes["vocab_size"])]
    metadata = lambda writer: gguf_files.add_metadata_of_server(
        writer, sizes, names, [gguf.TokenType.NORMAL] * len(names), eos=names.index("<|return|>"), bos=0)
    stored = {}
    for part in sorted(folder.glob("*.safetensors")):
        stored |= gguf_files.stored(part)
    tensors, f32 = [], gguf_files.f32
    add = lambda name, values, kind=None: tensors.append((name, values, kind))
    for name, entry in stored.items():
        stem = name.split("mlp.experts")[0].replace("model.layers.", "blk.")
        if name.endswith("_blocks"):
            scales = stored[name.replace("_blocks", "_scales")]
            parts = [("ffn_down", slice(None))]
            if "gate_up" in name:
                parts = [("ffn_gate", slice(0, None, 2)), ("ffn_up", slice(1, None, 2))]
            for part, rows in parts:
                add(f"{stem}{part}_exps.weight", mxfp4(entry, scales, rows), MXFP4)
        elif name.endswith("gate_up_proj_bias"):
            for part, first in [("gate", 0), ("up", 1)]:
                values = np.ascontiguousarray(f32(entry)[:, first::2])
                add(f"{stem}ffn_{part}_exps.bias", values)
        elif name.endswith("down_proj_bias"):
            add(f"{stem}ffn_down_exps.bias", f32(entry))
        elif name.endswith("_scales"):
            pass
        elif len(entry[1]) == 2 and "router" not in name:
            add(gguf_files.gguf_name(name, True), entry[2].reshape(entry[1][0], -1), BF16)
        else:
            add(gguf_files.gguf_name(name, True), f32(entry))
    gguf_files.write(path, "gpt-oss", metadata, tensors)


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
        tokens = [(7 * k + index) % 90 + 32 for k in range(prompt)]
        answer = server.post("completion", prompt=tokens, n_predict=MANY, temperature=1.0, top_k=0, seed=index, ignore_eos=True,
                             cache_prompt=False)
        return json.loads(answer)["timings"]
    with concurrent.futures.ThreadPoolExecutor(sequences) as pool:
        found = list(pool.map(ask, range(sequences)))
    # While others are still prefilled a step takes longer; the shortest is free of it.
    return min(t["predicted_ms"] / t["predicted_n"] for t in found) / 1e3, found[0]["prompt_ms"] / 1e3


def bench(arguments):
    arguments.folder = arguments.folder.absolute()
    path = arguments.folder / "model.gguf"
    if not path.exists():
        write_packed_gguf(arguments.folder, path)
    rows, most = {}, max(SEQUENCES)
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
            server = Server(path, arguments.threads, n_parallel=most, n_ctx=1024 * most, warmup=True)
            for n in SEQUENCES:
                note(f"decode, {n} sequences, ms a step", "llama.cpp", 1e3 * llama_cpp_times(server, n, PROMPT)[0])
            long = llama_cpp_times(server, 1, LONG_PROMPT)[1] - llama_cpp_times(server, 1, PROMPT)[1]
            note(f"prefill of {LONG_PROMPT - PROMPT} tokens, ms", "llama.cpp", 1e3 * long)
            del server
    print("| | rloss | llama.cpp | llama.cpp / rloss |\n| --- | --- | --- | --- |")
    for row, sides in rows.items():
        ours, theirs = (statistics.median(sides[side]) for side in ("rloss", "llama.cpp"))
        print(f"| {row} | {ours:,.0f} | {theirs:,.0f} | {theirs / ours:.2f} |")


# ---- lora ------------------------------------------------------------------------------------------------------------

CALCULATOR = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.\n\nYou may write Python in a "
    "block ```python; its output is then given to you in a block ```output.<|im_end|>\n<|im_start|>user\nCompute (({} - {}) * {}) "
    "+ {}.\nPut the final answer within \\boxed{{}}.<|im_end|>\n<|im_start|>assistant\n"
)


def greedy_answers(gguf, lora, prompts, tokens):
    """Returns the ids of each prompt and of its answer; without the adapter if `lora` is None."""
    settings = dict(n_ctx=2048, n_parallel=1, n_gpu_layers=0, port=0)
    if lora:
        adapter = xllamacpp.CommonAdapterLoraInfo()
        adapter.path, adapter.scale = lora, 1.0
        settings["lora_adapters"] = [adapter]
    server, answers = Server(gguf, **settings), []
    for prompt in prompts:
        ids = json.loads(server.post("tokenize", content=prompt, parse_special=True))["tokens"]
        answer = server.post("completion", prompt=ids, n_predict=tokens, temperature=0, return_tokens=True, cache_prompt=False)
        answers.append((ids, json.loads(answer)["tokens"]))
    return answers


def lora(args):
    rng = random.Random(3)
    prompts = [CALCULATOR.format(*(rng.randint(1000, 99999) for _ in range(4))) for _ in range(args.prompts)]
    adapted, plain = (greedy_answers(args.gguf, lora, prompts, args.tokens) for lora in (args.lora, None))
    print(f"the adapter changes {sum(a[1] != b[1] for a, b in zip(adapted, plain))} of {len(prompts)} answers of llama.cpp")
    sets = ["rollout.sequences_max=4", "rollout.prompt_tokens_max=256", f"rollout.response_tokens_max={args.tokens + 8}"]
    command = [args.rloss, "serve", args.run, "--port", str(args.port)]
    server = subprocess.Popen(command + [word for pair in sets for word in ("--set", pair)], stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{args.port}/v1"
    for _ in range(120):
        try:
            name = json.load(urllib.request.urlopen(f"{url}/models"))["data"][0]["id"]
            break
        except OSError:
            time.sleep(1)
    equal, wrong = 0, 0
    for ids, theirs in adapted:
        body = {"model": name, "prompt": ids, "max_tokens": args.tokens, "temperature": 0, "logprobs": 2, "return_token_ids": True}
        choice = json.loads(post(f"{url}/completions", body))["choices"][0]
        ours = choice["token_ids"]
        at = next((i for i, pair in enumerate(zip(ours, theirs)) if pair[0] != pair[1]), None)
        if at is None:
            equal += 1
            continue
        best, second = sorted(choice["logprobs"]["top_logprobs"][at].values(), reverse=True)[:2]
        wrong += best - second > args.gap
        print(f"another token at {at}: the two best log-probs are {best - second:.4f} apart")
    server.terminate()
    print(f"{equal} of {len(prompts)} answers are equal; {wrong} differ beyond a gap of {args.gap}")
    return 1 if wrong else 0


# ---- file ------------------------------------------------------------------------------------------------------------

TEXTS, QUESTIONS, ANSWER_TOKENS = 500, 20, 48
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

    def metadata(writer):
        for key, field in reader.fields.items():
            if not key.startswith("GGUF.") and key != "general.architecture":
                kind = field.types[0]
                inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(key, field.contents(), kind, sub_type=inner)

    tensors = []
    for tensor in reader.tensors:
        if tensor.name == "token_embd.weight":
            continue
        name = "token_embd.weight" if tensor.name == "output.weight" else tensor.name
        if tensor.tensor_type == gguf.GGMLQuantizationType.F32:
            tensors.append((name, gguf_files.rounded_to_bf16(tensor.data), None))
        else:
            tensors.append((name, tensor.data, tensor.tensor_type))
    gguf_files.write(target, "qwen2", metadata, tensors)


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


def values_of(checkpoint):
    """Returns the tensors of a checkpoint as f32."""
    return {name: gguf_files.f32(entry) for name, entry in gguf_files.stored(checkpoint / "model.safetensors").items()}


def partial_tokens(path):
    """Returns the tokens that are no whole ASCII text: llama.cpp omits the log-prob of a part of a character."""
    field = gguf.GGUFReader(str(path)).get_field("tokenizer.ggml.tokens")
    whole = lambda text: all(" " < char < "\x7f" or char in "ĠĊ" for char in text) and not text.startswith("<|")
    return [token for token, text in enumerate(field.contents()) if not whole(text)]


def sampled_row(server, prompt, tokens, seed, banned):
    """Samples an answer without the tokens `banned`. Returns it as rloss's simplest row: llama.cpp reports a prompt's
    text, not its ids. Its log-probs are those before the ban."""
    bias = [[token, False] for token in banned]
    answer = json.loads(server.complete(prompt, tokens, temperature=1.0, seed=seed, logit_bias=bias))
    probs = answer["completion_probabilities"]
    assert [one["id"] for one in probs] == answer["tokens"], "a token without its log-prob"
    return dict(tokens=prompt + [one["id"] for one in probs], temperature=1.0,
                logprobs=[None] * len(prompt) + [one["logprob"] for one in probs])


def exported_runs(binary, root):
    """Exports short runs, lets llama.cpp continue prompts with each file, and has the log-probs diagnosed."""
    wrong = 0
    for family, recipe, sets in RUNS:
        run = root / family
        sets = [word for one in [*sets, "train.steps=0", "eval.before_training=false"] for word in ("--set", one)]
        rloss(binary, "train", recipe, "--out", run, *sets)
        checkpoint = max((run / "checkpoints").iterdir())
        vocabulary = values_of(checkpoint)["model.embed_tokens.weight"].shape[0]
        for kind in ["f32", "bf16"]:
            path = root / f"{family}-{kind}.gguf"
            rloss(binary, "export", run, "--gguf", path, "--type", kind)
            compare_with_checkpoint(path, checkpoint)
            server = server_with_f32_cache(path, 512)
            rng = np.random.default_rng(7)
            answers = root / f"{family}-{kind}.jsonl"
            prompts = [rng.integers(20, min(vocabulary, 250), 16).tolist() for _ in range(6)]
            banned = partial_tokens(path)
            rows = [sampled_row(server, prompt, 40, seed, banned) for seed, prompt in enumerate(prompts)]
            answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
            model, out = root / f"{family}-{kind}.toml", root / f"{family}-{kind}-mismatch"
            found = diagnosed(binary, path, answers, out, model)
            verdict = found["diagnosis"]["verdict"]
            wrong += verdict not in ("agrees", "agreement", "rounding")
            print(f"{family} as {kind}: {verdict}: {found['verdict']}", flush=True)
    return wrong


def compare_with_checkpoint(path, checkpoint):
    """Demands that the `gguf` package decodes the values of every tensor of the checkpoint, and finds no other tensor."""
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(str(path)).tensors}
    expected = dict(gguf_files.gguf_tensors(values_of(checkpoint)))
    if found.keys() != expected.keys():
        sys.exit(f"{path}: other tensors: {sorted(found.keys() ^ expected.keys())}")
    for name, stored in expected.items():
        tensor = found[name]
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.tensor_type == gguf.GGMLQuantizationType.BF16:
            stored = gguf_files.rounded_to_bf16(stored)
        if not np.array_equal(values.reshape(stored.shape), stored):
            sys.exit(f"{path}: {name} differs")
    print(f"{path.name}: all {len(expected)} tensors decoded by gguf are the checkpoint's", flush=True)


def file(arguments):
    from tokenizers import Tokenizer

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
        server = server_with_f32_cache(arguments.model, 1024)
        with open(root / "answers.jsonl", "w") as out:
            for question in questions[:QUESTIONS]:
                prompt = encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
                answer = json.loads(server.complete(prompt, ANSWER_TOKENS, temperature=0.0))
                out.write(json.dumps(dict(prompt=prompt, answer=answer["tokens"])) + "\n")
        test = ["cargo", "test", "--release", "--test", "suite", "gguf_parity", "--", "--nocapture"]
        run = subprocess.run(test, cwd=ROOT, env=os.environ | dict(RLOSS_GGUF_PARITY=str(root)))
        return 1 if wrong or run.returncode else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)

    def command(run):
        added = commands.add_parser(run.__name__)
        added.set_defaults(call=run)
        added.add_argument("--rloss", type=Path, default=ROOT / "target" / "release" / "rloss", help="the binary")
        return added

    added = command(check)
    added.add_argument("--seed", type=int, default=1, help="of the model and the prompts (default 1)")
    added.add_argument("--keep", type=Path, help="leave the files in this folder, which must be new")
    added = command(bench)
    added.add_argument("folder", type=Path)
    added.add_argument("--rounds", type=int, default=3)
    added.add_argument("--threads", type=int, default=2)
    added = command(lora)
    for name in ["--gguf", "--lora", "--run"]:
        added.add_argument(name, required=True)
    added.add_argument("--port", type=int, default=8765)
    added.add_argument("--prompts", type=int, default=20)
    added.add_argument("--tokens", type=int, default=60)
    added.add_argument("--gap", type=float, default=0.25)
    added = command(file)
    added.add_argument("model", type=Path)
    added.add_argument("folder", type=Path)
    added.add_argument("--data", type=Path, required=True, help="folder of data sets")
    added.add_argument("--keep", type=Path, help="leave the files in this folder")
    arguments = parser.parse_args()
    return arguments.call(arguments)


if __name__ == "__main__":
    sys.exit(main())
