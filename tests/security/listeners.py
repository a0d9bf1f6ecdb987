"""Which sockets a job's processes listen at, and who answers there: what a stranger on the network sees.

python -m tests.security.listeners        # JSON: the sockets of all processes, within a network namespace
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import json
import os
import socket
import struct
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psutil

_SECONDS = 20.0  # that a connection may take
_SILENT = 8.0  # seconds after which a listener counts as one that says nothing
_VALIDATE = b"\0" + struct.pack("<I", 0x3C85F7CE)  # torch's protocol of stores
_PING = b"\x0d"


@dataclasses.dataclass(frozen=True, order=True)
class Listener:
    """A listening TCP socket.

    Attributes:
        process: what the process is: "launcher", "hub", "rank", ..., else its command line.
        address: the address that it is bound to.
        port: its port.
    """

    process: str
    address: str
    port: int

    @property
    def bound(self) -> str:
        """The kind of its address: "loopback", "one address" or "all addresses"."""
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
    """The sockets at which these processes listen, each once: forks share those of their parent."""
    found: dict[tuple[str, int], Listener] = {}
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            what = _what(process)
            for one in process.net_connections("tcp"):
                if one.status == psutil.CONN_LISTEN:
                    where = (one.laddr.ip, one.laddr.port)
                    found.setdefault(where, Listener(what, *where))
    return sorted(found.values())


_PROCESSES = (  # a part of the command line, and what the process is
    ("unicomm.launch.hub.server", "hub"),
    ("unicomm.launch.exporter.server", "exporter of metrics"),
    ("torch.distributed.run", "launcher"),
    ("unicomm run", "launcher"),
    ("hydra", "mpiexec"),
    ("mpiexec", "mpiexec"),
    ("in_a_notebook.py", "notebook"),
)


def _what(process: psutil.Process) -> str:
    line = " ".join(process.cmdline())
    if process.environ().keys() & {"RANK", "PMI_RANK"}:
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


def purpose(one: Listener) -> tuple[str, str]:
    """What a listener is for, and what a caller has to know: both by what it answers."""
    from unicomm.launch.rendezvous import connections

    if one.process == "mpiexec":
        return "MPI's process manager", "MPI's own"
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
        return "torch's store", "nothing"
    if (welcome := greeted.result() or b"").startswith(connections.MAGIC):
        return "store of the launchers", "the job's token" if welcome[len(connections.MAGIC)] else "nothing"
    if zeromq.startswith(_ZMTP[:1]):
        return "hub", "the job's token" if b"CURVE" in zeromq else "nothing"
    if (metrics.result() or b"").startswith(b"HTTP/"):
        return "metrics, by HTTP", "nothing"
    if garbage.result() == b"":
        return "`reconfigure`", "the secret of the init handle"
    return "Gloo's or UCX's connections", "nothing"


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
        here = listeners(psutil.process_iter())
        purposes = pool.map(purpose, here)
        print(
            json.dumps([(dataclasses.astuple(one), what) for one, what in zip(here, purposes, strict=True)])
        )


if __name__ == "__main__":
    main()
