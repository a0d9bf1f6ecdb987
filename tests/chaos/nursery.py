"""Forks the ranks of the rounds, on one host: importing torch once is what makes a round short.

A nursery is itself a fork of the conductor. `grow` makes one: it connects to the conductor's socket, says at
which port of its host a store serves the rounds, and then runs the ranks that it is told to, one round after
the other.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Client
from pathlib import Path

from torch.distributed import TCPStore

import unicomm.backends.auto  # noqa: F401  # and all that it chooses from
from tests.chaos import program
from tests.chaos.mpi_places import MpiPlaces, Place
from tests.chaos.spec import Spec

_PR_SET_PDEATHSIG = 1  # ends with its parent
_NEWNET, _NEWPID, _NEWNS = 0x40000000, 0x20000000, 0x20000
_DESCRIPTORS = 1024  # more than a conductor has


def keep_store(listen: str) -> int:
    """Starts a process with a store, which ends with this one; returns its port."""
    told, tell = os.pipe()
    alive, held = os.pipe()
    if os.fork() == 0:
        os.close(held)
        store = TCPStore(listen, 0, is_master=True, wait_for_workers=False)
        os.write(tell, str(store.port).encode())
        os.close(tell)
        os.read(alive, 1)
        os._exit(0)
    os.close(alive)
    os.close(tell)
    with os.fdopen(told) as answer:
        port = answer.read()
    os.set_inheritable(held, False)
    return int(port)


def start(spec: Spec, place: Place | None = None) -> int:
    nursery = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    # Nothing of the nursery's must run here, nor after the rank: no frames of it, no exit handlers.
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _live_with_parent()
        if os.getppid() != nursery:  # it ended before this asked for it
            os._exit(code)
        if place is not None:
            place.keep(_DESCRIPTORS)
        os.closerange(3, _DESCRIPTORS)
        if place is not None:
            place.enter()
        log = os.open(f"{spec.folder}/rank{spec.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        code = program.main(spec)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def grow(address: str, listen: str, environment: Mapping[str, str], log: Path, host: int | None) -> int:
    """Starts a nursery; returns the number of its process, or of one that ends with it. `host`: the first
    process of the host that it shall run on, as this process numbers it; None for this one.
    """
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _live_with_parent()
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the conductor says when it is over
        if host is not None:
            enter(host)
            inside = os.fork()  # a process is in another host's numbers from its birth on
            if inside:
                os.closerange(3, _DESCRIPTORS)  # whoever waits for their end waits for the nursery's
                os._exit(abs(os.waitstatus_to_exitcode(os.waitpid(inside, 0)[1])))
            _live_with_parent()
        os.closerange(3, _DESCRIPTORS)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ.clear()
        os.environ.update(environment)
        for one in list(weakref.finalize._registry):  # type: ignore[attr-defined]
            one.atexit = False  # a rank that ends must not remove the conductor's folders
        serve(address, listen)
        code = 0
    finally:
        os._exit(code)


def serve(address: str, listen: str) -> None:
    port = keep_store(listen)
    conductor = Client(address, "AF_UNIX")
    conductor.send(("nursery", listen, port))
    while True:
        try:
            specs: list[Spec] = conductor.recv()
        except (EOFError, OSError):
            return
        places = MpiPlaces(len(specs), specs[0].folder) if specs[0].backend == "mpi" else None
        children = {start(spec, places.of[spec.rank] if places else None): spec.rank for spec in specs}
        while children:
            pid, status = os.waitpid(-1, 0)
            if pid in children:
                conductor.send(("ended", children.pop(pid), os.waitstatus_to_exitcode(status)))
        if places is not None:
            places.close()


def enter(process: int) -> None:
    """Goes to the network and the mounts of another process, and has children among its process numbers."""
    handle = os.pidfd_open(process)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(handle, _NEWNET | _NEWPID | _NEWNS) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter the namespaces of process {process}")
    os.close(handle)


def _live_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
