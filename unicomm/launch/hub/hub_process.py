"""The hub as the launcher sees it: a child process that may be slow, stopped or gone.

No thread reads what it says: its messages are few and small, and wait in the pipe until the launcher looks.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_MOST_PENDING = 1 << 16  # bytes that a pipe holds


class HubProcess:
    """A hub's process, used by one thread.

    No method raises or blocks because of its state; `wait` waits up to its time limit.
    """

    def __init__(self, log: Path) -> None:
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "unicomm.launch.hub.server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # Ctrl-C ends the job, and the launcher then ends the hub
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._commands = self._process.stdin.fileno()
        self._answers = self._process.stdout.fileno()
        for descriptor in (self._commands, self._answers):
            os.set_blocking(descriptor, False)
        self._said: dict[str, dict[str, Any]] = {}
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
                    self._said[message["say"]] = message

    def tell(self, do: str, **what: Any) -> None:
        """Sends the hub a command; does nothing if the hub is gone or its pipe is full."""
        line = json.dumps({"do": do} | what).encode() + b"\n"
        if len(line) < _MOST_PENDING and not self.gone:
            with contextlib.suppress(OSError):
                os.write(self._commands, line)

    def forget(self, *what: str) -> None:
        """Discards the messages of these kinds that the hub has sent so far."""
        self._read()
        for each in what:
            self._said.pop(each, None)

    def wait(self, *what: str, seconds: float) -> dict[str, Any] | None:
        """Returns the first message of these kinds; None when the hub is gone or sends none in time."""
        poller, end = select.poll(), time.monotonic() + seconds
        poller.register(self._answers, select.POLLIN)
        while True:
            self._read()
            if found := next((self._said[each] for each in what if each in self._said), None):
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
