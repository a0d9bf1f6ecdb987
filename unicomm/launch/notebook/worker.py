"""A live worker: runs what its parent sends, one call after the other, until the parent says so or is gone.

Started by process.py as a process of its own, with the numbers of two descriptors: its end of the
channel, and the end of a pipe in which nobody ever writes. The pipe breaks when the parent ends, however it
ends, and then the kernel kills the worker and all that it started, even while it holds Python's lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import io
import os
import queue
import select
import signal
import socket
import sys
import threading
import traceback
from typing import Any

from .channel import Channel, dump, learn, load

_F_SETSIG = 10  # of Linux' <fcntl.h>; the fcntl module has no name for it
_PATIENCE = 1.0  # seconds after Ctrl-C, before operations that do not hear it are aborted
_AGAIN = 5  # so many of these until it is said once more
_here = False  # whether this process is a worker


class _State:
    """Attributes that live in a worker from run to run; every worker has its own."""

    def __reduce__(self) -> str:
        return "state"  # by name: a function that is sent finds the worker's

    def __setattr__(self, name: str, value: Any) -> None:
        if not _here:
            raise AttributeError("state is that of the ranks: use it in functions that they run")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        where = "no earlier run has set it" if _here else "state is that of the ranks: use it there"
        raise AttributeError(f"state.{name}: {where}")


state: Any = _State()


def main(arguments: list[str]) -> None:
    """The worker's life. `arguments`: descriptor of the channel, of the pipe, and modules to import."""
    global _here
    channel, pipe, *modules = arguments
    _die_with_parent(int(pipe))
    _here = True
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
    end = socket.socket(fileno=int(channel))
    end.set_inheritable(False)
    os.set_inheritable(int(pipe), False)
    worker = _Worker(Channel(end))
    signal.signal(signal.SIGINT, worker.on_interrupt)
    try:
        for name in modules:
            importlib.import_module(name)
    except BaseException as error:
        worker.channel.send("broken", *_describe(error, error.__traceback__))
        return
    worker.channel.send("ready", os.getpid())
    worker.serve()


def _die_with_parent(pipe: int) -> None:
    # Owner and signal belong to the open file, which this worker therefore shares with nobody.
    fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpgid(0))
    fcntl.fcntl(pipe, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(pipe, 0)  # that it is broken is always told
    if poll.poll(0):
        _die()


def _die() -> None:
    os.killpg(0, signal.SIGKILL)


class _Worker:
    """The main thread runs calls; another one listens, so that a call can be interrupted."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._calls: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._running = 0  # the number of the run; 0 for none
        self._ended = threading.Event()  # the run
        self._interrupted = 0  # the number of the run that is to end

    def serve(self) -> None:
        threading.Thread(target=self._listen, name="unicomm-worker", daemon=True).start()
        while (call := self._calls.get()) is not None:
            self.channel.send(*self._run(*call))

    def on_interrupt(self, number: int, frame: Any) -> None:
        if self._running and self._running == self._interrupted:
            raise KeyboardInterrupt

    def _listen(self) -> None:
        while (message := self.channel.receive()) is not None:
            what, *more = message
            if what == "run":
                number, call, source = more
                learn(source)
                self._calls.put((number, call))
            elif what == "interrupt":
                self._interrupt(*more)
            elif what == "learn":
                learn(*more)
            else:
                self._calls.put(None)
        _die()  # the parent is gone, or has closed

    def _interrupt(self, number: int) -> None:
        thread = threading.main_thread().ident
        if self._running != number or thread is None:
            return
        self._interrupted = number
        frame = sys._current_frames().get(thread)
        self.channel.send("where", number, "".join(traceback.format_stack(frame)[-8:]))
        threading.Thread(target=self._press, args=[number, thread], daemon=True).start()

    def _press(self, number: int, thread: int) -> None:
        """Interrupts a run until it ends: once is not enough where code swallows it, as some imports do."""
        signal.pthread_kill(thread, signal.SIGINT)
        seconds = 0
        while not self._ended.wait(_PATIENCE) and self._running == number:
            seconds += 1
            # Native waits do not hear it. They end when their communicator does.
            if (registry := sys.modules.get("unicomm.comms.failures.open_communicators")) is not None:
                registry.abort_all()
            if seconds % _AGAIN == 0:
                signal.pthread_kill(thread, signal.SIGINT)

    def _run(self, number: int, call: bytes) -> tuple[Any, ...]:
        """The answer to a call: its result, or how it failed."""
        # A group that is made again, in another run, finds nothing of the first one in the store.
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
        try:
            try:
                self._ended.clear()
                self._running = number
                fn, args, kwargs = load(call)
                result = fn(*args, **kwargs)
                answer: tuple[Any, ...] = ("done", number, dump(result))
            finally:
                self._running = 0
        except BaseException as error:
            self._running = 0
            trace = error.__traceback__
            answer = ("failed", number, *_describe(error, trace and trace.tb_next))
        self._ended.set()
        _flush()
        return answer


def _describe(error: BaseException, trace: Any) -> tuple[str, str, bytes | None]:
    """An exception in one line, with its traceback, and as a pickle if it has one."""
    text = "".join(traceback.format_exception(type(error), error, trace))
    line = "".join(traceback.format_exception_only(type(error), error)).strip()
    try:
        pickled = dump(error)
        load(pickled)
    except Exception:
        pickled = None
    return line, text, pickled


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    ctypes.CDLL(None).fflush(None)  # what C code printed
