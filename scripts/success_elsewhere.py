#!/usr/bin/env python3
"""Success of a model as transformers computes it, over the problems of a `rloss eval`, beside what rloss found.

    rloss eval RUN --set eval.temperature=0 --out mine
    rloss export RUN --merged --out merged
    scripts/success_elsewhere.py merged mine/trajectories/eval-000008.jsonl --greedy

Takes the prompts' tokens and the answers from the file of trajectories. transformers samples, in f32 on the CPU. A closed block
```python runs in a process of its own, and its output is inserted as rloss inserts it. Such a program has little time and
memory, but no sandbox. The last \\boxed{} must be the reference answer. Prints success of both with 95% intervals.
It is slow: a GPT-OSS of 1.6e9 parameters took two minutes for 6 problems on two cores.

Needs torch and transformers 5.
"""

import argparse
import json
import math
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, StoppingCriteria, logging

BLOCK = re.compile(r"```python[^\n]*\n(.*?)\n?```", re.DOTALL)
BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


class Closed(StoppingCriteria):
    """Stops a sequence whose last block has been closed and has not run."""

    def __init__(self, tokenizer, begin, seen, runs):
        self.tokenizer, self.begin, self.seen, self.runs = tokenizer, begin, seen, runs

    def __call__(self, tokens, scores, **_):
        texts = self.tokenizer.batch_decode(tokens[:, self.begin :])
        return torch.tensor([len(BLOCK.findall(before + text)) > self.runs for before, text in zip(self.seen, texts)])


def run(program, seconds=5, memory=2 << 30):
    def limit():
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))

    with tempfile.TemporaryDirectory() as folder:
        try:
            command = [sys.executable, "-I", "-c", program]
            done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=2 * seconds, preexec_fn=limit)
        except (subprocess.TimeoutExpired, ValueError) as error:
            return type(error).__name__
    return done.stdout if done.returncode == 0 else done.stdout + done.stderr.strip().rpartition("\n")[2]


def answers(model, tokenizer, prompts, args):
    """Returns the text that follows each prompt, what was inserted included."""
    ends, texts, tokens = model.generation_config.eos_token_id, ["" for _ in prompts], [list(prompt) for prompt in prompts]
    ends, open_rows = set(ends if isinstance(ends, list) else [ends]), list(range(len(prompts)))
    for turn in range(args.turns):
        if not open_rows:
            break
        longest = max(len(tokens[row]) for row in open_rows)
        pad = [longest - len(tokens[row]) for row in open_rows]
        ids = torch.tensor([[0] * fill + tokens[row] for fill, row in zip(pad, open_rows)])
        mask = torch.tensor([[0] * fill + [1] * (longest - fill) for fill in pad])
        with torch.no_grad():
            out = model.generate(
                input_ids=ids, attention_mask=mask, pad_token_id=min(ends), max_new_tokens=args.tokens, top_k=0, top_p=1.0,
                do_sample=not args.greedy, temperature=None if args.greedy else 1.0,
                stopping_criteria=[Closed(tokenizer, longest, [texts[row] for row in open_rows], turn)],
            )  # fmt: skip
        waiting = []
        for row, new in zip(open_rows, out[:, longest:].tolist()):
            # A sequence that stopped earlier is padded with the end token.
            end = next((at for at, token in enumerate(new) if token in ends), len(new))
            texts[row] += tokenizer.decode(new[:end])
            tokens[row] += new[:end]
            blocks = BLOCK.findall(texts[row])
            if len(blocks) > turn and turn + 1 < args.turns:
                line = "" if texts[row].endswith("\n") else "\n"
                shown = line + "```output\n" + run(blocks[turn]).rstrip("\n") + "\n```\n"
                texts[row] += shown
                tokens[row] += tokenizer.encode(shown, add_special_tokens=False)
                waiting.append(row)
        open_rows = waiting
    return texts


def is_right(text, answer):
    found = BOXED.findall(text)
    return bool(found) and re.sub(r"[\s,$]", "", found[-1]) == answer.replace(",", "")


def interval(share, count):
    return f"{share:.3f} ± {1.96 * math.sqrt(share * (1 - share) / count):.3f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a folder with the weights, adapters merged")
    parser.add_argument("trajectories", type=Path, help="of rloss eval")
    parser.add_argument("--problems", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=128, help="of a turn, where rloss limits all turns together")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--batch", type=int, default=25)
    parser.add_argument("--greedy", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    logging.set_verbosity_error()
    rows = [json.loads(line) for line in args.trajectories.read_text().splitlines()]
    rows = [row for row in rows if row["sample"] == 0][: args.problems]
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(args.model / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    right = []
    for first in range(0, len(rows), args.batch):
        batch = rows[first : first + args.batch]
        texts = answers(model, tokenizer, [row["tokens"][: row["prompt_tokens"]] for row in batch], args)
        right += [is_right(text, row["answer"]) for text, row in zip(texts, batch)]
        print(f"{len(right)} of {len(rows)} problems, {sum(right)} right; the last answer: {texts[-1]!r}", flush=True)
    own, count = sum(row["success"] for row in rows) / len(rows), len(rows)
    print(f"rloss {interval(own, count)}, transformers {interval(sum(right) / count, count)}, {count} problems")


if __name__ == "__main__":
    main()
