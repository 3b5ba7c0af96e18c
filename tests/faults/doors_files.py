#!/usr/bin/env python3
"""Mutated tokenizers and GGUF files, read by the program as a user runs it.

    tests/faults/doors_files.py --count 10000 --jobs 2 [--kind tokenizer|gguf] [--seed N] [--binary target/release/rloss]

Each file is refused with one clear error, or used. Rules for each case:
- At most 2 s (--seconds) of processor time, no panic, no signal, an exit code of 0, 1 or 2, at most 64 KiB of standard error.
- Tokenizers: if the prompt is encoded, the bytes of its tokens are those of the text after the file's normalizers.
- GGUF: if the file is used, its tensors lie side by side at their alignment within the file. Where the mutation does
  not change what the file says, the sampled tokens are those of the original.
The seed is printed; case N of a seed is always the same: --only N repeats it and keeps its folder.
"""

import concurrent.futures
import copy
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unicodedata
from collections import Counter
from pathlib import Path

from faults import HERE, Failed, options

FIXTURE = HERE.parent / "fixtures/gguf/gpt_oss.gguf"
SPECIAL = ["<|pad|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>"]
QWEN2 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
O200K = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
ATOMS = [r"[\s\S]", ".", r"\s", r"\S", r"\p{L}", r"\p{N}", "a", "[^a]", "(?i:s)", r"\w", r"\b", "^", "$", "(?=)", r"\x00"]
PIECES = ["2+3? ", "a", "A", " ", "\n", "\r\n", "1", "don't ", "é", "中文", "😀", "e\u0301", "\u00a0", "!!", "_x", "ﬁ", "İ"]


def alphabet():
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in keep else chr(next(others)) for byte in range(256)]


ALPHABET = alphabet()
BYTES = {char: byte for byte, char in enumerate(ALPHABET)}


# ---- tokenizers

def split(pattern, behavior="Isolated", invert=False):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}


LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def tokenizer():
    vocab = {text: id for id, text in enumerate(SPECIAL)}
    vocab.update({char: len(SPECIAL) + byte for byte, char in enumerate(ALPHABET)})
    for pair in ["th", "he", "Ġa", "12", "in"]:
        vocab[pair] = len(vocab)
    added = [{"id": id, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
              "special": True} for id, text in enumerate(SPECIAL)]
    return copy.deepcopy({"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split(QWEN2), LEVEL]},
            "post_processor": None, "decoder": LEVEL,
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                      "vocab": vocab, "merges": [["t", "h"], ["h", "e"], ["Ġ", "a"], ["1", "2"], ["i", "n"]]}})


def expression(rng, depth):
    if depth == 0 or rng.random() < 0.2:
        return rng.choice(ATOMS)
    inner = lambda: expression(rng, depth - 1)
    return rng.choice([
        lambda: f"(?:{inner()}|{inner()})", lambda: inner() + inner(), lambda: inner() + inner() + inner(),
        lambda: f"(?:{inner()})" + rng.choice(["*", "+", "?", "*?", "+?", "{2,5}", "{18}", "{900}", "{3,}"]),
        lambda: f"({rng.choice(['?=', '?!', '?<=', '?<!', '?>', '?:'])}{inner()})",
        lambda: f"({inner()})\\1"])()


def damage(rng, value):
    """Returns another JSON value in the place of one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([value + 1, -value - 1, 0, 1 << 31, 1 << 63, 1.5, None])
    if isinstance(value, str):
        return rng.choice([value + "a", value[:-1], "", value * 50, value.swapcase(), "\0", "Removed", None, []])
    return rng.choice([None, 0, "", [], {}, value and [value], True])


def mutate_tree(rng, tree):
    places = []

    def walk(value, depth):
        keys = list(value) if isinstance(value, dict) else range(len(value))
        for key in keys:
            places.append((value, key, depth))
            if isinstance(value[key], (dict, list)):
                walk(value[key], depth + 1)

    walk(tree, 0)
    model = tree.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    small = [place for place in places if place[0] is not vocab] or places
    if not places:
        return
    holder, key, _ = rng.choice(small if rng.random() < 0.8 else places)
    if isinstance(holder, dict) and rng.random() < 0.2:
        del holder[key]
    else:
        holder[key] = damage(rng, holder[key])


def mutate_tokenizer(rng):
    """Returns a tokenizer.json as bytes, and the name of the mutation."""
    tree = tokenizer()
    steps = tree["pre_tokenizer"]["pretokenizers"]
    kind = rng.choice(["regex", "regex", "regex", "doubling", "steps", "normalizer", "tree", "tree", "vocab", "added", "bytes"])
    if kind == "regex":
        steps[0] = split(expression(rng, rng.randrange(1, 6)) + rng.choice(["", "|" + QWEN2, r"|[\s\S]"]))
    elif kind == "doubling":
        count = rng.randrange(1, 25)
        inner = rng.choice([r"(?:(?=)[\s\S]|[\s\S](?=)){%d}", r"(?:\w|[\s\S]){%d}", r"(?:\S+\s*)*", r"[\s\S]*", r"(?:a|aa|\w)+"])
        end = rng.choice([r"\x00", "$\\x00", "(?!)"])
        steps[0] = split("(?=%s%s)|[\\s\\S]" % (inner % count if "%" in inner else inner, end))
    elif kind == "steps":
        behaviors = ["Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"]
        others = [{"type": "Digits", "individual_digits": rng.random() < 0.5}, {"type": "Punctuation", "behavior": rng.choice(behaviors)},
                  {"type": "WhitespaceSplit"}, {"type": "Whitespace"}, {"type": "UnicodeScripts"}, {"type": "FixedLength", "length": rng.randrange(0, 9)},
                  {"type": "CharDelimiterSplit", "delimiter": "3"}, {"type": "BertPreTokenizer"}, {**LEVEL, "use_regex": True},
                  {**LEVEL, "add_prefix_space": True}, split(O200K, rng.choice(behaviors), rng.random() < 0.5), split(r"\s+", rng.choice(behaviors))]
        chosen = [rng.choice(others) for _ in range(rng.randrange(1, 4))]
        tree["pre_tokenizer"]["pretokenizers"] = rng.choice([chosen + [LEVEL], chosen, [LEVEL] + chosen, [steps[0]] + chosen + [LEVEL]])
    elif kind == "normalizer":
        names = ["NFC", "NFD", "NFKC", "NFKD", "Lowercase"]
        tree["normalizer"] = {"type": "Sequence", "normalizers": [{"type": rng.choice(names)} for _ in range(rng.randrange(1, 5))]}
    elif kind == "tree":
        for _ in range(rng.randrange(1, 3)):
            mutate_tree(rng, tree)
    elif kind == "vocab":
        vocab = tree["model"]["vocab"]
        one, other = rng.sample(sorted(vocab), 2)
        rng.choice([lambda: vocab.update({one: vocab[other], other: vocab[one]}), lambda: vocab.pop(one),
                    lambda: vocab.update({one: vocab[other]}), lambda: vocab.update({one: rng.choice([9999, 1 << 22, 1 << 31])}),
                    lambda: tree["model"]["merges"].append([one, other]), lambda: tree["model"].update(ignore_merges=True, byte_fallback=True),
                    lambda: tree["model"].update({rng.choice(["continuing_subword_prefix", "end_of_word_suffix"]): "##"})])()
    elif kind == "added":
        extra = {"id": rng.choice([len(tree["model"]["vocab"]), 3, 300, 40]), "content": rng.choice(["2", "+3", " ", "<|x|>", "", "a", "é", "\u0301"]),
                 "single_word": rng.random() < 0.3, "lstrip": False, "rstrip": False, "normalized": rng.random() < 0.5, "special": rng.random() < 0.3}
        tree["added_tokens"].append(extra)
    data = bytearray(json.dumps(tree).encode())
    if kind == "bytes":
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(data))
            rng.choice([lambda: data.__setitem__(at, rng.randrange(256)), lambda: data.__delitem__(slice(at, at + rng.randrange(1, 50))),
                        lambda: data.__setitem__(slice(at, at), data[:rng.randrange(1, 400)])])()
    return bytes(data), kind


def spelled(tree, ids):
    """Returns the bytes of tokens, read as the file says."""
    texts = {id: entry for entry, id in tree["model"]["vocab"].items()}
    added = {token["id"]: token["content"].encode() for token in tree["added_tokens"]}
    of = lambda id: added[id] if id in added else bytes(BYTES[char] for char in texts[id])
    return b"".join(of(id) for id in ids)


def normalized(tree, text):
    steps = tree["normalizer"] or {"type": "Sequence", "normalizers": []}
    for step in steps["normalizers"] if "normalizers" in steps else [steps]:
        if step["type"] == "Lowercase":
            text = text.lower()
        elif step["type"] == "Strip":
            text = text.strip()
        elif step["type"] == "StripAccents":
            raise KeyError
        else:
            text = unicodedata.normalize(step["type"], text)
    return text


# ---- GGUF

FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
BLOCKS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 12: (256, 144), 13: (256, 176),
          14: (256, 210), 30: (1, 2), 39: (32, 17)}


class Reader:
    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, form):
        size = struct.calcsize("<" + form)
        (value,) = struct.unpack_from("<" + form, self.data, self.at)
        self.at += size
        return value

    def text(self):
        size = self.take("Q")
        if self.at + size > len(self.data):
            raise ValueError
        self.at += size
        return self.data[self.at - size:self.at]


def parse_gguf(data):
    """Returns the metadata, the tensors (name, shape, type, offset), and where their data begins."""
    reader = Reader(data)
    if data[:4] != b"GGUF":
        raise ValueError
    reader.at = 4
    version, tensors, entries = reader.take("I"), reader.take("Q"), reader.take("Q")
    if version not in (2, 3) or tensors > 10_000 or entries > 10_000:
        raise ValueError
    metadata = []
    for _ in range(entries):
        key, kind = reader.text(), reader.take("I")
        if kind == 8:
            value = reader.text()
        elif kind == 9:
            of, count = reader.take("I"), reader.take("Q")
            if count > len(data):
                raise ValueError
            value = (of, [reader.text() if of == 8 else reader.take(FORMATS[of]) for _ in range(count)])
        else:
            value = reader.take(FORMATS[kind])
        metadata.append([key, kind, value])
    table = []
    for _ in range(tensors):
        name, dimensions = reader.text(), reader.take("I")
        if dimensions > 4:
            raise ValueError
        table.append([name, [reader.take("Q") for _ in range(dimensions)], reader.take("I"), reader.take("Q")])
    return version, metadata, table, reader.at


def write_gguf(version, metadata, table, data, alignment, counts=(0, 0)):
    text = lambda value: struct.pack("<Q", len(value)) + value
    out = b"GGUF" + struct.pack("<IQQ", version, len(table) + counts[0], len(metadata) + counts[1])
    for key, kind, value in metadata:
        out += text(key) + struct.pack("<I", kind)
        if kind == 8:
            out += text(value)
        elif kind == 9:
            of, values = value
            out += struct.pack("<IQ", of, len(values))
            out += b"".join(text(one) if of == 8 else struct.pack("<" + FORMATS[of], one) for one in values)
        else:
            out += struct.pack("<" + FORMATS[kind], value)
    for name, shape, kind, offset in table:
        out += text(name) + struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", n) for n in shape) + struct.pack("<IQ", kind, offset)
    return out + b"\0" * (-len(out) % alignment) + data


def alignment_of(metadata):
    return next((value for key, _, value in metadata if key == b"general.alignment"), 32)


def lies_side_by_side(data):
    """Returns whether the tensors of a GGUF file lie side by side at their alignment, within the file."""
    _, metadata, table, at = parse_gguf(data)
    alignment = alignment_of(metadata)
    start, free = -(-at // alignment) * alignment, 0
    for _, shape, kind, offset in sorted(table, key=lambda row: row[3]):
        block, size = BLOCKS[kind]
        count = 1
        for n in shape:
            count *= n
        if offset != free or start + offset + count // block * size > len(data):
            return False
        free = -(-(offset + count // block * size) // alignment) * alignment
    return True


def mutate_gguf(rng, base):
    """Returns a GGUF file, the name of the mutation, and whether it still says the same."""
    version, metadata, table, at = copy.deepcopy(base[:4])
    data = base[4]
    kind = rng.choice(["offset", "offset", "offset", "overlap", "shape", "type", "name", "counts", "alignment", "metadata",
                       "metadata", "tokens", "bytes", "cut", "order", "padding"])
    alignment, counts, same = 32, (0, 0), False
    row = rng.choice(table)
    if kind == "offset":
        row[3] = rng.choice([row[3] + rng.choice([1, 4, 16, 31, 32, 64, -32, -4, 1 << 20]), 0, 1 << 62, (1 << 64) - 32, 4]) % (1 << 64)
    elif kind == "overlap":
        alike = [other for other in table if other is not row and other[1:3] == row[1:3]]
        row[3] = rng.choice(alike or table)[3]
    elif kind == "shape":
        place = rng.randrange(len(row[1]))
        row[1][place] = rng.choice([row[1][place] * 2, row[1][place] // 2, 0, 1, 1 << 40, row[1][place] + 32, (1 << 63) + 32])
        if rng.random() < 0.3:
            row[1].reverse()
    elif kind == "type":
        row[2] = rng.choice([*BLOCKS, 10, 99, 1 << 31])
    elif kind == "name":
        row[0] = rng.choice([rng.choice(table)[0], row[0] + b"x", b"", b"\xff", row[0] * 1000])
    elif kind == "counts":
        counts = rng.choice([(1, 0), (-1, 0), (0, 1), (0, -1), (1 << 40, 0), (0, 1 << 40), (-len(table), 0)])
    elif kind == "alignment":
        alignment = rng.choice([1, 4, 16, 32, 64, 128, 4096])
        metadata.append([b"general.alignment", 4, rng.choice([alignment, 0, 1 << 31, 8])])
    elif kind == "metadata":
        entry = rng.choice([entry for entry in metadata if entry[1] != 9])
        if rng.random() < 0.3:
            metadata.remove(entry)
        elif entry[1] == 8:
            entry[2] = rng.choice([entry[2] + b"x", b"", entry[2] * 20_000, b"\xff"])
        elif entry[1] in (6, 12):
            entry[2] = rng.choice([0.0, -1.0, 1e-30, 3e38, float("nan"), float("inf")])
        elif entry[1] == 7:
            entry[2] = not entry[2]
        else:
            bits = 8 * struct.calcsize(FORMATS[entry[1]])
            entry[2] = rng.choice([0, 1, entry[2] + 1, (1 << bits - 1) - 1]) % (1 << bits - 1)
    elif kind == "tokens":
        entry = rng.choice([entry for entry in metadata if entry[1] == 9])
        values = entry[2][1]
        place = rng.randrange(len(values))
        values[place] = rng.choice(values)
        if rng.random() < 0.3:
            values.pop()
    elif kind == "order":
        rng.shuffle(table)
        same = True
    elif kind == "padding":
        data, same = data + bytes(rng.randrange(1, 100)), True
    file = write_gguf(version, metadata, table, data, alignment, counts)
    if kind == "bytes":
        file = bytearray(file)
        for _ in range(rng.randrange(1, 6)):
            file[rng.randrange(base[3])] = rng.choice([0, 255, rng.randrange(256)])
        file = bytes(file)
    elif kind == "cut":
        file = file[:rng.randrange(len(file))]
    return file, kind, same


# ---- the program

class World:
    def __init__(self, arguments):
        self.place = Path(tempfile.mkdtemp(prefix="rloss-doors-files-"))
        self.binary = str(arguments.binary.resolve())
        self.seconds = arguments.seconds
        self.seed = arguments.seed
        data = FIXTURE.read_bytes()
        version, metadata, table, at = parse_gguf(data)
        start = -(-at // 32) * 32
        self.base = (version, metadata, table, at, data[start:])
        folder = self.place / "base"
        folder.mkdir()
        (folder / "m.gguf").write_bytes(data)
        code, error, _, row = self.rollout(folder, folder / "m.gguf", "2+3? ")
        if code != 0:
            raise Failed(f"the original: {error}")
        self.tokens = row["tokens"]

    def rollout(self, folder, model, text):
        """Samples one short conversation about `text`. Returns exit code, standard error, processor
        seconds and the trajectory."""
        (folder / "rows.jsonl").write_text(json.dumps({"question": text, "answer": "#### 1"}) + "\n")
        (folder / "recipe.toml").write_text(f"""
task = {{ name = "gsm8k", train_file = "{folder}/rows.jsonl", validation_file = "{folder}/rows.jsonl" }}
chat.system_message = false
parallel.threads = 1
model.path = "{model}"
[rollout]
prompts_per_step = 1
samples_per_prompt = 1
prompt_tokens_max = 1500
response_tokens_max = 8
turns_max = 1
""")
        command = [self.binary, "rollout", folder / "recipe.toml", "--out", folder / "out"]
        shutil.rmtree(folder / "out", ignore_errors=True)
        with open(folder / "stderr", "wb") as stderr:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr)
        stuck = threading.Timer(120, process.kill)
        stuck.start()
        _, status, usage = os.wait4(process.pid, 0)
        stuck.cancel()
        # Processor time: on a busy machine the clock says little.
        code, seconds = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
        process.returncode = code
        error = (folder / "stderr").read_bytes().decode("utf-8", "replace")
        rows = sorted((folder / "out").rglob("step-*.jsonl"))
        row = json.loads(rows[0].read_text().splitlines()[0]) if code == 0 and rows else None
        return code, error, seconds, row

    def check(self, code, error, seconds):
        if code not in (0, 1, 2):
            raise Failed(f"exit code {code}: {error[-500:]}")
        if "panicked" in error or "internal error" in error:
            raise Failed(f"a panic: {error[-500:]}")
        if seconds > self.seconds:
            raise Failed(f"{seconds:.1f} s, exit code {code}: {error[-200:]}")
        if len(error) > 1 << 16:
            raise Failed(f"{len(error)} bytes of standard error")
        if code and not re.search(r"^error: .", error, re.M):
            raise Failed(f"exit code {code} without an error: {error[-500:]}")

    def case(self, kind, number):
        """Returns the mutation, its outcome and the seconds."""
        rng = random.Random(f"{self.seed} {kind} {number}")
        folder = self.place / f"{kind}{number}"
        folder.mkdir()
        mutation, outcome, seconds = (self.tokenizer_case if kind == "tokenizer" else self.gguf_case)(rng, folder)
        shutil.rmtree(folder)
        return mutation, outcome, seconds

    def tokenizer_case(self, rng, folder):
        data, mutation = mutate_tokenizer(rng)
        (folder / "m").mkdir()
        (folder / "m/tokenizer.json").write_bytes(data)
        try:
            size = max([*json.loads(data)["model"]["vocab"].values(), 280], default=280) + 20
            size = size if size < 5000 else 300
        except (ValueError, KeyError, TypeError, AttributeError):
            size = 300
        config = {"model_type": "gpt_oss", "vocab_size": size, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
                  "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 32, "num_local_experts": 2, "num_experts_per_tok": 1,
                  "sliding_window": 16, "swiglu_limit": 7.0, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": {"rope_type": "default"},
                  "max_position_embeddings": 131072, "tie_word_embeddings": False, "eos_token_id": 6, "pad_token_id": 0}
        (folder / "m/config.json").write_text(json.dumps(config))
        length = rng.choice([1, 3, 30, 240, 1000, 4000 if mutation in ("regex", "doubling") else 500])
        if rng.random() < 0.3:
            text = rng.choice(PIECES) * length
        else:
            text = "".join(rng.choice(PIECES) for _ in range(length))
        # A prompt of more than 1500 tokens is refused after it was encoded: the model would be slow.
        code, error, seconds, row = self.rollout(folder, folder / "m", text)
        self.check(code, error, seconds)
        if row is None:
            return mutation, "refused" if code == 2 else f"exit code {code}", seconds
        tree = json.loads(data)
        if any(token.get("lstrip") or token.get("rstrip") for token in tree["added_tokens"]):
            return mutation, "used, strips", seconds
        try:
            # The task strips its question.
            expected = normalized(tree, text.strip()).encode()
        except (KeyError, TypeError, ValueError):
            return mutation, "used, other normalizers", seconds
        try:
            found = spelled(tree, row["tokens"][:row["prompt_tokens"]])
        except KeyError as absent:
            raise Failed(f"the prompt has the token {absent}, which the file does not have") from absent
        if b'"add_prefix_space": true' in data:
            expected, found = (part.replace(b" ", b"") for part in (expected, found))
        # Rust and Python lower-case a few letters differently.
        if expected not in found and "İ" not in text:
            raise Failed(f"the prompt {text[:80]!r} became {found[:300]!r}")
        return mutation, "used", seconds

    def gguf_case(self, rng, folder):
        data, mutation, same = mutate_gguf(rng, self.base)
        (folder / "m.gguf").write_bytes(data)
        code, error, seconds, row = self.rollout(folder, folder / "m.gguf", "2+3? ")
        self.check(code, error, seconds)
        if row is None:
            if same:
                raise Failed(f"{mutation} is refused: {error[-300:]}")
            return mutation, "refused" if code == 2 else f"exit code {code}", seconds
        if not lies_side_by_side(data):
            raise Failed(f"{mutation}: tensors that do not lie side by side are used")
        if same and row["tokens"] != self.tokens:
            raise Failed(f"{mutation}: other tokens are sampled")
        return mutation, "used", seconds


def main():
    parser = options(__doc__, 200, "cases, half of each kind")
    parser.add_argument("--kind", choices=["tokenizer", "gguf"])
    parser.add_argument("--seconds", type=float, default=2.0, help="limit of a case's processor time")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", type=int, help="the number of one case")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    world = World(arguments)
    kinds = [arguments.kind] if arguments.kind else ["tokenizer", "gguf"]
    numbers = [arguments.only] if arguments.only is not None else range(arguments.count // len(kinds))
    cases = [(kind, number) for number in numbers for kind in kinds]
    outcomes, slowest, failures = Counter(), (0.0, None), []
    began = time.monotonic()

    def one(case):
        try:
            return case, world.case(*case), None
        except Failed as failure:
            return case, None, failure

    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        for case, result, failure in pool.map(one, cases):
            if failure:
                failures.append(case)
                print(f"FAILED {case[0]} --only {case[1]}: {failure}", flush=True)
                continue
            mutation, outcome, seconds = result
            outcomes[f"{case[0]} {mutation}: {outcome}"] += 1
            slowest = max(slowest, (seconds, case), key=lambda one: one[0])
    for name, count in sorted(outcomes.items()):
        print(f"{count:6} {name}")
    print(f"{len(cases)} cases in {time.monotonic() - began:.0f} s, {len(failures)} failures, the slowest {slowest[0]:.2f} s: {slowest[1]}")
    if failures or arguments.only is not None:
        print(f"folders of failures: {world.place}")
    else:
        shutil.rmtree(world.place)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
