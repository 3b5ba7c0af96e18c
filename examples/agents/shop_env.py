"""A small environment of verifiers' classic API, with a tool: what do some fruits cost?"""

import random

import verifiers as vf
from datasets import Dataset

PRICES = {"apple": 3, "pear": 4, "plum": 2}


def price(fruit: str) -> str:
    """The price of one fruit.

    Args:
        fruit: apple, pear or plum
    """
    return str(PRICES[fruit])


def right(completion, answer) -> float:
    said = completion[-1]["content"] if completion else None
    return float((said or "").strip().rstrip(".") == answer)


def rows(tasks, most, seed):
    draw = random.Random(seed)
    for _ in range(tasks):
        fruit, number = draw.choice(sorted(PRICES)), draw.randint(1, most)
        yield {"question": f"What do {number} {fruit}s cost?",
               "answer": str(number * PRICES[fruit])}


def load_environment(tasks: int = 200, most: int = 9) -> vf.Environment:
    return vf.ToolEnv(
        tools=[price],
        max_turns=4,
        system_prompt="Ask for the price with the tool. Then answer with the total alone.",
        dataset=Dataset.from_list(list(rows(tasks, most, 0))),
        eval_dataset=Dataset.from_list(list(rows(20, most, 1))),
        rubric=vf.Rubric(funcs=[right]),
    )
