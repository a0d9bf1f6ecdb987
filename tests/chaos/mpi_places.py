"""The places of an MPI job, which a real mpiexec makes, for ranks that a nursery forks.

mpiexec starts a small process for each rank (mpi_place.py). It hands over its environment and the descriptor
by which MPI talks to the process manager, and then waits. So mpiexec notices nothing when a rank is killed,
and does not end the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests import ROOT
from tests.commands import clean_environment
from tools.mpi_libraries import Library, find

_WITHIN = 60.0  # seconds for the start of mpiexec
_MANAGER = "PMI_FD"  # the variable that names the descriptor


def why_not() -> str:
    """Why rounds with MPI cannot be played; "" when they can."""
    return "" if _library() else "MPICH is not installed; run `python -m tools.mpi_libraries mpich`"


def _library() -> Library | None:
    return next((one for one in find(ROOT / "build" / "mpi")[0] if one.name == "MPICH"), None)


@dataclass
class Place:
    """One rank's. `keep` and `enter` are called in the rank's process, before and after all is closed."""

    environment: dict[str, str]
    descriptor: int

    def keep(self, above: int) -> None:
        self.descriptor = fcntl.fcntl(self.descriptor, fcntl.F_DUPFD, above)

    def enter(self) -> None:
        os.environ.clear()
        os.environ.update(self.environment)
        os.dup2(self.descriptor, int(self.environment[_MANAGER]))
        os.close(self.descriptor)


class MpiPlaces:
    """`of`: the places by rank."""

    def __init__(self, ranks: int, folder: str) -> None:
        library = _library()
        assert library is not None
        address = str(Path(folder, "places"))
        self.of: dict[int, Place] = {}
        self._callers: list[socket.socket] = []
        with socket.socket(socket.AF_UNIX) as listener, Path(folder, "mpiexec.log").open("w") as log:
            listener.bind(address)
            listener.listen(ranks)
            listener.settimeout(_WITHIN)
            script = str(Path(__file__).with_name("mpi_place.py"))
            self._process = subprocess.Popen(
                [*library.command, "-n", str(ranks), sys.executable, "-IS", script, address],
                env=clean_environment() | library.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=_end_with_parent,  # noqa: PLW1509  # a nursery has no threads
            )
            for _ in range(ranks):
                caller, _ = listener.accept()
                caller.settimeout(_WITHIN)
                self._callers.append(caller)
                rank, place = _read(caller)
                self.of[rank] = place
        os.unlink(address)

    def close(self) -> None:
        for caller in self._callers:
            caller.close()
        for place in self.of.values():
            os.close(place.descriptor)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_WITHIN)
        self._process.kill()
        self._process.wait()


def _read(caller: socket.socket) -> tuple[int, Place]:
    data, descriptors, _, _ = socket.recv_fds(caller, 1 << 16, 1)
    while more := caller.recv(1 << 16):
        data += more
    environment = json.loads(data)
    return int(environment["PMI_RANK"]), Place(environment, descriptors[0])


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
