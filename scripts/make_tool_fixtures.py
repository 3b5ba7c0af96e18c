#!/usr/bin/env python3
"""Drawn tools and how published chat templates write a prompt with them: tests/fixtures/tools.jsonl.gz.
Drawn conversations with thoughts and how Qwen3's template writes them: tests/fixtures/thoughts.jsonl.gz.

    scripts/make_tool_fixtures.py --templates FOLDER

FOLDER holds gpt-oss.jinja, qwen2.5.jinja and qwen3.jinja as published with the models (Apache-2.0, not part of this project).
Each row of the first holds `tools`, `instructions` or null, and the prompt's text by family; of the second `messages`, `tools`,
`add_generation_prompt`, `enable_thinking` and the `text`. Needs transformers 5 and jinja2.
"""

import argparse
import gzip
import json
import random
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

from make_chat_fixtures import TEXTS, conversation

FIXTURES = Path(__file__).resolve().parent.parent / "tests" / "fixtures"
ROWS, DATE = 200, "2026-01-02"
WORDS = ["city", "Länge", "unit of \"length\"", "days < 7 & more", "a\\b", "世界", "price", "kind", "x", "two\nlines"]
NAMES = ["city", "days", "unit", "route", "größe", "items", "properties", "values", "x1", "default", "type"]
SCALARS = ["string", "number", "integer", "boolean"]


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


def function(rng, i):
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--templates", type=Path, required=True)
    folder = parser.parse_args().templates
    # The date of GPT-OSS's system message is that of the clock.
    templates = {name: (folder / name).read_text().replace('strftime_now("%Y-%m-%d")', f'"{DATE}"')
                 for name in ["gpt-oss.jinja", "qwen2.5.jinja", "qwen3.jinja"]}
    rng, rows = random.Random(1), []
    for i in range(ROWS):
        tools = [function(rng, j) for j in range(rng.randint(1, 4))]
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


if __name__ == "__main__":
    main()
