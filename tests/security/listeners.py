"""Which sockets a job's processes listen at, and who answers there: what a stranger sees.

python -m tests.security.listeners        # JSON: the sockets of all processes of this network namespace
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import json
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from tests.security import socket_owners

_SECONDS = 20.0  # that a connection may take
_SILENT = 8.0  # seconds after which a listener counts as one that says nothing
_VALIDATE = b"\0" + struct.pack("<I", 0x3C85F7CE)  # torch's protocol of stores
_PING = b"\x0d"
OF_RANKS = "connections of the ranks, during creation"
NOT_SEEN = "not seen"  # as the rank is held, and serves no caller


@dataclasses.dataclass(frozen=True, order=True)
class Listener:
    """A socket at which strangers can call: a listening one, or one that takes messages from anybody.

    Attributes:
        process: what the process is: "launcher", "hub", "rank", ..., else its command line.
        address: the address that it is bound to, or the path of a UNIX socket ("@..." for abstract ones).
        port: its port.
        kind: "TCP", "UDP", or "UNIX socket" and who can reach it.
    """

    process: str
    address: str
    port: int
    kind: str = "TCP"

    @property
    def bound(self) -> str:
        """The kind of its address: "loopback", "one address" or "all addresses"; with the kind if not TCP."""
        if self.kind.startswith("UNIX"):
            return self.kind
        return self._addresses if self.kind == "TCP" else f"{self._addresses} ({self.kind})"

    @property
    def _addresses(self) -> str:
        ip = ipaddress.ip_address(self.address.partition("%")[0])
        ip = getattr(ip, "ipv4_mapped", None) or ip
        return "loopback" if ip.is_loopback else "all addresses" if ip.is_unspecified else "one address"


def family(pid: int) -> list[psutil.Process]:
    """A process and those below it that run now."""
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        return [top, *top.children(recursive=True)]
    return []


def listeners(processes: Iterable[psutil.Process]) -> list[Listener]:
    """The sockets at which strangers can call these processes, each once: forks share their parent's."""
    found: dict[tuple[str, str, int], Listener] = {}
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            for kind, address, port in (*_of_networks(process), *_of_the_host(process)):
                if (kind, address, port) not in found:
                    found[kind, address, port] = Listener(_what(process), address, port, kind)
    return sorted(found.values())


def _of_networks(process: psutil.Process) -> Iterator[tuple[str, str, int]]:
    for one in process.net_connections("inet"):
        # A connected UDP socket takes messages of its peer alone.
        if one.status == psutil.CONN_LISTEN or (one.type == socket.SOCK_DGRAM and not one.raddr):
            yield "TCP" if one.type == socket.SOCK_STREAM else "UDP", one.laddr.ip, one.laddr.port


def _of_the_host(process: psutil.Process) -> Iterator[tuple[str, str, int]]:
    """UNIX sockets with a name that listen, or that take messages."""
    links = (os.readlink(f"/proc/{process.pid}/fd/{one.fd}") for one in process.net_connections("unix"))
    mine = set(links)
    for line in Path(f"/proc/{process.pid}/net/unix").read_text().splitlines()[1:]:
        words = line.split(maxsplit=7)
        flags, kind, inode = int(words[3], 16), int(words[4], 16), words[6]
        named = len(words) > 7 and (flags & _ACCEPTS or kind == socket.SOCK_DGRAM)
        if named and f"socket:[{inode}]" in mine:
            yield f"UNIX socket, {_who_may_enter(process.pid, words[7])}", words[7], 0


def _who_may_enter(pid: int, path: str) -> str:
    """Who reaches a UNIX socket: "abstract" ones have no folder, so every user of the host does."""
    if path.startswith("@"):
        return "abstract"
    folders = [Path(f"/proc/{pid}/root{folder}") for folder in Path(path).parents]
    if not all(folder.stat().st_mode & stat.S_IXOTH for folder in folders):
        return "private folder"
    return "private" if not Path(f"/proc/{pid}/root{path}").stat().st_mode & stat.S_IWOTH else "open to users"


_ACCEPTS = 0x10000  # the kernel's mark of UNIX sockets that listen
_PROCESSES = (  # a part of the command line, and what the process is
    ("unicomm.launch.hub.server", "hub"),
    ("unicomm.launch.exporter.server", "exporter of metrics"),
    ("torch.distributed.run", "launcher"),
    ("unicomm run", "launcher"),
    ("hydra", "mpiexec"),
    ("prterun", "mpiexec"),
    ("prted", "mpiexec"),
    ("mpiexec", "mpiexec"),
    ("in_a_notebook.py", "notebook"),
)


def _what(process: psutil.Process) -> str:
    line = " ".join(process.cmdline())
    if process.environ().keys() & {"RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK"}:
        return "rank"
    return next((name for part, name in _PROCESSES if part in line), line)


def is_store(address: str, port: int) -> bool:
    """Whether torch's store answers there whoever calls: it does as it is told after a magic number."""
    nonce = struct.pack("<I", os.getpid())
    with contextlib.suppress(OSError), socket.create_connection((address, port), _SECONDS) as s:
        s.settimeout(_SILENT)
        s.sendall(_VALIDATE + _PING + nonce)
        return s.recv(4) == nonce
    return False


def store_at(address: str, port: int) -> Any:
    """torch's store at this address, as anybody may use it; None if none answers there."""
    if not is_store(address, port):
        return None
    from torch.distributed import TCPStore  # here, as most who look at sockets need not import torch

    limit = timedelta(seconds=_SECONDS)
    return TCPStore(address, port, is_master=False, timeout=limit, wait_for_workers=False)


def answer(address: str, port: int, request: bytes) -> bytes | None:
    """What a listener answers to these bytes; None if it keeps silent, b"" if it ends the connection."""
    try:
        with socket.create_connection((address, port), _SECONDS) as s:
            s.settimeout(_SILENT)
            s.sendall(request)
            return s.recv(256)
    except TimeoutError:
        return None
    except OSError:
        return b""


_ZMTP = b"\xff" + bytes(8) + b"\x7f\x03\x00"  # the beginning of ZeroMQ's greeting, of 64 bytes


_UNASKED = "nothing"
#: By the library that made a socket: what it is for, and what its protocol asks of a caller; None if we do
#: not know the protocol.
_LIBRARIES: dict[str, tuple[str, str | None]] = {
    "libtorch_cpu": ("Gloo's connections", _UNASKED),
    "libucs": ("UCX's connections", _UNASKED),
    "libprrte": ("Open MPI's launcher (PRRTE)", None),
    "libpmix": ("Open MPI's launcher (PMIx)", None),
    "libopen-pal": ("Open MPI's connections", None),
    "libmpi": ("MPI's connections", None),
    "mpiexec": ("MPICH's launcher (Hydra)", None),
    "hydra": ("MPICH's launcher (Hydra)", None),
}


def purpose(one: Listener, owner: str, for_failures: bool) -> tuple[str, str]:
    """What a socket is for, and what a caller has to know: by what it answers, and by who made it.

    `owner`: the file of the library that made it, "" if that is unknown. `for_failures`: whether a rank has
    noted it as the one at which it listens for connections about failures.
    """
    from unicomm.launch.rendezvous import connections

    if one.kind != "TCP":
        return f"unknown: made by {owner or '?'}", "unknown"
    at = (_reachable(one.address), one.port)
    hello = connections.HELLO.pack(connections.MAGIC, 1, bytes(32))
    # All at once, as who keeps silent is waited for in each.
    with ThreadPoolExecutor(5) as pool:
        store = pool.submit(is_store, *at)
        greeted, metrics, garbage = (
            pool.submit(answer, *at, request)
            for request in (hello, b"GET /metrics HTTP/1.0\r\n\r\n", bytes(64))
        )
        zeromq = pool.submit(_zeromq, at).result()
    if store.result():
        return "torch's store", _UNASKED
    if (welcome := greeted.result() or b"").startswith(connections.MAGIC):
        return "store of the launchers", "the job's token" if welcome[len(connections.MAGIC)] else _UNASKED
    if zeromq.startswith(_ZMTP[:1]):
        return "hub", "the job's token" if b"CURVE" in zeromq else _UNASKED
    if (metrics.result() or b"").startswith(b"HTTP/"):
        return "metrics, by HTTP", _UNASKED
    refuses = garbage.result() == b""
    if for_failures:
        return OF_RANKS, "a secret of the ranks" if refuses else NOT_SEEN
    if owner.startswith("_socket") and refuses:
        return "`reconfigure`", "the secret of the init handle"
    what, needed = next(
        (found for library, found in _LIBRARIES.items() if owner.startswith(library)),
        (f"unknown: made by {owner or '?'}", None),
    )
    if needed is None:
        answered = any((greeted.result(), metrics.result(), garbage.result(), zeromq))
        needed = "nothing: it answers strangers" if answered else "unknown: strangers get no answer"
    return what, needed


def reaches(target: str) -> bool:
    """Whether a connection to ADDRESS:PORT can be made from here."""
    address, _, port = target.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((address, int(port)), _SILENT):
        return True
    return False


def _zeromq(at: tuple[str, int]) -> bytes:
    """The greeting of a ZeroMQ socket, which comes in several parts and names the way to authenticate."""
    got = b""
    with contextlib.suppress(OSError), socket.create_connection(at, _SECONDS) as s:
        s.settimeout(_SILENT)
        s.sendall(_ZMTP)
        while len(got) < 64 and (more := s.recv(64)):
            got += more
    return got


def _reachable(address: str) -> str:
    """An address by which a process of the same host reaches a socket that is bound to this one."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)


def main() -> None:
    with ThreadPoolExecutor(32) as pool:
        if targets := sys.argv[1:]:
            print(json.dumps([t for t, far in zip(targets, pool.map(reaches, targets), strict=True) if far]))
            return
        here = listeners(_neighbours())
        owners = socket_owners.owners() if socket_owners.TRACE in os.environ else {}
        noted = [tuple(json.loads(path.read_text())) for path in _noted()]
        facts = [(owners.get((one.address, one.port), ""), (one.address, one.port) in noted) for one in here]
        purposes = pool.map(lambda one, known: purpose(one, *known), here, facts)
        print(
            json.dumps([(dataclasses.astuple(one), what) for one, what in zip(here, purposes, strict=True)])
        )


def _neighbours() -> Iterator[psutil.Process]:
    """The processes of this process's network namespace."""
    mine = os.readlink("/proc/self/ns/net")
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{process.pid}/ns/net") == mine:
                yield process


def _noted() -> list[Path]:
    """Where ranks have noted that they listen for connections about failures (programs/held_creation.py)."""
    return list(Path(os.environ["HELD_CREATION"]).glob("listens.*")) if "HELD_CREATION" in os.environ else []


if __name__ == "__main__":
    main()
