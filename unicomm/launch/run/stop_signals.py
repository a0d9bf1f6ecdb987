"""Signals that tell the launcher to stop.

They are recorded from the first moment, before torch is imported, and none is lost afterwards. The first one
interrupts the job, where the job allows it; all others are only noted, so that the ranks are ended once and
the verdict is made to its end. `timeout` and schedulers send a signal to a process and then to its group: two
within milliseconds.

This module imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

DEFAULT = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")  # torchrun's
_BY_HAND = 0.5  # seconds: signals that follow each other faster are not two decisions of a person
_PATIENCE = 3.0  # seconds that the main thread has to heed a signal while no ranks run
_ADVICE = "the job is being ended, and its verdict made; press Ctrl-C again to give up without a verdict"


@dataclass(frozen=True)
class Received:
    """A signal, and when it came (`time.time()`, `time.monotonic()`)."""

    signal: signal.Signals
    at: float
    monotonic: float


class StopSignals:
    """The stop signals of this process, of which it has one instance at most that is installed.

    Attributes:
        received: all signals so far, the first one first.
        give_up: called when a person insists on an end without a verdict, just before the process ends.
    """

    def __init__(self) -> None:
        self.received: list[Received] = []
        self.give_up: Callable[[], None] = lambda: None
        self._error: Callable[[signal.Signals], BaseException] | None = None
        self._deferred = 0
        self._raised = False
        self._advised: float | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._process = os.getpid()
        # nohup: torch installs a handler all the same, and the job would end with the terminal.
        self._ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()

    # --- handlers --------------------------------------------------------------------------------------

    def install(self) -> None:
        """From now on signals are recorded. Does nothing in threads other than the main one."""
        if threading.current_thread() is threading.main_thread():
            os.register_at_fork(after_in_child=self._in_child)
            for name in DEFAULT:
                number = signal.Signals[name]
                if number not in self._ignored:
                    self._before[number] = signal.signal(number, self.handle)

    def only(self, names: Sequence[str]) -> None:
        """Leaves the signals that are not named to whoever had them before."""
        for number in [number for number in self._before if number.name not in names]:
            before = self._before.pop(number)
            signal.signal(number, signal.SIG_DFL if before is None else before)

    def ignore(self) -> None:
        """From now on the signals do nothing: the process is about to end, with its exit code."""
        for number in self.handled():
            signal.signal(number, signal.SIG_IGN)

    def handled(self) -> list[signal.Signals]:
        """The signals that come here."""
        return [number for number in signal.Signals if signal.getsignal(number) == self.handle]

    def _in_child(self) -> None:
        """A rank that is a fork of the launcher ends by a signal as any other process does."""
        for number in self.handled():
            usual = signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL
            signal.signal(number, usual)

    def handle(self, number: int, frame: FrameType | None = None) -> None:
        """The handler, also of signals that torch installs it for.

        Raises where the job can be interrupted.
        """
        del frame
        which = signal.Signals(number)
        if which in self._ignored or os.getpid() != self._process:
            return
        self.note(which)
        if which is signal.SIGINT and len(self.received) > 1:
            self._insisted()
        if not self._raised:
            self.check()

    def note(self, which: signal.Signals) -> None:
        """Records a signal."""
        self.received.append(Received(which, time.time(), time.monotonic()))

    def _insisted(self) -> None:
        now, last = self.received[-1].monotonic, self._advised
        if last is None:
            if now - self.received[0].monotonic >= _BY_HAND:
                self._advised = now
                _say(_ADVICE)
        elif now - last >= _BY_HAND:
            _say("given up; there is no verdict")
            try:
                self.give_up()
            finally:
                os._exit(128 + signal.SIGINT)

    # --- what may be interrupted --------------------------------------------------------------------------

    @property
    def first(self) -> Received | None:
        """The signal that stopped the job."""
        return self.received[0] if self.received else None

    @contextlib.contextmanager
    def interrupting(self, error: Callable[[signal.Signals], BaseException]) -> Iterator[None]:
        """In this block the first signal raises `error(signal)`, once; if it came earlier, at once."""
        self._error = error
        try:
            self.check()
            yield
        finally:
            self._error = None

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """A signal that comes in this block is raised at its end."""
        self._deferred += 1
        try:
            yield
        finally:
            self._deferred -= 1
        self.check()

    def ending(self) -> None:
        """From now on signals are only noted: the job is being ended already."""
        self._error = None

    def check(self) -> None:
        """Raises what the first signal has to raise; again, if whoever was interrupted has swallowed it."""
        if self.received and self._error is not None and not self._deferred:
            self._raised = True
            raise self._error(self.received[0].signal)


class Reacting:
    """While it is open, the process reacts to signals even if its main thread is inside a C++ call.

    Python runs handlers in the main thread, between two of its own steps. A call that waits for another host,
    such as the creation of torch's store, may take minutes. There are no ranks yet that need a verdict: if
    the main thread has not closed this within `_PATIENCE`, `at_end` is called and the process ends.

    The thread waits in system calls only. `close` ends and joins it.
    """

    def __init__(self, stop: StopSignals, at_end: Callable[[signal.Signals], None]) -> None:
        self._stop, self._at_end = stop, at_end
        self._numbers = frozenset(int(number) for number in stop.handled())
        self._heeded = threading.Event()
        self._thread: threading.Thread | None = None
        if not self._numbers:
            return
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._wait, name="signals", daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        # The interpreter's handler writes the number of a signal as it comes, whatever the main thread does.
        while number := os.read(self._read, 1)[0]:
            if number in self._numbers and not self._heeded.wait(_PATIENCE):
                try:
                    self._stop.note(signal.Signals(number))
                    self._at_end(signal.Signals(number))
                finally:
                    os._exit(128 + number)

    def close(self) -> None:
        """Leaves signals to the main thread alone."""
        if self._thread is None:
            return
        self._heeded.set()
        signal.set_wakeup_fd(self._before)
        os.write(self._write, b"\0")
        self._thread.join()
        self._thread = None
        for end in (self._read, self._write):
            os.close(end)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"\nunicomm run: {text}\n".encode())  # a handler must not wait for a lock of sys.stderr
