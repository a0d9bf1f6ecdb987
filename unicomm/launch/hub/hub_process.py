"""The hub as the launcher sees it: a child process that may be slow, stopped or gone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

_MOST_PENDING = 1 << 16  # bytes that a pipe holds


class HubProcess:
    """A hub's process. No method raises or blocks because of its state; `wait` waits up to its time limit."""

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
        self._commands = self._process.stdin.fileno()
        os.set_blocking(self._commands, False)
        self._said: dict[str, dict[str, Any]] = {}
        self._changed = threading.Condition()
        self._gone = False
        threading.Thread(target=self._listen, name="hub", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError), self._changed:
                message = json.loads(line)
                self._said[message["say"]] = message
                self._changed.notify_all()
        with self._changed:
            self._gone = True
            self._changed.notify_all()

    def tell(self, do: str, **what: Any) -> None:
        """Sends the hub a command; does nothing if the hub is gone or its pipe is full."""
        line = json.dumps({"do": do} | what).encode() + b"\n"
        if len(line) < _MOST_PENDING:
            with contextlib.suppress(OSError):
                os.write(self._commands, line)

    def forget(self, *what: str) -> None:
        """Discards the messages of these kinds that the hub has sent so far."""
        with self._changed:
            for each in what:
                self._said.pop(each, None)

    def wait(self, *what: str, seconds: float) -> dict[str, Any] | None:
        """Returns the first message of these kinds; None when the hub is gone or sends none in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._gone or any(each in self._said for each in what), seconds)
            return next((self._said[each] for each in what if each in self._said), None)

    def close(self) -> None:
        """Kills the process."""
        with contextlib.suppress(OSError):
            os.kill(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._process.wait(5)
