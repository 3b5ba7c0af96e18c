#!/usr/bin/env python3
"""Random models of a family, computed by transformers and by rloss, compared.

    scripts/parity.py [--family gpt_oss|qwen2|qwen3|qwen3_moe] [--cases N] [--seed S] [--keep FOLDER] [--exact]

Draws N configurations (heads, KV heads, head_dim, experts, top-k, windows, layer types, YaRN or plain RoPE, tied heads,
sizes that are multiples of nothing), makes a random model of each with PyTorch, and takes logits, the gradient of the mean
cross-entropy over masked rows, one SGD step and one AdamW step, in f32 with eager attention and experts. Rows with a token whose
router margin is under 1e-5 are drawn again, and those with a value so near its clamp that rounding decides on which
side its gradient lies, and models with a gradient that all but cancels, so that PyTorch's own moves by over 2e-5 in
double precision. All are counted. Then runs the test `random_models_agree_with_transformers` on them, which compares and saves
each model anew in f32; the script loads those folders in transformers and compares the logits.

Prints the worst difference a case: logits and cached decode over the largest logit (bar 2e-5), log-probs likewise,
the loss over itself, gradients and what the step changed over the largest of each tensor (bar 1e-4), logits of the
saved folder over the largest (bar 1e-5). Ends with status 1 if any is over its bar. `--exact` (Qwen's families) compares
the gradients of both programs with PyTorch's in double precision too, norms, softmax and angles included.

Needs cargo, torch, transformers 5 and safetensors.
"""

import argparse
import functools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, logging

from make_fixtures import ADAMW, CLAMP_MARGIN_MIN, EAGER, ROUTER_MARGIN_MIN, masked_loss, stored, write_model

ROOT = Path(__file__).resolve().parent.parent
TEST = "model::random_models_agree_with_transformers"
SAVED_BAR = 1e-5
# A tensor's gradient may move by this, of its largest value, between PyTorch's f32 and f64.
CANCELLATION_MAX = 2e-5
# A step so long that the rounding of the weights is small beside it.
SGD_LR = 10.0


def random_rope(rng):
    theta = rng.choice([100.0, 10000.0, 150000.0])
    if rng.random() < 0.6:
        return dict(
            rope_type="yarn", rope_theta=theta, factor=rng.choice([1.5, 4.0, 32.0]), truncate=rng.random() < 0.3,
            beta_fast=rng.choice([32.0, 8.0]), beta_slow=rng.choice([1.0, 2.0]),
            original_max_position_embeddings=rng.choice([16, 64, 4096]),
        )
    return dict(rope_type="default", rope_theta=theta)


def random_gpt_oss(rng):
    """The configuration of one case."""
    kv_heads = rng.randint(1, 4)
    experts = rng.choice([1, 2, 3, 4, 5, 8, 13, 32])
    layers = rng.randint(1, 5)
    sizes = dict(
        vocab_size=rng.choice([11, 37, 64, 101, 272, 513]),
        hidden_size=rng.choice([5, 17, 36, 48, 64, 100, 129, 600]),
        num_hidden_layers=layers,
        num_attention_heads=kv_heads * rng.randint(1, 4),
        num_key_value_heads=kv_heads,
        head_dim=rng.choice([2, 6, 8, 16, 18, 32, 64]),
        intermediate_size=rng.choice([1, 7, 16, 33, 51, 64]),
        num_local_experts=experts,
        num_experts_per_tok=rng.randint(1, min(experts, 6)),
        sliding_window=rng.choice([1, 2, 5, 16, 31, 33, 128]),
        max_position_embeddings=256,
        rms_norm_eps=rng.choice([1e-5, 1e-6, 1e-3]),
        swiglu_limit=rng.choice([7.0, 7.0, 1.0, 0.3]),
    )
    if rng.random() < 0.5:  # else alternating, as released
        sizes["layer_types"] = [rng.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]
    sizes["rope_parameters"] = random_rope(rng)
    return sizes


def random_qwen2(rng):
    """The configuration of one case: 1 to 8 query heads a KV head, half of the heads tied."""
    kv_heads = rng.randint(1, 4)
    heads = kv_heads * rng.randint(1, 8)
    sizes = dict(
        vocab_size=rng.choice([11, 37, 64, 101, 272, 513]),
        hidden_size=rng.choice([5, 17, 36, 48, 64, 100, 129, 600]),
        num_hidden_layers=rng.randint(1, 5),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=rng.choice([2, 6, 8, 16, 18, 32, 64]),
        intermediate_size=rng.choice([1, 7, 16, 33, 51, 64, 300]),
        max_position_embeddings=256,
        rms_norm_eps=rng.choice([1e-5, 1e-6, 1e-3]),
        tie_word_embeddings=rng.random() < 0.5,
    )
    if rng.random() < 0.3:  # as released: heads that share out the width, and no key for it
        del sizes["head_dim"]
        sizes["hidden_size"] = heads * rng.choice([2, 6, 8, 16])
    sizes["rope_parameters"] = random_rope(rng)
    return sizes


def random_qwen3(rng):
    """The configuration of one case: heads of up to 128, whatever the width. None is of 2: its norm leaves one direction of
    the gradient, and rounding decides on what is left."""
    sizes = random_qwen2(rng)
    sizes["head_dim"] = rng.choice([6, 16, 18, 64, 128])
    return sizes


def random_qwen3_moe(rng):
    """The configuration of one case: up to 32 experts, of which 2 to 8: one alone gives its router no gradient."""
    experts = rng.choice([2, 3, 5, 8, 13, 32])
    return random_qwen3(rng) | dict(
        moe_intermediate_size=rng.choice([1, 7, 16, 33, 64]), num_experts=experts,
        num_experts_per_tok=rng.randint(2, min(experts, 8)), norm_topk_prob=True,
    )


FAMILIES = {"gpt_oss": random_gpt_oss, "qwen2": random_qwen2, "qwen3": random_qwen3, "qwen3_moe": random_qwen3_moe}


def read_rows(folder):
    rows = json.loads((folder / "rows.json").read_text())["rows"]
    return [(torch.tensor(row["tokens"]), torch.tensor(row["mask"])) for row in rows]


def cancellation(folder):
    """How far PyTorch's f32 gradients are from its f64 ones (norms and angles stay f32), of the largest of a tensor."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **EAGER).eval()
    masked_loss(model, read_rows(folder))[2].backward()
    expected = load_file(folder / "expected.safetensors")
    worst = 0.0
    gradients = ((name, tensor.grad) for name, tensor in model.named_parameters())
    for name, gradient in stored(gradients, model.config.model_type).items():
        difference = (gradient - expected[f"grad.{name}"]).abs().max().item()
        worst = max(worst, difference / gradient.abs().max().item() if difference else 0.0)
    return worst


def exact_norm(norm, x):
    return norm.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon))


def exact_rotation(rotary, x, position_ids):
    angles = position_ids[..., None].double() * rotary.inv_freq.double()
    angles = torch.cat((angles, angles), -1)
    return angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling


def exact_gradients(folder):
    """The gradients in f64 throughout: transformers computes norms, softmax and angles in f32 whatever the model's type."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **EAGER).eval()
    for module in model.modules():
        for ending, forward in [("RMSNorm", exact_norm), ("RotaryEmbedding", exact_rotation)]:
            if type(module).__name__.endswith(ending):
                module.forward = functools.partial(forward, module)
    softmax = torch.nn.functional.softmax
    torch.nn.functional.softmax = lambda x, dim=None, dtype=None: softmax(x, dim=dim)
    try:
        masked_loss(model, read_rows(folder))[2].backward()
    finally:
        torch.nn.functional.softmax = softmax
    return stored(((name, tensor.grad) for name, tensor in model.named_parameters()), model.config.model_type)


def compare_exactly(folder, twins):
    """Compares gradients with exact ones: the worst of rloss and of transformers, each with its case and tensor."""
    theirs = []
    for case in sorted(folder.iterdir()):
        shutil.copytree(case, twins / case.name, ignore=shutil.ignore_patterns("saved"))
        expected = load_file(case / "expected.safetensors")
        for name, exact in exact_gradients(case).items():
            largest = exact.abs().max().item()
            difference = (exact - expected[f"grad.{name}"]).abs().max().item()
            theirs.append((difference / largest if difference else 0.0, f"{case.name} {name}"))
            expected[f"grad.{name}"] = exact.float().contiguous()
        save_file(expected, twins / case.name / "expected.safetensors")
    figures, _ = compare(twins)
    return max((*row["gradients"], name) for name, row in figures.items()), max(theirs)


def write_case(folder, family, sizes, lengths, generator):
    """Draws one case until no gradient cancels; returns what was drawn again, by reason."""
    redrawn = Counter()
    while True:
        folder.mkdir(parents=True)
        redrawn += write_model(folder, sizes, lengths, SGD_LR, generator, family, ADAMW)
        if cancellation(folder) <= CANCELLATION_MAX:
            return redrawn
        shutil.rmtree(folder)
        redrawn["model"] += 1


def describe(s):
    rope = "yarn" if s["rope_parameters"]["rope_type"] == "yarn" else "plain"
    heads, kv_heads = s["num_attention_heads"], s["num_key_value_heads"]
    text = f"L{s['num_hidden_layers']} H{s['hidden_size']} N{heads}/{kv_heads}x{s.get('head_dim', s['hidden_size'] // heads)}"
    if "num_local_experts" in s:
        text += f" E{s['num_local_experts']}/{s['num_experts_per_tok']} w{s['sliding_window']}"
    if "num_experts" in s:
        text += f" E{s['num_experts']}/{s['num_experts_per_tok']}x{s['moe_intermediate_size']}"
    tied = " tied" if s.get("tie_word_embeddings") else ""
    return f"{text} I{s['intermediate_size']} V{s['vocab_size']} {rope}{tied}"


def compare(folder, test=TEST, variable="RLOSS_PARITY"):
    """Runs the test on every case in `folder`, which `variable` names to it: {case: {kind: (difference, place)}}, and whether
    it passed."""
    command = ["cargo", "test", "--release", "--test", "suite", test, "--", "--exact", "--nocapture"]
    run = subprocess.run(command, cwd=ROOT, env=os.environ | {variable: str(folder)}, capture_output=True, text=True)
    lines = [line.split("|") for line in run.stdout.splitlines() if line.startswith("parity ")]
    figures = {
        fields[0].removeprefix("parity "): {
            kind: (float(difference), place) for kind, difference, place in zip(*[iter(fields[1:])] * 3)
        }
        for fields in lines
    }
    if run.returncode != 0:
        print(run.stdout[-2000:], run.stderr[-3000:], file=sys.stderr)
    return figures, run.returncode == 0


def saved_difference(folder):
    """Logits that transformers computes from the folder rloss saved, against the original's."""
    model, report = AutoModelForCausalLM.from_pretrained(
        folder / "saved", dtype=torch.float32, output_loading_info=True, **EAGER
    )
    wrong = [key for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for key in report[kind]]
    if wrong:
        sys.exit(f"parity.py: {folder}/saved: {wrong}")
    model.eval()
    expected = load_file(folder / "expected.safetensors")
    worst = 0.0
    for i, (tokens, _) in enumerate(read_rows(folder)):
        with torch.no_grad():
            logits = model(tokens[None]).logits[0]
        difference = (logits - expected[f"logits.{i}"]).abs().max() / expected[f"logits.{i}"].abs().max()
        worst = max(worst, difference.item())
    return worst


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES, default="gpt_oss", help="of the models (default gpt_oss)")
    parser.add_argument("--cases", type=int, default=20, help="configurations to draw (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="of configurations, weights and rows (default 0)")
    parser.add_argument("--keep", type=Path, help="leave the cases in this folder, which must be new")
    parser.add_argument("--exact", action="store_true", help="compare gradients with those of double precision too")
    arguments = parser.parse_args()
    if arguments.exact and not arguments.family.startswith("qwen"):
        parser.error("--exact knows the norms of Qwen's families alone")
    if arguments.keep and arguments.keep.exists():
        parser.error(f"{arguments.keep} exists")
    if arguments.cases < 1:
        parser.error("--cases must be at least 1")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    rng, generator = random.Random(arguments.seed), torch.Generator().manual_seed(arguments.seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.keep or Path(temporary) / "cases").absolute()
        sizes, redrawn, rows = {}, Counter(), 0
        for case in range(arguments.cases):
            name = f"case{case:03}"
            sizes[name] = FAMILIES[arguments.family](rng)
            lengths = [rng.randint(2, rng.choice([70, 70, 200])) for _ in range(rng.randint(1, 4))]
            # In a row of two the counted token has one key, so that no query has a gradient.
            lengths[0] = max(lengths[0], 8)
            redrawn += write_case(folder / name, arguments.family, sizes[name], lengths, generator)
            rows += len(lengths)
        figures, passed = compare(folder)
        for name in figures:
            saved = saved_difference(folder / name)
            figures[name]["saved"] = (saved, "")
            passed &= saved <= SAVED_BAR
        if arguments.exact:
            (ours, tensor, name), (theirs, place) = compare_exactly(folder, Path(temporary) / "exact")
            print(f"gradients against f64: rloss {ours:.1e} ({name} {tensor}), transformers {theirs:.1e} ({place})")
    if not figures:
        sys.exit(f"parity.py: {TEST} compared nothing")
    kinds = list(next(iter(figures.values())))
    print(f"{'case':8} {'configuration':42}" + "".join(f"{kind:>11}" for kind in kinds))
    for name, row in figures.items():
        print(f"{name:8} {describe(sizes[name]):42}" + "".join(f"{row[kind][0]:>11.1e}" for kind in kinds))
    print(
        f"\n{len(figures)} models, {rows} rows, "
        f"{redrawn['router']} drawn again for a router margin under {ROUTER_MARGIN_MIN}, "
        f"{redrawn['clamp']} for a value within {CLAMP_MARGIN_MIN} of its clamp; "
        f"{redrawn['model']} models drawn again for a gradient that cancels. Worst:"
    )
    for kind in kinds:
        name, (difference, place) = max(((n, row[kind]) for n, row in figures.items()), key=lambda item: item[1][0])
        print(f"  {kind:10} {difference:.1e}  {name} {place}")
    return 0 if passed and len(figures) == arguments.cases else 1


if __name__ == "__main__":
    sys.exit(main())
