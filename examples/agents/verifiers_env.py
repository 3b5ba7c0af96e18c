"""Any environment of verifiers, unmodified: pip install verifiers uv

The arguments are the environment's options, as JSON: {"taskset": {"id": "..."}}. A taskset that is a file beside
this one is found too. Its single agent plays with the run's policy; its rewards and metrics go to the run.
"""

import asyncio, itertools, json, os, sys
from pathlib import Path
import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_environment, resolve_env_config
from rloss_episodes import run_async

TASKS_MAX = 1000  # Of an infinite taskset. The last tenth of the tasks is held out.
# The processes of a taskset's tools find files beside this one too.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent.resolve()), os.environ.get("PYTHONPATH", "")])


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

    async def play(given):
        part = parts[given["phase"]]
        client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY",
                                     headers={"X-Episode-Id": given["id"]})
        context = vf.ModelContext(client=client, model="policy", sampling=vf.SamplingConfig())
        return result(await env.run_episode(part[given["index"] % len(part)], context))

    async with env.serving():
        # Each episode starts a process.
        await run_async(play, int(os.environ.get("VERIFIERS_AT_ONCE", 4)))


asyncio.run(main())
