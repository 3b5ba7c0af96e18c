#!/usr/bin/env python3
"""SIGKILL for a run that uses an MCP server, or for the server's processes, at random times.

    tests/faults/mcp_kills.py --count 20     # so many kills of the run, and so many of the server

A killed run leaves no process of the server behind. Resumed, it ends as a run without kills, to the byte. A killed
server is started again; only a trajectory that was in a call fails, and is counted. If no call was lost, the end is
that of a run without kills too.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from faults import HERE, Failed, World, end, log, options, played, same

SERVER = HERE.parent / "fixtures/mcp_server.py"
GONE_S = 10
# The fixture's tools, as a prompt declares them.
NUMBERS = {"a": {"type": "integer"}, "b": {"type": "integer", "description": "Added to a."}}
ADD = {"type": "object", "required": ["a", "b"], "properties": NUMBERS}
DECLARED = [
    {"type": "function", "function": {"name": "add", "description": "The sum of two numbers.", "parameters": ADD}},
    {"type": "function", "function": {"name": "picture", "parameters": {"type": "object"}}},
]


class McpWorld(World):
    def __init__(self, arguments):
        super().__init__(arguments)
        # The fixture takes any other word than its faults as none; this one finds the processes of this campaign.
        self.word = f"kills-{os.getpid()}"
        self.server = json.dumps(["python3", str(SERVER), self.word])
        self.model = self.place / "model"
        self.teach()
        self.rows = 0

    def teach(self):
        """Makes the model that calls `add` and repeats the reply."""
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
        rows = self.place / "rows.jsonl"
        with open(rows, "w") as file:
            for _ in range(480):
                a, b, c = (self.random.randrange(10) for _ in range(3))
                question = f"{a}{self.random.choice('+-')}{b}{self.random.choice('+-')}{c}?"
                messages = [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": "", "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "1", "content": "3"},
                    {"role": "assistant", "content": "3"},
                ]
                print(json.dumps({"tools": DECLARED, "messages": messages}), file=file)
        self.done(self.command("sft", HERE / "mcp.toml", "--data", rows, "--epochs", 2, "--out", self.model))

    def train(self, run, *more, steps=None):
        sets = [f"tools.mcp.command={self.server}", "tools.mcp.processes=2", f"model.path={self.model}"]
        flags = [part for one in sets for part in ("--set", one)]
        return self.command("train", HERE / "mcp.toml", "--out", run, *flags, *more)

    def servers(self):
        """Ids of the living processes of the server."""
        found = []
        for folder in Path("/proc").iterdir():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
                state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:
                continue
            if str(SERVER).encode() in words and self.word.encode() in words and state != "Z":
                found.append(int(folder.name))
        return found

    def check_gone(self):
        until = time.monotonic() + GONE_S
        while self.servers():
            if time.monotonic() > until:
                raise Failed(f"processes of the server are left: {self.servers()}")
            time.sleep(0.01)

    def without_kills(self):
        run = self.folder()
        self.seconds = self.done(self.train(run))
        self.check_gone()
        calls = sum(row["tool/answered"] for row in end(run)[2])
        if calls < 50:
            raise Failed(f"the model made {calls} calls; the campaign needs more")
        return end(run), calls


def kills_of_the_run(world, count):
    expected, calls = world.without_kills()
    killed, runs, interrupted = 0, 0, 0
    while killed < count:
        run = world.folder()
        runs += 1
        while True:
            command = world.resume(run)
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
            time.sleep(world.random.uniform(0.0, world.seconds))
            interrupted += bool(world.servers())
            process.kill()
            said = process.communicate()[1]
            world.check_gone()
            if process.returncode == 0:
                break
            if process.returncode != -signal.SIGKILL:
                raise Failed(f"exit {process.returncode}: {said}")
            killed += 1
            world.verify(run)
        same(end(run), expected)
        shutil.rmtree(run)
        log(f"{killed} kills of the run, {runs} runs")
    return f"{killed} kills of {runs} runs ({interrupted} while the server ran, {calls} calls a run): every end is equal"


def kills_of_the_server(world, count):
    expected, _ = world.without_kills()
    killed, runs, failed, equal = 0, 0, 0, 0
    while killed < count:
        run, before = world.folder(), killed
        runs += 1
        process = subprocess.Popen(
            world.train(run), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        while process.poll() is None and killed < count:
            time.sleep(world.random.uniform(0.0, world.seconds / 4))
            if servers := world.servers():
                try:
                    os.kill(world.random.choice(servers), signal.SIGKILL)
                    killed += 1
                except ProcessLookupError:
                    pass
        said = process.communicate()[1]
        if process.returncode == 2 and "tools.mcp" in said:
            continue  # It was killed while its tools were listed: the run is refused, before any work.
        if process.returncode != 0:
            raise Failed(f"exit {process.returncode}: {said}")
        world.check_gone()
        lost = sum(row["outcome/task_failed"] for row in end(run)[2])
        if lost > killed - before:
            raise Failed(f"{lost} trajectories failed after {killed - before} kills")
        failed += lost
        if lost == 0:
            same(end(run), expected)
            equal += 1
        world.verify(run)
        shutil.rmtree(run)
        log(f"{killed} kills of the server, {runs} runs")
    return f"{killed} kills of the server in {runs} runs: {failed:.0f} calls lost; {equal} runs without one are equal"


def main():
    arguments = options(__doc__, 20).parse_args()
    arguments.set = []
    log(f"kills with an MCP server, seed {arguments.seed}")
    kills = [lambda world, kill=kill: kill(world, arguments.count) for kill in (kills_of_the_run, kills_of_the_server)]
    played(McpWorld(arguments), arguments.seed, *kills)


if __name__ == "__main__":
    main()
