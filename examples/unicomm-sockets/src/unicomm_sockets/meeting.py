"""Connects each rank with each other one by two TCP connections: one for data, one for words.

Every rank listens at a port of its own and tells the others its address by the rendezvous that unicomm
provides. Of two ranks, the higher one connects. A caller first sends a secret that only these ranks know, so
that whoever else finds the port takes nobody's place.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
import time

from unicomm import CommTimeoutError
from unicomm.comms.backend import Setup

DATA, WORDS = 0, 1
_HELLO = struct.Struct("!16sIB")  # the secret, the caller's rank, what the connection is for
_LOOK = 0.1  # seconds between two looks at whether the other ranks still come
_STRANGER = 5.0  # seconds that a caller may take to say who it is

Sockets = dict[int, socket.socket]


def meet(setup: Setup) -> tuple[Sockets, Sockets]:
    """Returns the connections for data and for words, by rank. Called by all ranks.

    Raises `CommTimeoutError` with the ranks that did not come in time, and what the rendezvous raises when
    a rank has left.
    """
    made: tuple[Sockets, Sockets] = ({}, {})
    try:
        with socket.create_server((setup.hints["address"], 0), backlog=2 * setup.size) as server:
            _meet(setup, server, made)
    except BaseException:
        for one in (*made[DATA].values(), *made[WORDS].values()):
            one.close()
        raise
    for one in (*made[DATA].values(), *made[WORDS].values()):
        one.setblocking(False)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def _meet(setup: Setup, server: socket.socket, made: tuple[Sockets, Sockets]) -> None:
    mine = secrets.token_bytes(16) if setup.rank == 0 else None
    secret = setup.rendezvous.broadcast("sockets: secret", mine)
    address = json.dumps(server.getsockname()[:2]).encode()
    places = setup.rendezvous.exchange("sockets: address", address)
    for peer in range(setup.rank):
        for kind in (DATA, WORDS):
            one = made[kind][peer] = socket.create_connection(
                tuple(json.loads(places[peer])), timeout=max(0.01, setup.rendezvous.remaining())
            )
            one.sendall(_HELLO.pack(secret, setup.rank, kind))
    server.settimeout(_LOOK)
    awaited = {(kind, peer) for kind in (DATA, WORDS) for peer in range(setup.rank + 1, setup.size)}
    while awaited:
        setup.rendezvous.check()  # raises when a rank cannot come any more
        if setup.rendezvous.remaining() <= 0:
            missing = sorted({peer for _, peer in awaited})
            raise CommTimeoutError(f"ranks {missing} did not connect", culprits=missing, hint="look there")
        try:
            caller, _ = server.accept()
        except TimeoutError:
            continue
        place = _listen_to(caller, secret)
        if place in awaited:
            awaited.discard(place)
            made[place[0]][place[1]] = caller
        else:
            caller.close()


def _listen_to(caller: socket.socket, secret: bytes) -> tuple[int, int]:
    """Returns for what the caller has connected, and its rank; (-1, -1) for a stranger."""
    end = time.monotonic() + _STRANGER
    said = b""
    try:
        while len(said) < _HELLO.size:
            caller.settimeout(max(0.01, end - time.monotonic()))
            piece = caller.recv(_HELLO.size - len(said))
            if not piece:
                return -1, -1
            said += piece
    except OSError:
        return -1, -1
    theirs, rank, kind = _HELLO.unpack(said)
    return (kind, rank) if hmac.compare_digest(theirs, secret) else (-1, -1)
