#!/usr/bin/env python3
"""HTTP by grammar, valid and broken, against `rloss serve`, and loads against its planned memory.

    tests/faults/doors_http.py --count 50000 --loads 20    # so many requests, and so many drawn loads

The seed is printed; --seed takes it again. A valid request, however it is written (names in any case, spaces, chunks of
any size, extensions, trailers, any cut into packets), gets the answer of its plain form. A broken one gets the status
that its breach asks for, and never an answer. A request with a wrong token or host is refused before its body is sent.
Under every load the server's memory stays within the plan of `rloss check` and 64 MB, and it answers afterwards.
"""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from faults import HERE, Failed, options

RECIPE = HERE / "tiny.toml"
TOKEN = "secret"
NAME = "m"
MARGIN = 64 << 20
# A bound against hanging; nothing is timed.
HANG_S = 60
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODY_BYTES_MAX = 4 << 20


class Server:
    def __init__(self, binary, token, *more):
        environment = dict(os.environ, RUST_BACKTRACE="0")
        environment.pop("RLOSS_SERVE_TOKEN", None)
        if token:
            environment["RLOSS_SERVE_TOKEN"] = token
        command = [binary, "serve", RECIPE, "--port", "0", "--name", NAME, *more]
        self.token = token
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        for line in self.process.stderr:
            if found := re.search(r"at http://([^/]+)", line):
                self.host = found.group(1)
                break
        else:
            raise Failed("the server did not start")
        self.address = ("127.0.0.1", int(self.host.rsplit(":", 1)[1]))
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def connect(self):
        return socket.create_connection(self.address, timeout=HANG_S)

    def send(self, packets):
        """Sends a request; returns the status (0 if the connection was closed) and the body of the answer."""
        with self.connect() as stream:
            try:
                for packet in packets:
                    stream.sendall(packet)
            except OSError:
                pass  # It was answered before all of it was sent.
            return receive(stream)

    def headers(self):
        token = [("Authorization", f"Bearer {self.token}")] if self.token else []
        return [("Host", self.host), *token]

    def post(self, path, body):
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"POST {path} HTTP/1.1"] + [f"{name}: {value}" for name, value in self.headers()]
        head = "\r\n".join([*lines, f"Content-Length: {len(text)}", "", ""]).encode()
        return self.send([head, text])

    def memory(self, name="VmHWM"):
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(rf"{name}:\s+(\d+)", status).group(1)) << 10

    def check_alive(self):
        if self.process.poll() is not None:
            raise Failed(f"the server ended with {self.process.returncode}")
        status, _ = self.post(CHAT, chat(1))
        if status != 200:
            raise Failed(f"the server answers {status} afterwards")

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        if self.process.wait(HANG_S) != 0:
            raise Failed(f"the server ended with {self.process.returncode}")


def receive(stream):
    data = b""
    try:
        while piece := stream.recv(1 << 16):
            data += piece
    except ConnectionResetError:
        pass
    head, _, body = data.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n").partition(b"\r\n\r\n")
    found = re.match(rb"HTTP/1\.1 (\d+) ", head)
    if not found and head:
        raise Failed(f"this is no answer: {data[:200]}")
    return (int(found.group(1)) if found else 0), body


def chat(seed):
    return {"model": NAME, "messages": [{"role": "user", "content": "1+1"}], "seed": seed, "max_tokens": 4}


def answer(body):
    """What two answers to one request have in common."""
    value = json.loads(body)
    return value.get("choices", value.get("data"))


# The grammar. A request is its lines and its body, and how they are written.


def any_case(draw, name):
    return "".join(draw.choice([c.lower(), c.upper()]) for c in name)


def space(draw):
    return draw.choice(["", " ", "  ", "\t", " \t "])


def chunked(draw, body):
    """Writes a body in chunks."""
    out, at = b"", 0
    while at < len(body):
        size = draw.randint(1, draw.choice([1, 7, len(body)]))
        piece = body[at : at + size]
        digits = "0" * draw.choice([0, 0, 3]) + any_case(draw, f"{len(piece):x}")
        extension = draw.choice(["", "", ";a", ";a=b", ' ; a="b c"', ";a=b;c"])
        out += f"{digits}{extension}\r\n".encode() + piece + b"\r\n"
        at += len(piece)
    trailers = draw.choice(["", "", "A: b\r\n", "A: b\r\nX-Sum: 1\r\n"])
    return out + f"{draw.choice(['0', '000', '0;last'])}\r\n{trailers}\r\n".encode()


def packets(draw, data):
    """Cuts bytes into packets."""
    cuts = sorted(draw.randrange(len(data) + 1) for _ in range(draw.choice([0, 0, 1, 3, 8])))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)]) if a < b]


class Request:
    """A valid request. A breach changes its fields."""

    def __init__(self, draw, server, bodies):
        self.draw, self.server = draw, server
        self.path, self.body = draw.choice(bodies)
        self.method = "POST" if self.body is not None else "GET"
        self.version = draw.choice(["HTTP/1.1", "HTTP/1.1", "HTTP/1.0"])
        self.start = None
        self.headers = [(any_case(draw, name), value) for name, value in server.headers()]
        extra = [("Accept", "*/*"), ("User-Agent", "a/1 (b; c)"), ("X-Empty", ""), ("Content-Type", "text/odd"),
                 ("Origin", f"http://{server.host}"), ("X-Bytes", "\xe9\xff"), ("Connection", "keep-alive")]
        self.headers += draw.sample(extra, draw.randint(0, 4))
        self.lines = []
        self.sent = self.body or b""
        self.framing = []
        if self.body is not None:
            if self.version == "HTTP/1.1" and draw.random() < 0.5:
                self.framing, self.sent = [("Transfer-Encoding", "chunked")], chunked(draw, self.body)
            else:
                self.framing = [("Content-Length", "0" * draw.choice([0, 0, 2]) + str(len(self.body)))]
            if self.version == "HTTP/1.1" and draw.random() < 0.1:
                self.framing.append(("Expect", "100-continue"))
        draw.shuffle(self.headers)
        self.end = "\r\n"
        self.prefix = draw.choice(["", "", "", "\r\n"])
        self.tail = draw.choice([b"", b"", b"GET /health HTTP/1.1\r\n\r\n"])

    def data(self):
        start = self.start or f"{self.method} {self.path} {self.version}"
        fields = [*self.headers, *((any_case(self.draw, name), value) for name, value in self.framing)]
        lines = [f"{name}:{space(self.draw)}{value}{space(self.draw)}" for name, value in fields] + self.lines
        head = self.prefix + "".join(line + self.end for line in [start, *lines, ""])
        return head.encode("latin-1") + self.sent + self.tail

    def set(self, name, value):
        self.headers = [(n, v) for n, v in self.headers if n.lower() != name.lower()] + [(name, value)]

    def drop(self, name):
        self.headers = [(n, v) for n, v in self.headers if n.lower() != name.lower()]

    def in_chunks(self, data):
        self.version, self.framing, self.sent, self.tail = "HTTP/1.1", [("Transfer-Encoding", "chunked")], data, b""


def breach(draw, request):
    """Breaks a request in one way; returns its name and the statuses that are right."""
    r, has_body = request, request.body is not None
    control = chr(draw.choice([0, 1, 8, 11, 12, 14, 31, 127]))
    plain = r.body or b"{}"
    part = f"{len(plain):x}\r\n".encode() + plain + b"\r\n"

    def start(text):
        r.start = text

    def line(text):
        r.lines.insert(draw.randrange(len(r.lines) + 1), text)

    def twice(name, other=None):
        line(f"{any_case(draw, name)}: {other or dict((n.lower(), v) for n, v in r.headers).get(name.lower(), 'a')}")
        if other is None and not any(n.lower() == name.lower() for n, _ in r.headers):
            line(f"{name}: b")

    def length(text):
        r.framing = [("Content-Length", text)]

    def frame(*fields):
        r.version, r.framing = "HTTP/1.1", list(fields)

    both = [("Content-Length", str(len(plain))), ("Transfer-Encoding", "chunked")]
    other = draw.choice(["HTTP/2", "HTTP/0.9", "HTTP/1", "http/1.1", "HTTP/1.10", "HTTP/2.0", "HTTPS/1.1"])
    word = draw.choice(["a", "a b", "é".encode().decode("latin-1"), "1"])
    ways = [
        ("space before the colon", lambda: line(f"X-A{draw.choice([' ', chr(9)])}: b"), {400}),
        ("space before the colon of a length", lambda: line("Content-Length : 2"), {400}),
        ("folded line", lambda: line(f"X-A: b\r\n{draw.choice([' ', chr(9)])}c"), {400}),
        ("space before the first header", lambda: r.lines.insert(0, f"{draw.choice([' ', chr(9)])}X-A: b"), {400}),
        ("no colon", lambda: line(word), {400}),
        ("no name", lambda: line(": b"), {400}),
        ("wrong name", lambda: line(f"X{draw.choice('(),/;<=>?@[]{}')}A: b"), {400}),
        ("control character in a name", lambda: line(f"X{control}A: b"), {400}),
        ("control character in a value", lambda: line(f"X-A: b{control}c"), {400}),
        ("bare CR in a value", lambda: line("X-A: b\rc"), {400}),
        ("bare LF in a value", lambda: line("X-A: b\nX-C: d"), {400}),
        ("bare LF at every line's end", lambda: setattr(r, "end", "\n"), {400}),
        ("two hosts", lambda: twice("Host"), {400}),
        ("two origins", lambda: twice("Origin"), {400}),
        ("two tokens", lambda: (r.set("Authorization", "Bearer secret"), twice("Authorization")), {400}),
        ("two episodes", lambda: (line("X-Episode-Id: a"), line("x-episode-id: b")), {400}),
        ("no host", lambda: (r.drop("Host"), setattr(r, "version", "HTTP/1.1")), {400}),
        ("wrong host", lambda: r.set("Host", draw.choice(["a b", "a/b", "a\"b", "é".encode().decode("latin-1")])), {400}),
        ("two spaces", lambda: start(f"{r.method}  {r.path} {r.version}"), {400}),
        ("tab in the first line", lambda: start(f"{r.method}\t{r.path} {r.version}"), {400}),
        ("space after the version", lambda: start(f"{r.method} {r.path} {r.version} "), {400}),
        ("space before the method", lambda: start(f" {r.method} {r.path} {r.version}"), {400}),
        ("control character in the path", lambda: start(f"{r.method} {r.path}{control} {r.version}"), {400}),
        ("wrong method", lambda: start(f"P{draw.choice('(),/;<=>?@[]{}')}T {r.path} {r.version}"), {400}),
        ("relative path", lambda: start(f"{r.method} {r.path[1:]} {r.version}"), {400}),
        ("no version", lambda: start(f"{r.method} {r.path}"), {400}),
        ("other version", lambda: start(f"{r.method} {r.path} {other}"), {400}),
        ("two lengths", lambda: frame(*[("Content-Length", str(len(plain)))] * 2), {400}),
        ("two different lengths", lambda: frame(("Content-Length", "2"), ("Content-Length", "3")), {400}),
        ("list of lengths", lambda: length(f"{len(plain)}, {len(plain)}"), {400}),
        ("length that is no number", lambda: length(draw.choice(["", "+2", "-2", "0x2", "2.0", "1e1", "2 2", "٢"
                                                   .encode().decode("latin-1")])), {400}),
        ("huge length", lambda: length(draw.choice([str(BODY_BYTES_MAX + 1), "9" * 19, "9" * 40])), {413}),
        ("length and chunks", lambda: (r.in_chunks(part + b"0\r\n\r\n"), frame(*draw.sample(both, 2))), {400}),
        ("chunks twice", lambda: (r.in_chunks(part + b"0\r\n\r\n"), frame(both[1], both[1])), {400}),
        ("other encoding", lambda: frame(("Transfer-Encoding", draw.choice(["gzip", "gzip, chunked", "chunked, chunked",
                                         "identity", "", "chunked;a", "xchunked", "chunked\x0b"]))), {400}),
        ("chunks in HTTP/1.0", lambda: (r.in_chunks(part + b"0\r\n\r\n"), setattr(r, "version", "HTTP/1.0")), {400}),
        ("too many headers", lambda: [line("X-A: b") for _ in range(draw.choice([101, 400]))], {431}),
        ("long head", lambda: line("X-A: " + "b" * draw.choice([17 << 10, 60 << 10])), {431}),
    ]
    if has_body:
        digits = f"{len(plain):x}"
        bad = draw.choice([f"+{digits}", f"-{digits}", f" {digits}", f"{digits} ", f"0x{digits}", "", ";a", "g",
                           f"{digits};a\0", f"{digits};a\rb", f"1{'0' * 16}", f"{digits},", f"{digits}\t"]).encode()
        ways += [
            ("wrong length of a chunk", lambda: r.in_chunks(bad + b"\r\n" + plain + b"\r\n0\r\n\r\n"), {400}),
            ("length of the last chunk", lambda: r.in_chunks(part + draw.choice([b"-0", b"+0", b"0x0", b"00g"])
                                                              + b"\r\n\r\n"), {400}),
            ("chunk longer than its length", lambda: r.in_chunks(b"1\r\n" + plain + b"\r\n0\r\n\r\n"), {400}),
            ("chunk shorter than its length", lambda: r.in_chunks(f"{len(plain) + 1:x}\r\n".encode() + plain
                                                                   + b"\r\n0\r\n\r\n"), {400}),
            ("bare LF after a chunk's length", lambda: r.in_chunks(part.replace(b"\r\n", b"\n", 1) + b"0\r\n\r\n"), {400}),
            ("bare LF after a chunk", lambda: r.in_chunks(part[:-2] + b"\n0\r\n\r\n"), {400}),
            ("wrong trailer", lambda: r.in_chunks(part + b"0\r\n" + draw.choice([b"A : b", b"A", b" A: b", b"A: b\0"])
                                                   + b"\r\n\r\n"), {400}),
            ("huge chunk", lambda: r.in_chunks(f"{BODY_BYTES_MAX + 1:x}\r\n".encode() + plain), {413}),
        ]
    else:
        ways += [("body of a GET", lambda: (frame(("Content-Length", "2")), setattr(r, "sent", b"{}")), {400})]
    name, way, statuses = draw.choice(ways)
    way()
    return name, statuses


def grammar(draw, server, count, log):
    models = ("/v1/models", None)
    bodies = [models, ("/health", None), *((CHAT, json.dumps(chat(seed)).encode()) for seed in range(4))]
    expected = {}
    for path, body in bodies:
        if body is None:
            status, plain = server.send([Request.data(Plain(server, path))])
        else:
            status, plain = server.post(path, body)
        if status != 200:
            raise Failed(f"{path} answers {status}: {plain[:200]}")
        expected[path, body] = answer(plain) if plain else plain
    found = {}
    for number in range(count):
        request = Request(draw, server, bodies)
        kind = draw.choice(["valid", "broken", "foreign"])
        name, statuses = kind, {200}
        if kind == "broken":
            name, statuses = breach(draw, request)
        elif kind == "foreign":
            # Only the head is sent: the answer must not wait for the body.
            name, statuses = foreign(draw, request)
        data = request.data()
        if kind == "foreign":
            data = data[: data.index(b"\r\n\r\n", 2) + 4]
        status, body = server.send(packets(draw, data))
        if status not in statuses:
            raise Failed(f"request {number}, {name}: {status}, not {statuses}\n{data[:2000]}\n{body[:300]}")
        if kind == "valid" and (answer(body) if body else body) != expected[request.path, request.body]:
            raise Failed(f"request {number}: another answer\n{data[:2000]}\n{body[:300]}")
        found[name] = found.get(name, 0) + 1
        if number % 1000 == 999:
            log(f"{number + 1} requests")
    server.check_alive()
    return f"{count} requests of {len(found)} kinds, {found.get('valid', 0)} valid: every status and answer is right"


class Plain:
    """The plain form of a GET."""

    def __init__(self, server, path):
        self.draw, self.start, self.headers, self.framing = random.Random(0), f"GET {path} HTTP/1.1", server.headers(), []
        self.lines, self.prefix, self.end, self.sent, self.tail = [], "", "\r\n", b"", b""


def foreign(draw, request):
    """Makes a valid request one of another site, or of someone without the token."""
    ways = [
        ("other host", lambda: request.set("Host", draw.choice(["example.org", "127.0.0.1", "localhost:1", ""])), {403}),
        ("other origin", lambda: request.set("Origin", draw.choice(["http://example.org", "null", "https://localhost"])), {403}),
    ]
    if request.server.token and request.path != "/health":
        wrong = ["Bearer wrong", "Bearer ", "Bearer secret2", f"Basic {TOKEN}", TOKEN, "", f"bearer {TOKEN}x"]
        ways += [("no token", lambda: request.drop("Authorization"), {401})] * 2
        ways += [("wrong token", lambda: request.set("Authorization", draw.choice(wrong)), {401})] * 2
    name, way, statuses = draw.choice(ways)
    way()
    return name, statuses


# Loads. Each returns functions that clients run at the same time.


def request_bytes(server, body, path=CHAT, token=True):
    lines = [f"POST {path} HTTP/1.1"] + [f"{n}: {v}" for n, v in server.headers() if token or n == "Host"]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


def fill(begin, unit, end, size=BODY_BYTES_MAX):
    return (begin + unit * ((size - len(begin) - len(end)) // len(unit)) + end).encode()


def in_chat(unit, last="0"):
    return fill(f'{{"model":"{NAME}","messages":[', unit, last + "]}")


UNITS = ['{"":0},', "[0],", "[[]],", "{},", "0,", '"",', '"a",', '{"a":{}},', '{"a":[{"b":[]}]},', "-1e9,", "null,",
         '{"role":"user","content":"1"},', '{"role":"user","content":[{"type":"text","text":"1"}]},']


def ask(server, data):
    def client():
        stream = server.connect()
        try:
            stream.sendall(data)
        except OSError:
            pass
        status, _ = receive(stream)
        stream.close()
        return status

    return client


def held(server, data, seconds):
    """Sends what it can, and keeps the connection open."""

    def client():
        with server.connect() as stream:
            stream.settimeout(seconds)
            try:
                stream.sendall(data)
                time.sleep(seconds)
            except OSError:
                pass
        return None

    return client


def slow(server, data, pieces, seconds):
    def client():
        with server.connect() as stream:
            try:
                for number in range(pieces):
                    stream.sendall(data[number * len(data) // pieces : (number + 1) * len(data) // pieces])
                    time.sleep(seconds / pieces)
            except OSError:
                pass
            return receive(stream)[0]

    return client


def many_scores(server, draw):
    """Answers with many log-probabilities: far larger than their requests."""
    body = {"model": NAME, "prompt": ["1"] * draw.choice([1, 4]), "n": 8, "max_tokens": draw.choice([8, 64]), "logprobs": 20,
            "ignore_eos": True}
    return request_bytes(server, json.dumps(body).encode(), TEXT)


def long_text(server, draw):
    unit = draw.choice(["a", "1+1 ", "\\u0000", "\\n", "é", '\\"'])
    return request_bytes(server, fill(f'{{"model":"{NAME}","messages":[{{"role":"user","content":"', unit, '"}]}'))


def tools(server, draw):
    unit = '{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{"a":{}}}}},'
    tool = unit[:-1]
    begin = f'{{"model":"{NAME}","messages":[{{"role":"user","content":"1"}}],"tools":['
    return request_bytes(server, fill(begin, unit, tool + "]}", draw.choice([100_000, 1 << 20, BODY_BYTES_MAX])))


def fixed_loads(server):
    """The loads that once took gigabytes, and their kin."""
    objects = request_bytes(server, in_chat('{"":0},'))
    stolen = request_bytes(server, b"x" * BODY_BYTES_MAX, token=False)
    yield "24 clients with small objects", [ask(server, objects)] * 24
    yield "150 clients without a token", [held(server, stolen, 1)] * 150
    yield "40 slow clients", [slow(server, objects, 20, 1)] * 40
    yield "300 half heads", [held(server, objects[:40], 1)] * 300


def drawn_load(server, draw):
    clients, names = [], []
    for _ in range(draw.choice([1, 2])):
        kind = draw.choice(["values", "values", "text", "tools", "scores", "ids", "slow", "half", "stolen"])
        count = draw.choice([8, 24, 64])
        names.append(f"{count} {kind}")
        unit = draw.choice(UNITS)
        data = {
            "values": lambda: request_bytes(server, fill(f'{{"model":"{NAME}","messages":[', unit, "0]}",
                                                         draw.choice([100_000, 400_000, BODY_BYTES_MAX]))),
            "text": lambda: long_text(server, draw),
            "tools": lambda: tools(server, draw),
            "scores": lambda: many_scores(server, draw),
            "ids": lambda: request_bytes(server, fill(f'{{"model":"{NAME}","prompt":[', draw.choice(["1,", "[1],", "[1,2],"]),
                                                      "1]}", draw.choice([100_000, 400_000, BODY_BYTES_MAX])), TEXT),
            "slow": lambda: request_bytes(server, in_chat(unit)),
            "half": lambda: request_bytes(server, in_chat(unit))[: draw.choice([20, 1 << 20, 3 << 20])],
            "stolen": lambda: request_bytes(server, in_chat(unit), token=False),
        }[kind]()
        if kind == "slow":
            clients += [slow(server, data, 10, 2)] * count
        elif kind in ("half", "stolen"):
            clients += [held(server, data, 2)] * count
        else:
            clients += [ask(server, data)] * count
    draw.shuffle(clients)
    return ", ".join(names), clients


def planned(binary):
    said = subprocess.run([binary, "check", RECIPE], capture_output=True, text=True, check=True).stdout
    return int(float(re.search(r"`rloss serve`: ([\d.]+) GB", said).group(1)) * 1e9)


def run_load(server, name, clients, limit, log):
    statuses = []
    threads = [threading.Thread(target=lambda c=client: statuses.append(c())) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * HANG_S)
        if thread.is_alive():
            raise Failed(f"{name}: a client hangs")
    server.check_alive()
    counts = {status: statuses.count(status) for status in sorted(set(statuses), key=str)}
    peak, now = server.memory(), server.memory("VmRSS")
    log(f"{name}: {counts}, peak {peak / 1e6:.0f} MB, now {now / 1e6:.0f} MB")
    if peak > limit:
        raise Failed(f"{name}: the peak is {peak / 1e6:.0f} MB, more than {limit / 1e6:.0f}")
    return peak


def loads(draw, server, count, limit, log):
    before, peaks = server.memory("VmRSS"), []
    for name, clients in [*fixed_loads(server), *(drawn_load(server, draw) for _ in range(count))]:
        peaks.append(run_load(server, name, clients, limit, log))
    after = server.memory("VmRSS")
    return (f"{len(peaks)} loads: {before / 1e6:.0f} MB before, peak {max(peaks) / 1e6:.0f} MB, {after / 1e6:.0f} MB after; "
            f"the plan allows {(limit - MARGIN) / 1e6:.0f} MB and {MARGIN / 1e6:.0f} more")


def main():
    parser = options(__doc__, 600, "requests by grammar")
    parser.add_argument("--loads", type=int, default=0, help="drawn loads")
    arguments = parser.parse_args()
    seed, binary = arguments.seed, arguments.binary.resolve()
    print(f"seed {seed}", flush=True)
    draw, begun = random.Random(seed), time.monotonic()
    limit = planned(binary) + MARGIN

    def log(line):
        print(f"  {time.monotonic() - begun:6.1f} s  {line}", flush=True)

    for token in (None, TOKEN):
        server = Server(binary, token)
        try:
            print(grammar(draw, server, arguments.count // 2, log))
            print(loads(draw, server, arguments.loads, limit, log))
            server.stop()
        except Failed as failure:
            print(f"FAILED (seed {seed}): {failure}")
            return 1
        finally:
            server.process.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main())
