#!/usr/bin/env python3
"""Measures `rloss serve`, llama.cpp's server and `rloss rollout`: tokens per second, times of first tokens; and
checks `rloss serve`.

    scripts/serving.py serve   --rloss RLOSS --model FOLDER [--set KEY=VALUE ...]
    scripts/serving.py llama   --python PYTHON --gguf FILE
    scripts/serving.py url     --url http://127.0.0.1:8000/v1
    scripts/serving.py rollout --rloss RLOSS --model FOLDER [--set KEY=VALUE ...]
    scripts/serving.py overhead --rloss RLOSS --model RUN
    scripts/serving.py check   --rloss RLOSS --model RUN

Common options: --clients 1,8,32  --tokens 64  --prompt-tokens 200  --rounds 1  --threads CPUS.

`serve`, `llama` and `url` send one chat per client, all at once, and read the stream. The prompts are fixed,
and all of them differ in their first words, so no prefix is shared. Sampling is greedy. A line of output has
the number of clients, the tokens of all answers, the seconds from the first request to the last answer,
tokens per second, and the median and the maximum of the first-token time. The first round of each number of
clients is discarded.

`llama` starts llama.cpp's server in PYTHON, which must have the package xllamacpp. For weights of like size
in memory, compare `serve --set model.dtype=bf16` with the file of `rloss export RUN --gguf FILE`, whose
matrices are BF16. `rollout` samples the same prompts with `rloss rollout`; its time begins after the model is
read. `overhead` sends 64 requests for one token at once, many times, to a small model, and prints the
server's processor time and the wall time per request. Run these on a machine that does nothing else; they
need Python's standard library alone.

`check` asks the server through OpenAI's own Python client: chats, streams, tools, log-probs, errors. Needs
the package openai. Takes seconds; exit code 1 and a traceback when something is wrong.
"""

import argparse
import concurrent.futures
import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse

# Starts llama.cpp's server and prints its address. Arguments: file, clients, context of each, threads.
LLAMA = """
import sys, time, xllamacpp
file, clients, context, threads = sys.argv[1], *map(int, sys.argv[2:5])
parameters = xllamacpp.CommonParams()
parameters.model.path = file
parameters.n_parallel = clients
parameters.n_ctx = clients * context
parameters.n_gpu_layers = 0
parameters.cpuparams.n_threads = threads
parameters.cpuparams_batch.n_threads = threads
parameters.port = 0 if len(sys.argv) < 6 else int(sys.argv[5])
server = xllamacpp.Server(parameters)
print("serving at", server.listening_address, flush=True)
time.sleep(1e9)
"""


def prompts(count, tokens):
    """Returns fixed questions of about `tokens` tokens. Each begins with its own number."""
    names = ["Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gita", "Hugo"]
    found = []
    for number in range(count):
        text, index = f"{number + 2} friends go to the market. ", 0
        # A word of this text is about 1.35 tokens.
        while len(text.split()) * 1.35 < tokens - 25:
            name = names[(number + index) % len(names)]
            text += f"{name} buys {(number * 7 + index * 3) % 19 + 2} apples and gives {index % 5 + 1} of them away. "
            index += 1
        found.append(text + "How many apples do they have together? Explain every step at length.")
    return found


def ask(url, body):
    """Sends a chat; returns the seconds to its first token and to its end, and the number of tokens."""
    address = urllib.parse.urlparse(url)
    started = time.monotonic()
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=3600)
    connection.request("POST", address.path + "/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"status {response.status}: {response.read().decode()}")
    first, tokens = None, 0
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        for choice in chunk.get("choices", []):
            if first is None and choice.get("delta", {}).get("content"):
                first = time.monotonic() - started
        tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
    connection.close()
    return first if first is not None else float("nan"), time.monotonic() - started, tokens


def load(url, model, clients, options):
    """Measures `clients` chats at once."""
    bodies = [
        {
            "model": model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": options.tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for text in prompts(clients, options.prompt_tokens)
    ]
    for round_number in range(options.rounds + 1):
        # Other numbers at the front: a server that keeps earlier prompts gains nothing.
        for body, text in zip(bodies, prompts(clients, options.prompt_tokens)):
            body["messages"][0]["content"] = f"Question {round_number * 100 + clients}. {text}"
        started = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(clients) as pool:
            answers = list(pool.map(lambda body: ask(url, body), bodies))
        seconds = time.monotonic() - started
        if round_number > 0:
            firsts, tokens = [answer[0] for answer in answers], sum(answer[2] for answer in answers)
            print(
                f"clients {clients:3}  tokens {tokens:6}  seconds {seconds:8.2f}  tokens/s {tokens / seconds:8.1f}"
                f"  first token: median {statistics.median(firsts):.3f} s, maximum {max(firsts):.3f} s",
                flush=True,
            )


def start(command, pattern, **more):
    """Starts a server; returns its process, and its URL once it prints one."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **more)
    lines = []
    for line in process.stdout:
        lines.append(line)
        found = re.search(pattern, line)
        if found:
            threading.Thread(target=process.stdout.read, daemon=True).start()
            return process, found.group(1)
    raise SystemExit("the server did not start:\n" + "".join(lines[-20:]))


def served(options, model):
    sets = [part for value in options.sets for part in ("--set", value)]
    command = [options.rloss, "serve", model, "--port", "0", "--name", "policy", *sets]
    return start(command, r"at (http://\S+)")


def rollout(options, clients):
    """Samples the prompts of `clients` clients with `rloss rollout`."""
    with tempfile.TemporaryDirectory() as folder:
        rows = os.path.join(folder, "prompts.jsonl")
        with open(rows, "w") as file:
            for text in prompts(clients, options.prompt_tokens):
                print(json.dumps({"question": text, "answer": "#### 1"}), file=file)
        recipe = os.path.join(folder, "bench.toml")
        with open(recipe, "w") as file:
            print(
                f"""model.path = {json.dumps(os.path.abspath(options.model))}
task = {{ name = "gsm8k", train_file = {json.dumps(rows)}, validation_file = {json.dumps(rows)} }}
rollout = {{ prompts_per_step = {clients}, samples_per_prompt = 1, turns_max = 1, response_tokens_max = {options.tokens} }}
""",
                file=file,
            )
        out = os.path.join(folder, "out")
        sets = [part for value in options.sets for part in ("--set", value)]
        command = [options.rloss, "rollout", recipe, "--out", out, *sets]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        started, lines = None, []
        for line in process.stderr:
            lines.append(line)
            # The first line that names the folder comes after the model was read.
            if started is None and out in line:
                started = time.monotonic()
            if line.startswith("done: "):
                seconds = time.monotonic() - started
        if process.wait() != 0:
            raise SystemExit("".join(lines[-20:]))
        files = [os.path.join(out, "trajectories", name) for name in os.listdir(os.path.join(out, "trajectories"))]
        tokens = sum(sum(json.loads(line)["mask"]) for file in files for line in open(file))
        print(f"rollout {clients:3}  tokens {tokens:6}  seconds {seconds:8.2f}  tokens/s {tokens / seconds:8.1f}", flush=True)


def overhead(options):
    """Measures what a request costs beside the model's work: 64 at once, one token each."""
    server, url = served(options, options.model)
    address = urllib.parse.urlparse(url)
    ticks = os.sysconf("SC_CLK_TCK")

    def processor_time():
        with open(f"/proc/{server.pid}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / ticks

    def one(number):
        # Written by hand, so that the client costs little.
        body = json.dumps({"model": "policy", "prompt": [17 + number % 100], "max_tokens": 1, "seed": number})
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
        connection.request("POST", "/v1/completions", body)
        response = connection.getresponse()
        text = response.read()
        connection.close()
        assert response.status == 200, text

    try:
        with concurrent.futures.ThreadPoolExecutor(64) as pool:
            list(pool.map(one, range(640)))
            used, started, count = processor_time(), time.monotonic(), 64 * 100
            list(pool.map(one, range(count)))
            seconds, used = time.monotonic() - started, processor_time() - used
        print(
            f"overhead: 64 at once, {count} requests of 1 token: {1e3 * seconds / count:.3f} ms of wall time and"
            f" {1e3 * used / count:.3f} ms of the server's processor time a request, the model's work included"
        )
    finally:
        server.terminate()
        server.wait()


# The quickstart's context is short.
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def refused(error, call):
    """Checks that `call` raises `error`, with OpenAI's fields."""
    try:
        call()
    except error as found:
        assert found.body["message"], found
        return found
    raise AssertionError(f"{error.__name__} was expected")


def check_client(client):
    import openai

    [model] = client.models.list().data
    assert model.id == "policy" and client.models.retrieve("policy").id == "policy"

    def ask(content="1+1", **more):
        messages = [{"role": "user", "content": content}]
        return client.chat.completions.create(model="policy", messages=messages, **more)

    # A seed fixes the answer, alone and beside 31 others.
    alone = ask(seed=1, n=2, logprobs=True, top_logprobs=3, max_completion_tokens=24)
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        others = [pool.submit(ask, str(i), seed=i, max_tokens=24) for i in range(31)]
        beside = ask(seed=1, n=2, logprobs=True, top_logprobs=3, max_completion_tokens=24)
        for other in others:
            other.result()
    assert alone.choices == beside.choices
    assert len(alone.choices) == 2 and alone.usage.completion_tokens <= 48
    for choice in alone.choices:
        for token in choice.logprobs.content:
            assert token.logprob <= 0 and len(token.top_logprobs) == 3
            assert token.top_logprobs[0].logprob >= token.top_logprobs[2].logprob

    # A stream is the whole answer in parts.
    whole = ask(seed=2, max_tokens=40)
    parts = list(ask(seed=2, max_tokens=40, stream=True, stream_options={"include_usage": True}))
    assert parts[-1].usage == whole.usage
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == (whole.choices[0].message.content or "")
    reasons = [part.choices[0].finish_reason for part in parts if part.choices]
    assert [reason for reason in reasons if reason] == [whole.choices[0].finish_reason]

    # Greedy answers need no seed.
    assert ask(temperature=0).choices == ask(temperature=0).choices

    # Tools and their replies are part of the prompt.
    plain, tools = ask(max_tokens=1).usage, ask(max_tokens=1, tools=TOOLS, tool_choice="auto").usage
    assert tools.prompt_tokens > plain.prompt_tokens
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 1}'}}
    history = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "1+1"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]
    client.chat.completions.create(model="policy", messages=history, max_tokens=1)

    # Texts: prompts as text and as ids, log-probs of an echoed prompt.
    first = client.completions.create(
        model="policy", prompt=["1+1", "2+2"], max_tokens=8, logprobs=2, seed=3, extra_body={"return_token_ids": True}
    )
    assert [choice.index for choice in first.choices] == [0, 1]
    ids = first.choices[0].prompt_token_ids + first.choices[0].token_ids
    scored = client.completions.create(model="policy", prompt=ids, max_tokens=0, echo=True, logprobs=0)
    sampled = first.choices[0].logprobs.token_logprobs
    assert scored.choices[0].logprobs.token_logprobs[-len(sampled) :] == sampled
    stream = client.completions.create(model="policy", prompt="1+1", max_tokens=8, seed=3, stream=True)
    assert "".join(part.choices[0].text for part in stream) == first.choices[0].text

    # Errors are the client's own exceptions.
    refused(openai.NotFoundError, lambda: client.models.retrieve("gpt-4"))
    found = refused(openai.BadRequestError, lambda: ask("1+" * 5000))
    assert found.code == "context_length_exceeded", found.body
    found = refused(openai.BadRequestError, lambda: ask(temperature=-1))
    assert found.param == "temperature", found.body
    refused(openai.BadRequestError, lambda: ask(extra_body={"messages": "1"}))


def check(options):
    import openai

    server, url = served(options, options.model)
    try:
        check_client(openai.OpenAI(base_url=url, api_key="none", max_retries=0))
    except BaseException:
        server.kill()
        raise
    server.terminate()
    assert server.wait() == 0
    print("OpenAI's client is content")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["serve", "llama", "url", "rollout", "overhead", "check"])
    parser.add_argument("--rloss", default="target/release/rloss")
    parser.add_argument("--model", help="a model folder, a run or a recipe")
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with xllamacpp")
    parser.add_argument("--gguf")
    parser.add_argument("--url")
    parser.add_argument("--clients", default="1,8,32")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    counts = [int(count) for count in options.clients.split(",")]
    if options.what in ("overhead", "check"):
        return {"overhead": overhead, "check": check}[options.what](options)
    if options.what == "rollout":
        for count in counts:
            rollout(options, count)
        return
    server = None
    try:
        for count in counts:
            if options.what == "llama" and (server is None or count != counts[0]):
                # Its context is divided among as many clients as it was started for.
                if server:
                    server.kill()
                    server.wait()
                context = options.prompt_tokens * 2 + options.tokens + 64
                arguments = [options.gguf, str(count), str(context), str(options.threads)]
                server, url = start([options.python, "-c", LLAMA, *arguments], r"serving at (http://\S+)")
                url += "/v1"
            elif options.what == "serve" and server is None:
                server, url = served(options, options.model)
            elif options.what == "url":
                url = options.url
            model = "policy" if options.what == "serve" else model_name(url)
            load(url, model, count, options)
    finally:
        if server:
            server.kill()
            server.wait()


def model_name(url):
    address = urllib.parse.urlparse(url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
    connection.request("GET", address.path + "/models")
    return json.loads(connection.getresponse().read())["data"][0]["id"]


if __name__ == "__main__":
    main()
