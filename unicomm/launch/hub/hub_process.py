"""The hub as the launcher has it: a child that is told things, and may be slow, stopped or gone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

_MOST_PENDING = 1 << 16  # bytes, what a pipe takes


class HubProcess:
    """A hub. Nothing here raises or waits because of it, except `wait`, which waits as long as it is told."""

    def __init__(self, log: Path) -> None:
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "unicomm.launch.hub.server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # what the user's keys end is the job; the hub ends after it
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
        """Says something, unless the hub is gone or has not listened for long."""
        line = json.dumps({"do": do} | what).encode() + b"\n"
        if len(line) < _MOST_PENDING:
            with contextlib.suppress(OSError):
                os.write(self._commands, line)

    def forget(self, *what: str) -> None:
        """What it said of this does not count any more."""
        with self._changed:
            for each in what:
                self._said.pop(each, None)

    def wait(self, *what: str, seconds: float) -> dict[str, Any] | None:
        """The first of these that it says, or has said; None when it is gone, or says none in time."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while True:
                for each in what:
                    if each in self._said:
                        return self._said[each]
                left = deadline - time.monotonic()
                if self._gone or left <= 0:
                    return None
                self._changed.wait(left)

    def close(self) -> None:
        """Ends it."""
        with contextlib.suppress(OSError):
            os.kill(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._process.wait(5)
