"""The end of communicators: finalize, the end of the process, and forked children."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import parent_process
from typing import cast

from unicomm.comms.backend import SurvivesFork
from unicomm.comms.errors import AbortedError, BackendError, CommError, CommTimeoutError, NotReadyError
from unicomm.comms.execution.device import watchdog
from unicomm.comms.execution.engine import Engine
from unicomm.comms.execution.host import on_fast_path
from unicomm.comms.failures import daemon_pool, open_communicators

from .epoch import EpochHolder
from .store_users import await_users

_log = logging.getLogger("unicomm")
_EXIT_GRACE = 5.0  # seconds that pending operations of open communicators have when the process ends
_THREAD_ENDS = 10.0  # seconds for the end of the worker's thread, which a busy machine may not run soon
_LAST_JOBS = 5.0  # seconds for what this rank is about to tell the other ranks when the process ends


def finalize(comm: EpochHolder, timeout: float) -> None:
    """See `Communicator.finalize`."""
    if not comm._engine.closing:
        comm._engine.refuse_capture("finalize")
    close(comm, timeout)


def close(comm: EpochHolder, timeout: float) -> None:
    """Finalizes, also while a graph is captured."""
    if (dynamic := comm._dynamic) is None:
        _finalize_once(comm, timeout)
        return
    dynamic.cancel()
    if not dynamic.busy.acquire(timeout=timeout):
        raise comm._engine.error(
            NotReadyError,
            "finalize",
            "reconfigure is under way in another thread, or in the hook that called finalize",
            "finalize when reconfigure has returned",
        )
    try:
        await_users(comm._member.store, timeout, dynamic.endpoint.answered)
        dynamic.endpoint.close()
        _finalize_once(comm, timeout)
        comm._member.store = None  # the store of the epoch
    finally:
        dynamic.busy.release()


def _finalize_once(comm: EpochHolder, timeout: float) -> None:
    engine = comm._engine
    engine.executor.check_can_close()
    in_worker = engine.executor.is_current()  # in a callback or hook, which cannot wait for later operations
    if in_worker and engine.broken is None:
        engine.executor.check_can_wait("finalize")
    # Once, in one thread at a time, also a hook. The worker must not wait for a thread that joins it, nor a
    # thread that issues an operation for one that waits for the end of that operation.
    issues = engine.issuer == threading.get_ident()
    if engine.finalizing.acquire(blocking=not (in_worker or issues)):
        try:
            if not engine.closing:
                engine.closing = True
                _finalize(comm, timeout)
        finally:
            engine.finalizing.release()


def _finalize(comm: EpochHolder, timeout: float) -> None:
    engine, executor = comm._engine, comm._engine.executor
    # Another thread may be in abort: the other ranks shall hear of that, and not that this rank has left.
    engine.ended.wait(timeout)
    deadline = time.monotonic() + timeout
    late: list[str] = []
    ended = _run_pending(engine, deadline) and _stop_issuing(engine, max(0.0, deadline - time.monotonic()))
    # What other threads have issued between these two is pending now, and nothing comes behind it.
    ended = ended and _run_pending(engine, deadline)
    if not ended:
        late = [f"{work.name} #{work.seq}" for work in executor.pending()]
        if (op := executor.running) is not None and (text := f"{op.name} #{op.seq}") not in late:
            late.append(text)
        late = late + on_fast_path(engine) or ["an operation whose hook has not returned"]
        hint = "wait for all works before finalize"
        engine.break_(engine.error(AbortedError, None, "finalized with pending operations", hint))
        comm._member.backend.abort()
        ended = _stop_issuing(engine, _THREAD_ENDS)
    engine.finalized = True
    engine.vacant = None
    engine.fast.block()
    ended = executor.close(_THREAD_ENDS if late else max(timeout, _THREAD_ENDS)) and ended
    if ended:
        engine.drop_fast_path()
        if (symmetric := engine.symmetric) is not None:
            engine.symmetric = None
            if engine.broken is not None:  # the rank that broke it may not come to this point
                symmetric.abort()
            symmetric.close()
        comm._member.backend.close()
    member = comm._member
    member.recorder.set_comm_state(member.recorder_index, 3 if engine.broken else 2, member.uid)
    open_communicators.discard(comm)
    if not ended:
        raise engine.error(
            BackendError,
            "finalize",
            "an operation did not end when it was aborted; its resources are kept",
            "end the process; please report this with the recorder's rings",
        )
    if late:
        raise engine.error(
            CommTimeoutError,
            "finalize",
            f"still pending after {timeout:g} s, and aborted: {', '.join(late)}",
            "wait for all works before finalize, or find who is missing with `unicomm trace show`",
        )


def _run_pending(engine: Engine, deadline: float) -> bool:
    """Has the worker run what is pending, queued messages included; waits for that until the deadline.

    Returns whether nothing is left. The worker's own thread cannot wait.
    """
    executor = engine.executor
    executor.seal()
    if executor.is_current():
        return engine.broken is not None or not executor.busy
    return executor.drain(max(0.0, deadline - time.monotonic()))


def _stop_issuing(engine: Engine, seconds: float) -> bool:
    """Refuses operations from now on, behind those that other threads issue or run themselves.

    Returns False, and refuses none, when these are not over within `seconds`.
    """
    with engine.quiet(seconds) as free:
        if free:
            engine.finalized = True
            engine.fast.block()
    return free


def _forget(comm: EpochHolder) -> None:
    """In a forked child, where the communicator is the parent's: it refuses everything here.

    The child shares the parent's memory and connections: an operation, or a finalize at the end of a `with`
    block, would act for the parent. Takes no lock: at the fork another thread may have held it.
    """
    engine = comm._engine
    engine.closed_because = "the communicator belongs to the process that this one was forked from"
    engine.finalized = engine.closing = engine.inherited = True
    engine.finalizing = threading.RLock()
    engine.drop_fast_path()
    engine.executor.forget()
    if isinstance(comm._member.backend, SurvivesFork):
        comm._member.backend.forget()
    if comm._dynamic is not None:
        comm._dynamic.forget()


def _still_open() -> list[EpochHolder]:
    return cast("list[EpochHolder]", open_communicators.every())


def _after_fork() -> None:
    for comm in _still_open():
        _forget(comm)
        open_communicators.discard(comm)
    watchdog.forget_after_fork()


os.register_at_fork(after_in_child=_after_fork)

_when_closed: list[Callable[[], None]] = []


def when_closed(action: Callable[[], None]) -> None:
    """Has `action` called at the end of the process, when its communicators are closed."""
    _when_closed.append(action)


_ends_as_child = 0  # the process whose end as a child of multiprocessing is arranged


def close_in_child() -> None:
    """Has the communicators of a child of multiprocessing closed when it ends.

    A forked child ends without exit handlers. The other ranks would take it for one that was killed.
    """
    global _ends_as_child
    if _ends_as_child == os.getpid() or parent_process() is None:
        return
    _ends_as_child = os.getpid()
    if (children := sys.modules.get("multiprocessing.util")) is not None:
        children.Finalize(None, _at_exit, exitpriority=10)  # before the recorder's


@atexit.register
def _at_exit() -> None:
    deadline = time.monotonic() + _EXIT_GRACE
    for comm in _still_open():
        left = max(0.1, deadline - time.monotonic())
        try:
            close(comm, left)
        except CommError as error:
            _log.warning("at exit: %s", error)
        except Exception:
            with contextlib.suppress(Exception):
                _log.exception("at exit: %r", comm)
    for action in _when_closed:
        action()
    daemon_pool.finish(_LAST_JOBS)
