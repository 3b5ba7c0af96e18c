#!/usr/bin/env python3
"""Drawn conversations and how transformers renders them by chat templates: the reference of src/chat/template.

    scripts/check_templates.py --out FOLDER TEMPLATES...
    RLOSS_TEMPLATES=FOLDER cargo test --test suite -- chat_templates_of_a_folder

TEMPLATES are .jinja files or folders of them, for instance `chat_templates` of the PyPI package trl. FOLDER gets a copy of each
and `cases.json.gz`: the conversations, and by template the texts or the template's errors. `--own` writes the fixture of the ten
templates in tests/fixtures/templates. Needs transformers 5 and jinja2, no torch.
"""

import argparse
import gzip
import json
import random
import shutil
from datetime import datetime
from pathlib import Path

import jinja2
from transformers.utils import chat_template_utils
from transformers.utils.chat_template_utils import render_jinja_template

from make_chat_fixtures import TEXTS, parameters, words

OWN = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "templates"
CONVERSATIONS, DATE = 100, datetime(2026, 1, 2)
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
SWITCHES = {
    "enable_thinking": [True, False],
    "reasoning_effort": ["low", "high"],
    "preserve_thinking": [True, False],
    "model_identity": ["You are a test."],
    "date_string": ["1 Jan 2026"],
}
ODD = ["", " ", "\n\n", "<think>\na\n</think>\n\nb", "a</think>b", "<tool_response>x</tool_response>", "{{ x }}", "\x1f\u2028é\U0001f600 '\"\\",
       "<|im_end|>", "  lead and trail \n"]


def text(rng):
    return rng.choice(ODD) if rng.random() < 0.25 else rng.choice(TEXTS) if rng.random() < 0.6 else words(rng)


def argument(rng):
    drawn = [1, -2.5, 1e20, 1e-7, 10**18, True, False, None, [], {}, [1, None, "a'b"], {"a": {"b": [True, 0.1]}}, text(rng)]
    return rng.choice(drawn + [text(rng)] * 4)


def tool(rng, name):
    function = {"name": name, "description": words(rng), "parameters": parameters(rng)}
    if rng.random() < 0.15:
        del function["description"]
    if rng.random() < 0.15:
        function["return"] = {"type": "string"}
    return {"type": "function", "function": function}


def answer(rng, tools):
    message = {"role": "assistant", "content": text(rng)}
    if rng.random() < 0.3:
        message["reasoning_content"] = rng.choice([text(rng), "", None])
    if tools and rng.random() < 0.5:
        calls = []
        for number in range(rng.choice([1, 1, 1, 2, 3])):
            arguments = {words(rng) if rng.random() < 0.2 else f"a{i}": argument(rng) for i in range(rng.randint(0, 3))}
            arguments = json.dumps(arguments, ensure_ascii=False) if rng.random() < 0.05 else arguments
            call = {"type": "function", "function": {"name": rng.choice(tools)["function"]["name"], "arguments": arguments}}
            if rng.random() < 0.7:
                call["id"] = f"abcdefgh{number}"
            calls.append(call)
        message["tool_calls"] = calls
        message["content"] = rng.choice(["", None, message["content"]])
        if rng.random() < 0.05:
            del message["content"]
    elif rng.random() < 0.1:
        message["tool_calls"] = rng.choice([None, []])
    return message


def reply(rng, call):
    message = {"role": "tool", "content": rng.choice([text(rng), json.dumps(argument(rng)), ""])}
    if "id" in call:
        message["tool_call_id"] = call["id"]
    if rng.random() < 0.5:
        message["name"] = call["function"]["name"]
    return message


def conversation(rng):
    kind = rng.choice(["plain", "plain", "parts", "tools", "tools"])
    names = rng.sample(["add", "weather", "look_up", "größe"], rng.randint(1, 3))
    tools = [tool(rng, name) for name in names] if kind == "tools" else None
    messages = []
    if rng.random() < 0.4:
        messages.append({"role": "system", "content": text(rng)})
    turns = rng.randint(1, 3)
    for turn in range(turns):
        messages.append({"role": "user", "content": text(rng)})
        while turn < turns - 1 or rng.random() < 0.5:
            said = answer(rng, tools)
            messages.append(said)
            messages.extend(reply(rng, call) for call in said.get("tool_calls") or [])
            if not said.get("tool_calls"):
                break
    if rng.random() < 0.05:
        messages.append({"role": rng.choice(["critic", "developer", "user"]), "content": "?"})
    for message in messages if kind == "parts" else []:
        if isinstance(message.get("content"), str):
            message["content"] = [{"type": "text", "text": message["content"]}]
    switches = {name: rng.choice(values) for name, values in SWITCHES.items() if rng.random() < 0.2}
    return {"messages": messages, "tools": tools, "add_generation_prompt": rng.random() < 0.6, "variables": {**VARIABLES, **switches}}


def rendered(template, row):
    messages = chat_template_utils._normalize_chat_messages(row["messages"])
    rest = {"add_generation_prompt": row["add_generation_prompt"], **row["variables"]}
    try:
        texts, _ = render_jinja_template([messages], tools=row["tools"], chat_template=template, **rest)
        return {"text": texts[0]}
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


class FixedDate(datetime):
    @classmethod
    def now(cls, tz=None):
        return DATE


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", type=Path, help="the folder to write")
    arguments.add_argument("--own", action="store_true", help="write the fixture of our own templates")
    arguments.add_argument("--conversations", type=int, default=CONVERSATIONS)
    arguments.add_argument("templates", nargs="*", type=Path)
    options = arguments.parse_args()
    out = OWN if options.own else options.out
    if out is None:
        arguments.error("--out FOLDER or --own")
    chat_template_utils.datetime = FixedDate
    rng = random.Random(86)
    rows = [conversation(rng) for _ in range(options.conversations)]
    given = [OWN] if options.own else options.templates
    files = [file for path in given for file in (sorted(path.glob("*.jinja")) if path.is_dir() else [path])]
    out.mkdir(parents=True, exist_ok=True)
    expected = {}
    for file in files:
        name = file.stem if file.stem not in expected else f"{file.parent.name}-{file.stem}"
        expected[name] = [rendered(file.read_text(), row) for row in rows]
        if not options.own:
            shutil.copyfile(file, out / f"{name}.jinja")
        failed = sum("error" in row for row in expected[name])
        print(f"{name}: {len(rows) - failed} texts, {failed} errors")
    with gzip.GzipFile(out / "cases.json.gz", "wb", mtime=0) as packed:
        packed.write(json.dumps({"conversations": rows, "expected": expected}, ensure_ascii=False).encode())


if __name__ == "__main__":
    main()
