"""The store of ranks on several hosts without MASTER_ADDR: rank 0 opens it, and its address reaches the
others by what their launcher offers.

| launcher | address travels by |
|---|---|
| MPICH's and Intel MPI's mpiexec | PMI-1 (pmi.py) |
| Open MPI's mpiexec, srun --mpi=pmix | PMIx (pmix.py) |
| srun --mpi=pmi2 | PMI-2 (pmi.py), but MPI where this process uses it |
| others that start MPI processes | MPI (mpi_library.py) |

The choice follows from what is alike on all ranks, so that all choose the same.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping

from unicomm.c10d.compat import PrefixStore, Store
from unicomm.comms.errors import BackendError, CommTimeoutError, first_line
from unicomm.comms.failures.store_requests import StoreHost
from unicomm.comms.membership.environment import Environment
from unicomm.comms.membership.job_store import cached, open_store
from unicomm.comms.membership.tcp_store import SilentError, open_tcp_store

from . import addresses, mpi_library, pmi, pmix

_KEY = "unicomm-store"
_RANK_0 = StoreHost("rank 0, which holds the store", 0)
_CURE = "set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there, on all ranks"


def store_of_job(
    world: Environment, timeout: float, environ: Mapping[str, str] = os.environ, *, uses_mpi: bool = False
) -> Store | None:
    """Collective: returns the store of `open_store`; without an address, one by the launcher.

    `uses_mpi`: the store is for the MPI backend, so that this process may initialise MPI.

    Raises what `open_store` does; `CommTimeoutError` if not all ranks came, and `BackendError` if what the
    launcher offers does not work.
    """
    if environ.get("MASTER_ADDR") or world.size in (1, world.local_size):
        return open_store(world, timeout, environ)
    way = _way(world, environ, uses_mpi or mpi_library.running() is not None)
    if not way:
        return open_store(world, timeout, environ)  # whose error says what is missing
    return PrefixStore("unicomm", cached(("launcher",), timeout, lambda: _open(world, timeout, environ, way)))


def _way(world: Environment, environ: Mapping[str, str], uses_mpi: bool) -> str:
    """Returns by what the address travels, "" for nothing."""
    if world.source == "PMI" and "PMI_FD" in environ:
        if "PMI_JOBID" not in environ:
            return "PMI-1"
        if not uses_mpi:
            return "PMI-2"  # of Slurm; using it leaves MPI without its connection
    elif world.source in ("Open MPI", "PMIx", "Slurm") and pmix.offered(environ, world.rank):
        return "PMIx"
    starts_mpi = world.source in ("Open MPI", "PMI", "PMIx", "PALS") or (
        world.source == "Slurm" and environ.get("SLURM_MPI_TYPE", "none") not in ("none", "openmpi")
    )
    return "MPI" if mpi_library.installed() and (starts_mpi or uses_mpi) else ""


def _open(world: Environment, timeout: float, environ: Mapping[str, str], way: str) -> Store:
    began = time.monotonic()
    hosted, where = _host(timeout) if world.rank == 0 else (None, None)
    try:
        address = _address_of_rank_0(world, timeout, environ, way, where)
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"{address[:80]!r} is no address")
        if hosted is not None:
            return hosted
        left = max(0.001, timeout - (time.monotonic() - began))
        try:
            return open_tcp_store(host, int(port), left, _RANK_0, is_master=False)
        except SilentError as error:
            raise CommTimeoutError(
                f"rank 0, which hosts the store, did not answer at {address} within {timeout:g} s",
                rank=world.rank,
                culprits=[0],
                hint="see whether rank 0 is stopped, and whether this host reaches that address",
            ) from error
    except TimeoutError as error:
        raise CommTimeoutError(
            f"not all {world.size} ranks came to the process manager ({way}) within {timeout:g} s",
            rank=world.rank,
            hint="see whether all came up; all of them create the first communicator",
        ) from error
    except (OSError, KeyError, ValueError, RuntimeError) as error:
        text = f"the ranks could not meet by the process manager ({way}): {first_line(error)}"
        raise BackendError(text, rank=world.rank, hint=_CURE) from error


def _host(timeout: float) -> tuple[Store, str]:
    """Returns a store at a free port, and its address for the others."""
    host = addresses.of_interface(addresses.chosen_interface()) or addresses.route_anywhere() or "127.0.0.1"
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=2048)
        port = listener.getsockname()[1]
        store = open_tcp_store(
            host, port, timeout, _RANK_0, is_master=True, master_listen_fd=listener.detach()
        )
    except (OSError, RuntimeError) as error:
        raise BackendError(
            f"rank 0 could not open a store at {host}: {error}",
            rank=0,
            hint=f"name another interface by {addresses.INTERFACE}, or {_CURE}",
        ) from error
    return store, f"{host}:{port}"


def _address_of_rank_0(
    world: Environment, timeout: float, environ: Mapping[str, str], way: str, where: str | None
) -> str:
    if way == "PMI-1":
        return pmi.by_pmi1(environ["PMI_FD"], _KEY, where, timeout)
    if way == "PMI-2":
        return pmi.by_pmi2(environ["PMI_FD"], environ["PMI_JOBID"], world.rank, _KEY, where, timeout)
    if way == "PMIx":
        with contextlib.suppress(pmix.NoLibraryError):
            return pmix.by_pmix(environ, _KEY, where, timeout)
        if not mpi_library.installed():
            raise ValueError("libpmix.so.2 is not found, nor mpi4py")
    return mpi_library.tell(world.rank, world.size, where, timeout)
