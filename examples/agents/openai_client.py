"""The quickstart's arithmetic as an agent: OpenAI's own client, and a calculator that this program runs.

pip install openai
"""

import ast, json, operator, random, zlib
from openai import BadRequestError, OpenAI
from rloss_episodes import run

QUESTIONS = [("{} boxes of {}, {} sold. Left?", lambda a, b, c: a * b - c),
             ("{} boxes of {}, {} more. Total?", lambda a, b, c: a * b + c),
             ("{} red, {} blue in each of {} bags. Total?", lambda a, b, c: (a + b) * c),
             ("{} made, {} broke, each day, {} days. Total?", lambda a, b, c: (a - b) * c)]
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def problem(episode):  # The episodes of a group have one index, and so one problem.
    draw = random.Random(f"{episode['phase']} {episode['seed']} {episode['index']}")
    while True:
        kind, (a, b, c) = draw.randrange(4), [draw.randint(11, 99) for _ in range(3)]
        a, b = (max(a, b), min(a, b)) if kind == 3 else (a, b)
        held_out = zlib.crc32(bytes([kind, a, b, c])) % 10 == 0
        if held_out == (episode["phase"] == "validation") and (kind < 3 or a > b):
            text, value = QUESTIONS[kind]
            return text.format(a, b, c), str(value(a, b, c))


def calculate(call):
    def value(node):
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        return node.value
    try:
        return str(value(ast.parse(json.loads(call.function.arguments)["code"], mode="eval").body))
    except Exception:
        return "SyntaxError: Expected an expression"


def play(episode):
    client = OpenAI(api_key=episode["api_key"], max_retries=0)  # OPENAI_BASE_URL names the run's server.
    question, right = problem(episode)
    messages = [{"role": "user", "content": question}]
    for turn in range(3):
        try:
            answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message
        except BadRequestError:  # The conversation has outgrown the model's context.
            return -1.0
        if not answer.tool_calls:
            break
        messages.append(answer.model_dump(exclude_none=True))
        messages += [{"role": "tool", "tool_call_id": c.id, "content": calculate(c)} for c in answer.tool_calls]
    success = not answer.tool_calls and (answer.content or "").strip() == right
    return {"reward": 1.0 if success else -1.0, "success": success, "metrics": {"calls": turn}}


run(play)
