"""The queue of episodes, for an agent program in Python. Nothing but the standard library.

`run(play)` asks rloss for episodes, calls `play(episode)` for each, and posts what it returns: a reward, or a
dictionary {"reward": 1.0, "success": True, "metrics": {"name": 0.5}}. An exception makes the episode fail, and no
step learns from it. Several episodes are played at once, each in a thread of its own.
"""

import json, os, threading, traceback
from urllib.request import Request, urlopen


def post(path, body):
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    url = f"{os.environ['RLOSS_EPISODES']}/{path}"
    return json.load(urlopen(Request(url, json.dumps(body).encode(), headers)))


def run(play, at_once=16):
    def work():
        while not (episode := post("next", {})).get("done"):
            if episode["id"] is None:
                continue  # There is none now, for example because the weights are being updated.
            try:
                result = play(episode)
                result = result if isinstance(result, dict) else {"reward": float(result)}
            except Exception as error:
                traceback.print_exc()
                result = {"error": f"{type(error).__name__}: {error}"}
            try:
                post(f"{episode['id']}/reward", result)
            except OSError as error:  # The episode had already ended, by its time limit.
                print(f"{episode['id']}: {error}")

    threads = [threading.Thread(target=work) for _ in range(at_once)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
