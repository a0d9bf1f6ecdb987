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
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import psutil

_SECONDS = 10.0  # that a listener may take to greet; those that say nothing wait for the caller
_SILENT = 2.0  # after which it counts as one that says nothing
_VALIDATE = b"\0" + struct.pack("<I", 0x3C85F7CE)  # torch's protocol of stores
_PING = b"\x0d"


@dataclasses.dataclass(frozen=True, order=True)
class Listener:
    """A listening TCP socket.

    Attributes:
        process: what the process is: "launcher", "hub", "rank", "exporter", or the command line.
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


def _what(process: psutil.Process) -> str:
    words = process.cmdline()
    line = " ".join(words)
    for part, name in (
        ("unicomm.launch.hub.server", "hub"),
        ("unicomm.launch.exporter.server", "exporter"),
        ("torch.distributed.run", "launcher"),
        ("unicomm run", "launcher"),
    ):
        if part in line:
            return name
    return "rank" if "RANK" in process.environ() else line


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


def greeting(address: str, port: int) -> bytes:
    """What a listener says to a caller that says nothing."""
    with contextlib.suppress(OSError), socket.create_connection((address, port), _SECONDS) as s:
        s.settimeout(_SILENT)
        return s.recv(64)
    return b""


def main() -> None:
    print(json.dumps([dataclasses.astuple(one) for one in listeners(psutil.process_iter())]))


if __name__ == "__main__":
    main()
