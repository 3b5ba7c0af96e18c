#!/usr/bin/env python3
"""A folder of exactly the released shape and form, with random weights: the experts' matrices in MXFP4, all else in bf16.

    scripts/random_checkpoint.py OUT --config config.json [--tokenizer tokenizer.json] [--layers N] [--experts N]
                                     [--vocabulary N] [--seed N] [--shard-gb X] [--sparse]

Needs numpy alone. config.json is that of the released folder; --layers, --experts and --vocabulary replace its numbers
for a smaller model of the same width. Without --tokenizer a made-up vocabulary of the config's size is written, with the
control tokens at the released ids where they fit. Weights are scaled by their fan-in so that logits stay finite; the same
seed gives the same folder. --sparse writes headers and holes in place of values, all of them 0: no disk space is taken,
and `rloss check` plans as for the real folder.
"""

import argparse
import json
import math
import sys
from pathlib import Path

try:
    import numpy as np
except ImportError:
    print("error: numpy is missing; install it: pip install numpy (Debian: python3-numpy)", file=sys.stderr)
    sys.exit(2)

# Values made and written at a time, bytes.
PIECE = 64 << 20
# Root mean square of `bf16` below, over the smallest magnitude; of a nibble's magnitudes.
BF16_RMS, NIBBLE_RMS = 2.415, 2.926
CONTROL = {
    "<|startoftext|>": 199998, "<|endoftext|>": 199999, "<|return|>": 200002, "<|constrain|>": 200003,
    "<|channel|>": 200005, "<|start|>": 200006, "<|end|>": 200007, "<|message|>": 200008, "<|call|>": 200012,
}


def bf16(rng, count, std):
    """Random bf16 of about the standard deviation `std`: any sign and mantissa, one of two exponents."""
    bits = np.frombuffer(rng.bytes(2 * count), np.uint16) & 0x80FF
    exponent = 127 + round(math.log2(std / BF16_RMS))
    return bits + np.uint16((exponent & ~1) << 7)


def about_one(rng, count):
    """bf16 a little above 1."""
    return (np.frombuffer(rng.bytes(2 * count), np.uint16) & 0x0007) + np.uint16(0x3F80)


def scales(rng, count, std):
    """Scale bytes that give MXFP4 values about the standard deviation `std`."""
    exponent = 127 + round(math.log2(std / NIBBLE_RMS))
    return (np.frombuffer(rng.bytes(count), np.uint8) & 1) + np.uint8(exponent)


def tensors(c):
    """(name, dtype, shape, maker) of every tensor in file order; a maker takes (rng, count)."""
    h, i, e, layers = c["hidden_size"], c["intermediate_size"], c["num_local_experts"], c["num_hidden_layers"]
    q, k = (c[heads] * c["head_dim"] for heads in ("num_attention_heads", "num_key_value_heads"))
    for size in (h, i):
        if size % 32:
            sys.exit(f"hidden_size and intermediate_size must be multiples of 32, MXFP4's blocks, not {size}")
    # What writes to the residual stream is smaller: it is added to twice a layer.
    residual = 1 / math.sqrt(2 * layers)

    def dense(std):
        return lambda rng, count: bf16(rng, count, std)

    yield "model.embed_tokens.weight", "BF16", [c["vocab_size"], h], dense(0.5)
    for n in range(layers):
        at = f"model.layers.{n}."
        yield at + "input_layernorm.weight", "BF16", [h], about_one
        for name, out in (("q", q), ("k", k), ("v", k)):
            yield at + f"self_attn.{name}_proj.weight", "BF16", [out, h], dense(h**-0.5)
            yield at + f"self_attn.{name}_proj.bias", "BF16", [out], dense(0.02)
        yield at + "self_attn.o_proj.weight", "BF16", [h, q], dense(q**-0.5 * residual)
        yield at + "self_attn.o_proj.bias", "BF16", [h], dense(0.02)
        yield at + "self_attn.sinks", "BF16", [c["num_attention_heads"]], dense(1.0)
        yield at + "post_attention_layernorm.weight", "BF16", [h], about_one
        yield at + "mlp.router.weight", "BF16", [e, h], dense(h**-0.5)
        yield at + "mlp.router.bias", "BF16", [e], dense(0.02)
        for name, fan_in, out, factor in (("gate_up", h, 2 * i, 1.0), ("down", i, h, residual)):
            stem, std = at + f"mlp.experts.{name}_proj", fan_in**-0.5 * factor
            yield stem + "_blocks", "U8", [e, out, fan_in // 32, 16], lambda rng, count: rng.bytes(count)
            yield stem + "_scales", "U8", [e, out, fan_in // 32], lambda rng, count, s=std: scales(rng, count, s)
            yield stem + "_bias", "BF16", [e, out], dense(0.02)
    yield "model.norm.weight", "BF16", [h], about_one
    yield "lm_head.weight", "BF16", [c["vocab_size"], h], dense(0.5 * h**-0.5)


def size(dtype, shape):
    return math.prod(shape) * {"BF16": 2, "U8": 1}[dtype]


def write_shard(path, shard, seed, first, sparse):
    """One safetensors file; every tensor has a random stream of its own, so shards change nothing."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, dtype, shape, _ in shard:
        start, end = end, end + size(dtype, shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        if sparse:
            out.truncate(out.tell() + end)
            return
        for index, (_, dtype, shape, make) in enumerate(shard):
            rng = np.random.default_rng([seed, first + index])
            width = {"BF16": 2, "U8": 1}[dtype]
            left = math.prod(shape)
            while left:
                count = min(left, PIECE // width)
                made = make(rng, count)
                out.write(made if isinstance(made, bytes) else made.tobytes())
                left -= count


def write_weights(out, c, seed, shard_bytes, sparse):
    shards, room = [[]], shard_bytes
    for tensor in tensors(c):
        bytes_ = size(*tensor[1:3])
        if shards[-1] and bytes_ > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= bytes_
    # The released shards are numbered from 0 to their last.
    names = [f"model-{n:05}-of-{len(shards) - 1:05}.safetensors" for n in range(len(shards))]
    places, total, first = {}, 0, 0
    for name, shard in zip(names, shards):
        write_shard(out / name, shard, seed, first, sparse)
        places |= {tensor[0]: name for tensor in shard}
        total += sum(size(*tensor[1:3]) for tensor in shard)
        first += len(shard)
        print(f"{name}: {len(shard)} tensors", file=sys.stderr)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return total


def alphabet():
    """The character that stands for each byte in byte-level vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def made_up_tokenizer(vocabulary):
    """Every byte a token, and as many more as the vocabulary is large, which no text is encoded to."""
    control = dict(CONTROL)
    if vocabulary <= max(control.values()):
        first = vocabulary - len(control)
        control = {name: first + n for n, name in enumerate(CONTROL)}
    if vocabulary < 256 + len(control):
        sys.exit(f"a vocabulary of {vocabulary} has no room for the bytes and the control tokens")
    names = {place: name for name, place in control.items()}
    first_control = min(control.values())
    vocab, special = {}, []
    for place in range(vocabulary):
        if place < 256:
            vocab[alphabet_[place]] = place
        elif place < first_control:
            vocab[f"\u0120t{place}"] = place
        else:
            special.append((place, names.get(place, f"<|reserved_{place}|>")))
    added = [
        {"id": place, "content": name, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for place, name in special
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
             "vocab": vocab, "merges": []}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
            "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level, "model": model}, control


alphabet_ = alphabet()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--experts", type=int)
    parser.add_argument("--vocabulary", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard-gb", type=float, default=4.8)
    parser.add_argument("--sparse", action="store_true")
    args = parser.parse_args()

    config = json.loads(args.config.read_text())
    if args.layers:
        config["num_hidden_layers"] = args.layers
        config["layer_types"] = [("sliding_attention", "full_attention")[n % 2] for n in range(args.layers)]
    if args.experts:
        config["num_local_experts"] = args.experts
    args.out.mkdir(parents=True)
    if args.vocabulary:
        config["vocab_size"] = args.vocabulary
    if args.tokenizer:
        (args.out / "tokenizer.json").write_bytes(args.tokenizer.read_bytes())
    else:
        tokenizer, control = made_up_tokenizer(config["vocab_size"])
        config |= {"eos_token_id": control["<|return|>"], "pad_token_id": control["<|endoftext|>"]}
        (args.out / "tokenizer.json").write_text(json.dumps(tokenizer))
    ends = [config["eos_token_id"]]
    (args.out / "config.json").write_text(json.dumps(config, indent=2))
    (args.out / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    total = write_weights(args.out, config, args.seed, int(args.shard_gb * 1e9), args.sparse)
    print(f"{args.out}: {total:,} bytes of weights", file=sys.stderr)


if __name__ == "__main__":
    main()
