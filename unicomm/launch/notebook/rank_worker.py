"""The process of a live rank: runs the calls that its parent sends, until the parent closes it or ends.

worker_process.py starts it with the numbers of two descriptors: its end of the channel, and the reading end
of a pipe into which nothing is written. The pipe breaks whenever the parent ends; the kernel then kills the
worker and all processes that it has started, even while the worker holds Python's lock.
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

from unicomm.flight_recorder.recording import tracebacks
from unicomm.flight_recorder.recording.thread_frames import frames_of_threads

from .channel import Channel, dump, learn, load

_F_SETSIG = 10  # of Linux' <fcntl.h>; the fcntl module has no name for it
_PATIENCE = 1.0  # seconds after an interrupt until operations that do not react to it are aborted
_AGAIN = 5  # the interrupt is repeated after this many of these periods
_here = False  # whether this process is a worker


class _State:
    """A namespace that lives in a worker from call to call; each worker has its own."""

    def __reduce__(self) -> str:
        return "state"  # pickled by name, so that a function finds the state of its worker

    def __setattr__(self, name: str, value: Any) -> None:
        if not _here:
            raise AttributeError("state belongs to the ranks: use it in functions that they run")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        where = "no earlier run has set it" if _here else "state belongs to the ranks: use it there"
        raise AttributeError(f"state.{name}: {where}")


state: Any = _State()


def main(arguments: list[str]) -> None:
    """Runs the worker. `arguments`: the descriptors of the channel and the pipe, and modules to import."""
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
        worker.channel.send("broken", *_describe(error))
        return
    worker.channel.send("ready", os.getpid())
    worker.serve()


def _die_with_parent(pipe: int) -> None:
    # Owner and signal are properties of the open file, so no other worker may share it.
    fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpgid(0))
    fcntl.fcntl(pipe, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(pipe, 0)  # a broken pipe is always reported
    if poll.poll(0):
        _die()


def _die() -> None:
    os.killpg(0, signal.SIGKILL)


class _Worker:
    """Runs calls in the main thread; another thread receives messages, so that calls can be interrupted."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._calls: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._running = 0  # the number of the running call; 0 for none
        self._ended = threading.Event()  # set when the call has ended
        self._interrupted = 0  # the number of the call that was interrupted

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
        _die()  # the parent has ended or closed the channel

    def _interrupt(self, number: int) -> None:
        thread = threading.main_thread().ident
        self._interrupted = number  # before the look: a call that begins now sees it itself
        if self._running != number or thread is None:
            return
        frame = frames_of_threads().get(thread)
        self.channel.send("where", number, "".join(traceback.format_stack(frame)[-8:]))
        threading.Thread(target=self._press, args=[number, thread], daemon=True).start()

    def _press(self, number: int, thread: int) -> None:
        """Interrupts a call until it ends; repeats it, because some code swallows a KeyboardInterrupt."""
        signal.pthread_kill(thread, signal.SIGINT)
        seconds = 0
        while not self._ended.wait(_PATIENCE) and self._running == number:
            seconds += 1
            # Native waits do not react to signals. They end when their communicator is aborted.
            if (registry := sys.modules.get("unicomm.comms.failures.open_communicators")) is not None:
                registry.abort_all()
            if seconds % _AGAIN == 0:
                signal.pthread_kill(thread, signal.SIGINT)

    def _run(self, number: int, call: bytes) -> tuple[Any, ...]:
        """Runs a call and returns the answer: its result, or its failure."""
        # Separates the keys in the store of groups that are created again in a later call.
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
        try:
            try:
                self._ended.clear()
                self._running = number
                if self._interrupted == number:
                    raise KeyboardInterrupt
                fn, args, kwargs = load(call)
                result = fn(*args, **kwargs)
                answer: tuple[Any, ...] = ("done", number, dump(result))
            finally:
                self._running = 0
        except BaseException as error:
            self._running = 0
            answer = ("failed", number, *_describe(error, hidden=1))
        self._ended.set()
        _flush()
        return answer


def _describe(error: BaseException, hidden: int = 0) -> tuple[str, str, bytes | None]:
    """Returns an exception as one line, with its traceback, and as a pickle if it can be pickled.

    `hidden`: the number of this module's frames before those of the user's function.
    """
    whole = error.__traceback__
    with tracebacks.shown(error):
        trace = error.__traceback__
        for _ in range(hidden if trace is whole else 0):
            trace = trace and trace.tb_next
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
    ctypes.CDLL(None).fflush(None)  # output of C code
