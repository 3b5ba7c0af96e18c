#!/usr/bin/env python3
"""Gives tokens that a model never learned an embedding of their own.

    pip install torch safetensors transformers
    scripts/init_tokens.py FOLDER OUT '<tool_call>' '</tool_call>'

In some models the rows of special tokens are those of tokens that training never used: equal or nearly equal, so that a
tied head cannot tell them apart and an adapter cannot learn them. Each named token gets the mean of the rows of its
pieces, such as "<", "tool", "_call", ">", scaled to the median norm. Prints how many rows were nearly equal before
(cosine above 0.99). Nothing else changes. Refused for a model whose head is not tied to its embedding.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoTokenizer

NAME = "model.embed_tokens.weight"


def near(rows, row):
    return int((torch.nn.functional.cosine_similarity(rows, row[None]) > 0.99).sum()) - 1


def main(folder, out, *tokens):
    folder, out = Path(folder), Path(out)
    if not json.loads((folder / "config.json").read_text()).get("tie_word_embeddings"):
        sys.exit(f"{folder}: the head is not tied to the embedding; both would need new rows")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    shutil.copytree(folder, out)
    for path in sorted(out.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            if NAME not in file.keys():
                continue
            tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()
        rows = tensors[NAME].float()
        norm = rows.norm(dim=1).median()
        before = rows.clone()
        for token in tokens:
            number = tokenizer.convert_tokens_to_ids(token)
            if number is None or tokenizer.convert_ids_to_tokens(number) != token:
                sys.exit(f"{folder}: no token {token}")
            pieces = [*tokenizer.encode(token[:1]), *tokenizer.encode(token[1:])]
            mean = before[pieces].mean(dim=0)
            rows[number] = mean / mean.norm() * norm
            print(f"{token} ({number}): {near(before, before[number])} other rows were nearly equal, now "
                  f"{near(rows, rows[number])}; from {tokenizer.convert_ids_to_tokens(pieces)}")
        tensors[NAME] = rows.to(tensors[NAME].dtype)
        save_file(tensors, path, metadata)
        return
    sys.exit(f"{folder}: no tensor {NAME}")


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
