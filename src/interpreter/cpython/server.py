"""The fork server. It starts a process for each snippet. The process reads code and writes output through its own pipes.

The server never holds code or output: it receives the pipes' descriptors and hands them to the child that it forks.
Its own orders (five bytes: a letter and a number) come over descriptor 3, from a parent that it trusts.
"""

import sys

sys.path[:] = [folder for folder in sys.path if folder]

import ast
import ctypes
import gc
import importlib
import json
import linecache
import io
import os
import random
import resource
import signal
import socket
import struct
import traceback
import types

CONTROL = 3
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 1, 4, 22, 2
CLONE_NEWNS, MS_NOSUID, MS_NODEV, MS_NOEXEC = 0x20000, 2, 4, 8
LANDLOCK_RESTRICT_SELF = 446
# The byte that the parent reads after each call. Must be equal to those in snippet.rs.
ANSWERED, RAISED, MEMORY = b"A", b"R", b"M"
# Exit codes of a child that cannot report anything else.
SETUP_FAILED, OUT_OF_MEMORY = 71, 72
FRAMES_MAX = 8

libc = ctypes.CDLL(None, use_errno=True)


def read_exactly(descriptor, length):
    parts = []
    while length > 0:
        part = os.read(descriptor, min(length, 1 << 20))
        if not part:
            return None
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def read_frame(descriptor):
    length = read_exactly(descriptor, 4)
    return None if length is None else read_exactly(descriptor, int.from_bytes(length, "little"))


def write_frame(descriptor, payload):
    data = len(payload).to_bytes(4, "little") + payload
    while data:
        data = data[os.write(descriptor, data):]


class Filter:
    """A seccomp filter that is ready to be applied. The arrays must stay alive."""

    def __init__(self, instructions):
        self.instructions = ctypes.create_string_buffer(instructions, len(instructions))
        address = ctypes.addressof(self.instructions)
        self.program = ctypes.create_string_buffer(struct.pack("@HP", len(instructions) // 8, address))

    def apply(self):
        arguments = [ctypes.c_ulong(SECCOMP_MODE_FILTER), ctypes.c_ulong(ctypes.addressof(self.program))]
        return libc.prctl(PR_SET_SECCOMP, *arguments) == 0


class Output(io.TextIOWrapper):
    """Standard output and error. Remembers whether the last line is incomplete."""

    in_line = False

    def write(self, text):
        written = super().write(text)
        if text:
            self.in_line = not text.endswith("\n")
        return written

    def line(self, text):
        self.write("\n" + text if self.in_line else text)

    def end_call(self):
        self.flush()
        self.in_line = False


def standard_output():
    raw = io.FileIO(1, "w", closefd=False)
    buffered = io.BufferedWriter(raw, 1 << 16)
    return Output(buffered, encoding="utf-8", errors="backslashreplace", newline="\n")


class Snippets:
    """The code of one trajectory, or of one call: its names, and the text of its exceptions."""

    def __init__(self, paths):
        self.module = types.ModuleType("__main__")
        self.module.__builtins__ = __builtins__
        sys.modules["__main__"] = self.module
        self.paths = paths
        self.count = 0

    def run(self, code, output):
        self.count += 1
        name = "<snippet>" if self.count == 1 else f"<snippet {self.count}>"
        linecache.cache[name] = (len(code), None, code.splitlines(True), name)
        try:
            body, last = self.compiled(code, name)
        except MemoryError:
            output.line("SyntaxError: the code is nested too deeply")
            return RAISED
        except BaseException as error:
            return self.explain(error, output)
        try:
            exec(body, self.module.__dict__)
            value = None if last is None else eval(last, self.module.__dict__)
            if value is not None:
                output.line(repr(value))
            return ANSWERED
        except MemoryError as error:
            if type(error) is MemoryError and error.args:
                return self.explain(error, output)
            return MEMORY
        except BaseException as error:
            return self.explain(error, output)

    @staticmethod
    def compiled(code, name):
        """Returns two code objects: the statements, and the last one if it is an expression, whose value is shown."""
        tree = ast.parse(code, name)
        last = None
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last = compile(ast.Expression(tree.body.pop().value), name, "eval", dont_inherit=True)
        return compile(tree, name, "exec", dont_inherit=True), last

    def explain(self, error, output):
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return ANSWERED
        told = traceback.TracebackException.from_exception(error, limit=-200)
        frames = [frame for frame in told.stack if frame.filename.startswith("<snippet")]
        if len(frames) > FRAMES_MAX:
            frames = frames[: FRAMES_MAX // 2] + frames[-FRAMES_MAX // 2 :]
        told.stack = traceback.StackSummary.from_list(frames)
        text = "".join(told.format(chain=False)).rstrip("\n")
        for path in self.paths:
            text = text.replace(path + "/", "")
        output.line(text)
        return RAISED


def serve_snippets(code_from, result_to, paths, keep):
    snippets = Snippets(paths)
    sys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = output = standard_output()
    while True:
        code = read_frame(code_from)
        if code is None:
            os._exit(0)
        try:
            verdict = snippets.run(code.decode("utf-8", "replace"), output)
            # The code may have replaced these streams.
            sys.stdout = sys.stderr = output
            output.end_call()
        except MemoryError:
            if not keep:
                os._exit(OUT_OF_MEMORY)
            verdict = MEMORY
        os.write(result_to, verdict)
        if not keep:
            os._exit(0)


def take_scratch(scratch):
    """Mounts a file system for this process. Afterwards nothing else can be mounted, and files can be written only there."""
    place = scratch["place"].encode()
    options = "size={bytes},nr_inodes={inodes},mode=700".format(**scratch).encode()
    flags = ctypes.c_ulong(MS_NOSUID | MS_NODEV | MS_NOEXEC)
    if libc.unshare(CLONE_NEWNS) or libc.mount(b"scratch", place, b"tmpfs", flags, options):
        return False
    os.chdir(place)
    # Version 3 of capset(2). Removes all capabilities, including the ambient ones.
    if libc.capset(struct.pack("=II", 0x20080522, 0), bytes(24)):
        return False
    if libc.syscall(ctypes.c_long(LANDLOCK_RESTRICT_SELF), ctypes.c_long(scratch["rules"]), ctypes.c_long(0)):
        return False
    os.close(scratch["rules"])
    os.environ["TMPDIR"] = scratch["place"]
    try:
        os.open("/", os.O_RDONLY)
    except PermissionError:
        return True
    return False


def become_snippet(control, descriptors, server_id, setup, snippet_filter, memory_limit):
    """Runs a child process from its start to its end."""
    try:
        control.close()
        os.setsid()
        libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
        # The server may have died before this process requested the signal.
        if os.getppid() != server_id:
            os._exit(SETUP_FAILED)
        code_from, output_to, result_to = descriptors
        # Opens /dev/null for this process alone. A file that processes share has shared flags and a shared
        # offset, which could pass messages between trajectories.
        null = os.open("/dev/null", os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(output_to, 1)
        os.dup2(output_to, 2)
        os.close(output_to)
        if setup["scratch"] and not take_scratch(setup["scratch"]):
            os._exit(SETUP_FAILED)
        resource.setrlimit(resource.RLIMIT_AS, (memory_limit, memory_limit))
        if not snippet_filter.apply() and not setup["dangerously_allow_unsandboxed"]:
            os._exit(SETUP_FAILED)
        gc.enable()
        # Python seeds this generator again after each fork.
        random.seed(0)
        serve_snippets(code_from, result_to, setup["paths"], setup["keep"])
    finally:
        # Execution must not return to the server's loop.
        os._exit(SETUP_FAILED)


def prepare(setup):
    """Imports the modules that snippets then need not load again. Returns an error message if an import fails."""
    for name in setup["preload"]:
        try:
            importlib.import_module(name)
        except Exception as error:
            return f"`interpreter.preload`: {name} cannot be imported: {type(error).__name__}: {error}"
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(0)
    libc.prctl(PR_SET_DUMPABLE, ctypes.c_ulong(0))
    # Loaded objects stay in memory that the children share. Without a freeze, the garbage collector of a child
    # would write to all of this memory, and the kernel would copy it.
    gc.collect()
    gc.disable()
    gc.freeze()
    return None


def main():
    control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fileno=CONTROL)
    setup = json.loads(read_frame(CONTROL))
    refused = prepare(setup)
    answer = {"Refused": refused} if refused else {"Ready": f"CPython {sys.version.split()[0]}"}
    write_frame(CONTROL, json.dumps(answer).encode())
    memory_limit = read_frame(CONTROL)
    if memory_limit is None:
        os._exit(0)
    memory_limit = int.from_bytes(memory_limit, "little")
    snippet_filter = Filter(bytes.fromhex(setup["filter"]))
    own_id = os.getpid()
    while True:
        order, descriptors, _, _ = socket.recv_fds(control, 5, 3, socket.MSG_WAITALL)
        if len(order) < 5:
            os._exit(0)
        number = int.from_bytes(order[1:], "little")
        if order[:1] == b"f":
            try:
                child = os.fork()
            except OSError:
                child = -1
            if child == 0:
                become_snippet(control, descriptors, own_id, setup, snippet_filter, memory_limit)
            answer = child
        else:
            try:
                answer = os.waitpid(number, 0)[1]
            except ChildProcessError:
                answer = -1
        for descriptor in descriptors:
            os.close(descriptor)
        os.write(CONTROL, struct.pack("<i", answer))


main()
