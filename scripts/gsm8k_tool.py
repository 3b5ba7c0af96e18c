#!/usr/bin/env python3
"""Teaches a model to call the Python tool on GSM8K, from programs that it wrote itself.

    scripts/gsm8k_tool.py problems GSM8K.jsonl OUT.jsonl     rows for the task `retool`
    scripts/gsm8k_tool.py task GSM8K.jsonl                   a task program: asks for a Python program
    scripts/gsm8k_tool.py rows TRAJECTORIES.jsonl OUT.jsonl  conversations for `rloss sft`
    scripts/gsm8k_tool.py init_tokens FOLDER OUT '<tool_call>' '</tool_call>'

`rows` takes the trajectories of `rloss rollout` with the task program. It keeps those whose program prints
the reference answer, and writes each program as a call of the tool: rejection sampling. The task program
executes the model's code with your own rights, for at most ten seconds each.

`init_tokens` gives tokens that a model never learned an embedding of their own. In some models the rows of
special tokens are those of tokens that training never used: equal or nearly equal, so that a tied head cannot
tell them apart and an adapter cannot learn them. Each named token gets the mean of the rows of its pieces,
such as "<", "tool", "_call", ">", scaled to the median norm. Prints how many rows were nearly equal before
(cosine above 0.99). Nothing else changes. Refused for a model whose head is not tied to its embedding. Needs
torch, safetensors, transformers; the others the standard library alone.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ASK = ("Write a short Python program that computes the answer step by step and prints only the final number. "
       "Reply with one ```python code block and nothing else.")
# The system message and the prompt of recipes/results/gsm8k_tool.toml.
SYSTEM = ("You are Qwen, created by Alibaba Cloud. You are a helpful assistant.\n\n"
          "Compute with the function python. After its output, write the answer within \\boxed{}.")
PROMPT = "{}\nPut the final answer within \\boxed{{}}."
TOOL = {"type": "function", "function": {
    "name": "python",
    "description": "Runs Python code and answers with its output. Use it to compute and to check your reasoning. "
                   "The user sees neither code nor output.",
    "parameters": {"type": "object", "properties": {"code": {"type": "string", "description": "The code to run."}},
                   "required": ["code"]}}}
EMBEDDING = "model.embed_tokens.weight"


def read(path):
    with open(path) as file:
        return [json.loads(line) for line in file]


def reference(row):
    return row["answer"].rsplit("####")[-1].strip().replace(",", "")


def code_block(text):
    """Returns the text of the first block of Python; None without one."""
    found = re.search(r"```(?:python)?\n(.*?)```", text, re.DOTALL)
    return found and found.group(1).strip()


def output(code):
    """Returns what the program prints; None if it fails."""
    try:
        run = subprocess.run([sys.executable, "-I", "-c", code], stdin=subprocess.DEVNULL, capture_output=True,
                             text=True, errors="replace", timeout=10)
    except (subprocess.TimeoutExpired, ValueError):
        return None
    return run.stdout if run.returncode == 0 else None


def is_right(printed, answer):
    try:
        return printed is not None and float(printed.strip().replace(",", "")) == float(answer)
    except ValueError:
        return False


def problems(source, out):
    with open(out, "w") as file:
        for number, row in enumerate(read(source)):
            file.write(json.dumps({"id": number, "problem": row["question"], "answer": reference(row)}) + "\n")


def task(source):
    rows = read(source)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        ask = json.loads(line)
        if ask["request"] == "describe":
            reply = {"version": 2, "name": "gsm8k_programs", "validation_problems": 8}
        elif ask["request"] == "problem":
            row = rows[ask["index"] % len(rows)]
            reply = {"prompt": f"{row['question']}\n\n{ASK}", "answer": reference(row)}
        else:
            final = [message["content"] for message in ask["messages"] if message.get("channel") == "final"]
            code = code_block(final[-1]) if final else None
            reply = {"reward": float(bool(code) and is_right(output(code), ask["answer"]))}
        print(json.dumps({"request_id": ask["request_id"], **reply}), file=answers, flush=True)


def conversation(trajectory):
    """Returns the row of a trajectory whose program is right."""
    question = next(m["content"] for m in trajectory["messages"] if m["role"] == "user").rsplit("\n\n", 1)[0]
    code = code_block(trajectory["messages"][-1]["content"])
    call = {"type": "function", "function": {"name": "python", "arguments": json.dumps({"code": code})}}
    return {"tools": [TOOL], "messages": [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": PROMPT.format(question)},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": output(code)},
        {"role": "assistant", "content": f"\\boxed{{{trajectory['answer']}}}"}]}


def rows(source, out):
    trajectories = read(source)
    right = [trajectory for trajectory in trajectories if trajectory["reward"] > 0]
    with open(out, "w") as file:
        file.writelines(json.dumps(conversation(trajectory)) + "\n" for trajectory in right)
    print(f"{len(right)} of {len(trajectories)} programs print the right answer")


def init_tokens(folder, out, *tokens):
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    def near(rows, row):
        return int((torch.nn.functional.cosine_similarity(rows, row[None]) > 0.99).sum()) - 1

    folder, out = Path(folder), Path(out)
    if not json.loads((folder / "config.json").read_text()).get("tie_word_embeddings"):
        sys.exit(f"{folder}: the head is not tied to the embedding; both would need new rows")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    shutil.copytree(folder, out)
    for path in sorted(out.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            if EMBEDDING not in file.keys():
                continue
            tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()
        rows = tensors[EMBEDDING].float()
        norm = rows.norm(dim=1).median()
        before = rows.clone()
        for token in tokens:
            number = tokenizer.convert_tokens_to_ids(token)
            if number is None or tokenizer.convert_ids_to_tokens(number) != token:
                sys.exit(f"{folder}: no token {token}")
            pieces = [*tokenizer.encode(token[:1]), *tokenizer.encode(token[1:])]
            mean = before[pieces].mean(dim=0)
            rows[number] = mean / mean.norm() * norm
            print(f"{token} ({number}): {near(before, before[number])} other rows were nearly equal, now "
                  f"{near(rows, rows[number])}; from {tokenizer.convert_ids_to_tokens(pieces)}")
        tensors[EMBEDDING] = rows.to(tensors[EMBEDDING].dtype)
        save_file(tensors, path, metadata)
        return
    sys.exit(f"{folder}: no tensor {EMBEDDING}")


if __name__ == "__main__":
    commands = {"problems": problems, "task": task, "rows": rows, "init_tokens": init_tokens}
    if len(sys.argv) < (5 if sys.argv[1:2] == ["init_tokens"] else 3) or sys.argv[1] not in commands:
        sys.exit(__doc__)
    commands[sys.argv[1]](*sys.argv[2:])
