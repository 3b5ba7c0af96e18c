#!/usr/bin/env python3
"""Kills `rloss serve --train` and its client at random moments; the loop must end with the same bits.

    scripts/check_tinker_kills.py RLOSS [--kills 25] [--steps 120] [--seed N]

Needs tinker 0.38.0. The client samples with a seed per step and sample, reinforces, and saves its state after every
second step; started again, it goes on from the last path that a save answered. `--kills` is the number of kills of
the server, and of the client. Exit code 1 when a run ends with other log-probs than one that nobody killed.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

PROMPT = [5, 6, 7]


def client(folder: Path, steps: int) -> None:
    """One client: trains from the last saved state to the end, and writes the last log-probs."""
    import tinker
    from tinker import types

    service, state = tinker.ServiceClient(), folder / "state.json"
    if state.is_file():
        saved = json.loads(state.read_text())
        first, model = saved["step"], service.create_training_client_from_state_with_optimizer(saved["path"]).result()
    else:
        first, model = 0, service.create_lora_training_client(base_model="tiny", rank=4, seed=1).result()
    prompt = types.ModelInput.from_ints(PROMPT)
    for step in range(first, steps):
        sampler = model.save_weights_and_get_sampling_client().result()
        data = []
        for number in range(4):
            parameters = types.SamplingParams(max_tokens=8, seed=100 * step + number, stop=[])
            sampled = sampler.sample(prompt, 1, parameters).result().sequences[0]
            tokens = PROMPT + list(sampled.tokens)
            zeros, reward = [0.0] * (len(PROMPT) - 1), float(sum(sampled.tokens) % 3 - 1)
            inputs = {
                "target_tokens": tokens[1:],
                "logprobs": zeros + list(sampled.logprobs),
                "advantages": zeros + [reward] * len(sampled.tokens),
            }
            data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
        passed = model.forward_backward(data, "importance_sampling")
        model.optim_step(types.AdamParams(learning_rate=5e-3)).result()
        passed.result()
        if step % 2 == 1:
            path = model.save_state(f"step-{step}", overwrite=True).result().path
            part = folder / "state.part"
            part.write_text(json.dumps({"step": step + 1, "path": path}))
            part.rename(state)
    tokens = PROMPT + list(range(20, 40))
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
    last = model.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    (folder / "end.json").write_text(json.dumps(list(last)))


class Run:
    """A server and a client, each started again whenever it is gone."""

    def __init__(self, rloss: Path, folder: Path, steps: int):
        self.rloss, self.folder, self.steps, self.port = rloss, folder, steps, 0
        self.server = self.client = None
        folder.mkdir()

    def start(self):
        if self.server is None or self.server.poll() is not None:
            command = [self.rloss, "serve", "quickstart", "--name", "tiny", "--train"]
            command += ["--adapters", "64", "--port", str(self.port), "--store", self.folder / "store"]
            self.server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            lines = iter(self.server.stderr)
            self.port = next(int(found[1]) for line in lines if (found := re.search(r"at http://\S+:(\d+)/v1", line)))
            threading.Thread(target=self.server.stderr.read, daemon=True).start()
        if self.client is None or self.client.poll() is not None:
            command = [sys.executable, __file__, "client", "--folder", self.folder, "--steps", str(self.steps)]
            url = f"http://127.0.0.1:{self.port}"
            variables = {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-x", "TINKER_TELEMETRY": "0"}
            quiet = subprocess.DEVNULL
            self.client = subprocess.Popen(command, env=os.environ | variables, stdout=quiet, stderr=quiet)

    def kill(self, process):
        process.send_signal(signal.SIGKILL)
        process.wait()

    def end(self):
        for process in (self.client, self.server):
            if process is not None and process.poll() is None:
                self.kill(process)

    def result(self):
        """Waits for the end; a client that the server's restart ended is started again."""
        until = time.monotonic() + 600
        while not (self.folder / "end.json").is_file():
            if time.monotonic() > until:
                raise SystemExit("the loop does not end")
            self.start()
            time.sleep(0.2)
        self.client.wait()
        return json.loads((self.folder / "end.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rloss", type=Path)
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    if str(args.rloss) == "client":
        client(args.folder, args.steps)
        return
    rng, out = random.Random(args.seed), Path(tempfile.mkdtemp())
    calm = Run(args.rloss.resolve(), out / "calm", args.steps)
    calm.start()
    begun = time.monotonic()
    expected = calm.result()
    seconds = time.monotonic() - begun
    calm.end()
    print(f"undisturbed: {seconds:.0f} s", flush=True)
    killed = {"server": 0, "client": 0}
    rounds = 0
    while min(killed.values()) < args.kills:
        run = Run(args.rloss.resolve(), out / f"round-{rounds}", args.steps)
        rounds += 1
        run.start()
        while not (run.folder / "end.json").is_file() and min(killed.values()) < args.kills:
            time.sleep(rng.uniform(1.0, 1.0 + seconds / 8))
            target = min(killed, key=killed.get)
            process = getattr(run, target)
            if process.poll() is None:
                run.kill(process)
                killed[target] += 1
            if target == "server" and run.client.poll() is None:
                # The SDK waits five minutes for a server; its requests are unknown to the next one.
                run.kill(run.client)
            run.start()
        found = run.result()
        run.end()
        if found != expected:
            raise SystemExit(f"round {rounds}: other log-probs after {killed}")
        print(f"round {rounds} ends ==; so far {killed}", flush=True)


if __name__ == "__main__":
    main()
