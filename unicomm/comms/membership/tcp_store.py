"""`open_tcp_store`: a TCPStore within a deadline, whatever name service, network and server do.

torch's constructor waits for the name service, and for a server that accepts connections and answers nothing,
without a limit of time.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from unicomm.c10d.compat import Store, TCPStore
from unicomm.comms.failures.daemon_pool import call_within
from unicomm.comms.failures.store_requests import (
    NoAnswerError,
    Opening,
    StoreHost,
    connections,
    requests_of,
    set_host,
)

T = TypeVar("T")

_AGAIN = 0.5  # seconds between two questions to the name service
_OVERTIME = 0.25  # seconds in which torch's own error, which says more, may come after its timeout


class UnresolvedError(OSError):
    """The name service has not found the host within the deadline."""


def resolve(host: str, port: int, seconds: float) -> None:
    """Returns when the host has an address. A name may become known later: asks again until the deadline.

    Raises `UnresolvedError` at the deadline.
    """
    try:
        ipaddress.ip_address(host.partition("%")[0])
        return
    except ValueError:
        pass
    end, why = time.monotonic() + seconds, "the name service does not answer"
    while (left := end - time.monotonic()) > 0:
        try:
            call_within(left, "unicomm-resolve", lambda: socket.getaddrinfo(host, port))
            return
        except TimeoutError:
            break
        except OSError as error:
            why = error.strerror or str(error)
        time.sleep(max(0.0, min(_AGAIN, end - time.monotonic())))
    raise UnresolvedError(f"the name {host!r} has no address: {why}")


class SilentError(OSError):
    """A server has accepted the connection, and has not answered within the deadline."""


def within(seconds: float, host: str, port: int, make: Callable[[], T]) -> T:
    """Returns or raises what `make` does, which opens a store at an address.

    If it takes longer than `seconds`, raises `SilentError` when the server has accepted the connection, else
    `OSError`.
    """
    opening = Opening(host, port)
    requests = requests_of(opening)
    assert requests is not None
    try:
        return requests.ask(opening, seconds + _OVERTIME, make)
    except NoAnswerError:
        reached: list[socket.socket] = []
        connections(host, port, reached.append)
        if reached:
            raise SilentError("something listens there, and answers nothing") from None
        raise OSError("no connection could be made") from None


def open_tcp_store(host: str, port: int, timeout: float, holder: StoreHost, **options: Any) -> Store:
    """Opens a TCPStore that `holder` holds; `options` are torch's. Waits up to `timeout` seconds.

    Raises `UnresolvedError`, `SilentError`, `OSError`, or torch's errors.
    """
    began = time.monotonic()
    resolve(host, port, timeout)
    left = max(0.001, timeout - (time.monotonic() - began))

    def make() -> Store:
        return TCPStore(host, port, timeout=timedelta(seconds=left), wait_for_workers=False, **options)

    store = within(left, host, port, make)
    set_host(store, holder)
    return store
