"""Forks a process for each rank, with torch and unicomm imported already: starting one takes milliseconds.

    server.py DESCRIPTOR [MODULE ...]      (of a SOCK_SEQPACKET socket to the test; more modules to import)

A request is JSON: {"argv": [...], "env": {...}} with the new process's stdin, stdout and stderr attached,
answered by its pid; or {"reap": pid}, answered by its exit code (negative: the signal). A forked process runs
its script as `python SCRIPT ARGUMENTS` would, to the end of the interpreter. It has a process group of its
own and does not outlive the server, which ends when the test closes its end of the socket.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.processes.forked_interpreters import end_early, keep_modules
from unicomm.backends import shm  # noqa: F401
from unicomm.backends.gloo import backend as gloo  # noqa: F401
from unicomm.flight_recorder.recording import writer  # noqa: F401
from unicomm.testing import conformance  # noqa: F401

_PR_SET_PDEATHSIG = 1


def serve(control: socket.socket) -> list[str]:
    """Returns in the forked processes alone: the script and its arguments."""
    server = os.getpid()
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 3)
        if not data:
            os._exit(0)
        request = json.loads(data)
        if "reap" in request:
            _, status = os.waitpid(request["reap"], 0)
            control.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != server:
                os._exit(1)
            os.setpgid(0, 0)
            for i, descriptor in enumerate(descriptors):
                os.dup2(descriptor, i)
                os.close(descriptor)
            control.close()
            end_early()
            os.environ.clear()
            os.environ.update(request["env"])
            return list(request["argv"])
        with contextlib.suppress(OSError):  # the child does it too: whoever is first
            os.setpgid(pid, pid)
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(str(pid).encode())


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[2:]:
        importlib.import_module(name)
    # fork() copies the calling thread alone: a server with others could hand a held lock to its children.
    assert len(os.listdir("/proc/self/task")) == 1
    del sys.path[0]
    gc.freeze()  # the children's collections then leave alone what they share with the server
    atexit.register(keep_modules, list(sys.modules))
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.send(b"ready")
    sys.argv = serve(connection)
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
