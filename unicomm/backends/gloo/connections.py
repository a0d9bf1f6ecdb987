"""The connections that Gloo made for a communicator: found by their addresses, so that they can be ended.

Gloo cannot be interrupted: an operation ends when its peers answer, or when a connection ends. So a rank that
gives up ends the connections. Gloo does not say which ones they are. But each communicator's device listens
at a port of its own, whose address is in what Gloo tells its peers, and every connection has such a port at
one end.
"""

from __future__ import annotations

import contextlib
import socket
import struct

from unicomm.comms.failures.process_sockets import internet_sockets

Address = tuple[str, int]


class Pairs:
    """The connections of one communicator: those accepted at `own`, and those made to `others`."""

    def __init__(self, own: Address, others: frozenset[Address]) -> None:
        self.own, self._others = own, others

    def end(self) -> None:
        """Ends them, and no other socket; their users get an error. Does not wait."""
        for s in internet_sockets():
            # Both calls use the same duplicate: the original's number may mean another socket by now.
            with contextlib.suppress(OSError):
                if s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    continue
                if s.getsockname()[:2] == self.own or s.getpeername()[:2] in self._others:
                    s.shutdown(socket.SHUT_RDWR)


def listening_address(published: bytes) -> Address | None:
    """Returns the address that this process listens at and that `published`, Gloo's blob, names."""
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
