"""A task program with a tool and two named rewards, for shop.toml. docs/TASKS.md has the protocol.

The last message can be a tool call, so the program grades it only if its channel is "final".
"""

import json, os, random, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
PRICES = {"apple": 3, "pear": 4, "plum": 2}
FRUIT = {"type": "object", "required": ["fruit"],
         "properties": {"fruit": {"type": "string", "enum": sorted(PRICES)}}}
PRICE = {"type": "function",
         "function": {"name": "price", "description": "The price of one fruit.", "parameters": FRUIT}}

def answer(ask):
    if ask["request"] == "describe":
        return {"version": 2, "name": "shopping", "validation_problems": 32,
                "tools": [PRICE], "rewards": {"right": 1.0, "asked": 0.2}}
    if ask["request"] == "problem":
        draw = random.Random(f"{ask['split']} {ask['seed']} {ask['index']}")
        fruit, count = draw.choice(sorted(PRICES)), draw.randrange(2, 10)
        return {"prompt": f"What do {count} {fruit}s cost?", "answer": count * PRICES[fruit]}
    if ask["request"] == "call":
        if ask["call"]["name"] != "price":
            return {"content": None}
        try:
            return {"content": str(PRICES[json.loads(ask["call"]["arguments"])["fruit"]])}
        except (ValueError, KeyError, TypeError):
            return {"content": 'Error: give {"fruit": "apple"}, "pear" or "plum".'}
    last = ask["messages"][-1] if ask["messages"] else {}
    right = last.get("channel") == "final" and last["content"].strip() == str(ask["answer"])
    return {"rewards": {"right": float(right), "asked": float(ask["calls_answered"] > 0)}, "success": right}

for line in sys.stdin:
    ask = json.loads(line)
    print(json.dumps({"request_id": ask["request_id"], **answer(ask)}), file=answers, flush=True)
