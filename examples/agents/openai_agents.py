"""An agent of the OpenAI Agents SDK with a tool of its own: pip install openai-agents"""

import asyncio, random
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError
from openai import AsyncOpenAI, BadRequestError
from rloss_episodes import run

set_tracing_disabled(True)  # Nothing goes to OpenAI.
PRICES = {"apple": 3, "pear": 4, "plum": 2}


@function_tool
def price(fruit: str) -> str:
    """The price of one fruit."""
    return str(PRICES.get(fruit, "unknown"))


async def ask(episode, question):
    async with AsyncOpenAI(api_key=episode["api_key"], max_retries=0) as client:
        model = OpenAIChatCompletionsModel(model="policy", openai_client=client)
        agent = Agent(name="shop", instructions="Answer with a number.", model=model, tools=[price])
        return await Runner.run(agent, question, max_turns=4)


def play(episode):
    draw = random.Random(f"{episode['phase']} {episode['seed']} {episode['index']}")
    fruit, count = draw.choice(sorted(PRICES)), draw.randrange(2, 10)
    try:
        result = asyncio.run(ask(episode, f"What do {count} {fruit}s cost?"))
    except (MaxTurnsExceeded, ModelBehaviorError, BadRequestError):
        return 0.0  # The policy's own fault: it learns from it.
    said = str(result.final_output).strip()
    success = said == str(count * PRICES[fruit])
    return {"reward": 1.0 if success else 0.2 * said.isdigit(), "success": success}


run(play)
