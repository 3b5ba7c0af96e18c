#!/usr/bin/env python3
"""Files for `rloss check-mismatch --against`, made by transformers with one known mistake each, and what rloss says of them.

    scripts/against_cases.py [--family gpt_oss|qwen2] [--models N] [--seed S] [--keep FOLDER]

Draws N random models of a family over its embedded vocabulary, all with YaRN, and writes for each: correct log-probs;
sinks, where there are any, set to minus infinity; RoPE without YaRN's factor on cosine and sine; plain RoPE; temperature
0.7, unmarked; bf16; and rows that are no conversation. Runs rloss on each and prints the confusion table. Ends with status 1 if any
diagnosis is wrong.

Needs target/release/rloss (or --rloss), torch, transformers 5.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, logging

from make_fixtures import EAGER, random_model
from parity import FAMILIES

ROOT = Path(__file__).resolve().parent.parent
SPECIAL = ["<|pad|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>"]
WORDS = ["user", "assistant", "python", "analysis", "commentary", "final", " to=python", " to=assistant"]
START, MESSAGE, CHANNEL, END, RETURN = 1, 2, 3, 4, 6
USER, ASSISTANT, ANALYSIS, FINAL, BYTES = 7, 8, 10, 12, 16
# What the cause in words begins with, by case.
EXPECTED = {
    "correct": "agrees",
    "no sinks": "missing sinks",
    "no YaRN factor": "wrong RoPE",
    "plain RoPE": "wrong RoPE",
    "temperature 0.7": "another temperature",
    "bf16": "rounding: of the size that bf16",
    "no conversation": "agrees",
}
# The embedded ChatML vocabulary: control tokens, added tokens that are not special, words of the frame.
CHATML_SPECIAL, CHATML_ADDED = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], ["<tool_call>", "</tool_call>"]
CHATML_WORDS = [
    "system", "user", "assistant", '{"name": "python", "arguments": {"code": "', '"}}', "<tool_response>", "</tool_response>",
]  # fmt: skip
VOCABULARIES = {"gpt_oss": (SPECIAL, [], WORDS), "qwen2": (CHATML_SPECIAL, CHATML_ADDED, CHATML_WORDS)}
IM_START, IM_END, CHATML_USER, CHATML_ASSISTANT, NEWLINE = 1, 2, 6, 7, 26


def tokenizer_json(special, added, words):
    """An embedded vocabulary as a tokenizer.json: added tokens, words, reserved ids, bytes in GPT-2's spelling."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    spelling = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    spell = lambda text: "".join(spelling[byte] for byte in text.encode())
    known = special + added + [spell(word) for word in words]
    reserved = [f"<|reserved_{i}|>" for i in range(len(known), BYTES)]
    entries = known + reserved + [spelling[byte] for byte in range(256)]
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False)
    added = [
        dict(id=i, content=entry, special=entry not in added, **flags)
        for i, entry in enumerate(entries) if entry in special + added + reserved
    ]
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)
    model = dict(type="BPE", vocab={entry: i for i, entry in enumerate(entries)}, merges=[])
    return dict(version="1.0", added_tokens=added, pre_tokenizer=byte_level, decoder=byte_level, model=model)


def sizes_of(rng, family):
    """A configuration in which every mistake can show."""
    sizes = FAMILIES[family](rng) | dict(
        vocab_size=272, hidden_size=rng.choice([36, 64, 100, 129]), head_dim=rng.choice([8, 16, 32]),
        num_hidden_layers=rng.randint(2, 4), max_position_embeddings=256,
    )
    if family == "gpt_oss":
        sizes["sliding_window"] = rng.choice([16, 31, 128])
    sizes.pop("layer_types", None)
    sizes["rope_parameters"] = dict(
        rope_type="yarn", rope_theta=rng.choice([10000.0, 150000.0]), factor=rng.choice([4.0, 32.0]), truncate=False,
        beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=rng.choice([16, 64, 4096]),
    )
    return sizes


def conversation(rng, family):
    text = lambda n: [BYTES + rng.randrange(32, 127) for _ in range(rng.randint(1, n))]
    if family == "qwen2":
        return [
            IM_START, CHATML_USER, NEWLINE, *text(60), IM_END, NEWLINE,
            IM_START, CHATML_ASSISTANT, NEWLINE, *text(90), IM_END,
        ]  # fmt: skip
    return [
        START, USER, MESSAGE, *text(60), END,
        START, ASSISTANT, CHANNEL, ANALYSIS, MESSAGE, *text(90), END,
        START, ASSISTANT, CHANNEL, FINAL, MESSAGE, *text(40), RETURN,
    ]  # fmt: skip


def write_rows(path, model, conversations, temperature=1.0):
    with path.open("w") as file, torch.no_grad():
        for tokens in conversations:
            ids = torch.tensor(tokens)
            logits = model(ids[None]).logits[0].float() / temperature
            logprobs = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0].tolist()
            file.write(json.dumps(dict(tokens=tokens, logprobs=[None, *logprobs])) + "\n")


def load(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **EAGER).eval()


def plain_rope(folder, sizes):
    model = load(folder)
    config = type(model.config)(**sizes | dict(rope_parameters=dict(
        rope_type="default", rope_theta=sizes["rope_parameters"]["rope_theta"])))
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model


def write_cases(folder, family, sizes, rng, generator):
    """The model and one file a case; returns the files."""
    model = random_model(sizes, generator, family)
    model.save_pretrained(folder / "model")
    (folder / "model" / "tokenizer.json").write_text(json.dumps(tokenizer_json(*VOCABULARIES[family])))
    conversations = [conversation(rng, family) for _ in range(8)]
    noise = [[rng.randrange(272) for _ in range(100)] for _ in range(8)]
    files = {case: folder / f"{case.replace(' ', '_')}.jsonl" for case in EXPECTED}
    write_rows(files["correct"], model, conversations)
    write_rows(files["no conversation"], model, noise)
    write_rows(files["temperature 0.7"], model, conversations, 0.7)
    write_rows(files["bf16"], load(folder / "model", torch.bfloat16), conversations)
    if family == "gpt_oss":
        no_sinks = load(folder / "model")
        for layer in no_sinks.model.layers:
            layer.self_attn.sinks.data.fill_(float("-inf"))
        write_rows(files["no sinks"], no_sinks, conversations)
    else:
        del files["no sinks"]
    no_factor = load(folder / "model")
    no_factor.model.rotary_emb.attention_scaling = 1.0
    write_rows(files["no YaRN factor"], no_factor, conversations)
    write_rows(files["plain RoPE"], plain_rope(folder / "model", sizes), conversations)
    return files


def diagnosis(rloss, folder, file):
    """The verdict of `rloss check-mismatch --against`."""
    recipe = folder / "recipe.toml"
    recipe.write_text(f"[model]\npath = {json.dumps(str(folder / 'model'))}\n")
    out = folder / "out"
    command = [rloss, "check-mismatch", recipe, "--against", file, "--out", out]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(f"{file}: {run.stderr}")
    return json.loads((out / "mismatch.json").read_text())["verdict"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES, default="gpt_oss", help="of the models (default gpt_oss)")
    parser.add_argument("--models", type=int, default=8, help="models to draw (default 8)")
    parser.add_argument("--seed", type=int, default=0, help="of configurations, weights and rows (default 0)")
    parser.add_argument("--keep", type=Path, help="leave the files in this folder, which must be new")
    parser.add_argument("--rloss", type=Path, default=ROOT / "target" / "release" / "rloss", help="the binary")
    arguments = parser.parse_args()
    if arguments.keep and arguments.keep.exists():
        parser.error(f"{arguments.keep} exists")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    rng, generator = random.Random(arguments.seed), torch.Generator().manual_seed(arguments.seed)
    found, wrong = Counter(), []
    with tempfile.TemporaryDirectory() as temporary:
        root = (arguments.keep or Path(temporary) / "cases").absolute()
        for index in range(arguments.models):
            folder = root / f"model{index:02}"
            folder.mkdir(parents=True)
            for case, file in write_cases(folder, arguments.family, sizes_of(rng, arguments.family), rng, generator).items():
                verdict = diagnosis(arguments.rloss, folder, file)
                ill = "no well-formed" in verdict
                found[case, verdict.split(":")[0].split(".")[0] + (", no conversation" if ill else "")] += 1
                if not verdict.startswith(EXPECTED[case]) or ill != (case == "no conversation"):
                    wrong.append(f"{folder.name}, {case}: {verdict}")
    for case in EXPECTED:
        row = [f"{said} {count}" for (of, said), count in found.items() if of == case]
        print(f"{case:16} {'; '.join(row)}")
    print(f"{sum(found.values()) - len(wrong)} of {sum(found.values())} right, {arguments.models} models")
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
