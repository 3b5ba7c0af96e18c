#!/usr/bin/env python3
"""Conversations and tools of our own, and how published chat templates write them.

    scripts/chat_templates.py chatml FILE          tests/fixtures/chatml.jsonl, by Qwen2.5-Instruct's template
    scripts/chat_templates.py families FOLDER      tools.jsonl.gz, by three families; thoughts.jsonl.gz, by Qwen3's
    scripts/chat_templates.py check CHECKPOINT
    scripts/chat_templates.py reference --own      the fixture of the ten templates in tests/fixtures/templates
    scripts/chat_templates.py reference --out FOLDER TEMPLATES...
    RLOSS_TEMPLATES=FOLDER cargo test --test suite -- chat_templates_of_a_folder

FILE holds the template, which is Apache-2.0 and not part of this project: the value of `chat_template` in
tokenizer_config.json of the Qwen2.5-Instruct models. It was taken from a quotation of that value: the
docstring of `QwenFcHandler` in bfcl/model_handler/oss_model/ of the Berkeley Function-Calling Leaderboard
(ShishirPatil/gorilla), unescaped as JSON. The models' own file could not be had, but the quotation is whole:
its length, 2,507 bytes, and its digest are those that public repositories record for
Qwen/Qwen2.5-7B-Instruct. A template of another digest is refused.

Each row holds `messages`, `tools`, `add_generation_prompt` and the `text`. FOLDER of `families` holds
gpt-oss.jinja, qwen2.5.jinja and qwen3.jinja as published with the models; a row of tools.jsonl.gz holds
`tools`, `instructions` or null, and the prompt's text by family, one of thoughts.jsonl.gz also
`enable_thinking`. `check` loads the tokenizer of a checkpoint that rloss saved (its embedded ChatML
vocabulary) in transformers and compares `apply_chat_template` on every conversation that begins with a system
message: rloss's own template makes up no other.

`reference` draws conversations and renders them by transformers: the reference of src/chat/template.
TEMPLATES are .jinja files or folders of them, for instance `chat_templates` of the PyPI package trl. FOLDER
gets a copy of each and `cases.json.gz`: the conversations, and by template the texts or the template's
errors.

Needs transformers 5 and jinja2, no torch.
"""

import argparse
import gzip
import hashlib
import json
import random
import shutil
import sys
from datetime import datetime
from pathlib import Path

import jinja2
from transformers.utils import chat_template_utils
from transformers.utils.chat_template_utils import render_jinja_template

FIXTURES = Path(__file__).resolve().parent.parent / "tests" / "fixtures"
FIXTURE = FIXTURES / "chatml.jsonl"
TEMPLATE_SHA256 = "cd8e9439f0570856fd70470bf8889ebd8b5d1107207f67a5efb46e342330527f"
CONVERSATIONS, ROWS, REFERENCE_CONVERSATIONS = 50, 200, 100
DATE = datetime(2026, 1, 2)
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
    templates = {name: (folder / name).read_text().replace('strftime_now("%Y-%m-%d")', f'"{DATE:%Y-%m-%d}"')
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


def odd_text(rng):
    return rng.choice(ODD) if rng.random() < 0.25 else rng.choice(TEXTS) if rng.random() < 0.6 else words(rng)


def argument(rng):
    drawn = [1, -2.5, 1e20, 1e-7, 10**18, True, False, None, [], {}, [1, None, "a'b"], {"a": {"b": [True, 0.1]}}, odd_text(rng)]
    return rng.choice(drawn + [odd_text(rng)] * 4)


def tool(rng, name):
    function = {"name": name, "description": words(rng), "parameters": parameters(rng)}
    if rng.random() < 0.15:
        del function["description"]
    if rng.random() < 0.15:
        function["return"] = {"type": "string"}
    return {"type": "function", "function": function}


def answer(rng, tools):
    message = {"role": "assistant", "content": odd_text(rng)}
    if rng.random() < 0.3:
        message["reasoning_content"] = rng.choice([odd_text(rng), "", None])
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
    message = {"role": "tool", "content": rng.choice([odd_text(rng), json.dumps(argument(rng)), ""])}
    if "id" in call:
        message["tool_call_id"] = call["id"]
    if rng.random() < 0.5:
        message["name"] = call["function"]["name"]
    return message


def odd_conversation(rng):
    kind = rng.choice(["plain", "plain", "parts", "tools", "tools"])
    names = rng.sample(["add", "weather", "look_up", "größe"], rng.randint(1, 3))
    tools = [tool(rng, name) for name in names] if kind == "tools" else None
    messages = []
    if rng.random() < 0.4:
        messages.append({"role": "system", "content": odd_text(rng)})
    turns = rng.randint(1, 3)
    for turn in range(turns):
        messages.append({"role": "user", "content": odd_text(rng)})
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


def render_or_error(template, row):
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


def make_reference(options):
    own = FIXTURES / "templates"
    out = own if options.own else options.out
    chat_template_utils.datetime = FixedDate
    rng = random.Random(86)
    rows = [odd_conversation(rng) for _ in range(options.conversations)]
    given = [own] if options.own else options.templates
    files = [file for path in given for file in (sorted(path.glob("*.jinja")) if path.is_dir() else [path])]
    out.mkdir(parents=True, exist_ok=True)
    expected = {}
    for file in files:
        name = file.stem if file.stem not in expected else f"{file.parent.name}-{file.stem}"
        expected[name] = [render_or_error(file.read_text(), row) for row in rows]
        if not options.own:
            shutil.copyfile(file, out / f"{name}.jinja")
        failed = sum("error" in row for row in expected[name])
        print(f"{name}: {len(rows) - failed} texts, {failed} errors")
    with gzip.GzipFile(out / "cases.json.gz", "wb", mtime=0) as packed:
        packed.write(json.dumps({"conversations": rows, "expected": expected}, ensure_ascii=False).encode())


def make_chatml(path):
    template = path.read_text()
    digest = hashlib.sha256(template.encode()).hexdigest()
    if digest != TEMPLATE_SHA256:
        sys.exit(f"{path}: its SHA-256 is {digest}, not {TEMPLATE_SHA256}")
    rng = random.Random(0)
    rows = [conversation(rng) for _ in range(CONVERSATIONS)]
    lines = [json.dumps(row | {"text": render(row, template)}, ensure_ascii=False) for row in rows]
    FIXTURE.write_text("\n".join(lines) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, run, what in [
        ("chatml", make_chatml, "file with Qwen2.5-Instruct's chat template"),
        ("families", make_tools_and_thoughts, "folder with three published templates"),
        ("check", check, "checkpoint whose template is compared"),
    ]:
        command = commands.add_parser(name)
        command.set_defaults(run=lambda options, run=run: run(options.path))
        command.add_argument("path", type=Path, help=what)
    command = commands.add_parser("reference")
    command.set_defaults(run=make_reference)
    where = command.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, help="the folder to write")
    where.add_argument("--own", action="store_true", help="write the fixture of our own templates")
    command.add_argument("--conversations", type=int, default=REFERENCE_CONVERSATIONS)
    command.add_argument("templates", nargs="*", type=Path)
    options = parser.parse_args()
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
