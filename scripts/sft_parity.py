#!/usr/bin/env python3
"""Compares `rloss sft` with TRL's SFTTrainer: the same rows, weights and settings, some steps of AdamW in f32.

    sft_parity.py RLOSS TOKENIZER [--steps 5] [--family qwen2|qwen3]

TOKENIZER is a folder with the tokenizer of a Qwen2.5 or Qwen3 model. The model is small and random. Each step
takes all rows, so the order of rows does not matter. Prints the largest difference of the losses and of the
weights, and fails above 1e-5 and 5e-5.

Needs torch, transformers and trl; tried with trl 1.16, transformers 5.24 and torch 2.15.
"""

import argparse
import json
import random
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

LOSS_DIFFERENCE_MAX = 1e-5
WEIGHT_DIFFERENCE_MAX = 5e-5
LR = 1e-3
ROWS = 8


def make_model(family, tokenizer_folder, folder):
    """Writes a small random model with the tokenizer. Returns the size of the vocabulary."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    size = len(tokenizer)
    config = AutoConfig.for_model(
        family,
        vocab_size=size,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        use_sliding_window=False,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(tokenizer_folder) / name, folder)
    return size


def make_rows(vocabulary):
    """Returns rows of random tokens, each with a mask of two answers."""
    source = random.Random(7)
    rows = []
    for _ in range(ROWS):
        length = source.randrange(30, 120)
        first, second = source.randrange(4, length // 2), source.randrange(length // 2, length - 4)
        mask = [first <= i < first + 4 or i >= second for i in range(length)]
        rows.append({"tokens": [source.randrange(vocabulary) for _ in range(length)], "mask": mask})
    return rows


class LossRecorder(SFTTrainer):
    """Keeps the loss of every step, unrounded."""

    losses = []

    def compute_loss(self, model, inputs, **arguments):
        result = super().compute_loss(model, inputs, **arguments)
        self.losses.append(float(result[0] if isinstance(result, tuple) else result))
        return result


def train_with_trl(folder, rows, steps, out):
    """Returns the losses and the weights after `steps` steps."""
    data = Dataset.from_list(
        [{"input_ids": row["tokens"], "completion_mask": [int(m) for m in row["mask"]]} for row in rows]
    )
    settings = SFTConfig(
        output_dir=str(out),
        max_steps=steps,
        per_device_train_batch_size=ROWS,
        learning_rate=LR,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        max_grad_norm=1.0,
        completion_only_loss=True,
        max_length=None,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trainer = LossRecorder(model=model, args=settings, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    return trainer.losses, {name: value.detach() for name, value in model.state_dict().items()}


def train_with_rloss(rloss, folder, rows, steps, out):
    """Returns the losses and the weights after `steps` steps."""
    data = out.parent / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = [
        f"cold_start.steps={steps}",
        f"cold_start.batch_size={ROWS}",
        f"cold_start.optimizer.lr={LR}",
        "checkpoint.dtype=f32",
    ]
    command = [rloss, "sft", folder, "--data", data, "--out", out]
    subprocess.run(command + [word for key in sets for word in ("--set", key)], check=True)
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [row["cold_start/loss"] for row in metrics if "cold_start/loss" in row]
    checkpoint = max((out / "checkpoints").iterdir())
    return losses, load_file(checkpoint / "model.safetensors")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rloss")
    parser.add_argument("tokenizer")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--family", choices=["qwen2", "qwen3"], default="qwen2")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        temporary = Path(temporary)
        folder = temporary / "model"
        vocabulary = make_model(args.family, args.tokenizer, folder)
        rows = make_rows(vocabulary)
        theirs = train_with_trl(folder, rows, args.steps, temporary / "trl")
        ours = train_with_rloss(args.rloss, folder, rows, args.steps, temporary / "sft")
    print("losses, TRL: ", *(f"{loss:.7f}" for loss in theirs[0]))
    print("losses, sft: ", *(f"{loss:.7f}" for loss in ours[0]))
    assert len(ours[0]) == len(theirs[0]) == args.steps
    losses = max(abs(a - b) for a, b in zip(*(ours[0], theirs[0])))
    names = [name for name in theirs[1] if name in ours[1]]
    assert len(names) == len(ours[1]), set(ours[1]) - set(names)
    weights = max(float((ours[1][name].float() - theirs[1][name]).abs().max()) for name in names)
    print(f"largest difference: losses {losses:.2e}, weights {weights:.2e} ({len(names)} tensors)")
    assert losses <= LOSS_DIFFERENCE_MAX and weights <= WEIGHT_DIFFERENCE_MAX


if __name__ == "__main__":
    main()
