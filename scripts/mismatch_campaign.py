#!/usr/bin/env python3
"""How often `rloss check-mismatch --against` names the right cause: random models, random mistakes, made by transformers.

    scripts/mismatch_campaign.py [--cases N] [--seed S] [--out FILE]
    scripts/mismatch_campaign.py --make FOLDER [--cases N] [--seed S]
    scripts/mismatch_campaign.py --made FOLDER [--out FILE]

Draws small random GPT-OSS and Qwen2 models over the embedded vocabularies, and for each a few cases: no mistake, each cause of
mismatch_faults.py, and faults on some tokens only. The faulty side is transformers in f32 or bf16.
A case is set aside when its fault, computed in f32, moves no token further than the 99.9th percentile of what bf16 moves on the
healthy side, or when it is what bf16 does (bf16 weights, computed in bf16); it must then read as rounding, or be named rightly.
Prints the table, writes one line a case to --out, and ends with status 1 when a threshold is missed. --make stops before the
diagnosis, --made begins there.

Needs target/release/rloss (or --rloss), torch, transformers 5.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import torch
from transformers import logging

from make_fixtures import random_model
from mismatch_faults import FAULTS, GPT_OSS_ONLY, case_of, cast, healthy, plain

ROOT = Path(__file__).resolve().parent.parent
# The embedded vocabularies: special tokens, words of the frame, then the bytes.
VOCABULARY = {
    "gpt_oss": (
        ["<|pad|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>"],
        ["user", "assistant", "python", "analysis", "commentary", "final", " to=python", " to=assistant"],
    ),
    "qwen2": (
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"],
        ["system", "user", "assistant", "<tool_response>", "</tool_response>"],
    ),
}
BYTES = 16
# In the order of how often people meet them: right in at least 95%.
COMMONEST = [
    "another temperature", "log-probs after top-p", "log-probs after top-k", "sinks missing", "off by one",
    "double start token", "full attention everywhere", "weights one update old", "RoPE without YaRN",
]
PARTIAL = ["1% of the tokens", "20% of the tokens", "45% of the tokens", "one expert", "positions beyond 512", "a third of the rows"]
RIGHT_MIN, SETS_MAX, LEFT_MIN = 0.95, 0.15, 0.75
CASES_A_MODEL = 12
# One case in so many is of a Qwen2; where the case asks for nothing else, one in so many has earlier weights at hand.
QWEN2_SHARE, EARLIER_SHARE = 5, 8
ROWS, ROW_TOKENS = 5, 110


def tokenizer_json(family):
    """An embedded vocabulary as a tokenizer.json: special tokens, words, bytes in GPT-2's spelling."""
    special, words = VOCABULARY[family]
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    spelling = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    spell = lambda text: "".join(spelling[byte] for byte in text.encode())
    entries = special + [spell(word) for word in words]
    entries += [f"<|reserved_{i}|>" for i in range(len(entries), BYTES)] + [spelling[byte] for byte in range(256)]
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    added = [dict(id=i, content=entry, **flags) for i, entry in enumerate(entries[:BYTES])
             if entry in special or entry.startswith("<|")]
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)
    model = dict(type="BPE", vocab={entry: i for i, entry in enumerate(entries)}, merges=[])
    return dict(version="1.0", added_tokens=added, pre_tokenizer=byte_level, decoder=byte_level, model=model)


def sizes_of(rng):
    """A GPT-OSS in which every mistake can show."""
    kv_heads, layers = rng.choice([1, 2, 4]), rng.randint(2, 4)
    return dict(
        vocab_size=272, hidden_size=rng.choice([32, 64, 96]), num_hidden_layers=layers,
        num_attention_heads=kv_heads * rng.choice([2, 3]), num_key_value_heads=kv_heads, head_dim=rng.choice([16, 32]),
        intermediate_size=rng.choice([32, 64]), num_local_experts=rng.choice([4, 8]), num_experts_per_tok=rng.choice([2, 3]),
        sliding_window=rng.choice([8, 16, 31]), max_position_embeddings=1024, rms_norm_eps=1e-5,
        swiglu_limit=rng.choice([7.0, 1.5, 1.0]),
        layer_types=(["sliding_attention", "full_attention"] * 2)[:layers],
        rope_parameters=dict(
            rope_type="yarn", rope_theta=rng.choice([10000.0, 150000.0]), factor=rng.choice([4.0, 8.0, 32.0]),
            truncate=rng.random() < 0.3, beta_fast=32.0, beta_slow=1.0,
            original_max_position_embeddings=rng.choice([64, 256]),
        ),
    )


def sizes_of_qwen2(rng):
    """A Qwen2, half of them with YaRN, one in four with the head tied."""
    kv_heads, head_dim = rng.choice([1, 2, 4]), rng.choice([16, 32])
    rope = dict(rope_type="default", rope_theta=rng.choice([10000.0, 1000000.0]))
    if rng.random() < 0.5:
        rope |= dict(rope_type="yarn", factor=rng.choice([4.0, 8.0]), truncate=True, beta_fast=32.0, beta_slow=1.0,
                     original_max_position_embeddings=rng.choice([64, 256]))
    return dict(
        vocab_size=272, hidden_size=rng.choice([32, 64, 96]), num_hidden_layers=rng.randint(2, 4),
        num_attention_heads=kv_heads * rng.choice([2, 3]), num_key_value_heads=kv_heads, head_dim=head_dim,
        intermediate_size=rng.choice([64, 128]), max_position_embeddings=1024, rms_norm_eps=rng.choice([1e-5, 1e-6]),
        tie_word_embeddings=rng.random() < 0.25, rope_parameters=rope,
    )


def conversations(model, rng, long):
    """Rows that the model drew itself; long ones at random, which is cheaper."""
    if long:
        return [[1, *(BYTES + rng.randrange(256) for _ in range(n - 1))] for n in (620, 590)]
    torch.manual_seed(rng.randrange(2**31))
    starts = torch.tensor([[1, BYTES + rng.randrange(256)] for _ in range(ROWS)])
    settings = dict(do_sample=True, top_k=0, top_p=1.0, temperature=1.0, pad_token_id=0, eos_token_id=None)
    drawn = model.generate(starts, attention_mask=torch.ones_like(starts), max_new_tokens=ROW_TOKENS, **settings)
    return [row[: rng.randint(ROW_TOKENS // 2, ROW_TOKENS)].tolist() for row in drawn]


def computed(maker, case, rows):
    model, read = maker(case)
    return [read(model, tokens) for tokens in rows]


def flat(rows):
    return torch.tensor([float("nan") if v is None else v for row in rows for v in row[1:]])


def broken(rng, kind, rows, right, wrong):
    """Log-probs of which some tokens are wrong; `wrong` is another computation's."""
    found = [list(row) for row in right]
    places = [(r, i) for r, row in enumerate(right) for i in range(1, len(row))]
    if kind.endswith("of the tokens"):
        share = float(kind.split("%")[0]) / 100
        for r, i in rng.sample(places, max(1, round(share * len(places)))):
            found[r][i] -= rng.uniform(0.5, 5.0)
    elif kind == "positions beyond 512":
        for r, i in places:
            if i > 512:
                found[r][i] = wrong[r][i]
    else:
        for r, i in places:
            if r % 3 == 0:
                found[r][i] = wrong[r][i]
    return found


def one_expert(rng):
    def make(case):
        layer = rng.choice(list(case.model.model.layers))
        with torch.no_grad():
            layer.mlp.experts.down_proj[rng.randrange(case.sizes["num_local_experts"])] *= -1
        return case.ready(), plain
    return make


class World:
    """One random model with its folder, its rows and its healthy log-probs."""

    def __init__(self, folder, rng, long, family="gpt_oss"):
        self.folder, self.rng, self.family = folder, rng, family
        self.sizes = sizes_of(rng) if family == "gpt_oss" else sizes_of_qwen2(rng)
        # Mistakes of YaRN want a model that has it.
        self.has_yarn = self.sizes["rope_parameters"]["rope_type"] == "yarn"
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        self.model = random_model(self.sizes, generator, family)
        with torch.no_grad():
            self.model.lm_head.weight *= rng.choice([1.0, 2.0, 3.0])
            if family == "gpt_oss":  # so that a clamp matters
                for layer in self.model.model.layers:
                    layer.mlp.experts.gate_up_proj *= 2
            # Norms so small that epsilon counts, in some models.
            if rng.random() < 0.5:
                self.model.model.embed_tokens.weight *= 0.1
        # Released weights are bf16; only "bf16 weights" needs digits beyond.
        self.rounded = rng.random() < 0.7
        if self.rounded:
            self.model = cast(cast(self.model, torch.bfloat16), torch.float32)
        self.earlier = None
        self.rows = conversations(self.model, rng, long)
        folder.mkdir(parents=True)
        self.save("model", self.model)
        self.right = {d: self.log_probs(healthy, d) for d in (torch.float32, torch.bfloat16)}
        gap = (flat(self.right[torch.bfloat16]) - flat(self.right[torch.float32])).abs()
        self.rounding = gap.quantile(0.999).item()

    def save(self, name, model):
        model.save_pretrained(self.folder / name)
        (self.folder / name / "tokenizer.json").write_text(json.dumps(tokenizer_json(self.family)))

    def log_probs(self, maker, dtype, seed=0):
        case = case_of(random.Random(seed), self.sizes, self.model, dtype, self.earlier)
        return computed(maker, case, self.rows)

    def case(self, kind, dtype, seed):
        """Log-probs, and how far the fault moves a token in f32."""
        rng = random.Random(seed)
        if kind == "none":
            return self.right[dtype], 0.0
        if kind in PARTIAL:
            if kind == "one expert":
                make = lambda d: self.log_probs(one_expert(random.Random(seed)), d, seed)
                found, exact = make(dtype), make(torch.float32)
            else:
                whole = "sinks missing" if self.family == "gpt_oss" else "attention biases missing"
                other = "another temperature" if kind == "a third of the rows" else whole
                make = lambda d: broken(
                    random.Random(seed), kind, self.rows, self.right[d], self.log_probs(FAULTS[other], d, seed))
                found, exact = make(dtype), make(torch.float32)
        else:
            found, exact = (self.log_probs(FAULTS[kind], d, seed) for d in (dtype, torch.float32))
        return found, farthest(exact, self.right[torch.float32])


def farthest(rows, others):
    """How far a token is from its other log-prob, at most."""
    return (flat(rows) - flat(others)).abs().nan_to_num(0.0).max().item()


def update(world, rng, name):
    """An update's worth of change: the folder holds the later weights, the engine those before."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    world.earlier = case_of(rng, world.sizes, world.model, torch.float32).model
    with torch.no_grad():
        for tensor in world.earlier.parameters():
            noise = torch.empty_like(tensor).normal_(generator=generator)
            tensor += rng.choice([0.02, 0.05]) * tensor.std() * noise
    world.save(name, world.earlier)


def make(arguments, root):
    """Makes the cases in `root`: a folder a model, a file a case; yields what is known of each, as in cases.jsonl."""
    shard, shards = map(int, arguments.shard.split("/"))
    rng = random.Random(arguments.seed)
    root.mkdir(parents=True)
    listing = (root / "cases.jsonl").open("w")
    index = -1
    for number, (family, long, kinds) in enumerate(worlds_of(rng, arguments.cases, arguments.only)):
        world, model_seed = None, rng.randrange(2**31)
        for kind in kinds:
            index, seed, dtype = index + 1, rng.randrange(2**31), rng.choice([torch.float32, torch.bfloat16])
            if number % shards != shard:
                continue
            while world is None or kind == "bf16 weights" and world.rounded or "YaRN" in kind and not world.has_yarn:
                name = f"model{number:02}" if world is None else f"model{number:02}-{index:03}-{model_seed}"
                world = World(root / name, random.Random(model_seed), long, family)
                model_seed += 1
            case = made_case(root, world, index, kind, dtype, seed)
            listing.write(json.dumps(case) + "\n")
            listing.flush()
            yield case


def made_case(root, world, index, kind, dtype, seed):
    """Writes the file of one case beside its model; what is known of it."""
    world.earlier, earlier = None, None
    if kind == "weights one update old" or seed % EARLIER_SHARE == 0:
        earlier = f"earlier{index:03}"
        update(world, random.Random(seed), earlier)
    log_probs, moved = world.case(kind, dtype, seed)
    with (world.folder / f"case{index:03}.jsonl").open("w") as stream:
        for tokens, values in zip(world.rows, log_probs):
            stream.write(json.dumps(dict(tokens=tokens, logprobs=values)) + "\n")
    return dict(
        index=index, family=world.family, kind=kind, dtype=str(dtype).split(".")[1], model=world.folder.name, earlier=earlier,
        moved=moved, rounding=world.rounding, aside=is_aside(kind, dtype, moved, world.rounding))


def is_aside(kind, dtype, moved, rounding):
    """Whether nothing can be asked of a case. The healthy side in bf16 has bf16 weights, too: there they are no mistake."""
    return kind != "none" and (moved <= rounding or kind == "bf16 weights" and dtype == torch.bfloat16)


def diagnosis(rloss, folder, case):
    """What `rloss check-mismatch` finds for a case in `folder`."""
    file, out = folder / f"case{case['index']:03}.jsonl", folder / f"case{case['index']:03}-out"
    recipe = folder / "recipe.toml"
    recipe.write_text(f"[model]\npath = {json.dumps(str(folder / 'model'))}\n")
    command = [rloss, "check-mismatch", recipe, "--against", file, "--out", out, "--set", "parallel.threads=1"]
    if case["earlier"]:
        command += ["--earlier", folder / case["earlier"]]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode not in (0, 3):
        sys.exit(f"{file}: {run.stderr}")
    found = json.loads((out / "mismatch.json").read_text())
    assert (run.returncode == 3) == found["diagnosis"]["differs"]
    return found


def judge(case, found):
    """`right`, `set`, `rounding`, `unknown` or `wrong`."""
    kind, of = case["kind"], found["diagnosis"]
    sets = [e["causes"] for e in of["explanations"]]
    if of["verdict"] in ("agrees", "rounding"):
        return "right" if kind == "none" else "rounding" if of["verdict"] == "rounding" else "agrees"
    if of["verdict"] == "unknown":
        return "wrong" if kind == "none" else "unknown"
    if kind == "none" or kind in PARTIAL:
        return "wrong"
    if [kind] not in sets:
        return "wrong"
    return "right" if of["verdict"] == "named" else "set"


def worlds_of(rng, count, only):
    """`count` cases in an order of which any part is like the whole: a model's family, whether its rows are long, what is
    wrong in each of its cases. Every cause is alike often within a family. `only`: texts of which a kind contains one."""
    def of(family, count):
        faults = [name for name in FAULTS if family == "gpt_oss" or name not in GPT_OSS_ONLY]
        partial = [kind for kind in PARTIAL if family == "gpt_oss" or kind != "one expert"]
        pool = [*faults, "none", "none", *partial]
        pool = [kind for kind in pool if not only or any(text in kind for text in only)]
        if not pool:
            return
        kinds = []
        while len(kinds) < count:
            kinds += rng.sample(pool, len(pool))
        for long in (False, True):  # long rows cost much: the cases that need them share models
            alike = [kind for kind in kinds[:count] if (kind == "positions beyond 512") == long]
            yield from ((family, long, alike[i:i + CASES_A_MODEL]) for i in range(0, len(alike), CASES_A_MODEL))
    worlds = [*of("gpt_oss", count - count // QWEN2_SHARE), *of("qwen2", count // QWEN2_SHARE)]
    rng.shuffle(worlds)
    return worlds


def report(cases):
    """Prints the table; returns what is missed."""
    by_kind = defaultdict(Counter)
    aside = Counter()
    for case in cases:
        kind = case["kind"]
        if case["aside"]:
            # Named rightly is more than was asked. What differs otherwise must be said to be no larger than rounding.
            small = case["said"] == "unknown" and case["diagnosis"]["within_bf16_rounding"]
            fine = small or case["said"] in ("right", "rounding", "agrees", "set")
            aside[kind, "fine" if fine else "wrong"] += 1
        else:
            by_kind[kind][case["said"]] += 1
    missed = []
    columns = ["right", "set", "unknown", "rounding", "agrees", "wrong"]
    print(f"{'':34}" + "".join(f"{c:>9}" for c in columns) + "    aside")
    for kind in sorted({*by_kind, *(k for k, _ in aside)}):
        row = by_kind[kind]
        put = aside[kind, "fine"], aside[kind, "wrong"]
        print(f"{kind:34}" + "".join(f"{row[c] or '':>9}" for c in columns) + f"    {put[0]} fine, {put[1]} wrong")
        total = sum(row.values())
        if kind in COMMONEST and total and row["right"] + row["set"] < RIGHT_MIN * total:
            missed.append(f"{kind}: right in {row['right'] + row['set']} of {total}")
        if row["wrong"] or put[1]:
            missed.append(f"{kind}: {row['wrong'] + put[1]} wrong")
        if row["agrees"] + row["rounding"]:
            missed.append(f"{kind}: {row['agrees']} read as agreement, {row['rounding']} as rounding")
    left = [case for case in cases if not case["aside"]]
    named = [case for case in left if case["said"] in ("right", "set")]
    sets = sum(case["said"] == "set" for case in named)
    print(f"{len(cases)} cases, {len(cases) - len(left)} set aside, {len(left)} left")
    common = [case for case in left if case["kind"] in COMMONEST]
    right = sum(case["said"] in ("right", "set") for case in common)
    print(f"commonest causes: right in {right} of {len(common)}; sets in {sets} of {len(named)} named")
    if sets > SETS_MAX * max(1, len(named)):
        missed.append(f"sets in {sets} of {len(named)}")
    if len(left) < LEFT_MIN * len(cases):
        missed.append(f"only {len(left)} cases left")
    return missed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=400, help="cases to draw (default 400)")
    parser.add_argument("--seed", type=int, default=1, help="of models, rows, faults (default 1)")
    parser.add_argument("--shard", default="0/1", help="the I-th of N parts, for processes side by side (default 0/1)")
    parser.add_argument("--merge", type=Path, nargs="+", help="no cases: report on these files of --out")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="only kinds that contain one of these texts")
    parser.add_argument("--make", type=Path, metavar="FOLDER", help="make the cases in this folder, which must be new, and stop")
    parser.add_argument("--made", type=Path, metavar="FOLDER", help="diagnose the cases of this folder")
    parser.add_argument("--out", type=Path, help="a line a case, JSON")
    parser.add_argument("--rloss", type=Path, default=ROOT / "target" / "release" / "rloss", help="the binary")
    arguments = parser.parse_args()
    if arguments.merge:
        lines = [line for file in arguments.merge for line in file.read_text().splitlines()]
        missed = report([json.loads(line) for line in lines])
        print("\n".join(missed))
        return 1 if missed else 0
    kinds = ["none", *PARTIAL, *FAULTS]
    for text in arguments.only or []:
        if not any(text in kind for kind in kinds):
            parser.error(f"--only {text!r} is in no kind; the kinds are {', '.join(kinds)}")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    cases = []
    with tempfile.TemporaryDirectory() as temporary:
        root = (arguments.make or arguments.made or Path(temporary) / "cases").absolute()
        if arguments.made:
            made = [json.loads(line) for line in (root / "cases.jsonl").read_text().splitlines()]
            gone = {case["kind"] for case in made} - {"none", *PARTIAL, *FAULTS}
            if gone:
                sys.exit(f"{root}: made with {', '.join(sorted(gone))}, which is no cause here; make the cases anew with --make")
        else:
            made = make(arguments, root)
        if arguments.make:
            print(f"{sum(1 for _ in made)} cases in {root}")
            return 0
        out = arguments.out.open("w") if arguments.out else None
        for case in made:
            found = diagnosis(arguments.rloss, root / case["model"], case)
            case |= dict(said=judge(case, found), verdict=found["verdict"], diagnosis=found["diagnosis"])
            cases.append(case)
            if out:
                out.write(json.dumps(case) + "\n")
                out.flush()
    missed = report(cases)
    print("\n".join(missed))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
