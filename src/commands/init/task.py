"""The task of {recipe}: a program that gives problems and rewards, one JSON object per line.

rloss starts this program, writes requests to its standard input and reads answers from its standard output. The
output of print() goes to standard error. An answer must depend only on its request. docs/TASKS.md lists all requests.
"""

import json
import os
import random
import sys

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # print() goes to standard error; only answers go to rloss.


def describe():
    """Describes the task: its name in the metrics, and the number of held-out problems."""
    return {"version": 2, "name": "doubling", "validation_problems": 100}


def problem(split, seed, index):
    """Returns problem number `index` of "train" (endless) or "validation". The reward request repeats `answer`."""
    n = random.Random(f"{split} {seed} {index}").randrange(100)
    return {"prompt": f"2*{n}?", "answer": 2 * n}


def reward(answer, messages):
    """Returns the reward. `messages` are the model's messages; a finished answer ends on the channel "final"."""
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
    print(json.dumps({"request_id": ask["request_id"], **reply}), file=answers, flush=True)
