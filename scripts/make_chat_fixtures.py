#!/usr/bin/env python3
"""Conversations of our own and how Qwen2.5-Instruct's chat template writes them: tests/fixtures/chatml.jsonl.

    scripts/make_chat_fixtures.py --template FILE
    scripts/make_chat_fixtures.py --check FOLDER

FILE holds the template, which is Apache-2.0 and not part of this project: the value of `chat_template` in
tokenizer_config.json of the Qwen2.5-Instruct models. It was taken from a quotation of that value: the docstring of
`QwenFcHandler` in bfcl/model_handler/oss_model/ of the Berkeley Function-Calling Leaderboard (ShishirPatil/gorilla),
unescaped as JSON. The models' own file could not be had, but the quotation is whole: its length, 2,507 bytes, and its digest
are those that public repositories record for Qwen/Qwen2.5-7B-Instruct. A template of another digest is refused.

Each row holds `messages`, `tools`, `add_generation_prompt` and the `text`. --check loads the tokenizer of a checkpoint that
rloss saved (its embedded ChatML vocabulary) in transformers and compares `apply_chat_template` on every conversation that
begins with a system message: rloss's own template makes up no other.

Needs transformers 5 and jinja2.
"""

import argparse
import hashlib
import json
import random
import sys
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

FIXTURE = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "chatml.jsonl"
TEMPLATE_SHA256 = "cd8e9439f0570856fd70470bf8889ebd8b5d1107207f67a5efb46e342330527f"
CONVERSATIONS = 50


def function(name, description, required=(), **properties):
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    function("python", "Runs code.", ["code"], code={"type": "string"}),
    function("weather", "The weather \"now\" in a city.", ["city"], city={"type": "string"}, days={"type": "integer", "default": 1}),
    function("route", "A way from a to b, in km < 1000 & more.", stops={"type": "array", "items": {"type": "string"}}),
    function("größe", "Maße eines Körpers: Länge × Breite.", kind={"enum": ["klein", "groß"], "type": "string"}),
    function("noop", "Does nothing."),
]
CODE = ["print(1 + 2)", "x = \"a\\tb\"\nprint(x)\n", "for i in range(3):\n    print(f'{i}: \"ä\"')", "7*12", "'\\\\'"]
TEXTS = [
    "How many?", "Two lines\nof text", "  blanks around  ", "Grüße, 世界 🙂", "{\"json\": [1, 2]}", "a <tool_call> in words",
    "<|im_end|> spelled out", "tab\tand \"quotes\" and \\ backslash", "\nleading line break", "x",
]


def arguments(rng, name):
    if name == "python":
        return {"code": rng.choice(CODE)}
    return rng.choice([
        {},
        {"city": rng.choice(TEXTS), "days": rng.randint(-3, 12)},
        {"stops": ["Ulm", "Zürich", None, True], "km": 12.5, "far": 1e16, "near": 1e-07, "whole": 3.0},
        {"nested": {"a": [], "b": {}, "c": [[1], {"d": "é\u2028\u001f"}]}},
    ])


def conversation(rng):
    tools = rng.sample(TOOLS, rng.randint(0, 3))
    messages = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": rng.choice(TEXTS)})
    for _ in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": rng.choice(TEXTS)})
        for _ in range(rng.randint(0, 2) if tools else 0):
            names = [rng.choice(tools)["function"]["name"] for _ in range(rng.randint(1, 3))]
            calls = [{"type": "function", "function": {"name": n, "arguments": arguments(rng, n)}} for n in names]
            if rng.random() < 0.2:  # the function alone is a form that templates take
                calls = [call["function"] for call in calls]
            messages.append({"role": "assistant", "content": rng.choice(["", rng.choice(TEXTS)]), "tool_calls": calls})
            messages += [{"role": "tool", "name": n, "content": rng.choice(TEXTS + [""])} for n in names]
        messages.append({"role": "assistant", "content": rng.choice(TEXTS)})
    if rng.random() < 0.2:
        messages.append({"role": "system", "content": "Be brief from here on."})
        messages.append({"role": "user", "content": "Go on."})
    prompt = rng.random() < 0.5
    if prompt and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
        messages.pop()
    return {"messages": messages, "tools": tools, "add_generation_prompt": prompt}


def render(row, template):
    texts, _ = render_jinja_template(
        conversations=[row["messages"]], tools=row["tools"] or None, chat_template=template,
        add_generation_prompt=row["add_generation_prompt"],
    )
    return texts[0]


def check(folder):
    from transformers import AutoTokenizer

    tokenizer, compared = AutoTokenizer.from_pretrained(folder), 0
    for line in FIXTURE.read_text().rstrip().split("\n"):  # a text may hold other line separators
        row = json.loads(line)
        if row["messages"][0]["role"] != "system":
            continue
        text = tokenizer.apply_chat_template(
            row["messages"], tools=row["tools"] or None, add_generation_prompt=row["add_generation_prompt"], tokenize=False
        )
        if text != row["text"]:
            print(f"{folder}:\n{text!r}\nexpected\n{row['text']!r}", file=sys.stderr)
            return 1
        compared += 1
    print(f"{compared} conversations equal")
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--template", type=Path, help="file with Qwen2.5-Instruct's chat template")
    parser.add_argument("--check", type=Path, metavar="FOLDER", help="compare a checkpoint's template")
    options = parser.parse_args()
    if options.check:
        return check(options.check)
    if not options.template:
        parser.error("give --template or --check")
    template = options.template.read_text()
    digest = hashlib.sha256(template.encode()).hexdigest()
    if digest != TEMPLATE_SHA256:
        sys.exit(f"{options.template}: its SHA-256 is {digest}, not {TEMPLATE_SHA256}")
    rng = random.Random(0)
    rows = [conversation(rng) for _ in range(CONVERSATIONS)]
    lines = [json.dumps(row | {"text": render(row, template)}, ensure_ascii=False) for row in rows]
    FIXTURE.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
