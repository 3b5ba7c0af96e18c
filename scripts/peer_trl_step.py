#!/usr/bin/env python3
"""Times GRPO steps of TRL's trainer on the model and the shapes of scripts/peer_grpo_step.py, whose options it takes.

A step is what the trainer does between its callbacks: sampling, rewards, decoding of texts, loss, update. Texts are digits, a token
each; nothing ends a response early; rewards are random, so that no group is without signal.

Prints one JSON line as that script does, with whole steps alone. Needs torch, transformers, trl and datasets.
"""

import json
import os
import random
import tempfile
import time

from peer_grpo_step import GRADIENT_NORM_MAX, LEARNING_RATE, arguments, model_of, resident_bytes


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


def main():
    a = arguments()
    os.environ["OMP_NUM_THREADS"] = str(a.threads)
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
        "generated_tokens": a.prompts * a.samples * a.response_tokens,
        "parameter_bytes": 4 * sum(p.numel() for p in model.parameters()),
        "start_bytes": start_bytes,
        "peak_bytes": resident_bytes(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
