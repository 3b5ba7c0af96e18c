"""The queue of episodes, for an agent program in Python. Nothing but the standard library.

`run(play)` asks rloss for episodes, calls `play(episode)` for each, and posts what it returns: a reward, or a
dictionary {"reward": 1.0, "success": True, "metrics": {"name": 0.5}}. An exception makes the episode fail, and no
step learns from it. Several are played at once: by `run` in threads, by `run_async` in one event loop.
"""

import asyncio, json, os, traceback
from concurrent.futures import ThreadPoolExecutor
from urllib.request import Request, urlopen


def post(path, body):
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    url = f"{os.environ['RLOSS_EPISODES']}/{path}"
    return json.load(urlopen(Request(url, json.dumps(body).encode(), headers)))


def failure(error):
    traceback.print_exc()
    return {"error": f"{type(error).__name__}: {error}"}


def tell(episode, result):
    try:
        post(f"{episode['id']}/reward", result if isinstance(result, dict) else {"reward": float(result)})
    except (TypeError, ValueError) as error:  # It is no JSON, as NumPy's numbers are none.
        tell(episode, failure(error))
    except OSError as error:  # The episode had already ended, by its time limit.
        print(f"{episode['id']}: {error}")


def run(play, at_once=16):
    def work():
        while not (episode := post("next", {})).get("done"):
            if episode["id"] is not None:  # There may be none now, because the weights are being updated.
                try:
                    result = play(episode)
                except Exception as error:
                    result = failure(error)
                tell(episode, result)

    with ThreadPoolExecutor(at_once) as threads:
        list(threads.map(lambda _: work(), range(at_once)))


async def run_async(play, at_once=16):
    # Requests for an episode wait. In asyncio's own few threads they would hold up everything else.
    threads, loop = ThreadPoolExecutor(at_once), asyncio.get_running_loop()

    async def work():
        while not (episode := await loop.run_in_executor(threads, post, "next", {})).get("done"):
            if episode["id"] is not None:
                try:
                    result = await play(episode)
                except Exception as error:
                    result = failure(error)
                await loop.run_in_executor(threads, tell, episode, result)

    await asyncio.gather(*(work() for _ in range(at_once)))
