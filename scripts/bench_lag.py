#!/usr/bin/env python3
"""Shows what sampling ahead saves where a task is slow: the seconds of a step with rollout.lag_steps = 0 and 1.

    scripts/bench_lag.py [--rloss PATH] [--rounds N] [--threads N] [--task slow|tail|long]... [tiny|small]...

Tasks: "slow", each grading takes 0.2 s; "tail", 0.05 s, and 1 of 16 takes 8 times as long; "long", gradings take no time, and 1
of 16 answers has 8 times as many tokens, in 8 turns. Models: tiny is the quickstart's (8 prompts x 8 samples), small has 8
layers of 512 and 16 experts (4 x 8). Weights are random; for "long" they first learn to answer with 37 characters, the last
one at random. Prints medians over the steps and the interleaved rounds. The bound is the larger of processor seconds / threads
and the longest sampling time of a step with two trajectories alone; with two samplings in flight a step may take less. It
needs 2 GB of disk.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SECONDS = {"slow": (0.2, 0.2), "tail": (0.05, 0.4), "long": (0, 0)}
LAST = "abcdefghijklmnop"
TURNS = 8
TINY = ["rollout.prompts_per_step=8", "rollout.samples_per_prompt=8"]
SMALL = ["model.architecture.hidden_size=512", "model.architecture.num_hidden_layers=8",
         "model.architecture.num_attention_heads=8", "model.architecture.num_key_value_heads=2",
         "model.architecture.head_dim=64", "model.architecture.intermediate_size=512",
         "model.architecture.num_local_experts=16", "model.architecture.num_experts_per_tok=4",
         "rollout.prompts_per_step=4", "rollout.samples_per_prompt=8"]
SHAPES = {"tiny": (TINY, 24), "small": (SMALL, 5)}
# Steps of the cold start for "long".
LEARNS = {"tiny": 300, "small": 60}


def asks_again(messages):
    """Whether the program asks for another turn: if the first answer ends in the last of 16 letters."""
    answers = [message["content"] or "" for message in messages if message["role"] == "assistant"]
    return len(answers) < TURNS and answers[0].endswith(LAST[-1])


def demonstrations(path):
    """Answers with 36 fixed characters, each determined by the one before, and a random last one."""
    draw = random.Random(0)
    with open(path, "w") as file:
        for index in range(512):
            messages = []
            turns = 1 if index % 2 else 3
            for turn in range(turns):
                text = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789" + draw.choice(LAST)
                messages += [{"role": "user", "content": "more" if turn else f"{index} + 3"},
                             {"role": "assistant", "channel": "final", "content": text, "weight": int(turn == turns - 1)}]
            print(json.dumps({"messages": messages}), file=file)


def grade(task):
    """The task's program."""
    usual, rare = SECONDS[task]
    for line in sys.stdin:
        ask = json.loads(line)
        if ask["request"] == "describe":
            reply = {"version": 2, "name": task, "validation_problems": 2, "turns": task == "long"}
        elif ask["request"] == "problem":
            reply = {"prompt": f"{ask['index']} + 3", "answer": ask["index"]}
        elif ask["request"] == "turn":
            reply = {"content": "more" if asks_again(ask["messages"]) else None}
        else:
            text = "".join(message["content"] or "" for message in ask["messages"])
            total = sum(map(ord, text))
            time.sleep(rare if total % 16 == 0 else usual)
            reply = {"reward": (total if task == "long" else len(text) * 7) % 5 / 4, "success": True}
        print(json.dumps({"request_id": ask["request_id"], **reply}), flush=True)


def learn(a, folder, shape):
    """Returns the folder of a model that answers as in the demonstrations."""
    out, rows = Path(folder) / f"learned-{shape}", Path(folder) / "demonstrations.jsonl"
    demonstrations(rows)
    keys = [*command_keys("long"), *SHAPES[shape][0], f"cold_start.steps={LEARNS[shape]}", f"cold_start.train_file={rows}",
            "cold_start.batch_size=8", "train.steps=0", "model.architecture.max_position_embeddings=640", f"parallel.threads={a.threads}"]
    subprocess.run([*command(a, out), *(word for key in keys for word in ("--set", key))], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return max((out / "checkpoints").glob("cold-start-*"))


def command(a, out):
    recipe = Path(__file__).resolve().parent.parent / "recipes/quickstart.toml"
    return [a.rloss, "train", str(recipe), "--out", str(out), "--trust"]


def command_keys(task):
    program = json.dumps([sys.executable, str(Path(__file__).resolve()), "--grade", task])
    return ["task.name=command", f"task.command={program}", "task.command_processes=64", "eval.every_steps=0",
            "eval.before_training=false", "logging.tensorboard=false", "policy.old_logprob=rollout"]


def run(a, folder, task, shape, lag, alone=False):
    """Returns the rows of a run and its processor seconds per step, without those of the task's program."""
    sets, steps = SHAPES[shape]
    # A step has only two trajectories, and 1 of 16 is long.
    steps = 48 if alone else steps
    out = Path(folder) / f"{task}-{shape}-{lag}-{time.monotonic_ns()}"
    keys = [*command_keys(task), "cold_start.steps=0", f"train.steps={steps}", "checkpoint.every_steps=0", "train.optimizer.lr=1e-5",
            f"parallel.threads={a.threads}", f"rollout.lag_steps={lag}", *sets]
    if alone:
        keys += ["rollout.prompts_per_step=1", "rollout.samples_per_prompt=2"]
    if task == "long":
        keys = [key for key in keys if not key.startswith("model.")]
        keys += [f"model.path={a.learned}", f"rollout.turns_max={TURNS}", "rollout.response_tokens_max=448"]
    words = [*command(a, out), *(word for key in keys for word in ("--set", key))]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    ticks = 0
    while process.poll() is None:
        try:
            fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
            ticks = int(fields[11]) + int(fields[12])
        except (OSError, IndexError):
            pass
        time.sleep(0.05)
    if process.returncode:
        sys.exit(process.stderr.read().decode()[-2000:])
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(out)
    rows = [row for row in rows if row["phase"] == "rl"]
    # The first step also samples the steps ahead, and the last `lag` steps sample nothing.
    return rows[1:len(rows) - lag], ticks / os.sysconf("SC_CLK_TCK") / steps


def main():
    if "--grade" in sys.argv:
        return grade(sys.argv[-1])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rloss", default="target/release/rloss")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--task", action="append", choices=SECONDS)
    parser.add_argument("shapes", nargs="*", default=["tiny", "small"])
    a = parser.parse_args()
    print("| task | shape | lag 0, s | lag 1, s | ratio | processor s / threads | longest alone, s | lag 1 / bound |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for shape in a.shapes:
            for task in a.task or SECONDS:
                a.learned = learn(a, folder, shape) if task == "long" else None
                steps, processor, longest = {0: [], 1: []}, {0: [], 1: []}, []
                for _ in range(a.rounds):
                    for lag in (0, 1):
                        rows, seconds = run(a, folder, task, shape, lag)
                        steps[lag] += [row["timing_s/step"] for row in rows]
                        processor[lag].append(seconds / a.threads)
                    rows, _ = run(a, folder, task, shape, 0, alone=True)
                    longest += [max(row["timing_s/gen"] for row in rows)]
                none, one = (statistics.median(steps[lag]) for lag in (0, 1))
                work, alone = statistics.median(processor[1]), statistics.median(longest)
                print(f"| {task} | {shape} | {none:.3f} | {one:.3f} | {one / none:.2f} | {work:.3f} | {alone:.3f} "
                      f"| {one / max(work, alone):.2f} |", flush=True)


if __name__ == "__main__":
    main()
