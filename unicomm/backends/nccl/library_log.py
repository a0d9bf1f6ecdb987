"""The library's log, kept in memory even if nobody has set NCCL_DEBUG.

The library reads NCCL_DEBUG and NCCL_DEBUG_FILE once, when it writes its first line. So a call that the
library complains about is made first, while the two variables select warnings and a file that exists in
memory only. The variables are removed at once: neither the program nor its children see them. The log stays
the user's if the program, its environment or a settings file of the library names one of the variables, or if
the library was used before.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SETTINGS = ("NCCL_DEBUG", "NCCL_DEBUG_FILE")
_MAX_BYTES = 1 << 20  # size in memory above which older lines are dropped
_READ_BYTES = 1 << 16
_MAX_LINES = 8
_MAX_WIDTH = 300
# [time] host:pid:thread [device] file:line (function) NCCL WARN text
_LINE = re.compile(r"(?:(\S+:\d+) (?:\(\S+\) )?)?NCCL (?:WARN|INFO) (.*)")
_lock = threading.Lock()
_logs: dict[str, LibraryLog | None] = {}  # by the library's file, which has one log for all its users


class LibraryLog:
    """The last part of a library's log."""

    def __init__(self, descriptor: int, noise: str) -> None:
        """`noise` is the text of the first line, which the opening call caused."""
        self._descriptor = descriptor
        self._noise = noise

    def position(self) -> int:
        """Returns the position after all lines so far."""
        return os.fstat(self._descriptor).st_size

    def lines(self, since: int = 0) -> list[str]:
        """Returns the last lines after position `since`, as "file:line text"."""
        end = self.position()
        begin = max(since, end - _READ_BYTES)
        text = os.pread(self._descriptor, end - begin, begin).replace(b"\0", b"").decode(errors="replace")
        found: list[str] = []
        for line in text.splitlines():
            match = _LINE.search(line)
            words = (f"{match[1]} {match[2]}" if match[1] else match[2]) if match else line
            words = " ".join(words.split())[:_MAX_WIDTH]
            if words and self._noise not in words and words not in found[-1:]:
                found.append(words)
        self.trim()
        return found[-_MAX_LINES:]

    def trim(self) -> None:
        """Drops the lines so far if they take too much memory."""
        # The library continues to write at its own position; the hole before that takes no memory.
        if self.position() > _MAX_BYTES and os.fstat(self._descriptor).st_blocks * 512 > _MAX_BYTES:
            os.ftruncate(self._descriptor, 0)

    def is_noise(self, text: str) -> bool:
        return text == self._noise


def start(native: Any) -> LibraryLog | None:
    """Makes the library write its log to memory. Returns None if the log belongs to somebody else.

    Must be called before any other call that may write to the log.
    """
    with _lock:
        if native.file not in _logs:
            _logs[native.file] = _start(native)
        return _logs[native.file]


def _start(native: Any) -> LibraryLog | None:
    if any(name in os.environ for name in _SETTINGS) or _in_settings_files():
        return None
    try:
        descriptor = os.memfd_create("nccl-log")
    except OSError:
        return None
    os.environ.update(zip(_SETTINGS, ("WARN", f"/proc/self/fd/{descriptor}"), strict=True))
    try:
        native.count(0)  # a null communicator, about which the library writes a warning
    finally:
        for name in _SETTINGS:
            del os.environ[name]
    if not os.fstat(descriptor).st_size:
        os.close(descriptor)
        return None
    return LibraryLog(descriptor, native.last_error(0))


def _in_settings_files() -> bool:
    """Returns whether a settings file of the library says where its log goes."""
    return any(name in line.split("=")[0] for line in _settings_lines() for name in _SETTINGS)


def _settings_lines() -> Iterator[str]:
    places = ["/etc/nccl.conf"]
    if own := os.environ.get("NCCL_CONF_FILE"):
        places.append(own)
    else:
        with contextlib.suppress(KeyError):  # a user without a name
            places.append(os.path.join(pwd.getpwuid(os.getuid()).pw_dir, ".nccl.conf"))
    for place in places:
        try:
            yield from Path(place).read_text(errors="replace").splitlines()
        except OSError:
            continue
