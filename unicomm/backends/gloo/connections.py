"""The connections that Gloo made for a communicator: found by their addresses, so that they can be ended.

Gloo cannot be interrupted: an operation ends when its peers answer, or when a connection does. So whoever
gives up ends the connections. Which ones they are, Gloo does not say either; but each communicator's device
listens at a port of its own, whose address is in what Gloo tells its peers, and every connection has such a
port at one end.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator

Address = tuple[str, int]


class Pairs:
    """The connections of one communicator: those that came to `own`, and those that go to `others`."""

    def __init__(self, own: Address, others: frozenset[Address]) -> None:
        self.own, self._others = own, others

    def end(self) -> None:
        """Ends them, and no other socket. Does not wait; what uses them gets an error."""
        for s in internet_sockets():
            # What is asked and what is ended is the same duplicate: its number may mean another one by now.
            with contextlib.suppress(OSError):
                if s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    continue
                if s.getsockname()[:2] == self.own or s.getpeername()[:2] in self._others:
                    s.shutdown(socket.SHUT_RDWR)


def listening_address(published: bytes) -> Address | None:
    """Where this process listens for what is in `published`, what Gloo tells this rank's peers."""
    for s in internet_sockets():
        if s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            host, port = s.getsockname()[:2]
            if _as_sockaddr(s.family, (host, port)) in published:
                return host, port
    return None


def _as_sockaddr(family: int, address: Address) -> bytes:
    host, port = socket.inet_pton(family, address[0].partition("%")[0]), struct.pack(">H", address[1])
    between = bytes(4) if family == socket.AF_INET6 else b""  # the flow
    return struct.pack("=H", family) + port + between + host


def internet_sockets() -> Iterator[socket.socket]:
    """Duplicates of this process's internet sockets, each good until the next."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            s = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # it was closed meanwhile
            continue
        with s:
            if s.family in (socket.AF_INET, socket.AF_INET6) and s.type == socket.SOCK_STREAM:
                yield s
