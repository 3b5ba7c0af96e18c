#!/usr/bin/env python3
"""Conversations and tools of our own, and how published chat templates write them.

    scripts/make_chat_fixtures.py --template FILE       tests/fixtures/chatml.jsonl, by Qwen2.5-Instruct's template
    scripts/make_chat_fixtures.py --templates FOLDER    tools.jsonl.gz, by three families; thoughts.jsonl.gz, by Qwen3's
    scripts/make_chat_fixtures.py --check FOLDER

FILE holds the template, which is Apache-2.0 and not part of this project: the value of `chat_template` in
tokenizer_config.json of the Qwen2.5-Instruct models. It was taken from a quotation of that value: the docstring of
`QwenFcHandler` in bfcl/model_handler/oss_model/ of the Berkeley Function-Calling Leaderboard (ShishirPatil/gorilla),
unescaped as JSON. The models' own file could not be had, but the quotation is whole: its length, 2,507 bytes, and its digest
are those that public repositories record for Qwen/Qwen2.5-7B-Instruct. A template of another digest is refused.

Each row holds `messages`, `tools`, `add_generation_prompt` and the `text`. FOLDER of --templates holds gpt-oss.jinja,
qwen2.5.jinja and qwen3.jinja as published with the models; a row of tools.jsonl.gz holds `tools`, `instructions` or null, and
the prompt's text by family, one of thoughts.jsonl.gz also `enable_thinking`. --check loads the tokenizer of a checkpoint that
rloss saved (its embedded ChatML vocabulary) in transformers and compares `apply_chat_template` on every conversation that
begins with a system message: rloss's own template makes up no other.

Needs transformers 5 and jinja2.
"""

import argparse
import gzip
import hashlib
import json
import random
import sys
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

FIXTURES = Path(__file__).resolve().parent.parent / "tests" / "fixtures"
FIXTURE = FIXTURES / "chatml.jsonl"
TEMPLATE_SHA256 = "cd8e9439f0570856fd70470bf8889ebd8b5d1107207f67a5efb46e342330527f"
CONVERSATIONS = 50


ROWS, DATE = 200, "2026-01-02"
WORDS = ["city", "Länge", "unit of \"length\"", "days < 7 & more", "a\\b", "世界", "price", "kind", "x", "two\nlines"]
NAMES = ["city", "days", "unit", "route", "größe", "items", "properties", "values", "x1", "default", "type"]
SCALARS = ["string", "number", "integer", "boolean"]


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


def words(rng):
    return " ".join(rng.sample(WORDS, rng.randint(1, 3)))


def schema(rng, depth=0):
    kind = rng.choice(SCALARS * 2 + (["array", "object", "oneOf", "types", "any"] if depth < 3 else []))
    drawn = {}
    if kind == "oneOf":
        drawn["oneOf"] = [schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]
    elif kind == "types":
        drawn["type"] = rng.sample(SCALARS + ["object", "null"], rng.randint(1, 3))
    elif kind != "any":
        drawn["type"] = kind
    if kind == "array" and rng.random() < 0.8:
        drawn["items"] = schema(rng, depth + 1) if rng.random() < 0.9 else {}
    if kind == "object" and rng.random() < 0.8:
        drawn.update(parameters(rng, depth + 1))
    if kind == "string" and rng.random() < 0.4:
        drawn["enum"] = rng.sample(WORDS, rng.randint(1, 3))
        if rng.random() < 0.5:
            drawn["default"] = rng.choice(drawn["enum"])
    elif rng.random() < 0.3:
        drawn["default"] = words(rng) if kind == "oneOf" else rng.choice([1, -2.5, 1e-7, 1e20, True, None, words(rng), [], {"a": [1, None]}])
    if rng.random() < 0.5:
        drawn["description"] = rng.choice([words(rng), ""])
    if rng.random() < 0.2:
        drawn["nullable"] = rng.random() < 0.7
    keys = list(drawn)
    rng.shuffle(keys)
    return {key: drawn[key] for key in keys}


def parameters(rng, depth=0):
    names = rng.sample(NAMES, rng.randint(0, 4 - min(depth, 2)))
    drawn = {"type": "object", "properties": {name: schema(rng, depth) for name in names}}
    if rng.random() < 0.7:
        drawn["required"] = [name for name in names if rng.random() < 0.5]
    return drawn


def drawn_function(rng, i):
    drawn = {"name": f"{rng.choice(['look_up', 'route', 'noop', 'get-price'])}{i}", "description": words(rng)}
    if rng.random() < 0.9:
        drawn["parameters"] = parameters(rng)
    if rng.random() < 0.1:
        drawn["strict"] = True
    return {"type": "function", "function": drawn}


def thoughtful(rng):
    """A conversation whose assistant thinks in some turns: in a key of its own, or in the text."""
    row = conversation(rng)
    for message in row["messages"]:
        thought = rng.choice(TEXTS)
        if message["role"] == "assistant" and rng.random() < 0.3:
            message["reasoning_content"] = thought
        elif message["role"] == "assistant" and rng.random() < 0.4:
            message["content"] = f"<think>\n{thought}\n</think>\n\n{message['content']}"
    return row | {"enable_thinking": rng.random() < 0.5}


def write(name, rows):
    with open(FIXTURES / name, "wb") as file, gzip.GzipFile(fileobj=file, mode="wb", mtime=0, filename="") as packed:
        packed.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    print(f"{name}: {len(rows)} rows, {(FIXTURES / name).stat().st_size} bytes")


def make_tools_and_thoughts(folder):
    # The date of GPT-OSS's system message is that of the clock.
    templates = {name: (folder / name).read_text().replace('strftime_now("%Y-%m-%d")', f'"{DATE}"')
                 for name in ["gpt-oss.jinja", "qwen2.5.jinja", "qwen3.jinja"]}
    rng, rows = random.Random(1), []
    for i in range(ROWS):
        tools = [drawn_function(rng, j) for j in range(rng.randint(1, 4))]
        instructions = words(rng) if rng.random() < 0.5 else None
        messages = ([{"role": "system", "content": instructions}] if instructions else []) + [{"role": "user", "content": words(rng)}]
        row = {"tools": tools, "instructions": instructions, "user": messages[-1]["content"]}
        for name, template in templates.items():
            (text,), _ = render_jinja_template([messages], tools=tools, chat_template=template, add_generation_prompt=True)
            row[name.removesuffix(".jinja")] = text
        rows.append(row)
    write("tools.jsonl.gz", rows)
    rng, rows = random.Random(2), []
    for _ in range(ROWS):
        row = thoughtful(rng)
        (text,), _ = render_jinja_template(
            [row["messages"]], tools=row["tools"] or None, chat_template=templates["qwen3.jinja"],
            add_generation_prompt=row["add_generation_prompt"], enable_thinking=row["enable_thinking"],
        )
        rows.append(row | {"text": text})
    write("thoughts.jsonl.gz", rows)


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
    parser.add_argument("--templates", type=Path, metavar="FOLDER", help="folder with three published templates")
    parser.add_argument("--check", type=Path, metavar="FOLDER", help="compare a checkpoint's template")
    options = parser.parse_args()
    if options.check:
        return check(options.check)
    if options.templates:
        return make_tools_and_thoughts(options.templates)
    if not options.template:
        parser.error("give --template, --templates or --check")
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
