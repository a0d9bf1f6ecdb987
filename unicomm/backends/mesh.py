"""Sockets from each rank to each other one, private to the ranks of one communicator.

A rank listens at one address until all others have called. Who calls says the secret that the listener gave
the members through the rendezvous; whoever does not, or says it too slowly, is hung up on.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Sequence

from unicomm.comms.errors import BackendError, CommTimeoutError
from unicomm.comms.rendezvous import Rendezvous

_SECRET = 16  # bytes
_HELLO = struct.Struct(f"<{_SECRET}sIB")  # secret, rank, number of the socket
_PATIENCE = 2.0  # seconds in which a caller has to say who it is
_STRANGERS = 64  # callers that may wait besides the members
# A host that is gone, or a cable that is cut, is noticed when this many probes, one a second, are unanswered.
_PROBES = 3

Sockets = dict[int, socket.socket]


def connect(rendezvous: Rendezvous, host: str, each: int, comm: str) -> list[Sockets]:
    """`each` sockets to every other rank, as one dict by rank for each. Called by all members.

    `host`: the address to listen at. Raises `CommTimeoutError` naming who did not come, `BackendError` when
    the addresses cannot be reached, within the rendezvous' time.
    """
    rank, size = rendezvous.rank, rendezvous.size
    made: list[Sockets] = [{} for _ in range(each)]
    secret = secrets.token_bytes(_SECRET)
    with contextlib.ExitStack() as on_error:
        on_error.callback(_close, made)
        try:
            listener = _listen(host, each * size + _STRANGERS)
        except OSError as error:
            raise _unreachable(f"cannot listen at {host}", error, comm) from error
        with listener:
            mine = {"address": listener.getsockname()[:2], "secret": secret.hex()}
            posts = rendezvous.exchange("gloo mesh", json.dumps(mine).encode())
            for peer in range(rank):
                there = json.loads(posts[peer])
                for number in range(each):
                    try:
                        made[number][peer] = s = socket.create_connection(
                            tuple(there["address"]), max(0.1, rendezvous.remaining())
                        )
                        s.sendall(_HELLO.pack(bytes.fromhex(there["secret"]), rank, number))
                    except OSError as error:
                        what = f"cannot reach rank {peer} at {there['address'][0]}"
                        raise _unreachable(what, error, comm) from error
            _accept(listener, secret, made, rank, rendezvous, comm)
        for sockets in made:
            for s in sockets.values():
                _tune(s)
        on_error.pop_all()
    return made


def _close(made: Sequence[Sockets]) -> None:
    for sockets in made:
        for s in sockets.values():
            s.close()


def _listen(host: str, backlog: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.bind(address)
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


def _accept(
    listener: socket.socket,
    secret: bytes,
    made: Sequence[Sockets],
    rank: int,
    rendezvous: Rendezvous,
    comm: str,
) -> None:
    above = range(rank + 1, rendezvous.size)
    while missing := [peer for peer in above if any(peer not in sockets for sockets in made)]:
        listener.settimeout(max(0.01, rendezvous.remaining()))
        try:
            caller = listener.accept()[0]
        except TimeoutError:
            raise CommTimeoutError(
                f"ranks {missing} did not connect in time",
                comm=comm,
                culprits=missing,
                hint="see what they printed last; check that they reach this host",
            ) from None
        given, peer, number = _hello(caller) or (b"", -1, 0)
        known = hmac.compare_digest(given, secret) and peer in above and number < len(made)
        if known and peer not in made[number]:
            made[number][peer] = caller
        else:
            caller.close()


def _hello(caller: socket.socket) -> tuple[bytes, int, int] | None:
    said, end = b"", time.monotonic() + _PATIENCE
    try:
        while len(said) < _HELLO.size:
            caller.settimeout(max(0.01, end - time.monotonic()))
            more = caller.recv(_HELLO.size - len(said))
            if not more or time.monotonic() > end:
                return None
            said += more
    except OSError:
        return None
    given, peer, number = _HELLO.unpack(said)
    return given, peer, number


def _tune(s: socket.socket) -> None:
    s.settimeout(None)
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", _PROBES)):
        if hasattr(socket, option):
            s.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _unreachable(what: str, error: OSError, comm: str) -> BackendError:
    return BackendError(
        f"gloo: {what}: {error.strerror or error}",
        comm=comm,
        hint="check that the ranks reach each other; choose the interface by the hint 'interface'",
    )
