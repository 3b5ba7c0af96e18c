#!/usr/bin/env python3
"""Records what the Tinker SDK sends to `rloss serve --train`, and the answers, as tests/fixtures/tinker.jsonl.

    scripts/record_tinker.py --rloss PATH [--out FILE]

Needs the package tinker 0.38.0. The SDK talks to a proxy, which notes each request once its answer is there.
"""

import argparse
import base64
import http.client
import http.server
import json
import os
import re
import subprocess
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rloss", required=True)
    parser.add_argument("--out", type=Path, default=ROOT / "tests/fixtures/tinker.jsonl")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as store:
        command = [args.rloss, "serve", "quickstart", "--port", "0", "--name", "tiny", "--train", "--store", store]
        server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            address = next(found[1] for line in server.stderr if (found := re.search(r"at http://(\S+)/v1", line)))
            threading.Thread(target=server.stderr.read, daemon=True).start()
            port = proxy(address, rows).server_address[1]
            os.environ.update(
                TINKER_BASE_URL=f"http://127.0.0.1:{port}", TINKER_API_KEY="tml-x", TINKER_TELEMETRY="0"
            )
            import tinker
            from tinker import types

            session(types, tinker)
        finally:
            server.kill()
    args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} requests")


if __name__ == "__main__":
    main()
