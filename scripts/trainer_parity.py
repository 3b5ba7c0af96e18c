#!/usr/bin/env python3
"""Losses, advantages and SFT steps, computed by other trainers' own code and by rloss, compared.

    scripts/trainer_parity.py objectives --verl DIR --trl DIR --prime-rl DIR [--dppo FILE] [--cases 100] [--keep FOLDER]
    scripts/trainer_parity.py sft RLOSS TOKENIZER [--steps 5] [--family qwen2|qwen3]

`objectives`: the three folders are checkouts; docs/POLICY.md names the commits. FILE is a `core_algos.py` of
verl that has DPPO, if DIR's has none. Of each project the functions that compute an objective are executed
from its source, on random batches in f64; values and gradients go to FOLDER/policy-vectors/objectives.jsonl,
which the policy vectors' test reads.

| function | source |
| --- | --- |
| `sapo`, `opo`, `clip_cov`, `kl_cov` | verl, `verl/trainer/ppo/core_algos.py` |
| `dppo_tv`, `dppo_kl` | verl of February 2026, the same file |
| `dppo_tv` at ratios below the bound | prime-rl, `default_loss_fn` without its KL term |
| `vespo` | TRL, `GRPOTrainer.get_gamma_weights` |
| `policy.correction.off_policy_mask` | TRL, `GRPOTrainer.get_off_policy_mask` |

verl's selection of `clip_cov` and `kl_cov` is read while its code runs, and the loss gets it. The selections
themselves are compared where both are deterministic: on fresh data (T = O), and for `clip_cov` with the
fraction 1.

Needs torch and numpy.

`sft` compares `rloss sft` with TRL's SFTTrainer: the same rows, weights and settings, some steps of AdamW in
f32. TOKENIZER is a folder with the tokenizer of a Qwen2.5 or Qwen3 model. The model is small and random. Each
step takes all rows, so the order of rows does not matter. Prints the largest difference of the losses and of
the weights, and fails above 1e-5 and 5e-5. Needs torch, transformers and trl; tried with trl 1.16,
transformers 5.24 and torch 2.15.
"""

import argparse
import ast
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import torch

ROOT = Path(__file__).resolve().parent.parent
# Of `objectives`: rows and tokens of a batch, and settings.
ROWS, WIDTH = 6, 8
LOW, HIGH, RATIO_MAX = 0.2, 0.28, 3.0
COV = {"clip_cov_ratio": 0.1, "clip_cov_lb": 0.1, "clip_cov_ub": 1.0, "kl_cov_ratio": 0.1, "ppo_kl_coef": 0.7}
SOFT = {"tau_pos": 1.0, "tau_neg": 1.05, "k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}
# Of `sft`.
LOSS_DIFFERENCE_MAX = 1e-5
WEIGHT_DIFFERENCE_MAX = 5e-5
LR = 1e-3
SFT_ROWS = 8


def functions(path, names, scope):
    """Executes the definitions `names` of a source file, without its imports and decorators, in `scope`."""
    found = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in names:
            node.decorator_list = []
            found[node.name] = node
    missing = set(names) - set(found)
    if missing:
        sys.exit(f"{path}: no {', '.join(sorted(missing))}")
    for node in found.values():
        for part in ast.walk(node):
            if isinstance(part, ast.FunctionDef):
                part.returns = None
                for argument in part.args.args:
                    argument.annotation = None
        exec(compile(ast.Module([node], []), str(path), "exec"), scope)
    return SimpleNamespace(**{name: scope[name] for name in names})


class SpiedTorch:
    """torch, which keeps the tensors that hold verl's selection: `corr` of Clip-Cov, and the indices of KL-Cov."""

    def __init__(self):
        self.ones, self.top = None, None

    def __getattr__(self, name):
        return getattr(torch, name)

    def ones_like(self, tensor):
        self.ones = torch.ones_like(tensor)
        return self.ones

    def topk(self, *arguments, **named):
        self.top = torch.topk(*arguments, **named)
        return self.top


def masked_mean(values, mask):
    return (values * mask).sum() / mask.sum()


def verl_scope():
    import numpy as np

    class Config:
        clip_ratio, clip_ratio_low, clip_ratio_high, clip_ratio_c = LOW, LOW, HIGH, RATIO_MAX
        tau_pos, tau_neg, global_batch_info = SOFT["tau_pos"], SOFT["tau_neg"], {}

        def get(self, key, default):
            return getattr(self, key, default)

    # AlgoConfig is a class that the configuration is not.
    scope = dict(torch=torch, np=np, defaultdict=defaultdict, Any=Any, Optional=Optional, ActorConfig=Config, AlgoConfig=int,
                 verl_F=SimpleNamespace(masked_mean=masked_mean,
                                        masked_sum=lambda values, mask: (values * mask).sum()))
    return scope, Config()


def batch(generator):
    old = -torch.rand(ROWS, WIDTH, generator=generator, dtype=torch.float64) * 3 - 1 / 64
    apart = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) * 0.5
    now = torch.minimum(old + apart, torch.tensor(-1 / 128))
    mask = (torch.rand(ROWS, WIDTH, generator=generator) < 0.8).double()
    mask[:, 0] = 1
    gain = torch.randn(ROWS, 1, generator=generator, dtype=torch.float64).expand(ROWS, WIDTH).contiguous()
    # What f32 holds exactly: both sides read the same inputs.
    return [x.float().double() for x in (old, now, gain, mask)]


def row(name, function, inputs, params, expected):
    lists = {key: value.tolist() if hasattr(value, "tolist") else value for key, value in inputs.items()}
    return json.dumps(dict(name=name, fn=function, inputs=lists, params=params, expected=expected, noise_f32_vs_f64={}))


def gradient(loss, now):
    now = now.clone().requires_grad_()
    value = loss(now)
    value.backward()
    return value.item(), (now.grad if now.grad is not None else torch.zeros_like(now)).tolist()


def objective_rows(arguments):
    import numpy as np

    scope, config = verl_scope()
    path = arguments.verl / "verl" / "trainer" / "ppo" / "core_algos.py"
    losses = functions(path, ["agg_loss", "compute_policy_loss_sapo", "compute_opo_outcome_advantage"], scope)
    spied = SpiedTorch()
    covariance = functions(path, ["agg_loss", "compute_policy_loss_clip_cov", "compute_policy_loss_kl_cov"],
                           dict(scope, torch=spied))
    dppo = functions(arguments.dppo or path, ["compute_policy_loss_dppo_tv", "compute_policy_loss_dppo_kl"], scope)
    trl = functions(arguments.trl / "trl" / "trainer" / "grpo_trainer.py", ["get_gamma_weights", "get_off_policy_mask"],
                    dict(torch=torch, math=math))
    prime = functions(arguments.prime_rl / "src" / "prime_rl" / "trainer" / "rl" / "loss.py",
                      ["default_loss_fn", "compute_importance_ratio_and_mismatch_kl", "_safe_mean"],
                      dict(torch=torch, LossOutputs=lambda loss, metrics: loss))
    generator = torch.Generator().manual_seed(arguments.seed)
    for case in range(arguments.cases):
        old, now, gain, mask = batch(generator)
        inputs = dict(old_log_prob=old, log_prob=now, advantages=gain, response_mask=mask.int())
        mode = "seq-mean-token-mean" if case % 2 else "token-mean"

        def params(mode, **more):
            return dict(loss_agg_mode=mode, clip_ratio_low=LOW, clip_ratio_high=HIGH, clip_ratio_c=RATIO_MAX, **SOFT,
                        global_batch_info={}) | more

        def with_code(name, function, mode):
            loss, slope = gradient(lambda at: function(old, at, gain, mask, mode, config)[0], now)
            return row(f"{name}/peer/{case}", f"compute_policy_loss_{name}", inputs, params(mode),
                       dict(loss=loss, grad_log_prob=slope))

        # verl's SAPO has one aggregation.
        yield with_code("sapo", losses.compute_policy_loss_sapo, "seq-mean-token-mean")
        yield with_code("dppo_tv", dppo.compute_policy_loss_dppo_tv, mode)
        yield with_code("dppo_kl", dppo.compute_policy_loss_dppo_kl, mode)

        # Of every two cases, one is fresh data.
        here = old if case % 2 else now
        given = dict(inputs, log_prob=here)
        for name in ["clip_cov", "kl_cov"]:
            config.policy_loss = SimpleNamespace(**COV)
            if name == "clip_cov" and case % 4 == 1:
                config.policy_loss.clip_cov_ratio = 1.0
            function = getattr(covariance, f"compute_policy_loss_{name}")
            loss, slope = gradient(lambda at: function(old, at, gain, mask, mode, config)[0], here)
            if name == "clip_cov":
                selected = (spied.ones == 0).int()
            else:
                selected = torch.zeros(ROWS * WIDTH, dtype=torch.int)
                selected[mask.flatten().nonzero().flatten()[spied.top.indices]] = 1
                selected = selected.reshape(ROWS, WIDTH)
            expected, more = dict(loss=loss, grad_log_prob=slope), dict(COV)
            fraction = config.policy_loss.clip_cov_ratio if name == "clip_cov" else COV["kl_cov_ratio"]
            if case % 2 and (name == "kl_cov" or fraction == 1.0):
                more["cov_fraction"] = fraction
                expected["selected"] = selected.tolist()
            yield row(f"{name}/peer/{case}", f"compute_policy_loss_{name}", dict(given, selected=selected),
                      params(mode, **more), expected)

        def vespo(at):
            weight = trl.get_gamma_weights(
                gain[:, :1], (at - old).detach(), mask, None, SOFT["k_pos"], SOFT["lambda_pos"], SOFT["k_neg"],
                SOFT["lambda_neg"])
            return masked_mean(-weight * gain * at, mask)

        loss, slope = gradient(vespo, now)
        yield row(f"vespo/peer/{case}", "compute_policy_loss_vespo", inputs, params("token-mean"),
                  dict(loss=loss, grad_log_prob=slope))

        bound = 0.1
        kept = trl.get_off_policy_mask(gain[:, :1], now, old, mask, bound)
        yield row(f"off_policy_mask/peer/{case}", "get_off_policy_mask", inputs, dict(bound=bound),
                  dict(masked=(1 - kept).flatten().tolist()))

        # prime-rl multiplies by the ratio itself: the gradient is the same, the value is not.
        bounds = SimpleNamespace(dppo_mask_high=HIGH, dppo_mask_low=LOW, adv_tau=1.0, kl_tau=0.0)

        def binary_tv(at):
            return sum(prime.default_loss_fn(
                SimpleNamespace(trainer_logprobs=at[r], inference_logprobs=old[r], advantages=gain[r],
                                loss_mask=mask[r].bool(), loss_weights=None), bounds) for r in range(ROWS))

        _, slope = gradient(binary_tv, now)
        yield row(f"dppo_tv/prime-rl/{case}", "compute_policy_loss_dppo_tv", inputs,
                  params("token-sum", clip_ratio_c=1e9), dict(grad_log_prob=slope))

        rewards = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
        for r in range(ROWS):
            rewards[r, int(mask[r].nonzero().max())] = torch.randint(-64, 65, (1,), generator=generator).item() / 64
        index = [0, 0, 0, 1, 1, 1]
        expected, _ = losses.compute_opo_outcome_advantage(rewards, mask, np.array(index))
        yield row(f"opo/peer/{case}", "compute_opo_outcome_advantage",
                  dict(token_level_rewards=rewards, response_mask=mask.int(), index=index), {},
                  dict(advantages=expected.tolist()))


def make_model(family, tokenizer_folder, folder):
    """Writes a small random model with the tokenizer. Returns the size of the vocabulary."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    size = len(tokenizer)
    config = AutoConfig.for_model(
        family,
        vocab_size=size,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        use_sliding_window=False,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(tokenizer_folder) / name, folder)
    return size


def sft_rows(vocabulary):
    """Returns rows of random tokens, each with a mask of two answers."""
    source = random.Random(7)
    rows = []
    for _ in range(SFT_ROWS):
        length = source.randrange(30, 120)
        first, second = source.randrange(4, length // 2), source.randrange(length // 2, length - 4)
        mask = [first <= i < first + 4 or i >= second for i in range(length)]
        rows.append({"tokens": [source.randrange(vocabulary) for _ in range(length)], "mask": mask})
    return rows


def train_with_trl(folder, rows, steps, out):
    """Returns the losses and the weights after `steps` steps."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    class LossRecorder(SFTTrainer):
        """Keeps the loss of every step, unrounded."""

        losses = []

        def compute_loss(self, model, inputs, **arguments):
            result = super().compute_loss(model, inputs, **arguments)
            self.losses.append(float(result[0] if isinstance(result, tuple) else result))
            return result

    data = Dataset.from_list(
        [{"input_ids": row["tokens"], "completion_mask": [int(m) for m in row["mask"]]} for row in rows]
    )
    settings = SFTConfig(
        output_dir=str(out),
        max_steps=steps,
        per_device_train_batch_size=SFT_ROWS,
        learning_rate=LR,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        max_grad_norm=1.0,
        completion_only_loss=True,
        max_length=None,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trainer = LossRecorder(model=model, args=settings, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    return trainer.losses, {name: value.detach() for name, value in model.state_dict().items()}


def train_with_rloss(rloss, folder, rows, steps, out):
    """Returns the losses and the weights after `steps` steps."""
    from safetensors.torch import load_file

    data = out.parent / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = [
        f"cold_start.steps={steps}",
        f"cold_start.batch_size={SFT_ROWS}",
        f"cold_start.optimizer.lr={LR}",
        "checkpoint.dtype=f32",
    ]
    command = [rloss, "sft", folder, "--data", data, "--out", out]
    subprocess.run(command + [word for key in sets for word in ("--set", key)], check=True)
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [row["cold_start/loss"] for row in metrics if "cold_start/loss" in row]
    checkpoint = max((out / "checkpoints").iterdir())
    return losses, load_file(checkpoint / "model.safetensors")


def objectives(arguments):
    with tempfile.TemporaryDirectory() as temporary:
        data = (arguments.keep or Path(temporary)).absolute()
        (data / "policy-vectors").mkdir(parents=True, exist_ok=True)
        lines = list(objective_rows(arguments))
        (data / "policy-vectors" / "objectives.jsonl").write_text("\n".join(lines) + "\n")
        print(f"{len(lines)} rows", flush=True)
        test = ["cargo", "test", "--release", "--test", "suite", "policy_vectors_pass", "--", "--nocapture"]
        return subprocess.run(test, cwd=ROOT, env=os.environ | dict(RLOSS_DATA=str(data))).returncode


def sft(arguments):
    with tempfile.TemporaryDirectory() as temporary:
        temporary = Path(temporary)
        folder = temporary / "model"
        vocabulary = make_model(arguments.family, arguments.tokenizer, folder)
        rows = sft_rows(vocabulary)
        theirs = train_with_trl(folder, rows, arguments.steps, temporary / "trl")
        ours = train_with_rloss(arguments.rloss, folder, rows, arguments.steps, temporary / "sft")
    print("losses, TRL: ", *(f"{loss:.7f}" for loss in theirs[0]))
    print("losses, sft: ", *(f"{loss:.7f}" for loss in ours[0]))
    assert len(ours[0]) == len(theirs[0]) == arguments.steps
    losses = max(abs(a - b) for a, b in zip(*(ours[0], theirs[0])))
    names = [name for name in theirs[1] if name in ours[1]]
    assert len(names) == len(ours[1]), set(ours[1]) - set(names)
    weights = max(float((ours[1][name].float() - theirs[1][name]).abs().max()) for name in names)
    print(f"largest difference: losses {losses:.2e}, weights {weights:.2e} ({len(names)} tensors)")
    assert losses <= LOSS_DIFFERENCE_MAX and weights <= WEIGHT_DIFFERENCE_MAX


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("objectives")
    command.set_defaults(run=objectives)
    for name in ["verl", "trl", "prime-rl"]:
        command.add_argument(f"--{name}", type=Path, required=True)
    command.add_argument("--dppo", type=Path)
    command.add_argument("--cases", type=int, default=100)
    command.add_argument("--seed", type=int, default=1)
    command.add_argument("--keep", type=Path)
    command = commands.add_parser("sft")
    command.set_defaults(run=sft)
    command.add_argument("rloss")
    command.add_argument("tokenizer")
    command.add_argument("--steps", type=int, default=5)
    command.add_argument("--family", choices=["qwen2", "qwen3"], default="qwen2")
    arguments = parser.parse_args()
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
