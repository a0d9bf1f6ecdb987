"""stderr of the launcher, whose reader may go before the job ends.

Writing to a pipe fails if its reader has ended, and to a terminal if it was closed. That must cost neither
the verdict file nor the exit code nor the restarts of the ranks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO, cast

_GONE = (errno.EPIPE, errno.EIO, errno.EBADF)
_PIECE = 1024  # characters
_PATIENCE = 5.0  # seconds for a reader to make room


class _Lasting:
    """A stream that becomes /dev/null, for child processes too, when nobody can read it any more."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        # In pieces that the stream's buffer holds: of a longer one the rest is lost when a pipe is full.
        for at in range(0, len(text), _PIECE):
            with self._giving_up():
                self._stream.write(text[at : at + _PIECE])
                self._stream.flush()
        return len(text)

    def flush(self) -> None:
        with self._giving_up():
            self._stream.flush()

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except BlockingIOError:
            self._flush_slowly()
        except OSError as error:
            if error.errno in _GONE:
                self._go_nowhere()
        except ValueError:  # it is closed
            pass

    def _flush_slowly(self) -> None:
        """Writes to a pipe that does not block, and that its reader has let become full."""
        end = time.monotonic() + _PATIENCE
        while (left := end - time.monotonic()) > 0:
            try:
                select.select([], [self._stream], [], left)
                self._stream.flush()
                return
            except BlockingIOError:
                continue
            except (OSError, ValueError):
                break
        self._go_nowhere()

    def _go_nowhere(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            self._stream.flush()  # what was kept back


@contextlib.contextmanager
def lasting_stderr() -> Iterator[None]:
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
