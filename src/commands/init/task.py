"""The task of {recipe}: a program that gives problems and rewards, one JSON object a line.

rloss starts it, writes a request to its standard input and reads the answer from its standard output. Your own
prints go to standard error. Each answer must depend on its request alone. docs/TASKS.md says all that can be asked.
"""

import json
import os
import random
import sys

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # Prints go to standard error: only answers go to rloss.


def describe():
    """What the task is: its name in the metrics, and how many held-out problems there are."""
    return {"version": 2, "name": "doubling", "validation_problems": 100}


def problem(split, seed, index):
    """Problem number `index` of "train" (endless) or "validation"; `answer` comes back with the request for a reward."""
    n = random.Random(f"{split} {seed} {index}").randrange(100)
    return {"prompt": f"2*{n}?", "answer": 2 * n}


def reward(answer, messages):
    """What the model is trained on. `messages` is what it said; an answer that was finished ends in the channel "final"."""
    said = messages[-1] if messages else {}
    right = said.get("channel") == "final" and said.get("content", "").strip() == str(answer)
    return {"reward": 1.0 if right else 0.0, "success": right}


for line in sys.stdin:
    ask = json.loads(line)
    if ask["request"] == "describe":
        reply = describe()
    elif ask["request"] == "problem":
        reply = problem(ask["split"], ask["seed"], ask["index"])
    else:
        reply = reward(ask["answer"], ask["messages"])
    print(json.dumps({"request_id": ask.get("request_id"), **reply}), file=answers, flush=True)
