#!/usr/bin/env python3
"""Tokens a second of transformers' GptOssForCausalLM beside `gpu_check model`, as a table.

    scripts/model_peers.py [--ours FILE] [--seconds-max N] [--device cuda|cpu] [--tiny]

FILE holds the rows that gpu_check printed in the same run; a row of both has their ratio. Measured as gpu_check measures: the
shape of gpt-oss-20b with random weights made on the device, the same points, the median of five times after two. The attentions
that transformers offers take turns within a point. Its weights are dense bf16, its cache is the static one, and what trains keeps
no activations within layers, as ours. A point that cannot run, or crashes, or hangs is a row with the reason: models run in
processes of their own, which begin anew where one ends.
"""

import argparse
import gc
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time

WARM_UPS, TIMES = 2, 5  # as in benches/gpu_check/speed/model.rs, and so are the points
SHAPE = {
    "vocab_size": 201_088, "hidden_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 64, "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
    "max_position_embeddings": 131_072 + 64,
}  # fmt: skip
LARGE = {
    "sequences": [1, 8, 64, 256, 1024], "context": [1024, 4096, 32_768, 131_072], "prefill": 4096, "training": [4096, 16_384],
    "length": 4096,
}  # fmt: skip
TINY_SHAPE = {
    "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 300,
}  # fmt: skip
TINY = {"sequences": [2], "context": [200], "prefill": 70, "training": [12], "length": 6}
SPARE_BYTES = 8 << 30  # beside the weights, where not all layers fit
BEGIN_S = 180  # no sign of life for so long is a hang; flex attention compiles for a while
OTHER_MAKERS = ("metal", "aiter")  # their GPUs' kernels


def work_points(is_tiny):
    """What each model is to do: (layers, [(work, sequences, tokens of each)])."""
    cases = TINY if is_tiny else LARGE
    layers = (TINY_SHAPE if is_tiny else SHAPE)["num_hidden_layers"]
    training = [("training", tokens // cases["length"], cases["length"]) for tokens in cases["training"]]
    decode = [("decode", sequences, context) for context in cases["context"] for sequences in cases["sequences"]]
    # The longest last: time may run out.
    return [(1, training), (2, training), (layers, [("prefill", 1, cases["prefill"]), *decode])]


# ---- The process with the model ---------------------------------------------------------------------------------------


def say(**what):
    print(json.dumps(what), flush=True)


def reason(error):
    if type(error).__name__ == "OutOfMemoryError":
        return "does not fit"
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0].split('. ')[0]}"[:160]


class Peer:
    def __init__(self, device, layers, is_tiny):
        import torch
        import transformers

        self.torch, self.transformers, self.device = torch, transformers, device
        config = transformers.GptOssConfig(**{**SHAPE, **(TINY_SHAPE if is_tiny else {}), "num_hidden_layers": layers})
        torch.set_default_dtype(torch.bfloat16)
        if device != "cpu":
            config = self.fitting(config)
        self.layers = config.num_hidden_layers
        with torch.device(device):
            self.model = transformers.GptOssForCausalLM(config)
            with torch.no_grad():
                for name, values in self.model.named_parameters():
                    values.fill_(1.0) if "norm" in name else values.normal_(std=0.02)
        self.config = config

    def fitting(self, config):
        """The same with as many layers as fit."""

        def weight_bytes(layers):
            one = self.transformers.GptOssConfig(**{**config.to_dict(), "num_hidden_layers": layers, "layer_types": None})
            with self.torch.device("meta"):
                return sum(2 * values.numel() for values in self.transformers.GptOssForCausalLM(one).parameters())

        head, layer = 2 * weight_bytes(1) - weight_bytes(2), weight_bytes(2) - weight_bytes(1)
        free, _ = self.torch.cuda.mem_get_info()
        layers = min(config.num_hidden_layers, max(1, (free - SPARE_BYTES - head) // layer))
        return self.transformers.GptOssConfig(**{**config.to_dict(), "num_hidden_layers": int(layers), "layer_types": None})

    def attentions(self):
        """What the model may be told to use: sdpa too, whose refusal is worth a row."""
        offered = getattr(type(self.model), "_compatible_flash_implementations", None) or ["flash_attention_2"]
        return ["eager", "flex_attention", "sdpa", *(name for name in offered if not any(word in name for word in OTHER_MAKERS))]

    def tokens(self, sequences, count):
        values = self.torch.arange(sequences * count, device=self.device) * 7919 % self.config.vocab_size
        return values.reshape(sequences, count)

    def drawn(self, logits):
        return self.torch.multinomial(logits[:, -1].float().softmax(-1), 1)

    def filled_cache(self, sequences, context, room):
        torch, config = self.torch, self.config
        cache = self.transformers.StaticCache(config=config, max_cache_len=context + room)
        row = torch.zeros(1, config.num_key_value_heads, 1, config.head_dim, device=self.device)
        held = row.expand(sequences, -1, context, -1)
        for layer in range(config.num_hidden_layers):
            cache.update(held, held, layer)
        return cache

    def passes(self, work, sequences, tokens, rounds):
        """A function that does the work once."""
        torch = self.torch
        self.model.train(work == "training")
        if work == "training":
            recompute = getattr(self.model, "activation_checkpointing_enable", None) or self.model.gradient_checkpointing_enable
            recompute()
            fed = self.tokens(sequences, tokens)

            def train():
                self.model.zero_grad(set_to_none=True)
                self.model(fed, labels=fed, use_cache=False).loss.backward()

            return train
        is_decode = work == "decode"
        cache = self.filled_cache(sequences, tokens, rounds) if is_decode else None
        fed = self.tokens(sequences, 1 if is_decode else tokens)

        def step():
            with torch.no_grad():
                held = cache if is_decode else self.transformers.StaticCache(config=self.config, max_cache_len=tokens)
                self.drawn(self.model(fed, past_key_values=held, use_cache=True, logits_to_keep=1).logits)

        return step

    def seconds(self, attention, work):
        self.model.set_attn_implementation(attention)
        begun = time.perf_counter()
        work()
        if self.device != "cpu":
            self.torch.cuda.synchronize()
        return time.perf_counter() - begun

    def measure(self, index, point, attentions):
        """Says seconds or the trouble of each attention, which take turns."""
        times = {name: [] for name in attentions}
        try:
            work = self.passes(*point, rounds=(WARM_UPS + TIMES) * len(times))
        except Exception as error:  # the reason is the row
            for name in times:
                say(point=index, attention=name, trouble=reason(error))
            times = {}
        for _ in range(WARM_UPS + TIMES):
            for name in list(times):
                say(begun=index, attention=name)
                try:
                    times[name].append(self.seconds(name, work))
                except Exception as error:
                    del times[name]
                    say(point=index, attention=name, trouble=reason(error))
                    self.go_on()
        for name, seconds in times.items():
            say(point=index, attention=name, seconds=statistics.median(seconds[WARM_UPS:]))

    def go_on(self):
        """Makes room for what comes. A GPU on which something has failed may fail for good: then another process goes on."""
        self.model.zero_grad(set_to_none=True)
        gc.collect()
        if self.device == "cpu":
            return
        try:
            self.torch.cuda.synchronize()
            self.torch.cuda.empty_cache()
        except RuntimeError:
            sys.exit("model_peers: the GPU fails this process for good")


def model_process(arguments):
    asked = json.loads(sys.stdin.read())
    try:
        peer = Peer(arguments.device, asked["layers"], arguments.tiny)
    except Exception as error:
        return say(missing=reason(error))
    names = [name for name in peer.attentions() if name not in asked["without"]]
    experts = getattr(peer.config, "_experts_implementation", None) or "a loop"
    library = f"transformers {peer.transformers.__version__}, torch {peer.torch.__version__}, experts by {experts}"
    say(library=library, layers=peer.layers, attentions=names)
    for index, point in asked["points"]:
        peer.measure(index, point, names)
        peer.go_on()
        say(done=index)


# ---- The table --------------------------------------------------------------------------------------------------------


class Table:
    def __init__(self, arguments):
        self.arguments = arguments
        self.end = time.monotonic() + arguments.seconds_max
        self.found = {}  # (layers, point, attention): {"seconds": ...} or {"trouble": ...}
        self.library = self.missing = None
        self.attentions = []
        self.layers = {}  # asked for: that fitted

    def run(self, layers, points):
        """Until all points have their rows, in as many processes as that takes."""
        left, without = list(enumerate(points)), []
        while left and not self.missing:
            if time.monotonic() < self.end:
                ended, attention = self.one_process(layers, left, without)
            if time.monotonic() >= self.end:
                ended, attention = f"more than {self.arguments.seconds_max:.0f} seconds in all", None
            # What crashed is not tried again with this model; where it is not known, nothing is.
            lost = [attention] if attention else self.attentions or ["transformers"]
            for _, point in left:
                for name in lost:
                    self.found.setdefault((layers, point, name), {"trouble": ended})
            if not attention:
                return
            without.append(attention)

    def one_process(self, layers, left, without):
        """Takes what is done from `left`. Returns how it ended, and which attention was at work."""
        words = [sys.executable, os.path.abspath(__file__), "--model-process", "--device", self.arguments.device]
        child = subprocess.Popen(
            words + ["--tiny"] * self.arguments.tiny, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"},
        )  # fmt: skip
        child.stdin.write(json.dumps({"layers": layers, "points": left, "without": without}))
        child.stdin.close()
        lines = queue.Queue()
        threading.Thread(target=self.read, args=(child.stdout, lines), daemon=True).start()
        attention, ended, points = None, None, dict(left)
        while True:
            try:
                line = lines.get(timeout=max(0, min(BEGIN_S, self.end - time.monotonic())))
            except queue.Empty:
                child.kill()
                ended = f"no answer for {BEGIN_S} seconds"
                break
            if line is None:
                break
            said = json.loads(line)
            if "missing" in said:
                ended = said["missing"]
                self.missing = None if self.library else ended
            elif "library" in said:
                self.library, self.layers[layers] = said["library"], said["layers"]
                self.attentions = list(dict.fromkeys(self.attentions + said["attentions"]))
            elif "begun" in said:
                attention = said["attention"]
            elif "point" in said:
                self.found[layers, points[said["point"]], said["attention"]] = said
                seconds = said.get("seconds")
                told = said.get("trouble") or f"{seconds * 1e3:.2f} ms"
                print(f"{layers} layers, {points[said['point']]}, {said['attention']}: {told}", file=sys.stderr, flush=True)
            elif "done" in said:
                left.pop(0)
                attention = None
        child.wait()
        return ended or f"its process ended with code {child.returncode}", attention

    @staticmethod
    def read(pipe, lines):
        for line in pipe:
            if line.startswith("{"):
                lines.put(line)
        lines.put(None)

    def rows(self, all_layers):
        """(work, sequences, tokens of each, attention, seconds or None, trouble, tokens done)."""
        rows = []
        for (layers, (work, sequences, tokens), attention), found in self.found.items():
            fitted = self.layers.get(layers, layers)
            name = f"{work}, layers: {layers}" if work == "training" else work
            if fitted != layers:
                name = f"{work}, {fitted} of {layers} layers"
            done = sequences * (1 if work == "decode" else tokens)
            rows.append((name, sequences, tokens, attention, found.get("seconds"), found.get("trouble"), done))
        one_and_two = {key: found["seconds"] for key, found in self.found.items() if "seconds" in found and key[1][0] == "training"}
        for (layers, point, attention), one in one_and_two.items():
            two = one_and_two.get((2, point, attention))
            if layers != 1 or two is None:
                continue
            _, sequences, tokens = point
            seconds = one + (all_layers - 1) * (two - one)
            trouble = None if seconds > 0 else "two layers took no longer than one"
            name = f"training, {all_layers} layers, extrapolated"
            rows.append((name, sequences, tokens, attention, None if trouble else seconds, trouble, sequences * tokens))
        order = ["decode", "prefill", "training"]
        return sorted(rows, key=lambda row: order.index(row[0].split(",")[0]))

    def print(self, ours, all_layers):
        print("\nOther implementations of the same shape, in the same run. ours/theirs is of tokens/s: above 1 ours is faster.\n")
        if self.library:
            differs = "dense bf16 weights, where ours sample with experts in MXFP4; static cache; layers recomputed in training"
            print(f"{self.library}; {differs}.\n")
        print("| work | sequences | tokens of each | attention | ms | tokens/s | ours/theirs |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        if self.missing:
            print(f"| all | | | transformers | not run: {self.missing.replace('|', '/')} | | |")
            return
        rows = self.rows(all_layers)
        refused = {}
        for name in self.attentions:
            troubles = {row[5] for row in rows if row[3] == name}
            if len(troubles) == 1 and None not in troubles:
                refused[name] = troubles.pop()
        for work, sequences, tokens, attention, seconds, trouble, done in rows:
            if attention in refused:
                continue
            if trouble:
                print(f"| {work} | {sequences} | {tokens} | {attention} | not run: {trouble.replace('|', '/')} | | |")
                continue
            rate = done / seconds
            mine = ours.get((work, sequences, tokens))
            ratio = f"{mine / rate:.2f}" if mine else ""
            print(f"| {work} | {sequences} | {tokens} | {attention} | {seconds * 1e3:.2f} | {rate:.0f} | {ratio} |")
        for name, trouble in refused.items():
            name = {"sdpa": "sdpa, so cuDNN's too"}.get(name, name)
            print(f"| all | | | {name} | not run: {trouble.replace('|', '/')} | | |")


def rows_of_ours(path):
    """Tokens a second by (work, sequences, tokens of each) of the rows that gpu_check printed."""
    ours = {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            try:
                work, sequences, tokens, _, rate, _ = cells
                ours[work, int(sequences), int(tokens)] = float(rate)
            except ValueError:  # a head, or what did not run
                continue
    return ours


def main():
    parser = argparse.ArgumentParser(description="Tokens a second of transformers' gpt-oss, beside gpu_check model.")
    parser.add_argument("--ours", help="the rows of gpu_check model of the same run")
    parser.add_argument("--seconds-max", type=float, default=560, help="what is under way after so long is ended")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of two narrow layers, to try the script out")
    parser.add_argument("--model-process", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.model_process:
        return model_process(arguments)
    ours = rows_of_ours(arguments.ours) if arguments.ours else {}
    table = Table(arguments)
    points = work_points(arguments.tiny)
    for layers, asked in points:
        table.run(layers, asked)
    table.print(ours, points[-1][0])


if __name__ == "__main__":
    main()
