"""expect_slow: a rank that is about to be busy extends the other ranks' deadlines."""

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
# Blocks may be nested or run in several threads: the one that ends last counts.
_open: weakref.WeakKeyDictionary[Engine, list[float]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def expect_slow(engine: Engine, name: str, seconds: timedelta | float) -> Iterator[None]:
    """See `Communicator.expect_slow`."""
    engine.check_open("expect_slow")
    with engine.located("expect_slow"):
        length = in_seconds(seconds, 0.0)
        if not isinstance(name, str) or length <= 0:
            raise InvalidArgumentError(
                f"expect_slow({name!r}, {seconds!r}) needs a name and a positive duration",
                hint='pass what the rank does and its longest duration, e.g. expect_slow("checkpoint", 600)',
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
                # The block may have ended early. The others, whose own deadlines may have passed, wait for
                # this rank for as long as an operation may take.
                now = time.monotonic()
                left = min(until - now, engine.timeout)
                with contextlib.suppress(CommError):
                    backend.expect_slow(name, max(0.0, left, *(b - now for b in blocks)))
