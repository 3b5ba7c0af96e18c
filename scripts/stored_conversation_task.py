#!/usr/bin/env python3
"""A task (docs/TASKS.md) whose prompts are conversations with tool turns, for models that call no tool of themselves.

    [task]
    name = "command"
    command = ["python3", "scripts/stored_conversation_task.py"]

Each prompt holds a question, a call of the Python tool and its reply; the model answers after that.
"""

import json
import random
import sys


def problem(split, seed, index):
    rng = random.Random(f"{split} {seed} {index}")
    a, b = rng.randrange(10, 100), rng.randrange(10, 100)
    code = f"print({a} * {b})"
    return {
        "messages": [
            {"role": "user", "content": f"What is {a} times {b}? Use the tool."},
            {"role": "assistant", "channel": "analysis", "content": f"I multiply {a} by {b}."},
            {"role": "assistant", "channel": "commentary", "recipient": "python", "content_type": "code", "content": code},
            {"role": "tool", "name": "python", "recipient": "assistant", "channel": "commentary", "content": str(a * b)},
        ],
        "answer": a * b,
    }


for line in sys.stdin:
    ask = json.loads(line)
    if ask["request"] == "describe":
        reply = {"name": "stored_conversation", "validation_problems": 8, "python": True}
    elif ask["request"] == "problem":
        reply = problem(ask["split"], ask["seed"], ask["index"])
    else:
        right = any(m["content"].strip() == str(ask["answer"]) for m in ask["messages"][-1:])
        reply = {"reward": 1.0 if right else 0.0, "success": right}
    print(json.dumps(reply), flush=True)
