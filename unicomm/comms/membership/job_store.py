"""`open_store`: the store in which the ranks of a launcher meet when the program passes no `store=`."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import ipaddress
import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from unicomm.c10d.compat import FileStore, PrefixStore, Store
from unicomm.comms.errors import BackendError, CommTimeoutError, InvalidArgumentError, first_line
from unicomm.comms.failures.store_requests import host_at

from . import handles
from .environment import LAUNCHERS, TORCHRUN, Environment
from .processes import lives, scope, status
from .tcp_store import SilentError, UnresolvedError, open_tcp_store, resolve


def open_store(env: Environment, timeout: float, environ: Mapping[str, str] = os.environ) -> Store | None:
    """The store that the ranks of a launcher share. Called by all ranks; None for a single process.

    With MASTER_ADDR and MASTER_PORT it is a TCPStore at that address, hosted by rank 0 or by torchrun. A
    process opens it once; later calls return the same one. Its keys have a prefix for the attempt, so that a
    restarted job never reads keys of the attempt before. Without these variables, and if the launcher keeps
    all ranks on one host, it is a FileStore in a private folder.

    Waits up to `timeout` seconds for rank 0. Raises `CommTimeoutError` naming rank 0 if it does not come,
    `BackendError` if the store cannot be opened, and `InvalidArgumentError` if the ranks have no store in
    common.
    """
    if env.size == 1:
        return None
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    listen = environ.get(_LISTEN, "")
    if listen not in ("", "all", "address"):
        raise InvalidArgumentError(
            f"{_LISTEN}={listen!r} is neither 'address' (the default) nor 'all'",
            hint="'all' is for ranks that reach MASTER_ADDR by another address than rank 0 has",
        )
    if bool(host) != bool(port) or (port and not (port.isdecimal() and 0 < int(port) < 65536)):
        raise InvalidArgumentError(
            f"MASTER_ADDR={host!r} and MASTER_PORT={port!r} are no address",
            hint="set both, to rank 0's host and a free port there, or set neither, or pass store=",
        )
    if host:
        agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = cached(
            ("tcp", host, port), timeout, lambda: _connect(env, host, int(port), agent, listen, timeout)
        )
        attempt = [environ[name] for name in TORCHRUN.jobs if environ.get(name)]
        return PrefixStore("/".join(["unicomm", *attempt]), store)
    row = next((row for row in LAUNCHERS if row.name == env.source), None)
    if row is not None and row.hosts and env.local_size == env.size:
        launcher = _launcher_process(row.rank)
        if launcher is not None or env.job:
            return cached(("file", env.job, env.size), timeout, lambda: _open_file(env, launcher))
    raise InvalidArgumentError(
        f"{env.size} ranks (by {env.source}) have no store to meet at",
        hint="set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there, on all ranks"
        " (Slurm: MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n1)), or pass store=",
    )


_BACKLOG = 2048  # as in torch's own store
_LISTEN = "UNICOMM_STORE_LISTEN"


class _Slot:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.store: Store | None = None


_slots: dict[tuple[object, ...], _Slot] = {}
_slots_lock = threading.Lock()
# A FileStore removes its file when its last user destroys it, which the end of the process alone does not do.
atexit.register(_slots.clear)


def cached(key: tuple[object, ...], timeout: float, make: Callable[[], Store]) -> Store:
    """Returns this process's store of that key, which `make` opens at the first call.

    Raises `CommTimeoutError` if another thread opens it for longer than `timeout` seconds.
    """
    # A forked child must not use its parent's connection.
    with _slots_lock:
        slot = _slots.setdefault((os.getpid(), *key), _Slot())
    if not slot.lock.acquire(timeout=min(timeout, threading.TIMEOUT_MAX)):
        raise CommTimeoutError(
            f"another thread could not open the store of this job within {timeout:g} s",
            hint="see the error of that thread",
        )
    try:
        if slot.store is None:
            slot.store = make()
        return slot.store
    finally:
        slot.lock.release()


def _connect(env: Environment, host: str, port: int, agent: bool, listen: str, timeout: float) -> Store:
    master, where = env.rank == 0 and not agent, f"{host}:{port}"
    began = time.monotonic()
    try:
        resolve(host, port, timeout)
        # multi_tenant: torch.distributed may host its store at the same address in this process.
        return open_tcp_store(
            host,
            port,
            max(0.001, timeout - (time.monotonic() - began)),
            host_at(host, port),
            is_master=master,
            multi_tenant=True,
            master_listen_fd=_listen(env, host, port, listen) if master else None,
        )
    except UnresolvedError as error:
        raise CommTimeoutError(
            f"MASTER_ADDR is unknown: {error}, within {timeout:g} s",
            rank=env.rank,
            culprits=[] if agent else [0],
            hint="set MASTER_ADDR to a name or address of rank 0's host that this host knows",
        ) from error
    except Exception as error:
        text = first_line(error)
        silent = isinstance(error, SilentError)
        if (master or agent) and not silent:
            raise BackendError(
                f"the store at {where} could not be {'opened' if master else 'reached'}: {text}",
                rank=env.rank,
                hint="MASTER_ADDR has to be rank 0's host, and MASTER_PORT a free port there: choose another"
                if master
                else "torchrun hosts it: see whether it still runs there, and whether this host reaches it",
            ) from error
        who = "torchrun" if agent else "rank 0"
        raise CommTimeoutError(
            f"{who}, which hosts the store, did not {'answer at' if silent else 'come to'} {where} within"
            f" {timeout:g} s: {text}",
            rank=env.rank,
            culprits=[] if agent else [0],
            hint=f"see whether {who} came up and is not stopped, and whether this host reaches that address",
        ) from error


def _listen(env: Environment, host: str, port: int, listen: str) -> int | None:
    listener = store_listener(host, port, one_host=env.local_size == env.size, listen=listen)
    return None if listener is None else listener.detach()


def store_listener(
    host: str, port: int, *, one_host: bool, listen: str | None = None, backlog: int = _BACKLOG
) -> socket.socket | None:
    """A socket for a store that listens at the address of `host` only; torch's listens on all interfaces.

    Args:
        host: the name or address by which the ranks know the store's host.
        one_host: whether all ranks are on this host.
        listen: "all" or "address"; None for the value of UNICOMM_STORE_LISTEN.

    None, which lets torch open its own, in four cases: with UNICOMM_STORE_LISTEN=all; if the address is none
    of this machine's, as behind a NAT; if the name is loopback here (on Debian the host's own name is
    127.0.1.1) but the job has other hosts, which know it by another address; and if the port is taken, by
    another store of this process or by a stranger, which torch tells apart.
    """
    if (os.environ.get(_LISTEN, "") if listen is None else listen) == "all":
        return None
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
        here = ipaddress.ip_address(str(address).partition("%")[0]).is_loopback
        if here and not one_host and not _means_loopback(host):
            return None
        return handles.listen(host, port, backlog)
    except (OSError, ValueError):
        return None


def _means_loopback(host: str) -> bool:
    """Whether the name means the loopback interface on every host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".") in ("localhost", "ip6-localhost", "localhost.localdomain")


def _open_file(env: Environment, launcher: tuple[int, int] | None) -> Store:
    folder = Path(tempfile.gettempdir()) / f"unicomm-stores-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise BackendError(
            f"{folder} is not a private folder of this user",
            rank=env.rank,
            hint="remove it, or set TMPDIR to another place on all ranks, or MASTER_ADDR and MASTER_PORT",
        )
    # The name holds what makes the job unique, and what later shows that it is over: the launcher's process,
    # on this boot of this host, in this PID namespace.
    here = scope()
    for old in folder.glob(f"{here}-*"):
        pid, ticks, _ = old.name[len(here) + 1 :].split("-")
        if int(pid) and not lives(int(pid), int(ticks)):
            with contextlib.suppress(OSError):
                old.unlink()
    pid, ticks = map(str, launcher or (0, 0))
    job = hashlib.sha256(f"{env.source}/{env.job}/{env.size}".encode()).hexdigest()[:16]
    return FileStore(str(folder / f"{here}-{pid}-{ticks}-{job}"), env.size)


def _launcher_process(rank_variable: str) -> tuple[int, int] | None:
    """Process id and start time of the launcher on this host: the first ancestor without a rank of its own.

    The parent is not enough: each rank may have a shell of its own in between.
    """
    pid = os.getppid()
    try:
        while pid > 0:
            with contextlib.suppress(PermissionError):  # another user's process
                if f"\0{rank_variable}=".encode() in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
                    pid = int(status(pid)[1])
                    continue
            return pid, int(status(pid)[19])
    except OSError:
        pass  # no /proc, or one that hides other users' processes
    return None
