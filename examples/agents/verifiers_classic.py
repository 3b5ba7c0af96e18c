"""Any environment of verifiers' classic API, such as a ToolEnv, unmodified: pip install "verifiers<0.4"

The arguments are the environment's id and its options, as JSON: my_env '{"tasks": 100}'. A module beside this one is
found too. Its rewards and metrics go to the run.
"""

import asyncio, json, os, sys
import verifiers as vf
from rloss_episodes import run_async

ENV = vf.load_environment(sys.argv[1], **(json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}))
DATA = {"train": ENV.get_dataset(), "validation": ENV.get_eval_dataset()}


async def play(episode):
    rows = DATA[episode["phase"]]
    client = vf.ClientConfig(api_base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY",
                             extra_headers={"X-Episode-Id": episode["id"]})
    output = await ENV.run_rollout(rows[episode["index"] % len(rows)], client, "policy", {})
    error = output.get("error")
    # An empty answer is the policy's own fault: it learns from it.
    if error and "ModelResponse" not in error["error"]:
        return {"error": f"{error['error']}: {error['message']}"}
    metrics = {name: float(value) for name, value in (output["metrics"] or {}).items()}
    return {"reward": 0.0 if error else float(output["reward"]), "metrics": metrics}


asyncio.run(run_async(play, int(os.environ.get("VERIFIERS_AT_ONCE", 16))))
