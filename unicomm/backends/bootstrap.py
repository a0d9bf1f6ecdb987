"""Where the ranks of MPICH's mpiexec on several hosts meet without MASTER_ADDR: rank 0 opens a store, and
tells the others where by the key-value space that the process manager (Hydra) serves at PMI_FD.

The wire protocol is PMI-1's: lines of `key=value`. Neither `init` nor `finalize` is said, which belong to the
MPI library, whether this process uses it or not: Hydra takes a process that has said the one and ends without
the other for one that died.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from unicomm.comms.environment import Environment
from unicomm.comms.errors import BackendError, CommTimeoutError
from unicomm.comms.job_store import open_store

from . import addresses

_KEY = "unicomm-store"
_MOST = 4096  # characters of an answer
_stores: dict[int, Store] = {}  # one a process: the number tells a forked child


def store_of_job(world: Environment, timeout: float, environ: Mapping[str, str] = os.environ) -> Store | None:
    """`open_store`, and where that has nothing to meet by, the process manager. Called by all ranks."""
    # Slurm, which sets PMI_JOBID, serves PMI in another way.
    pmi = world.source == "PMI" and "PMI_FD" in environ and "PMI_JOBID" not in environ
    if not pmi or environ.get("MASTER_ADDR") or world.size in (1, world.local_size):
        return open_store(world, timeout, environ)
    if (store := _stores.get(os.getpid())) is None:
        store = _stores[os.getpid()] = _open(world, timeout, int(environ["PMI_FD"]))
    return PrefixStore("unicomm", store)


def _open(world: Environment, timeout: float, descriptor: int) -> Store:
    limit = timedelta(seconds=timeout)
    with socket.socket(fileno=os.dup(descriptor)) as manager:
        manager.settimeout(timeout)
        try:
            name = _ask(manager, "cmd=get_my_kvsname")["kvsname"]
            hosted = None
            if world.rank == 0:
                host = addresses.of_interface(addresses.chosen_interface()) or addresses.route_anywhere()
                listener = socket.create_server((host or "127.0.0.1", 0), backlog=2048)
                port = listener.getsockname()[1]
                where = f"{host or '127.0.0.1'}:{port}"
                hosted = TCPStore(
                    host or "127.0.0.1",
                    port,
                    is_master=True,
                    timeout=limit,
                    wait_for_workers=False,
                    master_listen_fd=listener.detach(),
                )
                _ask(manager, f"cmd=put kvsname={name} key={_KEY} value={where}")
            _ask(manager, "cmd=barrier_in")
            if hosted is not None:
                return hosted
            host, _, text = _ask(manager, f"cmd=get kvsname={name} key={_KEY}")["value"].rpartition(":")
            return TCPStore(host, int(text), is_master=False, timeout=limit, wait_for_workers=False)
        except TimeoutError as error:
            raise CommTimeoutError(
                f"not all {world.size} ranks came to the process manager within {timeout:g} s",
                rank=world.rank,
                hint="see whether all came up; all of them create the first communicator",
            ) from error
        except (OSError, KeyError, ValueError, RuntimeError) as error:
            raise BackendError(
                f"the ranks could not meet by the process manager (PMI): {error}",
                rank=world.rank,
                hint="set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port, on all ranks",
            ) from error
        finally:
            manager.settimeout(None)  # a timeout makes the connection non-blocking, for MPI as well


def _ask(manager: socket.socket, line: str) -> dict[str, str]:
    manager.sendall(line.encode() + b"\n")
    said = b""
    while not said.endswith(b"\n") and len(said) < _MOST:
        more = manager.recv(1)  # no more than the answer: what follows is MPI's
        if not more:
            raise OSError("it hung up")
        said += more
    answer = dict(part.split("=", 1) for part in said.decode(errors="replace").split() if "=" in part)
    if answer.get("rc", "0") != "0":
        raise ValueError(f"it answered {said.decode(errors='replace').strip()!r}")
    return answer
