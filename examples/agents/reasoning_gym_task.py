"""Tasks of reasoning-gym, one question and one answer: pip install openai reasoning-gym

The arguments are a data set's name and its options, as JSON: chain_sum '{"max_terms": 3}'.
"""

import json, sys
import reasoning_gym
from openai import BadRequestError, OpenAI
from rloss_episodes import run

NAME, OPTIONS = sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
PROBLEMS_MAX = 100_000
DATA = {phase: reasoning_gym.create_dataset(NAME, size=PROBLEMS_MAX, seed=seed, **OPTIONS)
        for phase, seed in [("train", 1), ("validation", 2)]}


def play(episode):
    data = DATA[episode["phase"]]
    entry = data[episode["index"] % PROBLEMS_MAX]  # Made from the data set's seed and the index.
    client = OpenAI(api_key=episode["api_key"], max_retries=0)  # OPENAI_BASE_URL names the run's server.
    messages = [{"role": "user", "content": entry["question"]}]
    try:
        answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content
    except BadRequestError:  # The question is longer than rollout.prompt_tokens_max.
        return {"error": "the question does not fit"}
    score = float(data.score_answer((answer or "").strip(), entry))
    return {"reward": score, "success": score >= 1.0}


run(play)
