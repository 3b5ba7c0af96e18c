#!/usr/bin/env python3
"""llama.cpp's own server, diagnosed: a small random GPT-OSS as a GGUF, its answers read by `rloss check-mismatch --against`.

    scripts/check_llama_cpp.py [--seed S] [--rloss FILE] [--keep FOLDER]

The server is the one inside the package xllamacpp, which is built from llama.cpp's tools/server and listens on HTTP. Each
case writes the model anew, as it is or with a mistake in the GGUF, lets the server continue a few prompts by /completion
with n_probs, and prints what is found. Ends with status 1 when a verdict is not the one expected.

Needs target/release/rloss (or --rloss), torch, transformers 5, gguf, xllamacpp.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import gguf
import numpy
import torch
import xllamacpp

from make_fixtures import random_model
from mismatch_campaign import BYTES, ROOT, VOCABULARY, tokenizer_json

# llama.cpp has GPT-OSS's clamp and gain built in, and bounds of the YaRN ramp that are rounded, as `truncate` says.
SIZES = dict(
    vocab_size=272, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    intermediate_size=64, num_local_experts=4, num_experts_per_tok=2, sliding_window=16, max_position_embeddings=512,
    rms_norm_eps=1e-5, swiglu_limit=7.0, layer_types=["sliding_attention", "full_attention"] * 2,
    rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=8.0, truncate=True, beta_fast=32.0, beta_slow=1.0,
                         original_max_position_embeddings=64),
)
PROMPTS, RESPONSE_TOKENS = 6, 90
# Name, what differs in the model's YaRN, in the GGUF; verdict, cause. Keys and values are cached in f16.
CASES = [
    ("no mistake", {}, {}, "rounding", None),
    ("truncate is false", dict(truncate=False), {}, "named", "other YaRN ramp"),
    ("sinks written as 0", {}, dict(sinks=0.0), "named", "sinks loaded as 0"),
    ("rope.freq_base of another model", {}, dict(freq_base=150000.0), "named", "other RoPE base"),
    ("window one longer", {}, dict(window=17), "named", "window off by one"),
]


def names_of(name):
    """GGUF's names of one of transformers' tensors."""
    for theirs, ours in [
        ("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output"),
        ("model.layers.", "blk."), ("input_layernorm", "attn_norm"), ("post_attention_layernorm", "post_attention_norm"),
        ("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"), ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"), ("self_attn.sinks", "attn_sinks.weight"), ("mlp.router", "ffn_gate_inp"),
    ]:
        name = name.replace(theirs, ours)
    return name


def tensors(model, sinks=None):
    """Name and values of each tensor as llama.cpp wants them: the experts' gate and up apart, inputs last."""
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        stem = name.split("mlp.experts")[0].replace("model.layers.", "blk.")
        if name.endswith("experts.gate_up_proj"):
            yield f"{stem}ffn_gate_exps.weight", values[..., ::2].swapaxes(1, 2)
            yield f"{stem}ffn_up_exps.weight", values[..., 1::2].swapaxes(1, 2)
        elif name.endswith("experts.gate_up_proj_bias"):
            yield f"{stem}ffn_gate_exps.bias", values[..., ::2]
            yield f"{stem}ffn_up_exps.bias", values[..., 1::2]
        elif name.endswith("experts.down_proj"):
            yield f"{stem}ffn_down_exps.weight", values.swapaxes(1, 2)
        elif name.endswith("experts.down_proj_bias"):
            yield f"{stem}ffn_down_exps.bias", values
        elif name.endswith("sinks") and sinks is not None:
            yield names_of(name), numpy.full_like(values, sinks)
        else:
            yield names_of(name), values


def add_metadata(writer, sizes, entries, kinds, eos, bos):
    """What llama.cpp reads beside the tensors, of transformers' configuration and the vocabulary's entries by id."""
    rope = sizes["rope_parameters"]
    writer.add_block_count(sizes["num_hidden_layers"])
    writer.add_context_length(sizes["max_position_embeddings"])
    writer.add_embedding_length(sizes["hidden_size"])
    writer.add_feed_forward_length(sizes["intermediate_size"])
    writer.add_expert_feed_forward_length(sizes["intermediate_size"])
    writer.add_head_count(sizes["num_attention_heads"])
    writer.add_head_count_kv(sizes["num_key_value_heads"])
    writer.add_key_length(sizes["head_dim"])
    writer.add_value_length(sizes["head_dim"])
    writer.add_layer_norm_rms_eps(sizes["rms_norm_eps"])
    writer.add_sliding_window(sizes["sliding_window"])
    writer.add_expert_count(sizes["num_local_experts"])
    writer.add_expert_used_count(sizes["num_experts_per_tok"])
    writer.add_rope_dimension_count(sizes["head_dim"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-4o")
    writer.add_token_list(entries)
    writer.add_token_types(kinds)
    # The list must not be empty; nothing asks for this pair, prompts are sent as ids.
    writer.add_token_merges(["\u0100 \u0100"])
    writer.add_eos_token_id(eos)
    writer.add_bos_token_id(bos)
    writer.add_add_bos_token(False)


def write_gguf(path, model, sizes, sinks=None, freq_base=None, window=None):
    rope = sizes["rope_parameters"]
    written = sizes | dict(
        sliding_window=window or sizes["sliding_window"],
        rope_parameters=rope | dict(rope_theta=freq_base or rope["rope_theta"]))
    entries = list(tokenizer_json("gpt_oss")["model"]["vocab"])
    special = VOCABULARY["gpt_oss"][0]
    kinds = [gguf.TokenType.CONTROL if entry in special else gguf.TokenType.NORMAL for entry in entries]
    writer = gguf.GGUFWriter(str(path), "gpt-oss")
    add_metadata(writer, written, entries, kinds, eos=special.index("<|return|>"), bos=special.index("<|start|>"))
    for name, values in tensors(model, sinks):
        writer.add_tensor(name, numpy.ascontiguousarray(values, dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def served(path, prompts):
    """The server's answers to `prompts`, as it wrote them."""
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.warmup = 512, 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    answers = []
    for seed, prompt in enumerate(prompts):
        body = dict(prompt=prompt, n_predict=RESPONSE_TOKENS, n_probs=1, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0,
                    seed=seed, ignore_eos=True, cache_prompt=False, return_tokens=True)
        request = urllib.request.Request(
            f"{server.listening_address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            answers.append(answer.read().decode())
    return answers


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of the model and the prompts (default 1)")
    parser.add_argument("--rloss", type=Path, default=ROOT / "target" / "release" / "rloss", help="the binary")
    parser.add_argument("--keep", type=Path, help="leave the files in this folder, which must be new")
    arguments = parser.parse_args()
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
            write_gguf(folder / "model.gguf", model, sizes, **written)
            answers = folder / "answers.jsonl"
            answers.write_text("\n".join(served(folder / "model.gguf", prompts)) + "\n")
            recipe = folder / "recipe.toml"
            recipe.write_text(f"[model]\npath = {json.dumps(str(folder / 'model'))}\n")
            command = [arguments.rloss, "check-mismatch", recipe, "--against", answers, "--out", folder / "out"]
            run = subprocess.run(command, capture_output=True, text=True)
            if run.returncode not in (0, 3):
                sys.exit(f"{name}: {run.stderr}")
            found = json.loads((folder / "out" / "mismatch.json").read_text())
            of = found["diagnosis"]
            causes = [explanation["causes"] for explanation in of["explanations"]]
            right = of["verdict"] == verdict and (cause is None or causes == [[cause]])
            wrong += not right
            print(f"{name}: {'' if right else 'NOT AS EXPECTED: '}{found['verdict']}\n", flush=True)
    print(f"{len(CASES) - wrong} of {len(CASES)} verdicts as expected; llama.cpp in xllamacpp {xllamacpp.__version__}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
