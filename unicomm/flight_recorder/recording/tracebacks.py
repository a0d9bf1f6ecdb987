"""Tracebacks of errors that unicomm raises on purpose, without unicomm's own frames.

An error of a communicator says what happened, and who is to blame. The frames between the user's call and the
place where it was raised tell the user nothing, and they push the user's line out of sight. They are left out
where an unhandled error is printed, so they cost nothing before that. UNICOMM_FULL_TRACEBACK=1 keeps them.
Other errors keep all frames: they may be faults of unicomm itself.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import unicomm

VARIABLE = "UNICOMM_FULL_TRACEBACK"
_ERRORS = "unicomm.comms.errors"  # the module of the errors that unicomm raises on purpose
_OWN = os.path.join(os.path.dirname(os.path.abspath(unicomm.__file__)), "")


def without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Returns a traceback without unicomm's frames; the whole one if it has no others."""
    entries = []
    at = trace
    while at is not None:
        if not at.tb_frame.f_code.co_filename.startswith(_OWN):
            entries.append(at)
        at = at.tb_next
    kept: TracebackType | None = None
    for entry in reversed(entries):
        kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept or trace


def trim(error: BaseException | None) -> list[tuple[BaseException, TracebackType | None]]:
    """Leaves unicomm's frames out of the traceback of an error, and of those that it was raised from.

    Returns the changed errors with their whole tracebacks.
    """
    before: list[tuple[BaseException, TracebackType | None]] = []
    if os.environ.get(VARIABLE, "0").lower() in ("1", "true", "yes", "on"):
        return before
    todo, seen = [error], set()
    while todo:
        one = todo.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        todo += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]
        if any(base.__module__ == _ERRORS for base in type(one).__mro__):
            before.append((one, one.__traceback__))
            one.__traceback__ = without_own_frames(one.__traceback__)
    return before


@contextmanager
def shown(error: BaseException | None) -> Iterator[None]:
    """While the block runs, an error has the traceback that is to be shown; see `trim`."""
    before = trim(error)
    try:
        yield
    finally:
        for one, trace in before:
            one.__traceback__ = trace


def _in_thread(args: Any, _next: Any = threading.excepthook) -> None:
    with shown(args.exc_value):
        trace = None if args.exc_value is None else args.exc_value.__traceback__
        _next(threading.ExceptHookArgs((args.exc_type, args.exc_value, trace, args.thread)))


def install() -> None:
    """Has threads print unhandled errors without unicomm's frames. The main thread's hook is in ending.py."""
    threading.excepthook = _in_thread
