"""expect_slow: a rank tells the others that it will be long, so that they do not give up."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta

from unicomm.comms.backend import ExtendsDeadlines
from unicomm.comms.errors import CommError, InvalidArgumentError, UnsupportedError
from unicomm.comms.options import seconds as in_seconds

from .engine import Engine

_lock = threading.Lock()
# Blocks may lie in each other, or run in several threads: the one that ends last counts.
_open: weakref.WeakKeyDictionary[Engine, list[float]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def expect_slow(engine: Engine, name: str, seconds: timedelta | float) -> Iterator[None]:
    """See `Communicator.expect_slow`."""
    engine.check_open("expect_slow")
    with engine.located("expect_slow"):
        length = in_seconds(seconds, 0.0)
        if not isinstance(name, str) or length <= 0:
            raise InvalidArgumentError(
                f"expect_slow({name!r}, {seconds!r}) names nothing, or no time",
                hint='pass what it is and its longest duration, e.g. expect_slow("checkpoint", 600)',
            )
        backend = engine.backend
        if not isinstance(backend, ExtendsDeadlines):
            raise UnsupportedError(
                f"backend '{backend.name}' cannot extend the other ranks' deadlines",
                hint="pass a longer timeout= to their operations",
            )
        until = time.monotonic() + length
        with _lock:
            blocks = _open.setdefault(engine, [])
            backend.expect_slow(name, max(until, *blocks) - time.monotonic() if blocks else length)
            blocks.append(until)
    try:
        yield
    finally:
        with _lock:
            blocks.remove(until)
            if not (engine.finalized or engine.broken):
                # It is over early, perhaps: the others, whose own time may be over, get as long as an
                # operation may take until this rank comes.
                now = time.monotonic()
                left = min(until - now, engine.timeout)
                with contextlib.suppress(CommError):
                    backend.expect_slow(name, max(0.0, left, *(b - now for b in blocks)))
