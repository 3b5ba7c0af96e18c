#!/usr/bin/env python3
"""Times one GRPO step of a random GPT-OSS model in PyTorch, the shapes of `cargo bench --bench step`.

    scripts/peer_step.py transformers [--hidden N ...] [--experts-implementation eager|batched_mm|grouped_mm] [--threads N]
    scripts/peer_step.py trl [--hidden N ...] [--experts-implementation eager|batched_mm|grouped_mm] [--threads N]

A step of `transformers`: `generate` with the KV cache, responses of a fixed length; one forward and backward
over all tokens of all samples, padding there is none; the gradient's norm clipped; AdamW. This is less than a
trainer around it does: no second forward for old log-probabilities, no decoding of texts, no logging.
Attention is eager, as sinks want it.

A step of `trl` is what its trainer does between its callbacks: sampling, rewards, decoding of texts, loss,
update. Texts are digits, a token each; nothing ends a response early; rewards are random, so that no group is
without signal.

Prints one JSON line: seconds of each step but the first, peak memory and that before the model was made; for
`transformers` also those of its rollout, of a token of all sequences within it, of forward and backward and
of the whole update, and processor seconds. Needs torch and transformers; `trl` also trl and datasets.
"""

import argparse
import json
import os
import random
import resource
import tempfile
import time

SHAPES = dict(
    hidden=64, layers=4, heads=4, kv=2, head_dim=16, inter=64, experts=8, topk=2, vocab=320,
    prompts=8, samples=8, prompt_tokens=64, response_tokens=64, steps=4, threads=2,
)  # fmt: skip
CLIP = 0.2
LEARNING_RATE = 1e-6
GRADIENT_NORM_MAX = 1.0


def model_of(transformers, a):
    config = transformers.GptOssConfig(
        vocab_size=a.vocab,
        hidden_size=a.hidden,
        num_hidden_layers=a.layers,
        num_attention_heads=a.heads,
        num_key_value_heads=a.kv,
        head_dim=a.head_dim,
        intermediate_size=a.inter,
        num_local_experts=a.experts,
        num_experts_per_tok=a.topk,
        sliding_window=16,
        layer_types=["full_attention" if i % 2 else "sliding_attention" for i in range(a.layers)],
        max_position_embeddings=4096,
        attn_implementation="eager",
        pad_token_id=0,
    )
    if a.experts_implementation:
        config._experts_implementation = a.experts_implementation
    model = transformers.GptOssForCausalLM(config)
    # Nothing ends a response early: the same work on both sides.
    model.generation_config.eos_token_id = None
    return model


def rollout(torch, model, prompts, a, stamps):
    """Sampled sequences; `stamps` gets the time of each of their tokens."""
    model.eval()

    def stamp(tokens, _scores, **_):
        stamps.append(time.perf_counter())
        return torch.zeros(len(tokens), dtype=torch.bool)

    with torch.no_grad():
        return model.generate(
            prompts.repeat_interleave(a.samples, 0),
            attention_mask=torch.ones(len(prompts) * a.samples, a.prompt_tokens, dtype=torch.long),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=a.response_tokens,
            min_new_tokens=a.response_tokens,
            stopping_criteria=[stamp],
        )


def update(torch, model, optimizer, tokens, a):
    """One update on fresh data: the ratio is 1, its gradient is not. Returns the time after forward and backward."""
    model.train()
    rewards = torch.tensor([[i % 2 for i in range(a.samples)]] * a.prompts, dtype=torch.float32)
    centred = rewards - rewards.mean(1, keepdim=True)
    advantages = (centred / (rewards.std(1, keepdim=True) + 1e-6)).reshape(-1, 1)
    with torch.autocast("cpu", torch.bfloat16, enabled=a.autocast):
        logits = model(tokens[:, :-1], logits_to_keep=a.response_tokens, use_cache=False).logits
    targets = tokens[:, -a.response_tokens :, None]
    log_probs = torch.log_softmax(logits.float(), -1).gather(-1, targets).squeeze(-1)
    ratio = (log_probs - log_probs.detach()).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    both_ways = time.perf_counter()
    torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM_MAX)
    optimizer.step()
    return both_ways


def resident_bytes():
    """The most this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def sizes(model, a, start_bytes):
    """What both commands print of their work and memory."""
    return {
        "generated_tokens": a.prompts * a.samples * a.response_tokens,
        "parameter_bytes": 4 * sum(p.numel() for p in model.parameters()),
        "start_bytes": start_bytes,
        "peak_bytes": resident_bytes(),
    }


def transformers_steps(a):
    import torch
    import transformers

    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    start_bytes = resident_bytes()
    model = model_of(transformers, a)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    seconds = ["step_s", "rollout_s", "update_s", "forward_backward_s", "decode_step_s"]
    found = {name: [] for name in [*seconds, "rollout_processor_s", "update_processor_s"]}
    for step in range(a.steps + 1):
        prompts = torch.randint(1, a.vocab, (a.prompts, a.prompt_tokens))
        start, work, stamps = time.perf_counter(), time.process_time(), []
        tokens = rollout(torch, model, prompts, a, stamps)
        middle, half = time.perf_counter(), time.process_time()
        assert tokens.shape == (a.prompts * a.samples, a.prompt_tokens + a.response_tokens)
        both_ways = update(torch, model, optimizer, tokens, a)
        end, done = time.perf_counter(), time.process_time()
        if step == 0:  # the one that meets fresh memory
            continue
        decode = (stamps[-1] - stamps[0]) / (len(stamps) - 1)
        row = [end - start, middle - start, end - middle, both_ways - middle, decode, half - work, done - half]
        for values, value in zip(found.values(), row):
            values.append(round(value, 6))
    found = {
        "peer": f"transformers, {model.config._experts_implementation}" + (", autocast" if a.autocast else ""),
        **found,
        **sizes(model, a, start_bytes),
    }
    print(json.dumps(found))


def tokenizer_of():
    """Bytes as tokens, and two more: the end and the padding."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    bytes_alone = models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    tokenizer = Tokenizer(bytes_alone)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>", "<pad>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>", padding_side="left"
    )


def trl_steps(a):
    os.environ["HF_HUB_OFFLINE"] = "1"
    import datasets
    import torch
    import transformers
    import trl

    torch.set_num_threads(a.threads)
    transformers.logging.set_verbosity_error()
    begun, ended = [], []

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            begun.append(time.perf_counter())

        def on_step_end(self, *_, **__):
            ended.append(time.perf_counter())

    start_bytes = resident_bytes()
    model = model_of(transformers, a)
    prompts = [{"prompt": str(i).zfill(a.prompt_tokens)} for i in range(a.prompts * (a.steps + 1))]
    with tempfile.TemporaryDirectory() as folder:
        settings = trl.GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            max_steps=a.steps + 1,
            per_device_train_batch_size=a.prompts * a.samples,
            num_generations=a.samples,
            max_completion_length=a.response_tokens,
            mask_truncated_completions=False,
            generation_kwargs={"min_new_tokens": a.response_tokens},
            temperature=1.0,
            beta=0.0,
            learning_rate=LEARNING_RATE,
            max_grad_norm=GRADIENT_NORM_MAX,
        )
        trainer = trl.GRPOTrainer(
            model=model,
            args=settings,
            reward_funcs=lambda completions, **_: [random.random() for _ in completions],
            train_dataset=datasets.Dataset.from_list(prompts),
            processing_class=tokenizer_of(),
            callbacks=[Clock()],
        )
        trainer.train()
    found = {
        "peer": "trl",
        "step_s": [round(end - begin, 6) for begin, end in zip(begun, ended)][1:],
        **sizes(model, a, start_bytes),
    }
    print(json.dumps(found))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, run in [("transformers", transformers_steps), ("trl", trl_steps)]:
        command = commands.add_parser(name)
        command.set_defaults(run=run)
        for shape, default in SHAPES.items():
            command.add_argument("--" + shape.replace("_", "-"), type=int, default=default)
        command.add_argument("--autocast", action="store_true", help="forward and backward in bf16 autocast")
        command.add_argument("--experts-implementation", default=None, help="transformers' own choice where it is absent")
    a = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(a.threads)
    a.run(a)


if __name__ == "__main__":
    main()
