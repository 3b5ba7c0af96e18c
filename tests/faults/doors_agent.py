#!/usr/bin/env python3
"""An agent that lies about ids, order, time and delivery, against an oracle of what may be trained.

    tests/faults/doors_agent.py --count 100000     # so many requests

Each run trains a tiny model. The agent's threads play its episodes: they leave before the answer, repeat requests, ask
at once, name two episodes or those of earlier steps and processes, guess ids, and reward twice. After each run, every
trained token must have been sampled for its episode, after the very tokens that the client was told, delivered to it,
and graded by the episode's first reward, once; and everything delivered must be trained. What was refused or lost must
be counted. The seed is printed; --seed takes it again.
"""

import json
import os
import random
import select
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from faults import Failed, options

TOKEN = "secret"
STEPS, PROMPTS, SAMPLES = 8, 2, 16
HANG_S = 120
RECIPE = f"""
task = {{ name = "agent", serve_on = "127.0.0.1:0", episode_timeout_s = 600 }}
chat.system_message = false
rollout = {{ prompts_per_step = {PROMPTS}, samples_per_prompt = {SAMPLES}, prompt_tokens_max = 300, response_tokens_max = 40 }}
train = {{ steps = {STEPS}, optimizer.lr = 1e-3 }}
eval = {{ every_steps = 0, before_training = false }}
checkpoint.every_steps = 100
logging.trajectories_per_step = 100000
parallel.threads = 1
[model.architecture]
hidden_size = 16
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 8
intermediate_size = 16
num_local_experts = 2
num_experts_per_tok = 1
max_position_embeddings = 512
"""


def read_rows(path):
    # `splitlines` would also split at U+0085 and others, which a random model samples.
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


class Answer:
    """What a client received: a status, and the ids if the answer was complete."""

    def __init__(self, data):
        self.data = data
        head, _, body = data.partition(b"\r\n\r\n")
        self.status = int(head.split(b" ", 2)[1]) if head.startswith(b"HTTP/1.1 ") else 0
        self.id, self.prompt, self.tokens, self.message, self.whole = None, None, [], None, False
        if b"chunked" in head:
            self.read_events(body)
            return
        length = int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0] or -1)
        if len(body) == length:
            self.whole = True
            value = json.loads(body)
            self.value = value
            if self.status == 200 and "choices" in value:
                choice = value["choices"][0]
                self.id, self.prompt = value["id"], value["prompt_token_ids"]
                self.tokens, self.message = choice["token_ids"], choice["message"]

    def read_events(self, body):
        text, rest = b"", body
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            size = int(size or b"0", 16)
            if size == 0:
                self.whole = rest == b"\r\n" and b"data: [DONE]" in text
                break
            text, rest = text + rest[:size], rest[size + 2 :]
        self.message = {"role": "assistant", "content": ""}
        for line in text.split(b"\n\n"):
            if not line.startswith(b"data: {"):
                continue
            try:
                event = json.loads(line[6:])
            except ValueError:
                continue  # Its end was not received.
            if "error" in event:
                self.whole = False
                return
            self.id, self.prompt = event["id"], event.get("prompt_token_ids") or self.prompt
            for choice in event["choices"]:
                self.tokens = self.tokens + (choice.get("token_ids") or [])
                self.message["content"] += choice["delta"].get("content") or ""
                if "tool_calls" in choice["delta"]:
                    calls = [{k: v for k, v in call.items() if k != "index"} for call in choice["delta"]["tool_calls"]]
                    self.message["tool_calls"] = calls

    def key(self):
        return json.dumps(self.prompt), json.dumps(self.tokens)


class Door:
    """The server of one run."""

    def __init__(self, binary, place):
        self.place = place
        (place / "agent.toml").write_text(RECIPE)
        command = [binary, "train", place / "agent.toml", "--out", place / "run"]
        env = dict(os.environ, RLOSS_SERVE_TOKEN=TOKEN)
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.said = []
        for line in self.process.stderr:
            self.said.append(line)
            if "waiting for an agent program at http://" in line:
                host, _, port = line.split("http://")[1].split("/")[0].partition(":")
                self.address, self.host = (host, int(port)), f"{host}:{port}"
                break
        else:
            raise Failed("".join(self.said))
        threading.Thread(target=lambda: self.said.extend(self.process.stderr), daemon=True).start()

    def send(self, path, body, key=TOKEN, headers=""):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection = socket.create_connection(self.address, timeout=HANG_S)
        head = f"POST /v1{path} HTTP/1.1\r\nHost: {self.host}\r\nAuthorization: Bearer {key}\r\n{headers}"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return connection

    def receive(self, connection):
        data = []
        with connection:
            while True:
                try:
                    part = connection.recv(1 << 16)
                except ConnectionResetError:
                    break
                if not part:
                    break
                data.append(part)
        return Answer(b"".join(data))

    def post(self, *arguments, **more):
        return self.receive(self.send(*arguments, **more))


class Known:
    """What the agent knows of one episode."""

    def __init__(self, given):
        self.id, self.key = given["id"], given["api_key"]
        self.place = given["step"], given["index"], given["sample"]
        self.delivered = Counter()  # by prompt and tokens
        self.perhaps = Counter()  # received, but the reward was under way
        self.abandoned = set()  # texts of requests whose connection was closed at once
        self.ids = set()
        self.reward = None


class Campaign:
    def __init__(self, seed, binary):
        self.seed, self.binary = seed, binary
        self.lock = threading.Lock()
        self.count = Counter()
        self.run = 0
        self.stale = []  # episodes of earlier steps and processes
        self.failures = []

    def play_run(self):
        place = Path(tempfile.mkdtemp(prefix="rloss-doors-"))
        self.run += 1
        self.known, self.exact, self.before = {}, Counter(), Counter(self.count)
        self.door = Door(self.binary, place)
        threads = [threading.Thread(target=self.play_thread) for _ in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        try:
            code = self.door.process.wait(HANG_S)
        finally:
            self.door.process.kill()
        if self.failures:
            raise Failed(self.failures[0])
        if code != 0:
            raise Failed(f"exit {code}: {''.join(self.door.said)}")
        self.check()
        shutil.rmtree(place)

    def play_thread(self):
        try:
            while True:
                given = self.next()
                if given.get("done"):
                    return
                if given["id"]:
                    Player(self, given).play()
        except Exception as error:
            with self.lock:
                self.failures.append(f"{type(error).__name__}: {error}")
            self.door.process.kill()

    def next(self):
        """Asks for an episode, sometimes as a client that has left. One that nobody received comes again."""
        connection = self.door.send("/episodes/next", {})
        if random.random() < 0.2:
            connection.shutdown(socket.SHUT_WR)
        answer = self.door.receive(connection)
        return answer.value if answer.whole else {"id": None}

    def add(self, name, count=1):
        with self.lock:
            self.count[name] += count
            self.exact[name] += count

    def check(self):
        rows = [row for row in read_rows(self.door.place / "run/metrics.jsonl") if row["phase"] == "rl"]
        trained = {}
        for step in range(1, STEPS + 1):
            for row in read_rows(self.door.place / f"run/trajectories/step-{step:06}.jsonl"):
                trained.setdefault((step, row["prompt"], row["sample"]), []).append(row)
        for place, episode in self.known.items():
            self.check_episode(place, episode, trained.pop(place, []))
        if trained:
            raise Failed(f"trained, but nobody played it: {list(trained)[:3]}")
        if any(row["mismatch/log_ppl_abs_diff_max"] != 0 for row in rows):
            raise Failed("a trained token has another log-prob than when it was sampled")
        total = {name: sum(row[f"agent/{name}"] for row in rows) for name in ("refused_requests", "undelivered_answers")}
        for name, least, more in (
            ("refused_requests", self.exact["refused"], self.exact["cut"] + self.exact["closed"]),
            ("undelivered_answers", self.exact["lost"], self.exact["cut"] + self.exact["closed"]),
        ):
            if not least <= total[name] <= least + more:
                raise Failed(f"agent/{name} is {total[name]}, and should be {least} to {least + more}")
        with self.lock:
            self.stale = [episode for episode in self.known.values()][-64:]

    def check_episode(self, place, episode, rows):
        found = Counter()
        for row in rows:
            if episode.reward is None or row["reward"] != episode.reward:
                raise Failed(f"{place}: trained with reward {row['reward']}, but {episode.reward} was given first")
            mask = [False] * len(row["tokens"])
            for turn in row["turns"]:
                start, end = turn["start"], turn["end"]
                mask[start:end] = [True] * (end - start)
                found[json.dumps(row["tokens"][:start]), json.dumps(row["tokens"][start:end])] += 1
                self.add("trained answers")
            if mask != list(map(bool, row["mask"])):
                raise Failed(f"{place}: the mask is not what the turns cover")
        expected = episode.delivered if episode.reward is not None else Counter()
        missing = expected - found
        if missing:
            raise Failed(f"{place}: delivered, but not trained: {list(missing.items())[:2]}")
        over = found - expected - episode.perhaps
        if over:
            # A connection that was closed unread, perhaps after the server had written the answer.
            texts = json.dumps([row.get("messages") for row in rows])
            written = sum(text in texts for text in episode.abandoned)
            if sum(over.values()) > written:
                raise Failed(f"{place}: trained, but never delivered: {list(over.items())[:2]}")
            self.add("closed after writing", sum(over.values()))


class Player:
    """One episode, played by draws of its own."""

    def __init__(self, campaign, given):
        self.campaign, self.door = campaign, campaign.door
        self.episode = Known(given)
        self.draw = random.Random(f"{campaign.seed} {campaign.run} {self.episode.place}")
        self.number = 0
        with campaign.lock:
            if self.episode.place in campaign.known:
                raise Failed(f"handed out twice: {given['id']}")
            campaign.known[self.episode.place] = self.episode

    def play(self):
        history = self.question()
        for _ in range(self.draw.randrange(2, 9)):
            trick = self.draw.choice(
                [self.ask, self.ask, self.lose, self.lose, self.lose_stream, self.close, self.at_once, self.mixed, self.late]
            )
            answer = trick(history)
            if answer is not None and answer.whole and answer.status == 200:
                history = self.continue_history(history, answer)
        if not self.episode.delivered:
            self.ask(self.question())
        self.reward()

    def question(self):
        return [{"role": "user", "content": f"q{self.draw.randrange(9)}"}]

    def continue_history(self, history, answer):
        if len(history) > 6 or self.draw.random() < 0.2:
            return self.question()
        more = [answer.message, {"role": "user", "content": f"u{self.draw.randrange(3)}"}]
        trick = self.draw.randrange(8)
        if trick == 0:
            return more
        if trick == 1:
            return [{"role": "user", "content": "again"}] + history[1:] + more
        if trick == 2:
            return history
        return history + more

    def body(self, messages, stream=None, tokens=None):
        stream = self.draw.random() < 0.3 if stream is None else stream
        tokens = tokens or self.draw.randrange(1, 7)
        body = {"model": "m", "messages": messages, "max_tokens": tokens, "stream": stream, "return_token_ids": True}
        return json.dumps(body).encode()

    def send(self, body):
        self.campaign.add("requests")
        way = self.draw.randrange(3)
        if way == 0:
            return self.door.send("/chat/completions", body, self.episode.key)
        if way == 1:
            return self.door.send("/chat/completions", body, headers=f"X-Episode-Id: {self.episode.id}\r\n")
        return self.door.send(f"/episodes/{self.episode.id}/chat/completions", body)

    def take(self, answer, expects=200):
        """Notes an answer that the client has read to its end."""
        if answer.status == 400 and expects == 200 and b"context_length_exceeded" in answer.data:
            self.campaign.add("refused")
            return answer
        if answer.status != expects or not answer.whole:
            raise Failed(f"{self.episode.id}: {answer.status} instead of {expects}: {answer.data[:400]}")
        if expects != 200:
            self.campaign.add("refused")
            return answer
        if answer.id in self.episode.ids:
            raise Failed(f"{self.episode.id}: the answer {answer.id} was delivered twice")
        self.episode.ids.add(answer.id)
        self.episode.delivered[answer.key()] += 1
        return answer

    def is_lost(self, answer):
        """Whether a client that closed one direction got no answer, and notes it. 499: the server noticed it before."""
        is_lost = answer.status in (0, 499) or (answer.status == 200 and not answer.whole)
        self.campaign.add("lost", int(is_lost))
        return is_lost

    def ask(self, history):
        return self.take(self.door.receive(self.send(self.body(history))))

    def lose(self, history):
        """Closes one direction, reads what still comes, and repeats the request if that is no whole answer."""
        body = self.body(history)
        for _ in range(self.draw.randrange(1, 4)):
            connection = self.send(body)
            if self.draw.random() < 0.5:
                time.sleep(self.draw.random() * 0.004)
            connection.shutdown(socket.SHUT_WR)
            answer = self.door.receive(connection)
            if not self.is_lost(answer):
                return self.take(answer)
        return self.take(self.door.receive(self.send(body))) if self.draw.random() < 0.7 else None

    def lose_stream(self, history):
        """Leaves a stream after its first events. A repetition must begin with what was received."""
        body = self.body(history, stream=True, tokens=30)
        connection = self.send(body)
        data = connection.recv(1 << 16)
        connection.shutdown(socket.SHUT_WR)
        first = Answer(data + self.door.receive(connection).data)
        if not self.is_lost(first):
            return self.take(first)
        if self.draw.random() < 0.3:
            self.ask(self.question())
        again = self.take(self.door.receive(self.send(body)))
        if first.id is not None and (again.id != first.id or again.tokens[: len(first.tokens)] != first.tokens):
            raise Failed(f"{self.episode.id}: a repetition has another answer: {first.data[:300]} {again.data[:300]}")
        return again

    def close(self, history):
        """Closes the connection, half of the times by a reset, without reading."""
        self.number += 1
        text = f"closed {self.number} of {self.episode.place}"
        connection = self.send(self.body([{"role": "user", "content": text}], tokens=30))
        if self.draw.random() < 0.5:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            connection.shutdown(socket.SHUT_WR)
        if not select.select([connection], [], [], 0)[0]:
            connection.close()
            self.episode.abandoned.add(text)
            self.campaign.add("closed")
            return None
        answer = self.door.receive(connection)
        return None if self.is_lost(answer) else self.take(answer)

    def at_once(self, history):
        """Equal and other requests at the same time, one of which is given up."""
        body = self.body(history)
        open_ones = [self.send(body) for _ in range(self.draw.randrange(2, 4))]
        other = self.send(self.body(self.question()))
        lost = self.send(body)
        lost.shutdown(socket.SHUT_WR)
        answers = [self.door.receive(connection) for connection in [*open_ones, other]]
        lost = self.door.receive(lost)
        [self.take(answer) for answer in answers]
        if not self.is_lost(lost):
            self.take(lost)
        return answers[0] if answers[0].whole else None

    def others(self):
        """Ids that are not this episode's."""
        with self.campaign.lock:
            stale = list(self.campaign.stale) or [self.episode]
        place = self.episode.id.rsplit("-", 1)[0]
        guess = f"{self.draw.getrandbits(128):032x}"
        own = self.episode.id
        return [self.draw.choice(stale).id, place, f"{place}-{guess}", own[:-1], own + "0", own.upper(), "t1-0-0"]

    def mixed(self, history):
        """Names this episode and another one."""
        other = self.draw.choice([id for id in self.others() if id != self.episode.id])
        if self.draw.random() < 0.5:
            with self.campaign.lock:
                open_ones = [e.id for e in self.campaign.known.values() if e is not self.episode]
            other = self.draw.choice(open_ones or [other])
        pair = [self.episode.id, other]
        self.draw.shuffle(pair)
        key, header = f"{TOKEN}:{pair[0]}", f"X-Episode-Id: {pair[1]}\r\n"
        self.campaign.add("requests")
        way, body = self.draw.randrange(5), self.body(history)
        if way == 0:
            answer = self.door.post("/chat/completions", body, key, header)
        elif way == 1:
            answer = self.door.post(f"/episodes/{pair[0]}/chat/completions", body, TOKEN, header)
        elif way == 2:
            answer = self.door.post(f"/episodes/{pair[1]}/chat/completions", body, key)
        elif way == 3:
            answer = self.door.post(f"/episodes/{pair[1]}/reward", {"reward": 777.0}, key)
        else:
            answer = self.door.post(f"/episodes/{pair[0]}/reward", {"reward": 777.0}, TOKEN, header)
        self.take(answer, 400)

    def late(self, history):
        """Asks for, or rewards, an episode that is over, of another process, or guessed."""
        other = self.draw.choice([id for id in self.others() if id != self.episode.id])
        self.campaign.add("requests")
        if self.draw.random() < 0.5:
            answer = self.door.post("/chat/completions", self.body(history), f"{TOKEN}:{other}")
        else:
            answer = self.door.post(f"/episodes/{other}/reward", {"reward": 777.0})
        if answer.status not in (404, 409, 410):
            raise Failed(f"{other}: {answer.status}: {answer.data[:400]}")
        self.campaign.add("refused")

    def give(self, value, expects):
        self.campaign.add("requests")
        if expects == [200] and self.draw.random() < 0.2:
            # Whether it was taken, nobody knows. So it is sent again.
            with self.door.send(f"/episodes/{self.episode.id}/reward", value) as connection:
                connection.shutdown(socket.SHUT_WR)
        answer = self.door.post(f"/episodes/{self.episode.id}/reward", value)
        if answer.status not in expects:
            raise Failed(f"{self.episode.id}: {answer.status} for {value}: {answer.data[:400]}")
        if answer.status != 200:
            self.campaign.add("refused")
        return answer.status

    def reward(self):
        reward = self.draw.randrange(-8, 9) / 8
        how = self.draw.randrange(12)
        if how == 0:
            self.campaign.add("requests")
            wrong = self.door.post(f"/episodes/{self.episode.id}/reward", self.draw.choice([b'{"reward": NaN}', b"{}", b"["]))
            if wrong.status != 400:
                raise Failed(f"{self.episode.id}: {wrong.status}: {wrong.data[:300]}")
            self.after(reward)
            return
        if how == 1:
            self.give({"error": "mine"}, [200])
            self.after(reward)
            return
        self.episode.reward = reward
        open_ones = [self.send(self.body(self.question())) for _ in range(2)] if how < 4 else []
        self.give({"reward": reward}, [200])
        for connection in open_ones:
            # The reward was under way: the answer came before it, or never.
            answer = self.door.receive(connection)
            self.campaign.add("cut")
            if answer.whole and answer.status == 200:
                self.episode.perhaps[answer.key()] += 1
            elif answer.status not in (0, 200, 410):
                raise Failed(f"{self.episode.id}: {answer.status}: {answer.data[:300]}")
        self.after(reward)

    def after(self, reward):
        # What is refused after the last step is in no row.
        is_last = self.episode.place[0] == STEPS
        if self.episode.reward is not None and self.draw.random() < 0.5:
            self.give({"reward": reward}, [200])
        if is_last:
            return
        with self.campaign.lock:
            self.campaign.stale = self.campaign.stale[-255:] + [self.episode]
        if self.draw.random() < 0.5:
            self.give({"reward": reward + 1}, [409])
        if self.draw.random() < 0.5:
            self.campaign.add("requests")
            self.take(self.door.post("/chat/completions", self.body(self.question()), self.episode.key), 410)
        if self.episode.reward is not None and self.draw.random() < 0.3:
            self.give({"reward": reward}, [200])


def main():
    arguments = options(__doc__, 2000, "least number of requests").parse_args()
    print(f"seed {arguments.seed}", flush=True)
    campaign, begun = Campaign(arguments.seed, arguments.binary.resolve()), time.monotonic()
    try:
        while campaign.count["requests"] < arguments.count:
            campaign.play_run()
            if sys.stdout.isatty() or campaign.run % 10 == 0:
                print(f"  {campaign.count['requests']} requests, {time.monotonic() - begun:.0f} s", flush=True)
        # A few may be written between the client's look and its close.
        if campaign.count["closed after writing"] * 10 > campaign.count["closed"] + 20:
            raise Failed("many answers whose connections were closed unread are trained")
    except Failed as failure:
        print(f"FAILED in run {campaign.run} ({campaign.door.place}): {failure}")
        return 1
    counts = ", ".join(f"{count} {name}" for name, count in sorted(campaign.count.items()))
    print(f"agent: {campaign.run} runs, {counts}; {time.monotonic() - begun:.0f} s; nothing wrong was trained")
    return 0


if __name__ == "__main__":
    sys.exit(main())
