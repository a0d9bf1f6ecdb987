"""Sockets from each rank to each other one, private to the ranks of one communicator.

A rank listens at one address until all others have called. A caller sends the secret that the listener gave
the ranks through the rendezvous; a caller that does not, or is too slow, is disconnected.
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

from unicomm.comms.backend import Setup, SetupRendezvous
from unicomm.comms.errors import BackendError
from unicomm.comms.failures.first_cause import await_cause
from unicomm.comms.membership.handles import HOST_SILENCE, listen, notice_silence
from unicomm.comms.options import Hint

_SECRET = 16  # bytes
_HELLO = struct.Struct(f"<{_SECRET}sIB")  # secret, rank, number of the socket
_PATIENCE = 2.0  # seconds for an attempt to connect, and in which a caller has to send its hello
_LOOK = 0.2  # seconds between two looks at whether somebody has left
_STRANGERS = 64  # callers that may wait besides the ranks

Sockets = dict[int, socket.socket]


def _parse_silence(text: str) -> float:
    seconds = float(text)
    if not 4 <= seconds <= 3600:
        raise ValueError("expected 4 to 3600 seconds")
    return seconds


SILENCE_HINT = Hint(
    "host_silence",
    _parse_silence,
    HOST_SILENCE,
    "Seconds without an answer, 4 to 3600, after which another host counts as gone.",
)


def connect_all(setup: Setup, host: str, each: int, library: str, trouble: str = "") -> list[Sockets]:
    """Collective: returns `each` sockets to every other rank, as that many dicts by rank.

    Args:
        host: the address to listen at.
        library: name of the communicator's library, for errors.
        trouble: why this rank cannot take part, if it cannot.

    Returns when all ranks are connected. Raises `CommTimeoutError` naming the ranks that did not come or are
    stopped, and `BackendError` on all ranks if one had trouble, within the rendezvous' time.
    """
    rendezvous, comm = setup.rendezvous, setup.name
    rank, size = rendezvous.rank, rendezvous.size
    made: list[Sockets] = [{} for _ in range(each)]
    secret = secrets.token_bytes(_SECRET)
    with contextlib.ExitStack() as on_error:
        on_error.callback(_close, made)
        try:
            listener = listen(host, backlog=each * size + _STRANGERS)
        except OSError as error:
            raise _unreachable(f"cannot listen at {host}", error, comm, library) from error
        with listener:
            mine = {"address": listener.getsockname()[:2], "secret": secret.hex(), "trouble": trouble}
            posts = rendezvous.exchange(f"{library} mesh", json.dumps(mine).encode())
            there = [json.loads(post) for post in posts]
            refuse([post["trouble"] for post in there], rendezvous, comm, library)
            for peer in range(rank):
                address, key = there[peer]["address"], bytes.fromhex(there[peer]["secret"])
                for number in range(each):
                    try:
                        made[number][peer] = s = _call(tuple(address), rendezvous)
                        s.sendall(_HELLO.pack(key, rank, number))
                    except OSError as error:
                        # What another rank reports, if it has given up: nobody listens there then.
                        await_cause(rendezvous.check, min(_PATIENCE, patience(rendezvous)))
                        who = rendezvous.labels[peer]
                        raise _unreachable(
                            f"cannot reach rank {who} at {address[0]}", error, comm, library, [who]
                        ) from error
            trouble = _accept(listener, secret, made, rank, rendezvous)
        for sockets in made:
            for s in sockets.values():
                _tune(s, setup.hints.get(SILENCE_HINT.name, HOST_SILENCE))
        troubles = rendezvous.exchange(f"{library} connected", trouble.encode())
        refuse([text.decode() for text in troubles], rendezvous, comm, library)
        on_error.pop_all()
    return made


def refuse(troubles: Sequence[str], rendezvous: SetupRendezvous, comm: str, library: str) -> None:
    """Raises `BackendError` if a rank had trouble. `troubles`: what each rank says, "" for nothing."""
    if bad := [r for r, trouble in enumerate(troubles) if trouble]:
        raise BackendError(
            f"{library} could not connect on rank {rendezvous.labels[bad[0]]}: {troubles[bad[0]]}",
            comm=comm,
            culprits=[rendezvous.labels[r] for r in bad],
            hint="check that the ranks reach each other; choose the address by the hint 'hostname'",
        )


def patience(rendezvous: SetupRendezvous) -> float:
    """Returns the seconds for one step of connecting; the rest is kept to tell the others its outcome."""
    return 0.8 * rendezvous.remaining()


def _close(made: Sequence[Sockets]) -> None:
    for sockets in made:
        for s in sockets.values():
            s.close()


def _call(address: tuple[str, int], rendezvous: SetupRendezvous) -> socket.socket:
    """Connects to a rank. Raises `OSError`, or what `rendezvous.check` does meanwhile.

    Each attempt is short: a host that has just been cut off sends no refusal, so one attempt would last as
    long as the creation may.
    """
    while True:
        try:
            return socket.create_connection(address, max(0.1, min(_PATIENCE, rendezvous.remaining())))
        except TimeoutError:
            rendezvous.check()
            if rendezvous.remaining() <= 0:
                raise


def _accept(
    listener: socket.socket, secret: bytes, made: Sequence[Sockets], rank: int, rendezvous: SetupRendezvous
) -> str:
    """Waits for calls of the higher ranks. Returns what went wrong, for the others; "" for nothing."""
    above = range(rank + 1, rendezvous.size)
    end = time.monotonic() + patience(rendezvous)
    while missing := [peer for peer in above if any(peer not in sockets for sockets in made)]:
        listener.settimeout(max(0.01, min(_LOOK, end - time.monotonic())))
        try:
            caller = listener.accept()[0]
        except TimeoutError:
            rendezvous.check()  # a rank that cannot connect has reported it
            if time.monotonic() < end:
                continue
            return f"ranks {[rendezvous.labels[r] for r in missing]} did not connect in time"
        given, peer, number = _hello(caller) or (b"", -1, 0)
        known = hmac.compare_digest(given, secret) and peer in above and number < len(made)
        if known and peer not in made[number]:
            made[number][peer] = caller
        else:
            caller.close()
    return ""


def _hello(caller: socket.socket) -> tuple[bytes, int, int] | None:
    data, end = b"", time.monotonic() + _PATIENCE
    try:
        while len(data) < _HELLO.size:
            caller.settimeout(max(0.01, end - time.monotonic()))
            more = caller.recv(_HELLO.size - len(data))
            if not more or time.monotonic() > end:
                return None
            data += more
    except OSError:
        return None
    given, peer, number = _HELLO.unpack(data)
    return given, peer, number


def receive_exactly(s: socket.socket, length: int) -> bytes:
    """Returns exactly `length` bytes. Raises `OSError` if the connection ends before, or at its timeout."""
    data = s.recv(length, socket.MSG_WAITALL)
    while len(data) < length:  # a signal came, or the socket has a timeout
        more = s.recv(length - len(data), socket.MSG_WAITALL)
        if not more:
            raise ConnectionError("Connection closed by peer")
        data += more
    return data


def _tune(s: socket.socket, silence: float) -> None:
    s.settimeout(None)
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    notice_silence(s, silence)


def _unreachable(
    what: str, error: OSError, comm: str, library: str, culprits: Sequence[int] = ()
) -> BackendError:
    return BackendError(
        f"{library}: {what}: {error.strerror or error}",
        comm=comm,
        culprits=culprits,
        hint="check that the ranks reach each other; choose the address by the hint 'hostname'",
    )
