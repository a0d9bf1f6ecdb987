"""A process of ours beside the launcher (the hub, the exporter), which may be slow, stopped or gone.

No thread reads what it says: its messages are few and small, and wait in the pipe until the launcher looks.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import unicomm

_MOST_PENDING = 1 << 16  # bytes that a pipe holds
_PACKAGES = str(Path(unicomm.__file__).resolve().parents[1])  # the folder in which this package was found
# As `python -m`, but without the present folder: that of the job may have modules with the names of Python's.
_START = """import sys
if sys.path[:1] == [""]:
    del sys.path[0]
sys.path.append(sys.argv.pop(1))
import runpy
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


class SideProcess:
    """A process as the launcher sees it, used by one thread.

    No method raises or blocks because of its state; `wait` waits up to its time limit.
    """

    def __init__(self, module: str, log: Path, *arguments: str, keep: Sequence[int] = ()) -> None:
        """Starts a module as a program, which inherits the descriptors `keep`. Raises `OSError`."""
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, _PACKAGES, module, *arguments],
                pass_fds=keep,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # Ctrl-C ends the job, and the launcher then ends this process
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._commands = self._process.stdin.fileno()
        self._answers = self._process.stdout.fileno()
        for descriptor in (self._commands, self._answers):
            os.set_blocking(descriptor, False)
        self._said: dict[tuple[str, int | None], dict[str, Any]] = {}  # by kind and attempt
        self._pending = b""
        self.gone = False  # whether it has closed its end; known after `wait`

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self) -> None:
        """Takes the messages that are there."""
        while not self.gone:
            try:
                data = os.read(self._answers, 1 << 16)
            except BlockingIOError:
                return
            except OSError:  # closed
                data = b""
            self.gone = not data
            *lines, self._pending = (self._pending + data).split(b"\n")
            for line in lines:
                with contextlib.suppress(ValueError):
                    message = json.loads(line)
                    self._said[message["say"], message.get("attempt")] = message

    def tell(self, do: str, **what: Any) -> None:
        """Sends a command; does nothing if the process is gone or its pipe is full."""
        line = json.dumps({"do": do} | what).encode() + b"\n"
        if len(line) < _MOST_PENDING and not self.gone:
            with contextlib.suppress(OSError):
                os.write(self._commands, line)

    def wait(self, *what: str, seconds: float, attempt: int | None = None) -> dict[str, Any] | None:
        """Returns the first message of these kinds; None when the process is gone or sends none in time.

        `attempt`: the start of the ranks of which it speaks, if it speaks of one.
        """
        poller, end = select.poll(), time.monotonic() + seconds
        poller.register(self._answers, select.POLLIN)
        while True:
            self._read()
            said = (self._said.get((each, attempt)) for each in what)
            if found := next(filter(None, said), None):
                return found
            left = end - time.monotonic()
            if self.gone or left <= 0:
                return None
            poller.poll(1000 * left)

    def close(self) -> None:
        """Kills the process, and reaps it."""
        with contextlib.suppress(OSError):
            self._process.kill()
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._process.wait(5)
        self.gone = True
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()


def live_with_the_launcher() -> None:
    """Called by the process itself: it ends with the launcher, and leaves signals of the terminal to it."""
    with contextlib.suppress(OSError, AttributeError):
        # PR_SET_PDEATHSIG: the process ends with the launcher, even when it is stopped.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the launcher handles them, and ends the process
