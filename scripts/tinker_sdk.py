#!/usr/bin/env python3
"""The unmodified Tinker packages against `rloss serve --train`: a home for recipes, checks, a recording.

    scripts/tinker_sdk.py home HOME [--name Qwen/Qwen3-4B-Instruct-2507] [--seed N]
    scripts/tinker_sdk.py check RLOSS [--out FOLDER]
    scripts/tinker_sdk.py kills RLOSS [--kills 25] [--steps 120] [--seed N]
    scripts/tinker_sdk.py record RLOSS [--out FILE]

`home` makes a folder in which the Tinker cookbook runs without a hub: a tiny random Qwen3 and two toy data
sets. The cookbook finds renderer and tokenizer by the model's name, and transformers and datasets take a
relative folder of that name before the hub. Run the recipes in HOME. Where tinker-cookbook is installed, the
chats have its prompt. Needs numpy and tokenizers.

`check` runs the SDK's verbs, then the cookbook's SFT and RL, in a fresh home, without a hub. Takes minutes;
exit code 1 and a traceback when something is wrong. Needs tinker 0.38.0 and tinker-cookbook 0.6.1.

`kills` kills the server and its client at random moments; the loop must end with the same bits. The client
samples with a seed per step and sample, reinforces, and saves its state after every second step; started
again, it goes on from the last path that a save answered. `--kills` is the number of kills of the server, and
of the client. Exit code 1 when a run ends with other log-probs than one that nobody killed. Needs tinker
0.38.0.

`record` writes what the SDK sends, and the answers, as tests/fixtures/tinker.jsonl. The SDK talks to a proxy,
which notes each request once its answer is there. Needs tinker 0.38.0.
"""

import argparse
import base64
import http.client
import http.server
import importlib.util
import json
import os
import random
import re
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAME = "Qwen/Qwen3-4B-Instruct-2507"


def serve(rloss, model, store, *options, name="tiny", port=0):
    """Starts a server that trains. Returns its process and its host and port."""
    command = [rloss, "serve", model, "--name", name, "--port", str(port), "--train", "--store", store, *options]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    address = next(found[1] for line in server.stderr if (found := re.search(r"at http://(\S+)/v1", line)))
    threading.Thread(target=server.stderr.read, daemon=True).start()
    return server, address


def variables(address):
    """Returns the environment in which the SDK talks to `address`."""
    return {"TINKER_BASE_URL": f"http://{address}", "TINKER_API_KEY": "tml-x", "TINKER_TELEMETRY": "0"}


# ---- home -------------------------------------------------------------------------------------------------------------

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
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

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
    import numpy as np

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


def make_home(home: Path, name: str, seed: int) -> None:
    # The prompt of the cookbook's recipe for GSM8K, so that the SFT warm-up teaches what RL asks.
    suffix, shots = "", []
    if importlib.util.find_spec("tinker_cookbook"):
        from tinker_cookbook.recipes.math_rl.math_env import MathEnv

        suffix, shots = MathEnv.question_suffix(), MathEnv.standard_fewshot_prefix()
    rng = random.Random(seed)
    chats = []
    for index in range(2048):
        answer = {"role": "assistant", "content": "\\boxed{%d}" % rng.randint(1, 5)}
        messages = [*shots, {"role": "user", "content": question(index) + suffix}, answer]
        row = {"prompt": question(index), "prompt_id": str(index), "category": "toy", "messages": messages}
        chats.append(row)
    problems = [{"question": question(index), "answer": "It has four.\n#### 4"} for index in range(64)]
    folder = home / name
    folder.mkdir(parents=True, exist_ok=True)
    texts = [message["content"] for row in chats[:64] for message in row["messages"]]
    vocabulary = write_tokenizer(folder, texts + ["user\nassistant\nsystem\n"] * 8)
    write_model(folder, vocabulary, seed)
    write_data(home / "HuggingFaceH4/no_robots", {"train": chats, "test": chats[:32]}, "default")
    write_data(home / "openai/gsm8k", {"train": problems, "test": problems[:16]}, "main")
    print(folder)


# ---- check ------------------------------------------------------------------------------------------------------------


def verbs(tinker, types):
    """The SDK alone: learns one sentence, samples it, saves, loads."""
    service = tinker.ServiceClient()
    model = service.create_lora_training_client(base_model=NAME, rank=8, seed=1).result()
    tokenizer = model.get_tokenizer()
    tokens = tokenizer.encode("How many legs has a dog? \\boxed{4}") + [tokenizer.eos_token_id]
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
    losses = []
    for _ in range(30):
        passed = model.forward_backward([datum], "cross_entropy")
        stepped = model.optim_step(types.AdamParams(learning_rate=1e-2))
        losses.append(passed.result().metrics["loss:sum"])
        stepped.result()
    assert losses[-1] < 0.1 * losses[0], losses
    sampler = model.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(tokens[:6])
    sampled = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=32, temperature=0.0)).result().sequences[0]
    assert tokens[6:] == list(sampled.tokens), tokenizer.decode(sampled.tokens)
    forward = model.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    assert list(forward[5:]) == list(sampled.logprobs), "a sample's bits are those of the forward pass"
    state = model.save_state("done").result().path
    again = service.create_training_client_from_state_with_optimizer(state).result()
    assert list(again.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data) == list(forward)


def recipe(name, home, log, **options):
    """Runs a recipe of the cookbook; returns the last value of each metric."""
    words = [f"{key}={value}" for key, value in options.items()]
    command = [sys.executable, "-m", f"tinker_cookbook.recipes.{name}", f"model_name={NAME}", f"log_path={log}", *words]
    subprocess.run(command, cwd=home, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    return {key: value for row in rows for key, value in row.items()}


def check(args) -> None:
    out = (args.out or Path(tempfile.mkdtemp())).resolve()
    home = out / "home"
    subprocess.run([sys.executable, __file__, "home", home], check=True)
    server, address = serve(args.rloss.resolve(), home / NAME, out / "store", name=NAME)
    try:
        os.environ.update(variables(address), HF_HUB_OFFLINE="1")
        import tinker
        from tinker import types

        os.chdir(home)
        verbs(tinker, types)
        print("verbs ok", flush=True)
        warm = recipe(
            "sl_loop", home, out / "sl", batch_size=16, learning_rate=5e-3, lora_rank=16, max_steps=125,
            train_on_what="last_assistant_message",
        )
        assert warm["train_mean_nll"] < 0.4, warm
        print("sl_loop ok:", warm["train_mean_nll"], flush=True)
        # RL goes on from the weights that SFT saved.
        last = json.loads((out / "sl/checkpoints.jsonl").read_text().splitlines()[-1])
        (out / "rl").mkdir()
        (out / "rl/checkpoints.jsonl").write_text(json.dumps(last | {"batch": 0}) + "\n")
        reached = recipe(
            "rl_loop", home, out / "rl", batch_size=4, group_size=8, learning_rate=2e-3, max_tokens=12, max_steps=12,
            loss_fn="importance_sampling",
        )
        assert reached["reward/total"] > 0.6, reached
        print("rl_loop ok:", reached["reward/total"])
    finally:
        server.kill()


# ---- kills ------------------------------------------------------------------------------------------------------------

PROMPT = [5, 6, 7]


def client(folder: Path, steps: int) -> None:
    """One client: trains from the last saved state to the end, and writes the last log-probs."""
    import tinker
    from tinker import types

    service, state = tinker.ServiceClient(), folder / "state.json"
    if state.is_file():
        saved = json.loads(state.read_text())
        first, model = saved["step"], service.create_training_client_from_state_with_optimizer(saved["path"]).result()
    else:
        first, model = 0, service.create_lora_training_client(base_model="tiny", rank=4, seed=1).result()
    prompt = types.ModelInput.from_ints(PROMPT)
    for step in range(first, steps):
        sampler = model.save_weights_and_get_sampling_client().result()
        data = []
        for number in range(4):
            parameters = types.SamplingParams(max_tokens=8, seed=100 * step + number, stop=[])
            sampled = sampler.sample(prompt, 1, parameters).result().sequences[0]
            tokens = PROMPT + list(sampled.tokens)
            zeros, reward = [0.0] * (len(PROMPT) - 1), float(sum(sampled.tokens) % 3 - 1)
            inputs = {
                "target_tokens": tokens[1:],
                "logprobs": zeros + list(sampled.logprobs),
                "advantages": zeros + [reward] * len(sampled.tokens),
            }
            data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
        passed = model.forward_backward(data, "importance_sampling")
        model.optim_step(types.AdamParams(learning_rate=5e-3)).result()
        passed.result()
        if step % 2 == 1:
            path = model.save_state(f"step-{step}", overwrite=True).result().path
            part = folder / "state.part"
            part.write_text(json.dumps({"step": step + 1, "path": path}))
            part.rename(state)
    tokens = PROMPT + list(range(20, 40))
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
    last = model.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    (folder / "end.json").write_text(json.dumps(list(last)))


class Run:
    """A server and a client, each started again whenever it is gone."""

    def __init__(self, rloss: Path, folder: Path, steps: int):
        self.rloss, self.folder, self.steps, self.port = rloss, folder, steps, 0
        self.server = self.client = None
        folder.mkdir()

    def start(self):
        if self.server is None or self.server.poll() is not None:
            store = self.folder / "store"
            self.server, address = serve(self.rloss, "quickstart", store, "--adapters", "64", port=self.port)
            self.port = int(address.rpartition(":")[2])
        if self.client is None or self.client.poll() is not None:
            command = [sys.executable, __file__, "client", "--folder", self.folder, "--steps", str(self.steps)]
            environment = os.environ | variables(f"127.0.0.1:{self.port}")
            quiet = subprocess.DEVNULL
            self.client = subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet)

    def kill(self, process):
        process.send_signal(signal.SIGKILL)
        process.wait()

    def end(self):
        for process in (self.client, self.server):
            if process is not None and process.poll() is None:
                self.kill(process)

    def result(self):
        """Waits for the end; a client that the server's restart ended is started again."""
        until = time.monotonic() + 600
        while not (self.folder / "end.json").is_file():
            if time.monotonic() > until:
                raise SystemExit("the loop does not end")
            self.start()
            time.sleep(0.2)
        self.client.wait()
        return json.loads((self.folder / "end.json").read_text())


def kills(args) -> None:
    rng, out = random.Random(args.seed), Path(tempfile.mkdtemp())
    calm = Run(args.rloss.resolve(), out / "calm", args.steps)
    calm.start()
    begun = time.monotonic()
    expected = calm.result()
    seconds = time.monotonic() - begun
    calm.end()
    print(f"undisturbed: {seconds:.0f} s", flush=True)
    killed = {"server": 0, "client": 0}
    rounds = 0
    while min(killed.values()) < args.kills:
        run = Run(args.rloss.resolve(), out / f"round-{rounds}", args.steps)
        rounds += 1
        run.start()
        while not (run.folder / "end.json").is_file() and min(killed.values()) < args.kills:
            time.sleep(rng.uniform(1.0, 1.0 + seconds / 8))
            target = min(killed, key=killed.get)
            process = getattr(run, target)
            if process.poll() is None:
                run.kill(process)
                killed[target] += 1
            if target == "server" and run.client.poll() is None:
                # The SDK waits five minutes for a server; its requests are unknown to the next one.
                run.kill(run.client)
            run.start()
        found = run.result()
        run.end()
        if found != expected:
            raise SystemExit(f"round {rounds}: other log-probs after {killed}")
        print(f"round {rounds} ends ==; so far {killed}", flush=True)


# ---- record -----------------------------------------------------------------------------------------------------------

QUIET = ("session_heartbeat", "telemetry", "healthz")


def proxy(address: str, rows: list):
    """Returns a server that passes requests on, and notes them in the order of their answers."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            connection = http.client.HTTPConnection(address)
            names = ("X-API-Key", "Content-Type", "Accept")
            headers = {name: self.headers[name] for name in names if self.headers[name]}
            connection.request(self.command, self.path, body, headers)
            response = connection.getresponse()
            answer = response.read()
            kind = response.headers["Content-Type"]
            if response.status != 408 and not self.path.endswith(QUIET):
                encode = lambda data: base64.b64encode(data).decode()
                rows.append({
                    "method": self.command, "path": self.path, "body": encode(body), "status": response.status,
                    "content_type": kind, "answer": encode(answer),
                })
            self.send_response(response.status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST = do_DELETE = answer

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def session(types, tinker):
    """One client's session: all verbs, each awaited before the next, so that the order is one."""
    service = tinker.ServiceClient()
    model = service.create_lora_training_client(base_model="tiny", rank=4, seed=1).result()
    model.get_info()
    tokens = [5, 6, 7, 8, 9, 10]
    data = lambda **inputs: types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], **inputs},
    )
    for _ in range(3):
        model.forward_backward([data(weights=[0.0, 1.0, 1.0, 0.5, -0.5])] * 2, "cross_entropy").result()
        model.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    inputs = {"logprobs": [-5.0] * 5, "advantages": [1.0] * 5}
    for loss in ("importance_sampling", "ppo", "cispo", "dro"):
        model.forward_backward([data(**inputs)], loss).result()
    model.forward([data(weights=[1.0] * 5)], "cross_entropy").result()
    state = model.save_state("state").result().path
    sampler = model.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(tokens)
    sampler.sample(prompt, 2, types.SamplingParams(max_tokens=4, seed=3)).result()
    sampler.compute_logprobs(prompt).result()
    path = model.save_weights_for_sampler("sampler").result().path
    service.create_sampling_client(model_path=path).result()
    service.create_training_client_from_state_with_optimizer(state).result()
    service.close("success").result()


def record(args) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as store:
        server, address = serve(args.rloss, "quickstart", store)
        try:
            port = proxy(address, rows).server_address[1]
            os.environ.update(variables(f"127.0.0.1:{port}"))
            import tinker
            from tinker import types

            session(types, tinker)
        finally:
            server.kill()
    args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} requests")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("home")
    command.set_defaults(run=lambda args: make_home(args.home, args.name, args.seed))
    command.add_argument("home", type=Path)
    command.add_argument("--name", default=NAME)
    command.add_argument("--seed", type=int, default=0)
    command = commands.add_parser("check")
    command.set_defaults(run=check)
    command.add_argument("rloss", type=Path)
    command.add_argument("--out", type=Path)
    command = commands.add_parser("kills")
    command.set_defaults(run=kills)
    command.add_argument("rloss", type=Path)
    command.add_argument("--kills", type=int, default=25)
    command.add_argument("--steps", type=int, default=120)
    command.add_argument("--seed", type=int, default=0)
    # What `kills` starts.
    command = commands.add_parser("client")
    command.set_defaults(run=lambda args: client(args.folder, args.steps))
    command.add_argument("--folder", type=Path)
    command.add_argument("--steps", type=int)
    command = commands.add_parser("record")
    command.set_defaults(run=record)
    command.add_argument("rloss", type=Path)
    command.add_argument("--out", type=Path, default=ROOT / "tests/fixtures/tinker.jsonl")
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
