"""Any environment of verifiers, unmodified: pip install verifiers uv

The arguments are the environment's options, as JSON: {"taskset": {"id": "..."}}. A taskset that is a file beside
this one is found too. Its single agent plays with the run's policy; its rewards and metrics go to the run.
"""

import asyncio, itertools, json, os, sys
import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_environment, resolve_env_config
from rloss_episodes import post

AT_ONCE = int(os.environ.get("VERIFIERS_AT_ONCE", 4))  # Each episode is a process of its own.
TASKS_MAX = 1000  # Of an infinite taskset. The last tenth of the tasks is held out.


def result(episode):
    trace = episode.traces[-1] if episode.traces else None
    if not episode.ok or trace is None:
        errors = [error.message for error in episode.errors + (trace.errors if trace else [])]
        return {"error": "; ".join(errors) or "the episode failed"}
    numbers = {**trace.metrics, "turns": episode.num_turns}
    plain = {name: float(value) for name, value in numbers.items() if isinstance(value, (int, float))}
    return {"reward": float(trace.reward), "metrics": plain}


async def main():
    env = load_environment(resolve_env_config(json.loads(sys.argv[1])))
    tasks = list(itertools.islice(env.taskset, TASKS_MAX))
    held_out = max(1, len(tasks) // 10)
    parts = {"train": tasks[:-held_out], "validation": tasks[-held_out:]}

    async def work():
        while not (given := await asyncio.to_thread(post, "next", {})).get("done"):
            if given["id"] is None:
                continue
            part = parts[given["phase"]]
            client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY",
                                         headers={"X-Episode-Id": given["id"]})
            context = vf.ModelContext(client=client, model="policy", sampling=vf.SamplingConfig())
            episode = await env.run_episode(part[given["index"] % len(part)], context)
            await asyncio.to_thread(post, f"{given['id']}/reward", result(episode))

    async with env.serving():
        await asyncio.gather(*(work() for _ in range(AT_ONCE)))


asyncio.run(main())
