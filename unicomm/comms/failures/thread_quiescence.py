"""Census: whether a thread of this process may still call a communicator, or all are bound to wait.

A rank that waits for another one can only be told that it waits for ever when nobody may act for that other
one any more: neither the thread that did so until now, nor another one of its process. So this looks at all
threads that run Python. Each must be one of these, or the answer is no:

- It waits in a communicator; the native core knows in which, and goes on from there.
- It waits, without a limit of time, for what only another thread of the process does: an asynchronous
  operation that has not come to its end, a thread that it joins, a condition, an event or a queue.
- It runs nothing of the user's, and nothing of the user's will it run by itself: idle threads of ours and
  of executors, and some of well-known libraries.
- It is another rank: it created one of a communicator of which whoever created this one created another.
  Where ranks are threads, each is itself and no other; who joins one is where the ranks were started.

Threads that run no Python are taken for such that never will. docs/design/deadlocks.md says the rest.
"""

from __future__ import annotations

import concurrent.futures.thread
import os
import queue
import selectors
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import FrameType

import unicomm
from unicomm.comms import work

_SWITCH = 0.02  # seconds: a thread that waits for Python's lock moves within 5 ms

# Files whose threads wait for something and then run nothing of the user's that could call a communicator ...
_OWN = os.path.join(os.path.dirname(os.path.abspath(unicomm.__file__)), "")
_SILENT = frozenset(
    {
        *(module.__file__ for module in (threading, queue, concurrent.futures.thread, work)),
        os.path.join(_OWN, "comms", "execution", "message_queue.py"),
        os.path.join(_OWN, "comms", "execution", "worker.py"),
        os.path.join(_OWN, "comms", "failures", "threads.py"),
    }
)
_SILENT_LIBRARIES = ("/multiprocessing/queues.py", "/tqdm/_monitor.py", "/pytest_timeout.py")
# ... and those that may wake a thread of the user's then, when they hear something from outside.
_LIBRARIES = (
    "/torch/utils/data/_utils/pin_memory.py",
    "/execnet/gateway_base.py",
    str(selectors.__file__),  # in which the watch of Gloo's communicators waits
)


def bound(
    waiting: Sequence[int], creators: Mapping[int, Mapping[int, threading.Thread]], comm: int, rank: int
) -> list[int] | None:
    """Whether nobody will enter `comm` as `rank` while some of the threads `waiting` stay where they are.

    Those are returned; None: somebody may. `creators`: by communicator and rank, the threads of this process
    that created them.
    """
    me = creators.get(comm, {}).get(rank)
    shared = [set(ranks.values()) for ranks in creators.values() if len(ranks) > 1]
    launched = {t for threads in shared for t in threads}
    others = {t for threads in shared if me in threads for t in threads if t is not me}
    others = {t for t in others if not isinstance(t, threading._DummyThread)}

    def alone() -> bool:
        return _stay(lambda: _standing(set(waiting), others, launched, False))

    # Whoever may be woken by any other thread is bound as long as all are. That is looked at only where what
    # says more does not hold, which has a second chance: a thread may just have been about to come to rest.
    if not alone():
        if not _stay(lambda: _standing(set(waiting), set(), launched, True)):
            return None
        if not alone():
            return list(waiting)
    elsewhere = {t.ident for t in others} | _workers_of(others)
    return [ident for ident in waiting if ident not in elsewhere]


def _stay(look: Callable[[], dict[int, str] | None]) -> bool:
    before = look()
    if not before:
        return before is not None
    time.sleep(_SWITCH)
    # Whoever has not moved has been where it is all the while: so there was a time when all were.
    return look() == before


def _standing(
    waiting: Collection[int],
    others: Collection[threading.Thread],
    launched: Collection[threading.Thread],
    events: bool,
) -> dict[int, str] | None:
    """How often each of the remaining threads has moved; None when one of them may call something.

    `events`: threads that wait for an event may, too, be among them, but then none that others could wake.
    """
    if not _idle_or_in(waiting):
        return None
    frames = sys._current_frames()
    try:
        return _moves_of(frames, waiting, others, launched, events)
    finally:
        frames.clear()  # this very frame is among them, and would keep them all, with all that they hold


def _moves_of(
    frames: dict[int, FrameType],
    waiting: Collection[int],
    others: Collection[threading.Thread],
    launched: Collection[threading.Thread],
    events: bool,
) -> dict[int, str] | None:
    threads = {t.ident: t for t in threading.enumerate()}
    # One that is being started runs nothing yet.
    if any(t.ident not in frames for t in threads.values() if not isinstance(t, threading._DummyThread)):
        return None
    found = {}
    for ident, frame in frames.items():
        if ident in waiting:
            continue
        thread = threads.get(ident)
        if thread is None:
            # Started by `_thread` alone, as execnet's reader is: its number in the kernel is unknown. If it
            # wakes another thread, that one moves.
            if not _is_harmless(None, frame, events):
                return None
            found[ident] = f"{id(frame)} {frame.f_lasti}"
            continue
        if thread in others:
            continue
        moves = _moves(thread)
        if moves is None or not (_is_harmless(thread, frame, events) or _is_parked(frame, launched, events)):
            return None
        found[ident] = moves
    return found


def _workers_of(creators: Collection[threading.Thread]) -> set[int]:
    from unicomm.comms.membership.lifecycle import _living

    engines = [comm._engine for comm in list(_living)]
    return {e.executor.thread for e in engines if getattr(e.backend, "creator", None) in creators}


def _idle_or_in(waiting: Collection[int]) -> bool:
    """Whether whatever runs operations in the background has nothing to do, or waits in one."""
    from unicomm.comms.membership.lifecycle import _living

    for comm in list(_living):
        engine = comm._engine
        if engine.executor.thread and engine.executor.busy and engine.executor.thread not in waiting:
            return False
        if engine.executor.unattended:
            return False
    return True


def _moves(thread: threading.Thread) -> str | None:
    """Changes whenever the thread runs; None while it does."""
    # In a forked process the main thread has the number that it had in the parent.
    number = os.getpid() if thread is threading.main_thread() else thread.native_id
    try:
        lines = Path(f"/proc/self/task/{number}/status").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    if fields["State"].strip()[:1] != "S":
        return None
    return fields["voluntary_ctxt_switches"] + fields["nonvoluntary_ctxt_switches"]


def _is_harmless(thread: threading.Thread | None, frame: FrameType | None, silent: bool) -> bool:
    if isinstance(thread, threading.Timer):  # it waits first, and runs something then
        code = getattr(thread.function, "__code__", None)
        return code is not None and code.co_filename.endswith(_SILENT_LIBRARIES)
    while frame is not None:
        name = frame.f_code.co_filename
        quiet = name in _SILENT or name.endswith(_SILENT_LIBRARIES)
        if not (quiet or (not silent and (name.startswith(_OWN) or name.endswith(_LIBRARIES)))):
            return False
        frame = frame.f_back
    return True


def _is_parked(frame: FrameType, launched: Collection[threading.Thread], events: bool) -> bool:
    """Whether a thread waits without a limit for what another thread of this process does."""
    code, local = frame.f_code, frame.f_locals
    this = local.get("self")
    if code is work.Work.wait.__code__:
        return isinstance(this, work.Work) and this._pending and local.get("timeout") is None
    if code.co_filename != threading.__file__:
        return False
    if events and code.co_name == "wait" and isinstance(this, threading.Condition):
        return local.get("timeout") is None and local.get("waiter") in this._waiters  # type: ignore[attr-defined]
    if code.co_name in ("join", "_wait_for_tstate_lock") and isinstance(this, threading.Thread):
        return this.is_alive() and (local.get("timeout") in (None, -1) or this in launched)
    return False
