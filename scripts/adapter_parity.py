#!/usr/bin/env python3
"""Random adapters of PEFT on tiny models, computed by PEFT and by rloss, compared.

    scripts/adapter_parity.py [--cases N] [--seed S] [--keep FOLDER]
    scripts/adapter_parity.py --fixtures            writes tests/fixtures/adapter_* anew

Draws N cases, GPT-OSS and Qwen2.5 in turn: sizes, rank 1 to 32, alpha, rsLoRA, targets (all, attention alone, experts or MLP alone, one
matrix alone, one layer alone), both factors random. PEFT gives logits, the gradients of the mean cross-entropy by the factors, and
the adapter after one SGD and one AdamW step, in f32 with eager attention and experts. A case whose rows lie near a tie of the router
or a clamp, or with a gradient that all but cancels in double precision, is drawn again. Then runs the test
`random_adapters_agree_with_peft` on them, which compares, saves each adapter anew and merges it into its base; the script loads
the former in PEFT and the latter in transformers and compares the logits.

Each case is a folder: base/ (a model), adapter/, grad/, sgd/, adamw/ (adapters as PEFT saves them: the values themselves, their gradients,
and after a step), rows.json and expected.safetensors as scripts/make_fixtures.py has them.

Prints the worst difference a case, in the measures and with the bars of scripts/parity.py; status 1 if any is over its bar.
Needs cargo, torch, transformers 5, peft and safetensors.
"""

import argparse
import copy
import json
import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, logging

from make_fixtures import ADAMW, DENSE_MODELS, EAGER, FIXTURES, MODELS, masked_loss, random_model, random_row
from parity import CANCELLATION_MAX, SAVED_BAR, compare, random_gpt_oss, random_qwen2

TEST = "adapter::random_adapters_agree_with_peft"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
LOGITS_BAR = 2e-5
# So long a step that the rounding of the factors is small beside it, where a gradient is small too.
SGD_LR = 1000.0


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


def adapted(model, config, generator):
    """The model under an adapter whose every value is random and matters."""
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


def write_case(folder, family, sizes, lora, lengths, generator, base=None):
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
        model = adapted(model, LoraConfig(**lora), generator)
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
        settings = dict(lr=SGD_LR) if kind == "sgd" else ADAMW
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
        "sgd_lr": SGD_LR,
        "adamw": ADAMW,
    }
    (folder / "rows.json").write_text(json.dumps(content) + "\n")
    return redrawn


def logits_difference(model, folder):
    """Of the largest logit."""
    model.eval()
    expected = load_file(folder / "expected.safetensors")
    rows = json.loads((folder / "rows.json").read_text())["rows"]
    worst = 0.0
    for i, row in enumerate(rows):
        with torch.no_grad():
            logits = model(torch.tensor(row["tokens"])[None]).logits[0]
        difference = (logits - expected[f"logits.{i}"]).abs().max() / expected[f"logits.{i}"].abs().max()
        worst = max(worst, difference.item())
    return worst


def saved_differences(folder):
    """Logits of what rloss saved: the adapter in PEFT, the merged model in transformers."""
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32, **EAGER)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        saved = PeftModel.from_pretrained(base, folder / "saved")
    missing = [str(warning.message) for warning in told if "missing" in str(warning.message).lower()]
    if missing:
        sys.exit(f"adapter_parity.py: {folder}/saved: {missing}")
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
        write_case(FIXTURES / name, None, None, lora, [2, 9, 21], generator, FIXTURES / base)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=40, help="adapters to draw (default 40)")
    parser.add_argument("--seed", type=int, default=0, help="of sizes, weights, adapters and rows (default 0)")
    parser.add_argument("--keep", type=Path, help="leave the cases in this folder, which must be new")
    parser.add_argument("--fixtures", action="store_true", help="write the tests' fixtures and end")
    arguments = parser.parse_args()
    if arguments.keep and arguments.keep.exists():
        parser.error(f"{arguments.keep} exists")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    rng, generator = random.Random(arguments.seed), torch.Generator().manual_seed(arguments.seed)
    if arguments.fixtures:
        return write_fixtures(generator)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.keep or Path(temporary) / "cases").absolute()
        told, redrawn = {}, Counter()
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
            redrawn += write_case(folder / name, family, sizes, lora, lengths, generator)
            adapted_names = ",".join(target.rsplit(".", 1)[-1].removesuffix("_proj") for target in modules + parameters)
            told[name] = f"{family} r{lora['r']}{' rs' if lora['use_rslora'] else ''} {adapted_names}"
        figures, passed = compare(folder, TEST, "RLOSS_ADAPTER_PARITY")
        for name, row in figures.items():
            saved, merged = saved_differences(folder / name)
            row |= {"saved": (saved, ""), "merged": (merged, "")}
            passed &= saved <= SAVED_BAR and merged <= LOGITS_BAR
    if not figures:
        sys.exit(f"adapter_parity.py: {TEST} compared nothing")
    kinds = list(next(iter(figures.values())))
    print(f"{'case':8} {'adapter':44}" + "".join(f"{kind:>11}" for kind in kinds))
    for name, row in figures.items():
        print(f"{name:8} {told[name][:44]:44}" + "".join(f"{row[kind][0]:>11.1e}" for kind in kinds))
    print(f"\n{len(figures)} adapters; drawn again: {dict(redrawn)}. Worst:")
    for kind in kinds:
        name, (difference, place) = max(((n, row[kind]) for n, row in figures.items()), key=lambda item: item[1][0])
        print(f"  {kind:10} {difference:.1e}  {name} {place}")
    return 0 if passed and len(figures) == arguments.cases else 1


if __name__ == "__main__":
    sys.exit(main())
