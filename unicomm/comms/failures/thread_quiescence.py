"""Whether a thread of this process may still call a communicator, or all threads wait and none will go on.

A rank that waits for another rank waits forever only if nobody can act for the other rank any more: neither
the thread that has acted for it until now, nor another thread of its process. So all threads that run Python
are looked at. The answer is no unless each thread is in one of these states:

- It waits in a communicator. The native core knows for whom, and goes on from there.
- It waits, without a limit of time, for what only another thread of the process does: an asynchronous
  operation that is not over, a thread that it joins, a condition, an event or a queue.
- It runs no code of the user and will not do so by itself: idle threads of unicomm and of the standard
  library's executors and queues, and threads in the files that `UNICOMM_HARMLESS_THREADS` names.
- It sends requests of other threads to a store. Those are looked at themselves, so this one may be running.
- It is another rank: it created one rank of a communicator of which the thread in question created another.
  Where ranks are threads, each thread acts for its own rank only; a thread that joins one has started ranks.

Threads that run no Python are taken never to call a communicator. docs/design/deadlocks.md has the argument.
"""

from __future__ import annotations

import concurrent.futures.thread
import multiprocessing.connection
import os
import queue
import selectors
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import FrameType

import unicomm
from unicomm.comms import work
from unicomm.comms.failures import daemon_pool, open_communicators, store_requests
from unicomm.flight_recorder.recording.thread_frames import frames_of_threads

_SWITCH = 0.02  # seconds: a thread that waits for Python's lock moves within 5 ms

_OWN = os.path.join(os.path.dirname(os.path.abspath(unicomm.__file__)), "")
_STANDARD = os.path.dirname(os.path.abspath(threading.__file__))
# Files whose threads wait and then run nothing of the user's that could call a communicator.
_SILENT = frozenset(
    {
        *(module.__file__ for module in (threading, queue, concurrent.futures.thread, daemon_pool)),
        os.path.join(_OWN, "comms", "execution", "message_queue.py"),
        os.path.join(_OWN, "comms", "execution", "worker.py"),
        os.path.join(_STANDARD, "multiprocessing", "queues.py"),
    }
)
#: Endings of file names, separated as in PATH. A thread all of whose frames are in these files, or whose
#: `threading.Timer` calls a function there, never calls a communicator by itself.
VARIABLE = "UNICOMM_HARMLESS_THREADS"


def _harmless_files() -> tuple[str, ...]:
    """Files whose threads call no communicator, but may wake a thread of the user's that does."""
    named = os.environ.get(VARIABLE, "").split(os.pathsep)
    # Gloo's communicators are watched by a thread that waits in `selectors`. So does whoever takes something
    # from another process, such as the data loader's thread that pins memory, by way of `connection`.
    waits = (str(selectors.__file__), str(multiprocessing.connection.__file__))
    return (*waits, *filter(None, named))


def threads_that_stay(
    waiting: Sequence[int], creators: Mapping[int, Mapping[int, threading.Thread]], comm: int, rank: int
) -> list[int] | None:
    """Those of the threads `waiting` that matter: while they wait, no thread will enter `comm` as `rank`.

    None if a thread may enter it all the same. `creators`: the threads of this process that have created a
    rank of a communicator, by communicator and rank.
    """
    me = creators.get(comm, {}).get(rank)
    shared = [set(ranks.values()) for ranks in creators.values() if len(ranks) > 1]
    launched = {t for threads in shared for t in threads}
    others = {t for threads in shared if me in threads for t in threads if t is not me}
    others = {t for t in others if not isinstance(t, threading._DummyThread)}

    def alone() -> bool:
        return _stay(lambda: _standing(set(waiting), others, launched, False))

    # A thread that any other thread may wake stays as long as all do. That is looked at only if the stronger
    # condition does not hold, which gets a second chance: a thread may just have been about to come to rest.
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
    # A thread that has not moved has been in its place all the time: so there was a moment when all were.
    return look() == before


def _standing(
    waiting: Collection[int],
    others: Collection[threading.Thread],
    launched: Collection[threading.Thread],
    events: bool,
) -> dict[int, str] | None:
    """How often each of the remaining threads has moved; None if one of them may call a communicator.

    `events`: the remaining threads may also wait for events, but then none of them may wake another thread.
    """
    if not _idle_or_in(waiting):
        return None
    frames = frames_of_threads()
    try:
        return _moves_of(frames, waiting, others, launched, events)
    finally:
        frames.clear()  # this frame is among them, and would keep them all alive, with all that they hold


def _moves_of(
    frames: dict[int, FrameType],
    waiting: Collection[int],
    others: Collection[threading.Thread],
    launched: Collection[threading.Thread],
    events: bool,
) -> dict[int, str] | None:
    threads = {t.ident: t for t in threading.enumerate()}
    # A thread that is being started runs nothing yet.
    if any(t.ident not in frames for t in threads.values() if not isinstance(t, threading._DummyThread)):
        return None
    found = {}
    for ident, frame in frames.items():
        if ident in waiting:
            continue
        thread = threads.get(ident)
        if thread is None:
            # Started by `_thread` alone: its number in the kernel is unknown. If it wakes another thread,
            # that one moves.
            if not _is_harmless(None, frame, events):
                return None
            found[ident] = f"{id(frame)} {frame.f_lasti}"
            continue
        # On a busy machine a store's thread is awake for a while after each answer.
        if thread in others or thread.name == store_requests.THREAD:
            continue
        moves = _moves(thread)
        if moves is None or not (_is_harmless(thread, frame, events) or _is_parked(frame, launched, events)):
            return None
        found[ident] = moves
    return found


def _workers_of(creators: Collection[threading.Thread]) -> set[int]:
    engines = [comm._engine for comm in open_communicators.every()]
    return {e.executor.thread for e in engines if getattr(e.backend, "creator", None) in creators}


def _idle_or_in(waiting: Collection[int]) -> bool:
    """Whether the threads that run operations in the background have nothing to do, or wait in one."""
    for comm in open_communicators.every():
        executor = comm._engine.executor
        if executor.thread and executor.busy and executor.thread not in waiting:
            return False
        if executor.unattended:
            return False
    return True


def _moves(thread: threading.Thread) -> str | None:
    """A text that changes whenever the thread runs; None while the thread runs."""
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
    """Whether a thread calls no communicator by itself; with `silent` it wakes no other thread either."""
    wakers = () if silent else _harmless_files()
    if isinstance(thread, threading.Timer):  # it waits first and then runs its function
        code = getattr(thread.function, "__code__", None)
        return code is not None and code.co_filename.endswith(wakers)
    while frame is not None:
        name = frame.f_code.co_filename
        if not (name in _SILENT or name.endswith(wakers) or (not silent and name.startswith(_OWN))):
            return False
        frame = frame.f_back
    return True


def _is_parked(frame: FrameType, launched: Collection[threading.Thread], events: bool) -> bool:
    """Whether a thread waits without a limit of time for what another thread of this process does."""
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
