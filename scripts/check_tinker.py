#!/usr/bin/env python3
"""Runs the unmodified Tinker packages against `rloss serve --train`: the SDK's verbs, then the cookbook's SFT and RL.

    scripts/check_tinker.py RLOSS [--out FOLDER]

Needs tinker 0.38.0 and tinker-cookbook 0.6.1. Works in a fresh folder of scripts/tinker_home.py, without a hub. Takes
minutes; exit code 1 and a traceback when something is wrong.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAME = "Qwen/Qwen3-4B-Instruct-2507"


def verbs(tinker, types):
    """The SDK alone: learns one sentence, samples it, saves, loads."""
    service = tinker.ServiceClient()
    model = service.create_lora_training_client(base_model=NAME, rank=8, seed=1).result()
    tokenizer = model.get_tokenizer()
    tokens = tokenizer.encode("How many legs has a dog? \\boxed{4}") + [tokenizer.eos_token_id]
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
    losses = []
    for _ in range(30):
        passed = model.forward_backward([datum], "cross_entropy")
        stepped = model.optim_step(types.AdamParams(learning_rate=1e-2))
        losses.append(passed.result().metrics["loss:sum"])
        stepped.result()
    assert losses[-1] < 0.1 * losses[0], losses
    sampler = model.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(tokens[:6])
    sampled = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=32, temperature=0.0)).result().sequences[0]
    assert tokens[6:] == list(sampled.tokens), tokenizer.decode(sampled.tokens)
    forward = model.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    assert list(forward[5:]) == list(sampled.logprobs), "a sample's bits are those of the forward pass"
    state = model.save_state("done").result().path
    again = service.create_training_client_from_state_with_optimizer(state).result()
    assert list(again.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data) == list(forward)


def recipe(name, home, log, **options):
    """Runs a recipe of the cookbook; returns the last value of each metric."""
    words = [f"{key}={value}" for key, value in options.items()]
    command = [sys.executable, "-m", f"tinker_cookbook.recipes.{name}", f"model_name={NAME}", f"log_path={log}", *words]
    subprocess.run(command, cwd=home, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    return {key: value for row in rows for key, value in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rloss", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    out = (args.out or Path(tempfile.mkdtemp())).resolve()
    home = out / "home"
    subprocess.run([sys.executable, ROOT / "scripts/tinker_home.py", home], check=True)
    command = [args.rloss.resolve(), "serve", home / NAME, "--name", NAME, "--port", "0", "--train", "--store", out / "store"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        address = next(found[1] for line in server.stderr if (found := re.search(r"at (http://\S+)/v1", line)))
        threading.Thread(target=server.stderr.read, daemon=True).start()
        os.environ.update(
            TINKER_BASE_URL=address, TINKER_API_KEY="tml-x", TINKER_TELEMETRY="0", HF_HUB_OFFLINE="1"
        )
        import tinker
        from tinker import types

        os.chdir(home)
        verbs(tinker, types)
        print("verbs ok", flush=True)
        warm = recipe(
            "sl_loop", home, out / "sl", batch_size=16, learning_rate=5e-3, lora_rank=16, max_steps=125,
            train_on_what="last_assistant_message",
        )
        assert warm["train_mean_nll"] < 0.4, warm
        print("sl_loop ok:", warm["train_mean_nll"], flush=True)
        # RL goes on from the weights that SFT saved.
        last = json.loads((out / "sl/checkpoints.jsonl").read_text().splitlines()[-1])
        (out / "rl").mkdir()
        (out / "rl/checkpoints.jsonl").write_text(json.dumps(last | {"batch": 0}) + "\n")
        reached = recipe(
            "rl_loop", home, out / "rl", batch_size=4, group_size=8, learning_rate=2e-3, max_tokens=12, max_steps=12,
            loss_fn="importance_sampling",
        )
        assert reached["reward/total"] > 0.6, reached
        print("rl_loop ok:", reached["reward/total"])
    finally:
        server.kill()


if __name__ == "__main__":
    main()
