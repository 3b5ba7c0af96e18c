#!/usr/bin/env python3
"""Files as engines write them, and a sample of the campaign's cases, for the tests: tests/fixtures/engines/.

    scripts/make_engine_fixtures.py

One tiny random model, rows that it drew itself, and transformers' log-probs of them:
    model/           config.json and model.safetensors, for the embedded vocabulary
    rows.jsonl       our own rows; every other file holds the same numbers in another shape (in vllm_completions.json and the
                     like, see `SHAPES`), made by code of our own after the projects' sources, which docs/AGAINST.md names
    cases.jsonl      {"kind", "dtype", "tokens", "logprobs"}: mistakes of mismatch_faults.py, as scripts/mismatch_campaign.py
                     draws them, one a line; tests/suite/against.rs says what must be found

Needs torch, transformers 5, numpy.
"""

import base64
import gzip
import io
import json
import random
import shutil
from pathlib import Path

import numpy
import torch

import mismatch_campaign
from mismatch_campaign import World
from mismatch_faults import FAULTS, logits

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "engines"
SEED = 7
PROMPT = 4
CASES = [
    ("none", "float32"), ("none", "bfloat16"), ("sinks missing", "float32"), ("sinks missing", "bfloat16"),
    ("another temperature", "float32"), ("another temperature", "bfloat16"), ("log-probs after top-k", "float32"),
    ("off by one", "bfloat16"), ("double start token", "float32"), ("full attention everywhere", "bfloat16"),
    ("YaRN attention factor missing", "float32"), ("RoPE without YaRN", "bfloat16"), ("SwiGLU alpha missing", "bfloat16"),
    ("softmax before top-k", "float32"), ("attention biases missing", "bfloat16"), ("tied head", "float32"),
    ("MXFP4 weights", "float32"), ("other RMS epsilon", "float32"),
    ("1% of the tokens", "bfloat16"), ("20% of the tokens", "float32"), ("45% of the tokens", "bfloat16"),
    ("one expert", "float32"), ("a third of the rows", "float32"),
]  # fmt: skip


def text_of(world, token):
    return world.spelled[token]


def completions(world, rows):
    """vLLM's /v1/completions with return_token_ids, prompt_logprobs=0 and logprobs=0; with the routes."""
    for tokens, values, routes in rows:
        entry = lambda at: {str(tokens[at]): dict(logprob=values[at], rank=1, decoded_token=text_of(world, tokens[at]))}
        stream = io.BytesIO()
        numpy.save(stream, routes.astype(numpy.uint8))
        yield dict(id="cmpl-1", object="text_completion", created=1, model="m", choices=[dict(
            index=0, text="", finish_reason="length", stop_reason=None,
            logprobs=dict(text_offset=[0] * (len(tokens) - PROMPT), token_logprobs=values[PROMPT:],
                          tokens=[text_of(world, t) for t in tokens[PROMPT:]],
                          top_logprobs=[{text_of(world, t): v} for t, v in zip(tokens[PROMPT:], values[PROMPT:])]),
            token_ids=tokens[PROMPT:], prompt_token_ids=tokens[:PROMPT],
            prompt_logprobs=[None, *(entry(at) for at in range(1, PROMPT))],
            routed_experts=base64.b64encode(stream.getvalue()).decode(),
        )], usage=dict(prompt_tokens=PROMPT, total_tokens=len(tokens)))


def chat(world, rows):
    """vLLM's /v1/chat/completions with return_token_ids: the prompt's values beside the choices."""
    for tokens, values, _ in rows:
        entry = lambda at: {str(tokens[at]): dict(logprob=values[at], rank=1, decoded_token=text_of(world, tokens[at]))}
        content = [dict(token=text_of(world, t), logprob=v, bytes=list(text_of(world, t).encode()), top_logprobs=[])
                   for t, v in zip(tokens[PROMPT:], values[PROMPT:])]
        yield dict(id="chatcmpl-1", object="chat.completion", model="m", choices=[dict(
            index=0, message=dict(role="assistant", content=""), logprobs=dict(content=content), finish_reason="length",
            token_ids=tokens[PROMPT:])], prompt_token_ids=tokens[:PROMPT],
            prompt_logprobs=[None, *(entry(at) for at in range(1, PROMPT))])


def vllm_scoring(world, rows):
    """vLLM's /v1/completions as a scoring request: prompt_logprobs=0, max_tokens=1, return_token_ids, no logprobs."""
    for tokens, values, _ in rows:
        entry = lambda at: {str(tokens[at]): dict(logprob=values[at], rank=1, decoded_token=text_of(world, tokens[at]))}
        yield dict(id="cmpl-1", object="text_completion", created=1, model="m", choices=[dict(
            index=0, text=text_of(world, 3), logprobs=None, finish_reason="length", stop_reason=None, token_ids=[3],
            prompt_logprobs=[None, *(entry(at) for at in range(1, len(tokens)))], prompt_token_ids=tokens,
        )], usage=dict(prompt_tokens=len(tokens), total_tokens=len(tokens) + 1, completion_tokens=1))


def vllm_chat_scoring(world, rows):
    """vLLM's /v1/chat/completions as a scoring request: the prompt's log-probs beside choices without any."""
    for response in vllm_scoring(world, rows):
        choice = response["choices"][0]
        prompt = {key: choice.pop(key) for key in ("prompt_logprobs", "prompt_token_ids")}
        message = dict(role="assistant", content=choice.pop("text"))
        yield dict(response, object="chat.completion", choices=[dict(choice, message=message)], **prompt)


def llama_cpp_python(world, rows):
    """llama-cpp-python's create_completion with echo and logprobs: text alone."""
    for tokens, values, _ in rows:
        spelled = [text_of(world, t) for t in tokens]
        yield dict(id="cmpl-1", object="text_completion", model="m", choices=[dict(
            text="".join(spelled), index=0, finish_reason="length",
            logprobs=dict(text_offset=[0] * len(tokens), tokens=spelled, token_logprobs=values, top_logprobs=[None] * len(tokens)))])


def sglang(world, rows):
    """SGLang's /generate with return_logprob, logprob_start_len=0 and return_routed_experts."""
    for tokens, values, routes in rows:
        entries = [[v, t, None] for v, t in zip(values, tokens)]
        yield dict(text="", output_ids=tokens[PROMPT:], meta_info=dict(
            id="1", prompt_tokens=PROMPT, completion_tokens=len(tokens) - PROMPT, weight_version="default",
            input_token_logprobs=entries[:PROMPT], output_token_logprobs=entries[PROMPT:],
            routed_experts=base64.b64encode(routes.astype(numpy.int32).tobytes()).decode()))


def llama_cpp(world, rows):
    """llama.cpp's /completion with n_probs: values of the sampled tokens alone."""
    for tokens, values, _ in rows:
        yield dict(index=0, content="", tokens=[], stop=True, model="m", tokens_evaluated=PROMPT,
                   generation_settings=dict(temperature=1.0), prompt="".join(text_of(world, t) for t in tokens[:PROMPT]),
                   stop_type="limit", completion_probabilities=[
                       dict(id=t, token=text_of(world, t), bytes=list(text_of(world, t).encode()), logprob=v, top_logprobs=[])
                       for t, v in zip(tokens[PROMPT:], values[PROMPT:])])


def prime_rl(world, rows):
    """prime-rl's token export: 0 where the mask is false."""
    for index, (tokens, values, _) in enumerate(rows):
        mask = [i >= PROMPT for i in range(len(tokens))]
        kept = [v if m else 0.0 for v, m in zip(values, mask)]
        yield dict(schema_version=1, step=3, export_step=3, rank=0, micro_step=0, micro_sequence_idx=index,
                   export_sequence_idx=index, run_id=None, env_name="e", token_ids=tokens,
                   position_ids=list(range(len(tokens))), loss_mask=mask, inference_logprobs=kept, trainer_logprobs=kept)


def verifiers(world, rows):
    """verifiers' traces: two messages a row."""
    for tokens, values, _ in rows:
        sampled = len(tokens) - PROMPT
        yield dict(nodes=[
            dict(parent=None, message=dict(role="user", content=""), sampled=False, token_ids=tokens[:PROMPT],
                 mask=[False] * PROMPT, logprobs=[]),
            dict(parent=0, message=dict(role="assistant", content=""), sampled=True, token_ids=tokens[PROMPT:],
                 mask=[True] * sampled, logprobs=values[PROMPT:])])


def slime(world, rows):
    """slime's samples, after the converter that the refusal of a .pt names."""
    for tokens, values, routes in rows:
        response = len(tokens) - PROMPT
        yield dict(tokens=tokens, response_length=response, loss_mask=[1] * response,
                   rollout_log_probs=values[PROMPT:], rollout_routed_experts=routes.tolist())


def verl(world, rows):
    """verl's agent loop output."""
    for tokens, values, _ in rows:
        yield dict(prompt_ids=tokens[:PROMPT], response_ids=tokens[PROMPT:],
                   response_mask=[1] * (len(tokens) - PROMPT), response_logprobs=values[PROMPT:])


SHAPES = dict(
    vllm_completions=completions, vllm_chat=chat, vllm_scoring=vllm_scoring,
    vllm_chat_scoring=vllm_chat_scoring, llama_cpp_python=llama_cpp_python, sglang=sglang, llama_cpp=llama_cpp,
    prime_rl=prime_rl, verifiers=verifiers, slime=slime, verl=verl,
)


def routes_of(model, tokens):
    """Experts of every token that is fed: [tokens - 1, layers, slots]."""
    found, hooks = [], []
    for layer in model.model.layers:
        hooks.append(layer.mlp.router.register_forward_hook(lambda m, i, out: found.append(out[2].numpy())))
    logits(model, tokens)
    [hook.remove() for hook in hooks]
    return numpy.stack(found, 1)[: len(tokens) - 1]


def tiny_sizes(_):
    return dict(
        vocab_size=272, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=8, max_position_embeddings=256,
        rms_norm_eps=1e-5, swiglu_limit=1.5, layer_types=["sliding_attention", "full_attention"],
        rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=8.0, truncate=False, beta_fast=32.0, beta_slow=1.0,
                             original_max_position_embeddings=64))


def printable(world):
    """Rows of ASCII text, which every engine can spell."""
    text = [t for t in range(16, 272) if 32 <= t - 16 < 127]
    rng = random.Random(SEED)
    world.rows = [[1, *(rng.choice(text) for _ in range(n))] for n in (70, 90, 60)]
    world.spelled = ["<|start|>" if t == 1 else chr(t - 16) if t >= 16 else "" for t in range(272)]
    world.right = {d: world.log_probs(mismatch_campaign.healthy, d) for d in (torch.float32, torch.bfloat16)}


def main():
    shutil.rmtree(FOLDER, ignore_errors=True)
    torch.set_num_threads(1)
    mismatch_campaign.sizes_of = tiny_sizes
    world = World(FOLDER, random.Random(SEED), long=False)
    printable(world)
    for extra in FOLDER.glob("model/generation_config.json"):
        extra.unlink()
    (FOLDER / "model" / "tokenizer.json").unlink()
    dump = lambda rows: "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    right = [[None if v is None else round(v, 7) for v in row] for row in world.right[torch.float32]]
    rows = [(t, v, routes_of(world.model, t)) for t, v in zip(world.rows, right)]
    (FOLDER / "rows.jsonl").write_text(dump(dict(tokens=t, logprobs=v) for t, v, _ in rows))
    for name, shape in SHAPES.items():
        written = list(shape(world, rows))
        if name in ("vllm_chat", "sglang"):  # an array, over several lines; gzip
            (FOLDER / f"{name}.json").write_text(json.dumps(written, indent=0))
        elif name == "verifiers":
            (FOLDER / f"{name}.jsonl.gz").write_bytes(gzip.compress(dump(written).encode(), mtime=0))
        else:
            (FOLDER / f"{name}.jsonl").write_text(dump(written))
    with (FOLDER / "cases.jsonl").open("w") as file:
        for index, (kind, dtype) in enumerate(CASES):
            found, _ = world.case(kind, getattr(torch, dtype), SEED + index)
            for tokens, values in zip(world.rows, found):
                values = [None if v is None else round(v, 7) for v in values]
                row = dict(kind=kind, dtype=dtype, tokens=tokens, logprobs=values)
                file.write(json.dumps(row, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
