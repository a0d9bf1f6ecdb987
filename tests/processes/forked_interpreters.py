"""`subprocess.Popen` for interpreters that are forked, with torch imported, instead of started anew.

An interpreter with torch costs a second of processor time to start, a forked one some milliseconds. `Popen`
here takes the arguments of `subprocess.Popen`. If the command is this Python with a script, `-c` or `-m`, the
process is forked from a server that has imported torch and unicomm. It is a child of the caller, with its own
pid, files, environment, session, signals, exit code and end of the interpreter. All other commands are
started as usual. A launcher (`LAUNCHERS`) that is forked gives its own ranks the same start.

This is for tests whose subject is what processes do. Tests of the start itself use `subprocess`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import inspect
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests import commands

ROOT = Path(__file__).resolve().parents[2]
SWITCH = "TORCH_DISTRIBUTED_USE_TORCHCOMMS"  # the server has imported torch without it
LAUNCHERS = ("torch.distributed.run", "unicomm")  # modules whose children are forked as well
# What the processes of these tests import: once in the server instead of once each.
MODULES = (
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.distributed.tensor.parallel",
    "torch.profiler",
    "unicomm.backends.gloo.backend",
    "unicomm.backends.shm",
    "unicomm.c10d",
    "unicomm.flight_recorder.recording.writer",
    "unicomm.launch.cli",
    "unicomm.testing.conformance",
)
_NSENTER = ("--net", "--pid", "--mount", "--")  # tools/namespaces.py
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen` whose interpreters are forked.

    `nests`: the process is a launcher, whose own interpreters are forked as well.
    """

    def __init__(self, args: Any, *more: Any, nests: bool = False, **options: Any) -> None:
        self.nests = nests
        super().__init__(args, *more, **options)

    def _execute_child(self, *arguments: Any) -> None:
        _start(self, arguments)


#: `tests.commands.run` for a forked interpreter.
run = functools.partial(commands.run, popen=Popen)


# --- the process that starts others -------------------------------------------------------------------

_PlainPopen = subprocess.Popen  # tests may put `Popen` in its place
_really = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_signature = inspect.signature(_really)
_lock = threading.Lock()
_server: socket.socket | None = None  # made when first needed; a forked launcher inherits its own


def _start(process: Any, arguments: tuple[Any, ...]) -> None:
    """`Popen._execute_child` that asks a server, where the command and the options allow it."""
    asked = _signature.bind(process, *arguments).arguments
    request = _request(asked)
    if request is None:
        _really(process, *arguments)
        return
    standard = [asked["p2cread"], asked["c2pwrite"], asked["errwrite"]]
    sent = [own if given == -1 else given for own, given in enumerate(standard)]
    pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    request["nests"] |= getattr(process, "nests", False)
    with _lock:
        server = _get_server()
        # Only while the process is handed over: other orphans of this process's children are init's.
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(server, [json.dumps(request).encode()], [*sent, *request["pass_fds"]])
            process.pid = int(server.recv(100))
        finally:
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    process._child_created = True
    process._close_pipe_fds(*(asked[pipe] for pipe in pipes))


def _request(asked: Mapping[str, Any]) -> dict[str, Any] | None:
    """What to ask a server for; None if the process cannot be forked."""
    args = asked["args"]
    refused = ("executable", "preexec_fn", "gid", "gids", "uid")
    if isinstance(args, str | bytes | os.PathLike) or asked["shell"]:
        return None
    if any(asked[name] is not None for name in refused):
        return None
    words = [os.fspath(word) for word in args]
    target = None
    if words[0] == "nsenter" and tuple(words[2:6]) == _NSENTER:
        target, words = int(words[1].removeprefix("--target=")), words[6:]
    if words[0] != sys.executable or not all(isinstance(word, str) for word in words):
        return None
    unbuffered = words[1:2] == ["-u"]
    words = words[1 + unbuffered :]
    if not words or (words[0].startswith("-") and words[0] not in ("-c", "-m")):
        return None
    module = words[1 if words[0] == "-m" else 3 :][:1]  # see unicomm/launch/side_process.py
    if module and module[0].startswith("unicomm."):
        return None  # a launcher's own side process, which needs no torch, and is known by its command line
    env = dict(os.environ if asked["env"] is None else asked["env"])
    return {
        "words": words,
        "unbuffered": unbuffered or bool(env.get("PYTHONUNBUFFERED")),
        "nests": words[0] == "-m" and words[1] in LAUNCHERS,
        "namespaces_of": target,
        "env": env,
        "cwd": os.fspath(asked["cwd"] or os.getcwd()),
        "pass_fds": list(asked["pass_fds"]),
        "session": bool(asked["start_new_session"]),
        "group": asked.get("process_group", -1),
    }


def _get_server() -> socket.socket:
    global _server
    if _server is not None:
        return _server
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.settimeout(120)
    code = "import sys; from tests.processes import forked_interpreters as f; f.main(int(sys.argv[1]))"
    process = _PlainPopen(
        [sys.executable, "-c", code, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        env=commands.clean_environment(),
        cwd=ROOT,
    )
    theirs.close()
    if control.recv(100) != b"ready":
        raise AssertionError("the server of interpreters did not start; see its output")

    def close() -> None:
        control.close()
        process.wait(30)

    atexit.register(close)
    _server = control
    return control


# --- the server ---------------------------------------------------------------------------------------


def main(descriptor: int) -> None:
    """Imports what processes need and serves requests; in a forked process, runs what was asked for."""
    import torch

    torch.set_num_threads(1)
    for name in MODULES:
        importlib.import_module(name)
    sys.path[:] = [path for path in sys.path if path not in ("", str(ROOT))]
    # fork() copies the calling thread alone: a server with others could hand a held lock to its children.
    assert len(os.listdir("/proc/self/task")) == 1
    gc.freeze()  # the children's collections then leave alone what they share with the server
    atexit.register(keep_modules, list(sys.modules))
    control = socket.socket(fileno=descriptor)
    control.send(b"ready")
    _become(_serve(control))


def _serve(control: socket.socket) -> dict[str, Any]:
    """Answers each request with the pid of a new process; returns in the new processes alone."""
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the group of the processes
        signal.signal(number, signal.SIG_IGN)
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 64)
        if not data:
            os._exit(0)
        reading, writing = os.pipe()
        # As an orphan, the new process becomes a child of the process that asked: that is a subreaper now.
        middle = os.fork()
        if middle == 0:
            middle = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == middle:
                os.sched_yield()
            control.close()
            os.close(reading)
            return json.loads(data) | {"descriptors": descriptors, "answer": writing}
        os.waitpid(middle, 0)
        for each in (writing, *descriptors):
            os.close(each)
        control.send(os.read(reading, 100))
        os.close(reading)


def _become(request: dict[str, Any]) -> None:
    """Makes this forked process what was asked for, and runs its program."""
    if request["session"]:
        os.setsid()
    if request["group"] >= 0:
        os.setpgid(0, request["group"])
    os.write(request["answer"], str(os.getpid()).encode())
    os.close(request["answer"])
    # Away from the numbers that they are to have, then there.
    away = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 500) for each in request["descriptors"]]
    for each in request["descriptors"]:
        os.close(each)
    for target, each in zip((0, 1, 2, *request["pass_fds"]), away, strict=True):
        os.dup2(each, target)
        os.close(each)
    if request["namespaces_of"] is not None:
        _enter(request["namespaces_of"])
    os.chdir(request["cwd"])
    if request["nests"]:
        nest()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_early()
    os.environ.clear()
    os.environ.update(request["env"])
    _open_streams(request["unbuffered"])
    path = request["env"].get("PYTHONPATH", "")
    sys.path[:0] = [each for each in path.split(os.pathsep) if each]
    if request["env"].get(SWITCH, "0") == "1":
        # What `import torch` would have done: read the variable, and in the end call `autoload`.
        importlib.import_module("torch.distributed.config").use_torchcomms = True  # type: ignore[attr-defined]
        importlib.import_module("unicomm.c10d.switch").autoload()
    _run(request["words"])


def keep_modules(names: Sequence[str]) -> None:
    """Keeps what the server has imported from being cleared, object by object, at the interpreter's end.

    The modules of torch.distributed, which hold groups, and of unicomm are cleared, as are the program's own.
    """
    for name in names:
        if not name.startswith(("torch.distributed", "unicomm")) and name not in (
            "__main__",
            "builtins",
            "sys",
        ):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(sys.modules.pop(name, None)))


def end_early() -> None:
    """Leaves out the end of torch's libraries, which takes 0.15 s of a core in a forked process.

    That is after the end of the interpreter: what is left out are destructors of global C++ objects, in which
    torch takes its operators from its tables one by one.
    """
    _libc.on_exit(_libc._exit, None)


def _open_streams(unbuffered: bool) -> None:
    """Makes `sys.stdin`, `sys.stdout` and `sys.stderr` anew: a stream keeps of which kind its file was."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        raw = os.fdopen(number, "wb" if number else "rb", 0 if number and unbuffered else -1, closefd=False)
        stream = io.TextIOWrapper(
            raw,
            errors="backslashreplace" if name == "stderr" else "strict",
            line_buffering=name == "stderr" or os.isatty(number),
            write_through=unbuffered and number > 0,
        )
        stream.mode = "w" if number else "r"
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(words: list[str]) -> None:
    """Runs `python WORDS` in this process."""
    how, *rest = words
    if how == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if how == "-c":
        sys.argv, code = ["-c", *rest[1:]], compile(rest[0], "<string>", "exec")
        sys.path.insert(0, "")
    else:
        sys.argv, code = words, compile(Path(how).read_bytes(), how, "exec")
        sys.path.insert(0, str(Path(how).resolve().parent))
        main.__file__ = how
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    exec(code, main.__dict__)


def nest() -> None:
    """Gives this process, a launcher, a server of its own, before it has threads."""
    global _server
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        nothing = os.open(os.devnull, os.O_RDWR)
        for each in (0, 1, 2):  # what reads from the launcher shall see its end
            os.dup2(nothing, each)
        os.close(nothing)
        _become(_serve(theirs))
        sys.exit()
    theirs.close()
    ours.settimeout(120)
    _server = ours
    subprocess.Popen._execute_child = Popen._execute_child  # type: ignore[attr-defined]


def _enter(pid: int) -> None:
    """What `nsenter` does: goes on as a child in the namespaces of a process, and ends as the child ends."""
    kinds = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in ("net", "pid", "mnt")]
    for kind in kinds:
        if _libc.setns(kind, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(kind)
    child = os.fork()
    if child == 0:
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    for each in (0, 1, 2):
        with contextlib.suppress(OSError):
            os.close(each)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)
