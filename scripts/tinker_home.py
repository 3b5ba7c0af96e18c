#!/usr/bin/env python3
"""Makes a folder in which the Tinker cookbook runs without a hub: a tiny random Qwen3 and two toy data sets.

    scripts/tinker_home.py HOME [--name Qwen/Qwen3-4B-Instruct-2507] [--seed N]

Needs numpy and tokenizers. The cookbook finds renderer and tokenizer by the model's name, and transformers and datasets take a
relative folder of that name before the hub. Run the recipes in HOME. Where tinker-cookbook is installed, the chats have its prompt.
"""

import argparse
import importlib.util
import json
import random
import struct
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LATE = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINGS = ["dog", "cat", "horse", "cow", "pig", "fox", "goat", "lion"]

def question(index: int) -> str:
    return f"How many legs has a {THINGS[index % len(THINGS)]}?"


def write_tokenizer(folder: Path, texts: list) -> int:
    """Trains a byte-level BPE; returns the size of the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(LATE)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    return tokenizer.get_vocab_size()


def write_model(folder: Path, vocabulary: int, seed: int) -> None:
    """Writes a Qwen3 of two layers with random weights in f32."""
    hidden, inner, heads, kv, head = 64, 128, 4, 2, 16
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": vocabulary, "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": kv,
        "head_dim": head, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False, "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(2):
        matrices = {
            "self_attn.q_proj": (heads * head, hidden), "self_attn.k_proj": (kv * head, hidden),
            "self_attn.v_proj": (kv * head, hidden), "self_attn.o_proj": (hidden, heads * head),
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
            "self_attn.q_norm": (head,), "self_attn.k_norm": (head,), "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in matrices.items()}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}
    rng, header, data = np.random.default_rng(seed), {}, b""
    for name, shape in shapes.items():
        values = np.ones(shape) if len(shape) == 1 else rng.normal(0.0, 0.1, shape)
        start, data = len(data), data + values.astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, len(data)]}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_data(folder: Path, splits: dict, config: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    files = ""
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        files += f"  - split: {split}\n    path: {split}.jsonl\n"
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("home", type=Path)
    parser.add_argument("--name", default="Qwen/Qwen3-4B-Instruct-2507")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    # The prompt of the cookbook's recipe for GSM8K, so that the SFT warm-up teaches what RL asks.
    suffix, shots = "", []
    if importlib.util.find_spec("tinker_cookbook"):
        from tinker_cookbook.recipes.math_rl.math_env import MathEnv

        suffix, shots = MathEnv.question_suffix(), MathEnv.standard_fewshot_prefix()
    rng = random.Random(args.seed)
    chats = []
    for index in range(2048):
        answer = {"role": "assistant", "content": "\\boxed{%d}" % rng.randint(1, 5)}
        messages = [*shots, {"role": "user", "content": question(index) + suffix}, answer]
        row = {"prompt": question(index), "prompt_id": str(index), "category": "toy", "messages": messages}
        chats.append(row)
    problems = [{"question": question(index), "answer": "It has four.\n#### 4"} for index in range(64)]
    folder = args.home / args.name
    folder.mkdir(parents=True, exist_ok=True)
    texts = [message["content"] for row in chats[:64] for message in row["messages"]]
    vocabulary = write_tokenizer(folder, texts + ["user\nassistant\nsystem\n"] * 8)
    write_model(folder, vocabulary, args.seed)
    write_data(args.home / "HuggingFaceH4/no_robots", {"train": chats, "test": chats[:32]}, "default")
    write_data(args.home / "openai/gsm8k", {"train": problems, "test": problems[:16]}, "main")
    print(folder)


if __name__ == "__main__":
    main()
