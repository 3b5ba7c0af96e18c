"""Runs the reward functions of a file. Requests and answers are JSON lines on the first standard input and output."""

import asyncio
import importlib.util
import inspect
import json
import math
import os
import sys
import traceback
import types

answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
# What the file prints, or a program that it starts, goes to standard error; it reads nothing.
os.dup2(2, 1)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

# The end of a traceback that is shown.
TRACE_CHARS_MAX = 4000
NEVER_A_COLUMN = ("prompt", "completion", "completion_ids")


def load(path):
    sys.path.insert(0, os.path.dirname(path))
    name = os.path.splitext(os.path.basename(path))[0]
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def is_verl(function):
    return "solution_str" in inspect.signature(function).parameters


def own_functions(module):
    """The functions of the file that have the form of a reward."""
    found = {}
    for name, value in vars(module).items():
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_"):
            names = inspect.signature(value).parameters
            if "completions" in names or "solution_str" in names:
                found[name] = value
    return found


def call(function, arguments, optional):
    """Calls with the arguments that the function takes; `optional` ones only if it names them."""
    parameters = inspect.signature(function).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        arguments = {name: value for name, value in arguments.items() if name in parameters}
    arguments |= {name: value for name, value in optional.items() if name in parameters}
    result = function(**arguments)
    return asyncio.run(result) if inspect.isawaitable(result) else result


def number(value):
    value = float(value)
    if not math.isfinite(value):
        raise ValueError(f"the reward is {value}, which is no finite number")
    return value


def verl_score(function, ask):
    row = ask["row"]
    model = row.get("reward_model")
    truth = model.get("ground_truth") if isinstance(model, dict) else row.get("ground_truth", row.get("answer"))
    arguments = {
        "data_source": row.get("data_source"),
        "solution_str": ask["text"],
        "ground_truth": truth,
        "extra_info": row.get("extra_info") or {},
    }
    score = call(function, arguments, {})
    if isinstance(score, dict):
        success = score.get("acc")
        return number(score["score"]), None if success is None else bool(success)
    return number(score), None


def trl_reward(function, ask):
    columns = {name: [value] for name, value in ask["row"].items() if name not in NEVER_A_COLUMN}
    step, steps = ask["step"], ask["steps"]
    state = types.SimpleNamespace(
        global_step=step, max_steps=steps, epoch=0.0, is_world_process_zero=True, log_history=[]
    )
    arguments = columns | {
        "prompts": [ask["prompt"]],
        "completions": [ask["messages"] if ask["conversational"] else ask["text"]],
        "completion_ids": [ask["completion_ids"]],
        "trainer_state": state,
    }
    ignore = {"log_extra": lambda *_: None, "log_metric": lambda *_: None}
    rewards = call(function, arguments, ignore)
    if isinstance(rewards, (str, dict)) or not hasattr(rewards, "__len__"):
        raise TypeError(f"returned {rewards!r}, not a list with one reward for each completion")
    if len(rewards) != 1:
        raise ValueError(f"returned {len(rewards)} rewards for 1 completion")
    return None if rewards[0] is None else number(rewards[0])


def grade(functions, ask):
    rewards, failed, success, traces = {}, {}, None, []
    for name in ask["rewards"]:
        try:
            if is_verl(functions[name]):
                rewards[name], success = verl_score(functions[name], ask)
            else:
                rewards[name] = trl_reward(functions[name], ask)
        except Exception as error:
            traces.append(traceback.format_exc()[-TRACE_CHARS_MAX:])
            failed[name] = f"{type(error).__name__}: {error}"[:500]
            if ask["conversational"] and not is_verl(functions[name]):
                failed[name] += " (the row's prompt is messages, so a completion is a list of messages)"
    return {"rewards": rewards, "failed": failed, "success": success, "traceback": "".join(traces)}


def main():
    functions, mistake = {}, None
    try:
        module = load(sys.argv[1])
        functions = own_functions(module)
        # A name that the recipe gives may be imported.
        named = {name: getattr(module, name) for name in sys.argv[2:] if callable(getattr(module, name, None))}
        functions |= named
    except BaseException as error:
        traceback.print_exc()
        mistake = f"{type(error).__name__}: {error}"[:500]
    for line in requests:
        ask = json.loads(line)
        if ask["request"] == "describe":
            reply = {"functions": list(functions), "mistake": mistake}
        else:
            reply = grade(functions, ask)
        sys.stderr.flush()
        print(json.dumps(reply), file=answers, flush=True)


main()
