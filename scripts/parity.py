#!/usr/bin/env python3
"""Random models or adapters on tiny models, computed by transformers or PEFT and by rloss, compared.

    scripts/parity.py models [--family gpt_oss|qwen2|qwen3|qwen3_moe] [--cases N] [--seed S] [--keep FOLDER] [--exact]
    scripts/parity.py adapters [--cases N] [--seed S] [--keep FOLDER]
    scripts/parity.py adapters --fixtures            writes tests/fixtures/adapter_* anew

`models` draws N configurations (heads, KV heads, head_dim, experts, top-k, windows, layer types, YaRN or
plain RoPE, tied heads, sizes that are multiples of nothing), makes a random model of each with PyTorch, and
takes logits, the gradient of the mean cross-entropy over masked rows, one SGD step and one AdamW step, in f32
with eager attention and experts. Rows with a token whose router margin is under 1e-5 are drawn again, and
those with a value so near its clamp that rounding decides on which side its gradient lies, and models with a
gradient that all but cancels, so that PyTorch's own moves by over 2e-5 in double precision. All are counted.
Then runs the test `random_models_agree_with_transformers` on them, which compares and saves each model anew
in f32; the script loads those folders in transformers and compares the logits.

Prints the worst difference a case: logits and cached decode over the largest logit (bar 2e-5), log-probs
likewise, the loss over itself, gradients and what the step changed over the largest of each tensor (bar
1e-4), logits of the saved folder over the largest (bar 1e-5). Ends with status 1 if any is over its bar.
`--exact` (Qwen's families) compares the gradients of both programs with PyTorch's in double precision too,
norms, softmax and angles included.

`adapters` draws N cases, GPT-OSS and Qwen2.5 in turn: sizes, rank 1 to 32, alpha, rsLoRA, targets (all,
attention alone, experts or MLP alone, one matrix alone, one layer alone), both factors random. PEFT gives
logits, the gradients of the mean cross-entropy by the factors, and the adapter after one SGD and one AdamW
step. Cases are drawn again as above. Then runs the test `random_adapters_agree_with_peft` on them, which
compares, saves each adapter anew and merges it into its base; the script loads the former in PEFT and the
latter in transformers and compares the logits, with the same measures and bars.

Each case of an adapter is a folder: base/ (a model), adapter/, grad/, sgd/, adamw/ (adapters as PEFT saves
them: the values themselves, their gradients, and after a step), rows.json and expected.safetensors as
scripts/make_fixtures.py has them.

Needs cargo, torch, transformers 5 and safetensors; `adapters` peft too.
"""

import argparse
import copy
import functools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, logging

from make_fixtures import (
    ADAMW, CLAMP_MARGIN_MIN, DENSE_MODELS, EAGER, FIXTURES, MODELS, ROUTER_MARGIN_MIN, masked_loss, random_model, random_row, stored,
    write_model,
)  # fmt: skip

ROOT = Path(__file__).resolve().parent.parent
# The test of each command, and the variable that names it the folder of the cases.
TESTS = {
    "models": ("model::random_models_agree_with_transformers", "RLOSS_PARITY"),
    "adapters": ("adapter::random_adapters_agree_with_peft", "RLOSS_ADAPTER_PARITY"),
}
SAVED_BAR = 1e-5
# Logits of an adapter merged into its base.
MERGED_BAR = 2e-5
# A tensor's gradient may move by this, of its largest value, between PyTorch's f32 and f64.
CANCELLATION_MAX = 2e-5
# Steps so long that the rounding of the weights is small beside it, of factors where a gradient is small too.
MODEL_LR, ADAPTER_LR = 10.0, 1000.0
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


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
    figures, _ = compare(twins, "models")
    return max((*row["gradients"], name) for name, row in figures.items()), max(theirs)


def write_model_case(folder, family, sizes, lengths, generator):
    """Draws one case until no gradient cancels; returns what was drawn again, by reason."""
    redrawn = Counter()
    while True:
        folder.mkdir(parents=True)
        redrawn += write_model(folder, sizes, lengths, MODEL_LR, generator, family, ADAMW)
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


def compare(folder, what):
    """Runs the test of `what` on every case in `folder`: {case: {kind: (difference, place)}}, and whether it passed."""
    test, variable = TESTS[what]
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


def logits_difference(model, folder):
    """How far the logits of `model` are from those expected, of the largest logit."""
    model.eval()
    expected = load_file(folder / "expected.safetensors")
    worst = 0.0
    for i, (tokens, _) in enumerate(read_rows(folder)):
        with torch.no_grad():
            logits = model(tokens[None]).logits[0]
        difference = (logits - expected[f"logits.{i}"]).abs().max() / expected[f"logits.{i}"].abs().max()
        worst = max(worst, difference.item())
    return worst


def saved_model_difference(folder):
    """Logits that transformers computes from the folder rloss saved, against the original's."""
    model, report = AutoModelForCausalLM.from_pretrained(
        folder / "saved", dtype=torch.float32, output_loading_info=True, **EAGER
    )
    wrong = [key for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for key in report[kind]]
    if wrong:
        sys.exit(f"parity.py: {folder}/saved: {wrong}")
    return logits_difference(model, folder)


def random_targets(rng, family, layers):
    """Modules and parameters to adapt."""
    modules, parameters = list(ATTENTION), list(EXPERTS)
    if family == "qwen2":
        modules, parameters = ATTENTION + MLP, []
    kind = rng.choice(["all", "all", "attention", "feed forward", "one", "layer"])
    if kind == "attention":
        return ATTENTION, []
    if kind == "feed forward":
        return (MLP, []) if family == "qwen2" else ([], parameters)
    if kind == "one":
        chosen = rng.choice(modules + parameters)
        return ([chosen], []) if chosen in modules else ([], [chosen])
    if kind == "layer":
        layer = rng.randrange(layers)
        places = {name: "mlp" if name in MLP else "self_attn" for name in modules}
        return [f"model.layers.{layer}.{places[name]}.{name}" for name in modules], [
            f"model.layers.{layer}.{name}" for name in parameters
        ]
    return modules, parameters


def adapted(model, lora, generator):
    """The model under an adapter whose every value is random and matters."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(**lora)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = get_peft_model(model, config)
    with torch.no_grad():
        for name, tensor in wrapped.named_parameters():
            if "lora_A" in name:
                tensor.normal_(generator=generator).mul_(tensor.shape[1] ** -0.5)
            elif "lora_B" in name:
                # A correction of about half the base, whatever rank and alpha.
                scale = config.lora_alpha / (config.r**0.5 if config.use_rslora else config.r)
                tensor.normal_(generator=generator).mul_(0.5 * config.r**-0.5 / scale)
    return wrapped.eval()


def factors(model):
    return {name: tensor for name, tensor in model.named_parameters() if "lora_" in name}


def save_values(model, folder, values):
    """The adapter's folder as PEFT writes it, with `values` in place of the factors."""
    own = {name: tensor.detach().clone() for name, tensor in factors(model).items()}
    with torch.no_grad():
        for name, tensor in factors(model).items():
            tensor.copy_(values[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    config = folder / "adapter_config.json"
    # Where the base lay when the case was made is of no use later.
    content = json.loads(config.read_text()) | {"base_model_name_or_path": "base"}
    config.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    with torch.no_grad():
        for name, tensor in factors(model).items():
            tensor.copy_(own[name])


def cancels(model, rows, gradients):
    """Whether a gradient is another one in double precision."""
    double = copy.deepcopy(model).double()
    double.zero_grad()
    masked_loss(double, rows)[2].backward()
    for name, tensor in factors(double).items():
        difference = (tensor.grad - gradients[name]).abs().max().item()
        if difference > CANCELLATION_MAX * tensor.grad.abs().max().item():
            return True
    return False


def write_adapter_case(folder, family, sizes, lora, lengths, generator, base=None):
    """Draws one case, on the model in `base` or a random one; returns what was drawn again, by reason."""
    redrawn = Counter()
    while True:
        if base:
            model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, **EAGER).eval()
        else:
            model = random_model(sizes, generator, family)
        folder.mkdir(parents=True)
        if not base:
            model.save_pretrained(folder / "base")
        model = adapted(model, lora, generator)
        merged = copy.deepcopy(model).merge_and_unload()
        rows = [random_row(merged, length, generator, redrawn) for length in lengths]
        model.zero_grad()
        logits, logprobs, loss = masked_loss(model, rows)
        loss.backward()
        gradients = {name: tensor.grad.clone() for name, tensor in factors(model).items()}
        if not cancels(model, rows, gradients):
            break
        shutil.rmtree(folder)
        redrawn["model"] += 1
    own = {name: tensor.detach().clone() for name, tensor in factors(model).items()}
    save_values(model, folder / "adapter", own)
    save_values(model, folder / "grad", gradients)
    for kind, optimizer in (("sgd", torch.optim.SGD), ("adamw", torch.optim.AdamW)):
        settings = dict(lr=ADAPTER_LR) if kind == "sgd" else ADAMW
        trained = {name: tensor.clone().requires_grad_() for name, tensor in own.items()}
        for name, tensor in trained.items():
            tensor.grad = gradients[name].clone()
        optimizer(trained.values(), **settings).step()
        save_values(model, folder / kind, {name: tensor.detach() for name, tensor in trained.items()})
    save_file({f"logits.{i}": row.detach().contiguous() for i, row in enumerate(logits)}, folder / "expected.safetensors")
    content = {
        "rows": [{"tokens": tokens.tolist(), "mask": mask.tolist()} for tokens, mask in rows],
        "logprobs": [[0.0] + row.tolist() for row in logprobs],
        "loss": loss.item(),
        "sgd_lr": ADAPTER_LR,
        "adamw": ADAMW,
    }
    (folder / "rows.json").write_text(json.dumps(content) + "\n")
    return redrawn


def saved_adapter_differences(folder):
    """Logits of what rloss saved: the adapter in PEFT, the merged model in transformers."""
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32, **EAGER)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        saved = PeftModel.from_pretrained(base, folder / "saved")
    missing = [str(warning.message) for warning in told if "missing" in str(warning.message).lower()]
    if missing:
        sys.exit(f"parity.py: {folder}/saved: {missing}")
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32, **EAGER)
    return logits_difference(saved, folder), logits_difference(merged, folder)


def write_fixtures(generator):
    for name, base, lora in (
        ("adapter_gpt_oss", "gpt_oss_yarn", dict(r=3, lora_alpha=5, use_rslora=True, target_modules=ATTENTION, target_parameters=EXPERTS)),
        ("adapter_qwen2", "qwen2", dict(r=4, lora_alpha=8, target_modules=ATTENTION + MLP)),
    ):
        assert base in MODELS or base in DENSE_MODELS
        shutil.rmtree(FIXTURES / name, ignore_errors=True)
        lora = dict(lora_dropout=0.0, bias="none", task_type="CAUSAL_LM") | lora
        write_adapter_case(FIXTURES / name, None, None, lora, [2, 9, 21], generator, FIXTURES / base)


def model_cases(arguments, rng, generator, folder):
    """Draws models, compares them, and prints gradients against exact ones if asked."""
    described, redrawn, rows = {}, Counter(), 0
    for case in range(arguments.cases):
        name, sizes = f"case{case:03}", FAMILIES[arguments.family](rng)
        lengths = [rng.randint(2, rng.choice([70, 70, 200])) for _ in range(rng.randint(1, 4))]
        # In a row of two the counted token has one key, so that no query has a gradient.
        lengths[0] = max(lengths[0], 8)
        redrawn += write_model_case(folder / name, arguments.family, sizes, lengths, generator)
        described[name] = describe(sizes)
        rows += len(lengths)
    figures, passed = compare(folder, "models")
    for name in figures:
        saved = saved_model_difference(folder / name)
        figures[name]["saved"] = (saved, "")
        passed &= saved <= SAVED_BAR
    if arguments.exact:
        with tempfile.TemporaryDirectory() as twins:
            (ours, tensor, name), (theirs, place) = compare_exactly(folder, Path(twins) / "exact")
        print(f"gradients against f64: rloss {ours:.1e} ({name} {tensor}), transformers {theirs:.1e} ({place})")
    counts = (
        f"{len(figures)} models, {rows} rows, "
        f"{redrawn['router']} drawn again for a router margin under {ROUTER_MARGIN_MIN}, "
        f"{redrawn['clamp']} for a value within {CLAMP_MARGIN_MIN} of its clamp; "
        f"{redrawn['model']} models drawn again for a gradient that cancels"
    )
    return figures, passed, described, counts


def adapter_cases(arguments, rng, generator, folder):
    """Draws adapters and compares them."""
    described, redrawn = {}, Counter()
    for case in range(arguments.cases):
        name, family = f"case{case:03}", ["gpt_oss", "qwen2"][case % 2]
        sizes = (random_gpt_oss if family == "gpt_oss" else random_qwen2)(rng)
        modules, parameters = random_targets(rng, family, sizes["num_hidden_layers"])
        lora = dict(
            r=rng.choice([1, 2, 3, 4, 7, 8, 16, 32]),
            lora_alpha=rng.choice([1, 8, 16, 33]),
            use_rslora=rng.random() < 0.3,
            target_modules=modules,
            target_parameters=parameters or None,
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
        )
        lengths = [rng.randint(2, 70) for _ in range(rng.randint(1, 3))]
        redrawn += write_adapter_case(folder / name, family, sizes, lora, lengths, generator)
        adapted_names = ",".join(target.rsplit(".", 1)[-1].removesuffix("_proj") for target in modules + parameters)
        described[name] = f"{family} r{lora['r']}{' rs' if lora['use_rslora'] else ''} {adapted_names}"[:44]
    figures, passed = compare(folder, "adapters")
    for name, row in figures.items():
        saved, merged = saved_adapter_differences(folder / name)
        row |= {"saved": (saved, ""), "merged": (merged, "")}
        passed &= saved <= SAVED_BAR and merged <= MERGED_BAR
    return figures, passed, described, f"{len(figures)} adapters; drawn again: {dict(redrawn)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    for what, cases in [("models", 20), ("adapters", 40)]:
        command = commands.add_parser(what)
        command.add_argument("--cases", type=int, default=cases, help=f"how many to draw (default {cases})")
        command.add_argument("--seed", type=int, default=0, help="of sizes, weights, adapters and rows (default 0)")
        command.add_argument("--keep", type=Path, help="leave the cases in this folder, which must be new")
        if what == "models":
            command.add_argument("--family", choices=FAMILIES, default="gpt_oss", help="of the models (default gpt_oss)")
            command.add_argument("--exact", action="store_true", help="compare gradients with those of double precision too")
        else:
            command.add_argument("--fixtures", action="store_true", help="write the tests' fixtures and end")
    arguments = parser.parse_args()
    is_models = arguments.what == "models"
    if is_models and arguments.exact and not arguments.family.startswith("qwen"):
        parser.error("--exact knows the norms of Qwen's families alone")
    if arguments.keep and arguments.keep.exists():
        parser.error(f"{arguments.keep} exists")
    if arguments.cases < 1:
        parser.error("--cases must be at least 1")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    rng, generator = random.Random(arguments.seed), torch.Generator().manual_seed(arguments.seed)
    if not is_models and arguments.fixtures:
        return write_fixtures(generator)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.keep or Path(temporary) / "cases").absolute()
        cases = model_cases if is_models else adapter_cases
        figures, passed, described, counts = cases(arguments, rng, generator, folder)
    if not figures:
        sys.exit(f"parity.py: {TESTS[arguments.what][0]} compared nothing")
    kinds = list(next(iter(figures.values())))
    print(f"{'case':8} {'configuration':44}" + "".join(f"{kind:>11}" for kind in kinds))
    for name, row in figures.items():
        print(f"{name:8} {described[name]:44}" + "".join(f"{row[kind][0]:>11.1e}" for kind in kinds))
    print(f"\n{counts}. Worst:")
    for kind in kinds:
        name, (difference, place) = max(((n, row[kind]) for n, row in figures.items()), key=lambda item: item[1][0])
        print(f"  {kind:10} {difference:.1e}  {name} {place}")
    return 0 if passed and len(figures) == arguments.cases else 1


if __name__ == "__main__":
    sys.exit(main())
