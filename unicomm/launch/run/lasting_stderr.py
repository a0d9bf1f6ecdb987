"""stderr of the launcher, whose reader may go before the job ends.

Writing to a pipe fails if its reader has ended, and to a terminal if it was closed. That must cost neither
the verdict file nor the exit code nor the restarts of the ranks.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, TextIO, cast


class _Lasting:
    """A stream that becomes /dev/null, for child processes too, when nobody can read it any more."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._giving_up():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._giving_up():
            self._stream.flush()

    @contextlib.contextmanager
    def _giving_up(self) -> Any:
        try:
            yield
        except OSError:
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)
                self._stream.flush()  # what was kept back
        except ValueError:  # it is closed
            pass


@contextlib.contextmanager
def lasting_stderr() -> Any:
    """While it lasts, writing to `sys.stderr` does not fail."""
    before = sys.stderr
    if before is None:
        yield
        return
    sys.stderr = cast("TextIO", _Lasting(before))
    try:
        yield
        sys.stderr.flush()
    finally:
        sys.stderr = before
