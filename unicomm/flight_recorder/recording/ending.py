"""How this process ends: noted in files beside its ring, for readers that come later.

`begin` is called when the ring is opened; under `unicomm run` already when torch is imported, so that a rank
that fails before its first communicator is explained, too. From then on an exception that ends the program, a
call of `sys.exit`, a crash, and a request for stacks leave their trace in files (ring/endings.py).

Costs two small files on tmpfs and no time while the program runs. What the program has installed itself
stays: its exception hook is called after ours, and `faulthandler` is left alone where it is enabled already.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TextIO

from unicomm.flight_recorder.ring import endings
from unicomm.flight_recorder.ring.files import create_own
from unicomm.flight_recorder.ring.folder import (
    SUFFIX,
    pid_namespace,
    process_start_ticks,
    ring_name,
    rings_folder,
)
from unicomm.flight_recorder.ring.places import Place

from . import tracebacks

on_failure: Callable[[], None] | None = None  # called when an unhandled exception ends the program
failed = False  # whether an exception ends the program

_MAIN = ("__main__", "runpy")  # modules in which a program begins

_path: Path | None = None  # of the ending file; None before `begin` and where there is no folder
_pid = 0
_facts: dict[str, Any] = {}
_exit_call: dict[str, Any] = {}
_stacks: TextIO | None = None
_crashes_are_ours = False


def begin_under_launcher() -> None:
    """Calls `begin` if `unicomm run` has started this process."""
    if (
        os.environ.get(endings.LAUNCHER) == str(os.getppid())
        and (rank := os.environ.get("RANK", "")).isdigit()
    ):
        with contextlib.suppress(OSError):
            begin(rings_folder(), int(rank))


def begin(folder: Path, rank: int) -> str:
    """Creates the files of this process, once, and returns the name for its ring. Raises `OSError`."""
    global _path, _pid, _stacks
    if _path is not None and _path.parent == folder:
        if rank >= 0 > _facts["rank"]:
            _facts["rank"] = rank
            _write({})
        return _path.stem + SUFFIX
    name = ring_name(rank, os.getpid())
    path = folder / (name.removesuffix(SUFFIX) + endings.ENDING)
    stacks = open(path.with_suffix(endings.STACKS), "a", opener=create_own)  # noqa: SIM115
    number = _listen(stacks)
    _path, _pid, _stacks = path, os.getpid(), stacks
    ticks = process_start_ticks(_pid) or 0
    _facts.clear()
    _facts.update(endings.describe_process(rank, _pid, socket.gethostname(), ticks, pid_namespace(), number))
    _write({})
    return name


def _listen(stacks: TextIO) -> int:
    """Lets crashes, SIGTERM and a free signal write the stacks of all threads.

    Returns the free signal, 0 without one. SIGTERM ends the process as before.
    """
    global _crashes_are_ours
    if not faulthandler.is_enabled():
        faulthandler.enable(stacks, all_threads=True)
        _crashes_are_ours = True
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        faulthandler.register(signal.SIGTERM, stacks, all_threads=True, chain=True)
    for number in range(signal.SIGRTMAX - 6, signal.SIGRTMIN, -1):
        if signal.getsignal(number) is signal.SIG_DFL:
            # Python restores this action when it ends: a request at that moment must not end the process.
            _set_action(number, signal.SIG_IGN)
            faulthandler.register(number, stacks, all_threads=True, chain=False)
            return number
    return 0


def _set_action(number: int, action: signal.Handlers) -> None:
    """`signal.signal` for any thread. `signal.getsignal` does not show the action."""
    ctypes.CDLL(None).signal(number, ctypes.c_void_p(action))


def _write(more: dict[str, Any]) -> None:
    """Writes the file, complete or not at all. Never raises: it must not hide the error that it tells of."""
    if _path is None or _pid != os.getpid():
        return
    part = _path.with_name(f".{_path.name}.part")
    with contextlib.suppress(OSError, ValueError):
        part.unlink(missing_ok=True)  # where others may write, it may be a link
        with open(part, "w", opener=create_own) as file:
            file.write(json.dumps(_facts | more))
        os.replace(part, _path)


# --- the end of the program -----------------------------------------------------------------------------


def note_exception(error: BaseException) -> None:
    """Notes the exception that ends the program."""
    global failed
    failed = True
    with contextlib.suppress(Exception):  # the text of an exception is the user's code
        _write(endings.describe_exception(error, time.time_ns()))
    if on_failure is not None and _pid in (0, os.getpid()):
        on_failure()


def _hook(
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
    _next: Any = sys.excepthook,
) -> None:
    note_exception(error if error.__traceback__ is trace else error.with_traceback(trace))
    with tracebacks.shown(error):
        _next(kind, error, trace and error.__traceback__)


sys.excepthook = _hook
tracebacks.install()


@functools.wraps(sys.exit)
def _exit(status: Any = None, /, _exit: Callable[[Any], NoReturn] = sys.exit) -> NoReturn:
    if threading.current_thread() is threading.main_thread():  # elsewhere it ends the thread only
        _exit_call.clear()
        if status not in (None, 0):
            with contextlib.suppress(Exception):
                _note_exit(status, Place.of_stack(sys._getframe(1)))
    _exit(status)


sys.exit = _exit


def _note_exit(status: Any, frames: Sequence[Place]) -> None:
    """Notes a call of `sys.exit`. It counts if the program then ends without an exception."""
    _exit_call.clear()
    now = time.time_ns()
    code = status if isinstance(status, int) else 1
    _exit_call.update(ended_ns=now, exit_call=[vars(p) for p in frames], exit_argument=code & 0xFF)
    # torch.multiprocessing ends its processes so, after it has caught what they raised.
    error = sys.exc_info()[1]
    if error is not None and not isinstance(error, SystemExit):
        _exit_call.update(endings.describe_exception(error, now))


def child_ends() -> None:
    """For a process of multiprocessing, which prints its exceptions itself and runs no hooks."""
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        if not _exit_call and isinstance(error.code, int) and error.code:
            with contextlib.suppress(Exception):
                _note_exit(error.code, Place.of_traceback(error.__traceback__)[::-1])
    elif error is not None:
        note_exception(error)
        tracebacks.trim(error)  # multiprocessing prints it after this


def has_failed() -> bool:
    """Whether this process ends by an exception, or by `sys.exit` with a code other than 0."""
    # The interpreter notes the exception also if a hook of the program takes the place of ours.
    error = getattr(sys, "last_value", None)
    if not failed and sys.excepthook is not _hook and isinstance(error, BaseException) and _left_main(error):
        note_exception(error)
    return failed or bool(_exit_call)


def _left_main(error: BaseException) -> bool:
    """Whether nothing in the main module has caught an exception. Test runners and notebooks catch theirs."""
    trace = error.__traceback__
    interactive = hasattr(sys, "ps1") or "IPython" in sys.modules
    return trace is not None and not interactive and trace.tb_frame.f_globals.get("__name__") in _MAIN


@atexit.register
def close() -> None:
    """Ends the notes when the process ends: removes the files if there is nothing to tell."""
    global _path
    if _path is None or _pid != os.getpid():
        return
    if _exit_call and not failed:
        _write(_exit_call)
    if not has_failed() or os.environ.get("UNICOMM_TRACE_KEEP") == "never":
        for path in (_path, _path.with_suffix(endings.STACKS)):
            with contextlib.suppress(OSError):
                path.unlink()
        _path = None


def _after_fork() -> None:
    # The files, and the handlers that write to them, are the parent's.
    global _path, _stacks, failed, on_failure, _crashes_are_ours
    if _stacks is not None:
        if _crashes_are_ours:
            faulthandler.disable()
        for number in (signal.SIGTERM, _facts.get("stack_signal")):
            # `unregister` would also remove a handler that the program has set since.
            if number and signal.getsignal(number) is signal.SIG_DFL:
                faulthandler.unregister(number)
                if number != signal.SIGTERM:  # `unregister` restores what `_listen` has set
                    _set_action(number, signal.SIG_DFL)
    _path = _stacks = on_failure = None
    failed = _crashes_are_ours = False
    _facts.clear()
    _exit_call.clear()


os.register_at_fork(after_in_child=_after_fork)
