#!/usr/bin/env python3
"""The sampling rate of an agent program beside that of the built-in loop: 64 episodes at once, six turns, 50 ms between turns.

    scripts/bench_agent.py --rounds 5                          # the binary of target/release
    scripts/bench_agent.py --binary OLD --binary NEW           # two builds, in turn

Both programs play the same conversation with the same model, which is first taught to answer in short lines. The
rounds are interleaved and medians are told, because other work changes the speed of a machine. Prints a table: sampled
tokens a second of rollouts, and processor seconds of the run and of its programs.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

TURNS, PAUSE_S = 6, 0.05
REPLY = "go on"
RECIPE = """
[model]
path = {model!r}
[chat]
system_message = false
[rollout]
prompts_per_step = {prompts}
samples_per_prompt = 8
turns_max = {turns}
prompt_tokens_max = 1200
response_tokens_max = 800
prefix_tokens_max = 65536
[train]
steps = {steps}
[train.optimizer]
lr = 1e-9
[policy]
old_logprob = "detach"
[eval]
every_steps = 0
before_training = false
[checkpoint]
every_steps = 1000
[task]
"""
COMMAND = 'name = "command"\ncommand = {program!r}\ncommand_processes = 64\n'
AGENT = 'name = "agent"\ncommand = {program!r}\n'


def say(value):
    print(json.dumps(value), flush=True)


def task_program():
    import time

    for line in sys.stdin:
        ask = json.loads(line)
        reply = {"request_id": ask["request_id"]}
        if ask["request"] == "describe":
            say({**reply, "version": 2, "name": "talk", "turns": True})
        elif ask["request"] == "problem":
            say({**reply, "prompt": f"begin {ask['index'] % 10}"})
        elif ask["request"] == "turn":
            time.sleep(PAUSE_S)
            spoken = sum(message["role"] == "assistant" for message in ask["messages"])
            say({**reply, "content": REPLY if spoken < TURNS else None})
        else:
            say({**reply, "reward": len(ask["messages"][-1]["content"]) % 3})


def agent_program():
    import http.client
    import threading
    import time

    host = os.environ["OPENAI_BASE_URL"].split("/")[2]

    def post(path, body, key=os.environ["OPENAI_API_KEY"]):
        connection = http.client.HTTPConnection(host)
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        connection.request("POST", f"/v1/{path}", json.dumps(body), headers)
        answer = json.loads(connection.getresponse().read())
        connection.close()
        return answer

    def play():
        while not (episode := post("episodes/next", {})).get("done"):
            if episode["id"] is None:
                continue
            messages = [{"role": "user", "content": f"begin {episode['index'] % 10}"}]
            for turn in range(TURNS):
                answer = post("chat/completions", {"model": "m", "messages": messages}, episode["api_key"])
                messages += [answer["choices"][0]["message"], {"role": "user", "content": REPLY}]
                time.sleep(PAUSE_S)
            reward = len(messages[-2]["content"]) % 3
            post(f"episodes/{episode['id']}/reward", {"reward": reward})

    threads = [threading.Thread(target=play) for _ in range(64)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]


def teach(binary, place, characters):
    """Trains the default model to answer with about `characters` letters."""
    draw = random.Random(0)
    rows = place / "rows.jsonl"
    with open(rows, "w") as file:
        for number in range(1600):
            messages = [{"role": "user", "content": f"begin {number % 10}"}]
            for _ in range(TURNS):
                word = draw.choice("abcdefghij") * draw.randint(characters * 3 // 4, characters * 5 // 4)
                messages += [{"role": "assistant", "content": word}, {"role": "user", "content": REPLY}]
            print(json.dumps({"messages": messages[:-1]}), file=file)
    recipe = place / "warm.toml"
    recipe.write_text(
        "[chat]\nsystem_message = false\n[model.architecture]\nmodel_type = \"qwen2\"\nmax_position_embeddings = 2048\n"
        "[cold_start]\nbatch_size = 16\n[cold_start.optimizer]\nlr = 4e-3\nwarmup_steps = 20\nbeta2 = 0.98\n"
    )
    model = place / "warm"
    command = [binary, "sft", recipe, "--data", rows, "--epochs", "1", "--out", model]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return str(model)


def rate(binary, place, name, recipe):
    """Runs `recipe`. Returns tokens a second of its rollouts, and processor seconds of the run and its programs."""
    file = place / f"{name}.toml"
    file.write_text(recipe)
    out = Path(tempfile.mkdtemp(dir=place)) / "run"
    begun = os.times()
    subprocess.run([binary, "train", file, "--out", out], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    ended = os.times()
    rows = [json.loads(line) for line in open(out / "metrics.jsonl")]
    # The first step starts the programs.
    rows = [row for row in rows if row["phase"] == "rl"][1:]
    seconds = sum(row["timing_s/gen"] for row in rows)
    tokens = sum(row["timing_s/gen"] * row["perf/sampled_tokens_per_s"] for row in rows)
    own = ended.children_user + ended.children_system - begun.children_user - begun.children_system
    return tokens / seconds, own


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", action="append")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--characters", type=int, default=32, help="mean length of an answer")
    parser.add_argument("--play", choices=["task", "agent"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.play:
        return task_program() if arguments.play == "task" else agent_program()
    binaries = [str(Path(b).resolve()) for b in arguments.binary or ["target/release/rloss"]]
    with tempfile.TemporaryDirectory(prefix="rloss-agent-") as folder:
        place = Path(folder)
        model = teach(binaries[0], place, arguments.characters)
        base = RECIPE.format(model=model, prompts=8, turns=TURNS, steps=arguments.steps)
        found = {}
        for _ in range(arguments.rounds):
            for number, binary in enumerate(binaries):
                for kind, text in (("task", COMMAND), ("agent", AGENT)):
                    program = [sys.executable, str(Path(__file__).resolve()), "--play", kind]
                    figures = rate(binary, place, kind, base + text.format(program=program))
                    found.setdefault((number, kind), []).append(figures)
        print("| build | loop | tokens/s | of the built-in loop | processor s |\n| --- | --- | --- | --- | --- |")
        for number, binary in enumerate(binaries):
            ratios = [a[0] / b[0] for a, b in zip(found[number, "agent"], found[number, "task"])]
            for kind in ("task", "agent"):
                rates, seconds = zip(*found[number, kind])
                share = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
                print(f"| {number} | {kind} | {statistics.median(rates):.0f} | {share if kind == 'agent' else ''} | "
                      f"{statistics.median(seconds):.1f} |")


if __name__ == "__main__":
    main()
