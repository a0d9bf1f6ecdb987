"""Forks the ranks of the rounds, on one host: importing torch once is what makes a round short.

    python nursery.py ADDRESS LISTEN

connects to the conductor's socket ADDRESS, says at which port of this host's address LISTEN a store serves
the rounds, and then runs the ranks that it is told to, one round after the other.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from multiprocessing.connection import Client

from torch.distributed import TCPStore

import unicomm.backends.auto  # noqa: F401  # and all that it chooses from
from tests.chaos import program
from tests.chaos.mpi_places import MpiPlaces, Place
from tests.chaos.spec import Spec

_PR_SET_PDEATHSIG = 1  # ends with its parent
_DESCRIPTORS = 256  # more than a nursery has


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
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
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


def serve(address: str, listen: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the conductor says when it is over
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


if __name__ == "__main__":
    serve(*sys.argv[1:])
