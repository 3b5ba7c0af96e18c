#!/usr/bin/env python3
"""Compares greedy answers of llama.cpp with a LoRA file and of `rloss serve` with the run that the file was exported from.

    rloss export RUN --gguf adapter.gguf
    scripts/lora_llama_cpp.py --gguf BASE.gguf --lora adapter.gguf --run RUN [--rloss FILE]

llama.cpp's server runs inside the package xllamacpp. Prompts are questions of the task `calculator` in ChatML. Ends with
status 1 if the two differ where rloss' two best log-probs are more than --gap apart.
"""

import argparse
import json
import random
import subprocess
import sys
import time
import urllib.request

import xllamacpp

PROMPT = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.\n\nYou may write Python in a "
    "block ```python; its output is then given to you in a block ```output.<|im_end|>\n<|im_start|>user\nCompute (({} - {}) * {}) "
    "+ {}.\nPut the final answer within \\boxed{{}}.<|im_end|>\n<|im_start|>assistant\n"
)


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=600))


def llama_answers(gguf, lora, prompts, tokens):
    """Returns the ids of each prompt and of its answer; without the adapter if `lora` is None."""
    parameters = xllamacpp.CommonParams()
    parameters.model.path = gguf
    parameters.n_ctx, parameters.n_parallel, parameters.n_gpu_layers, parameters.port = 2048, 1, 0, 0
    if lora:
        adapter = xllamacpp.CommonAdapterLoraInfo()
        adapter.path, adapter.scale = lora, 1.0
        parameters.lora_adapters = [adapter]
    server = xllamacpp.Server(parameters)
    answers = []
    for prompt in prompts:
        url = server.listening_address
        ids = post(f"{url}/tokenize", {"content": prompt, "parse_special": True})["tokens"]
        body = {"prompt": ids, "n_predict": tokens, "temperature": 0, "return_tokens": True, "cache_prompt": False}
        answers.append((ids, post(f"{url}/completion", body)["tokens"]))
    return answers


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", required=True)
    parser.add_argument("--lora", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--rloss", default="target/release/rloss")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--gap", type=float, default=0.25)
    args = parser.parse_args()
    rng = random.Random(3)
    prompts = [PROMPT.format(*(rng.randint(1000, 99999) for _ in range(4))) for _ in range(args.prompts)]
    adapted, plain = (llama_answers(args.gguf, lora, prompts, args.tokens) for lora in (args.lora, None))
    print(f"the adapter changes {sum(a[1] != b[1] for a, b in zip(adapted, plain))} of {len(prompts)} answers of llama.cpp")
    sets = ["rollout.sequences_max=4", "rollout.prompt_tokens_max=256", f"rollout.response_tokens_max={args.tokens + 8}"]
    command = [args.rloss, "serve", args.run, "--port", str(args.port)]
    server = subprocess.Popen(command + [word for pair in sets for word in ("--set", pair)], stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{args.port}/v1"
    for _ in range(120):
        try:
            name = json.load(urllib.request.urlopen(f"{url}/models"))["data"][0]["id"]
            break
        except OSError:
            time.sleep(1)
    equal, wrong = 0, 0
    for ids, theirs in adapted:
        body = {"model": name, "prompt": ids, "max_tokens": args.tokens, "temperature": 0, "logprobs": 2, "return_token_ids": True}
        choice = post(f"{url}/completions", body)["choices"][0]
        ours = choice["token_ids"]
        at = next((i for i, pair in enumerate(zip(ours, theirs)) if pair[0] != pair[1]), None)
        if at is None:
            equal += 1
            continue
        best, second = sorted(choice["logprobs"]["top_logprobs"][at].values(), reverse=True)[:2]
        wrong += best - second > args.gap
        print(f"another token at {at}: the two best log-probs are {best - second:.4f} apart")
    server.terminate()
    print(f"{equal} of {len(prompts)} answers are equal; {wrong} differ beyond a gap of {args.gap}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
