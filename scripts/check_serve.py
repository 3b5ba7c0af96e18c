#!/usr/bin/env python3
"""Serves a run's model and asks it through OpenAI's own Python client: chats, streams, tools, log-probs, errors.

Usage: check_serve.py RLOSS RUN. Needs the package openai. Takes seconds; exit code 1 and a traceback when
something is wrong.
"""

import concurrent.futures
import re
import subprocess
import sys

import openai

# The quickstart's context is short.
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def serve(binary, run):
    """Starts the server; returns its process and its URL."""
    server = subprocess.Popen(
        [binary, "serve", run, "--port", "0", "--name", "policy"], stderr=subprocess.PIPE, text=True
    )
    for line in server.stderr:
        found = re.search(r"at (http://\S+)", line)
        if found:
            return server, found.group(1)
    raise SystemExit("the server ended before it served")


def refused(error, call):
    """Checks that `call` raises `error`, with OpenAI's fields."""
    try:
        call()
    except error as found:
        assert found.body["message"], found
        return found
    raise AssertionError(f"{error.__name__} was expected")


def check(client):
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


def main():
    binary, run = sys.argv[1:]
    server, url = serve(binary, run)
    try:
        check(openai.OpenAI(base_url=url, api_key="none", max_retries=0))
    except BaseException:
        server.kill()
        raise
    server.terminate()
    assert server.wait() == 0
    print("OpenAI's client is content")


main()
