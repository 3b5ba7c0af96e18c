#!/usr/bin/env python3
"""GGUF files by the `gguf` package (PyPI), the reference for reading them.

    scripts/make_gguf_fixtures.py tests/fixtures/gguf                    the committed fixtures
    scripts/make_gguf_fixtures.py FOLDER --blocks 1000000 --type Q4_K    blocks of one type, many
    RLOSS_GGUF=FOLDER cargo test --release --test suite gguf::every_type

`types*.gguf` holds, for each type, a tensor of random blocks, and `NAME.expected`, its values by gguf's own decoder.
`gpt_oss.gguf` is a small random GPT-OSS, its experts in MXFP4; `gpt_oss.safetensors` has its tensors under Hugging Face's
names, decoded by gguf. Needs numpy, gguf, safetensors.
"""

import argparse
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T
from safetensors.numpy import save_file

TYPES = [T.F32, T.F16, T.BF16, T.Q8_0, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q4_K, T.Q5_K, T.Q6_K, T.MXFP4]
# Places of the 16-bit floats of a block.
HALVES = {T.Q8_0: [0], T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q4_K: [0, 2], T.Q5_K: [0, 2],
          T.Q6_K: [208], T.F16: [0]}


def random_blocks(kind, count, rng):
    """Random bytes whose scales are finite: [count, bytes]."""
    _, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
    for place in HALVES.get(kind, []):
        high = blocks[:, place + 1]
        high[(high & 0x7C) == 0x7C] ^= 0x40
    if kind in (T.F32, T.BF16):
        high = blocks[:, -1]
        high[(high & 0x7F) == 0x7F] ^= 0x40
    if kind == T.MXFP4:
        blocks[:, 0] = np.minimum(blocks[:, 0], 250)
    return blocks


def write(path, architecture, metadata, tensors):
    """`tensors`: name, array and, for bytes of blocks, their type."""
    writer = gguf.GGUFWriter(str(path), architecture)
    metadata(writer)
    for name, values, kind in tensors:
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def types(path, kinds, count, rng):
    tensors = []
    for kind in kinds:
        blocks = random_blocks(kind, count, rng)
        values = gguf.dequantize(blocks, kind).astype(np.float32).reshape(-1)
        tensors += [(kind.name, blocks.reshape(-1), kind), (f"{kind.name}.expected", values, None)]
    write(path, "none", lambda writer: None, tensors)


def add_metadata(writer, sizes, entries, kinds):
    writer.add_block_count(sizes["layers"])
    writer.add_context_length(512)
    writer.add_embedding_length(sizes["hidden"])
    writer.add_feed_forward_length(sizes["intermediate"])
    writer.add_expert_feed_forward_length(sizes["intermediate"])
    writer.add_head_count(sizes["heads"])
    writer.add_head_count_kv(sizes["kv_heads"])
    writer.add_key_length(sizes["head_dim"])
    writer.add_value_length(sizes["head_dim"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_sliding_window(16)
    writer.add_expert_count(sizes["experts"])
    writer.add_expert_used_count(2)
    writer.add_rope_freq_base(150000.0)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(8.0)
    writer.add_rope_scaling_orig_ctx_len(64)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-4o")
    writer.add_token_list(entries)
    writer.add_token_types(kinds)
    writer.add_token_merges(["h e", "l l"])
    writer.add_eos_token_id(entries.index("<|return|>"))
    writer.add_chat_template("{{ 'not a template of this family' }}")


def vocabulary():
    """The 256 bytes, two merges, and Harmony's control tokens with an unused one between them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    entries = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))] + ["he", "ll"]
    kinds = [gguf.TokenType.NORMAL] * len(entries)
    special = ["<|start|>", "<|message|>", "<|channel|>", "[PAD261]", "<|end|>", "<|call|>", "<|return|>"]
    kinds += [gguf.TokenType.UNUSED if token[0] == "[" else gguf.TokenType.CONTROL for token in special]
    return entries + special, kinds


def gpt_oss(folder, rng):
    sizes = dict(layers=2, hidden=64, intermediate=32, heads=4, kv_heads=2, head_dim=16, experts=4)
    entries, kinds = vocabulary()
    h, i, e = sizes["hidden"], sizes["intermediate"], sizes["experts"]
    q, k, v = sizes["heads"] * sizes["head_dim"], sizes["kv_heads"] * sizes["head_dim"], len(entries)
    tensors, expected = [], {}

    def add(name, theirs, shape, kind=T.F32):
        values = rng.standard_normal(shape).astype(np.float32) / 4
        data = gguf.quantize(values, kind)
        tensors.append((name, data, None if kind == T.F32 else kind))
        values = gguf.dequantize(data, kind).reshape(shape)
        if theirs:
            expected[theirs] = values
        return values

    add("token_embd.weight", "model.embed_tokens.weight", (v, h), T.BF16)
    for layer in range(sizes["layers"]):
        ours, theirs = f"blk.{layer}.", f"model.layers.{layer}."
        add(ours + "attn_norm.weight", theirs + "input_layernorm.weight", (h,))
        for name, size, kind in [("q", q, T.BF16), ("k", k, T.Q8_0), ("v", k, T.F16)]:
            add(f"{ours}attn_{name}.weight", f"{theirs}self_attn.{name}_proj.weight", (size, h), kind)
            add(f"{ours}attn_{name}.bias", f"{theirs}self_attn.{name}_proj.bias", (size,))
        add(ours + "attn_sinks.weight", theirs + "self_attn.sinks", (sizes["heads"],))
        add(ours + "attn_output.weight", theirs + "self_attn.o_proj.weight", (h, q), T.F32)
        add(ours + "attn_output.bias", theirs + "self_attn.o_proj.bias", (h,))
        add(ours + "post_attention_norm.weight", theirs + "post_attention_layernorm.weight", (h,))
        add(ours + "ffn_gate_inp.weight", theirs + "mlp.router.weight", (e, h))
        add(ours + "ffn_gate_inp.bias", theirs + "mlp.router.bias", (e,))
        # The second layer's experts are not packed.
        kind = [T.MXFP4, T.BF16][layer]
        gate, up = (add(f"{ours}ffn_{name}_exps.weight", None, (e, i, h), kind) for name in ("gate", "up"))
        expected[theirs + "mlp.experts.gate_up_proj"] = np.stack([gate, up], 2).reshape(e, 2 * i, h).swapaxes(1, 2)
        gate, up = (add(f"{ours}ffn_{name}_exps.bias", None, (e, i)) for name in ("gate", "up"))
        expected[theirs + "mlp.experts.gate_up_proj_bias"] = np.stack([gate, up], 2).reshape(e, 2 * i)
        down = add(ours + "ffn_down_exps.weight", None, (e, h, i), kind)
        expected[theirs + "mlp.experts.down_proj"] = down.swapaxes(1, 2)
        add(ours + "ffn_down_exps.bias", theirs + "mlp.experts.down_proj_bias", (e, h))
    add("output_norm.weight", "model.norm.weight", (h,))
    add("output.weight", "lm_head.weight", (v, h), T.BF16)
    write(folder / "gpt_oss.gguf", "gpt-oss", lambda writer: add_metadata(writer, sizes, entries, kinds), tensors)
    save_file({name: np.ascontiguousarray(values) for name, values in expected.items()}, folder / "gpt_oss.safetensors")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--blocks", type=int, default=4, help="blocks of each type (default 4)")
    parser.add_argument("--type", choices=[kind.name for kind in TYPES], help="only this type, and no model")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(arguments.seed)
    kinds = [T[arguments.type]] if arguments.type else TYPES
    types(arguments.folder / "types.gguf", kinds, arguments.blocks, rng)
    if not arguments.type:
        gpt_oss(arguments.folder, rng)


main()
