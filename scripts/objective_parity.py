#!/usr/bin/env python3
"""Losses and advantages, computed by other projects' own code and by rloss, compared.

    scripts/objective_parity.py --verl DIR --trl DIR --prime-rl DIR [--dppo FILE] [--cases 100] [--keep FOLDER]

The three folders are checkouts; docs/POLICY.md names the commits. FILE is a `core_algos.py` of verl that has DPPO, if
DIR's has none. Of each project the functions that compute an objective are executed from its source, on random batches
in f64; values and gradients go to FOLDER/policy-vectors/objectives.jsonl, which the policy vectors' test reads.

| function | source |
| --- | --- |
| `sapo`, `opo`, `clip_cov`, `kl_cov` | verl, `verl/trainer/ppo/core_algos.py` |
| `dppo_tv`, `dppo_kl` | verl of February 2026, the same file |
| `dppo_tv` at ratios below the bound | prime-rl, `default_loss_fn` without its KL term |
| `vespo` | TRL, `GRPOTrainer.get_gamma_weights` |
| `policy.correction.off_policy_mask` | TRL, `GRPOTrainer.get_off_policy_mask` |

verl's selection of `clip_cov` and `kl_cov` is read while its code runs, and the loss gets it. The selections themselves
are compared where both are deterministic: on fresh data (T = O), and for `clip_cov` with the fraction 1.

Needs torch and numpy.
"""

import argparse
import ast
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
ROWS, WIDTH = 6, 8
LOW, HIGH, RATIO_MAX = 0.2, 0.28, 3.0
COV = {"clip_cov_ratio": 0.1, "clip_cov_lb": 0.1, "clip_cov_ub": 1.0, "kl_cov_ratio": 0.1, "ppo_kl_coef": 0.7}
SOFT = {"tau_pos": 1.0, "tau_neg": 1.05, "k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}


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


def rows(arguments):
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ["verl", "trl", "prime-rl"]:
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--dppo", type=Path)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        data = (arguments.keep or Path(temporary)).absolute()
        (data / "policy-vectors").mkdir(parents=True, exist_ok=True)
        lines = list(rows(arguments))
        (data / "policy-vectors" / "objectives.jsonl").write_text("\n".join(lines) + "\n")
        print(f"{len(lines)} rows", flush=True)
        test = ["cargo", "test", "--release", "--test", "suite", "policy_vectors_pass", "--", "--nocapture"]
        return subprocess.run(test, cwd=ROOT, env=os.environ | dict(RLOSS_DATA=str(data))).returncode


if __name__ == "__main__":
    sys.exit(main())
