#!/usr/bin/env python3
"""GGUF files by the `gguf` package (PyPI), the reference for reading them; what other scripts write and
read of them.

    scripts/gguf_files.py tests/fixtures/gguf                    the committed fixtures
    scripts/gguf_files.py FOLDER --blocks 1000000 --type Q4_K    blocks of one type, many
    RLOSS_GGUF=FOLDER cargo test --release --test suite gguf::every_type

`types*.gguf` holds, for each type, a tensor of random blocks, and `NAME.expected`, its values by gguf's own
decoder. `gpt_oss.gguf` is a small random GPT-OSS, its experts in MXFP4; `gpt_oss.safetensors` has its tensors
under Hugging Face's names, decoded by gguf. Needs numpy, gguf; the fixtures safetensors.
"""

import argparse
import json
import re
import sys
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T

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
    """Writes `tensors`: name, array and, for bytes of blocks, their type. `metadata` gets the writer."""
    writer = gguf.GGUFWriter(str(path), architecture)
    metadata(writer)
    for name, values, kind in tensors:
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_metadata(writer, sizes, entries, kinds, merges, eos):
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
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-4o")
    writer.add_token_list(entries)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(eos)


def add_metadata_of_server(writer, sizes, entries, kinds, eos, bos):
    """As `add_metadata`, with what llama.cpp's server wants too."""
    # The list must not be empty; nothing asks for this pair, prompts are sent as ids.
    add_metadata(writer, sizes, entries, kinds, ["\u0100 \u0100"], eos)
    writer.add_rope_dimension_count(sizes["head_dim"])
    writer.add_bos_token_id(bos)
    writer.add_add_bos_token(False)


def stored(path):
    """Returns by name the dtype, shape and bytes of each tensor of a safetensors file."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        start = file.tell()
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        found[name] = entry["dtype"], entry["shape"], np.memmap(path, np.uint8, "r", start + begin, (end - begin,))
    return found


def f32(entry):
    """Returns the values of a tensor of `stored` as f32; numpy has no bf16."""
    dtype, shape, values = entry
    if dtype == "F32":
        return values.view(np.float32).reshape(shape)
    assert dtype == "BF16", dtype
    return (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)


def rounded_to_bf16(values):
    """Returns f32 values rounded to bf16, as f32."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)


NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.router": "ffn_gate_inp", "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_name(name, has_sinks):
    """Returns GGUF's name of a tensor of a checkpoint that has one layout in both; None for the experts' and unknown ones."""
    block = re.match(r"model\.layers\.(\d+)\.", name)
    prefix, rest = (f"blk.{block[1]}.", name[block.end() :]) if block else ("", name)
    if rest == "self_attn.sinks":
        return f"{prefix}attn_sinks.weight"
    part, _, kind = rest.rpartition(".")
    if part == "post_attention_layernorm":
        return f"{prefix}{'post_attention_norm' if has_sinks else 'ffn_norm'}.{kind}"
    return f"{prefix}{NAMES[part]}.{kind}" if part in NAMES else None


def gguf_tensors(stored):
    """Yields each tensor of a checkpoint under its name in GGUF and in GGUF's layout: gate and up apart, inputs last."""
    experts, has_sinks = {}, "model.layers.0.self_attn.sinks" in stored
    for name, values in stored.items():
        if ours := gguf_name(name, has_sinks):
            yield ours, values
            continue
        _, _, layer, rest = name.split(".", 3)
        block = f"blk.{layer}"
        if rest == "mlp.experts.gate_up_proj":
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


def types(path, kinds, count, rng):
    tensors = []
    for kind in kinds:
        blocks = random_blocks(kind, count, rng)
        values = gguf.dequantize(blocks, kind).astype(np.float32).reshape(-1)
        tensors += [(kind.name, blocks.reshape(-1), kind), (f"{kind.name}.expected", values, None)]
    write(path, "none", lambda writer: None, tensors)


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
    from safetensors.numpy import save_file

    sizes = dict(
        num_hidden_layers=2, hidden_size=64, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_local_experts=4, num_experts_per_tok=2, sliding_window=16, max_position_embeddings=512, rms_norm_eps=1e-5,
        rope_parameters=dict(rope_theta=150000.0, factor=8.0, original_max_position_embeddings=64),
    )  # fmt: skip
    entries, kinds = vocabulary()
    h, i, e = sizes["hidden_size"], sizes["intermediate_size"], sizes["num_local_experts"]
    q, k = (sizes[f"num_{name}_heads"] * sizes["head_dim"] for name in ("attention", "key_value"))
    v = len(entries)
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
    for layer in range(sizes["num_hidden_layers"]):
        ours, theirs = f"blk.{layer}.", f"model.layers.{layer}."
        add(ours + "attn_norm.weight", theirs + "input_layernorm.weight", (h,))
        for name, size, kind in [("q", q, T.BF16), ("k", k, T.Q8_0), ("v", k, T.F16)]:
            add(f"{ours}attn_{name}.weight", f"{theirs}self_attn.{name}_proj.weight", (size, h), kind)
            add(f"{ours}attn_{name}.bias", f"{theirs}self_attn.{name}_proj.bias", (size,))
        add(ours + "attn_sinks.weight", theirs + "self_attn.sinks", (sizes["num_attention_heads"],))
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

    def metadata(writer):
        add_metadata(writer, sizes, entries, kinds, ["h e", "l l"], entries.index("<|return|>"))
        writer.add_chat_template("{{ 'not a template of this family' }}")

    write(folder / "gpt_oss.gguf", "gpt-oss", metadata, tensors)
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


if __name__ == "__main__":
    main()
