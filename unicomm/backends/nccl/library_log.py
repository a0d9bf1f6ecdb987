"""What the library writes into its log, kept in memory, also where nobody has set NCCL_DEBUG.

The library reads NCCL_DEBUG and NCCL_DEBUG_FILE once, with its first line. So a call that it complains about
is made first, with the two set to warnings and to a file that exists in memory only, and they are taken
back at once: neither the program nor its children ever see them. Where the program, its environment or a
file of the library's settings names one of them, the log is theirs, and so it is where somebody else used
the library before.
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
_MOST_BYTES = 1 << 20  # in memory: when there is more, the older lines go
_READ = 1 << 16
_LINES = 8
_WIDTH = 300
# [time] host:pid:thread [device] file:line (function) NCCL WARN words
_LINE = re.compile(r"(?:(\S+:\d+) (?:\(\S+\) )?)?NCCL (?:WARN|INFO) (.*)")
_lock = threading.Lock()
_logs: dict[str, LibraryLog | None] = {}  # by the library's file: it has one log, whoever opened it


class LibraryLog:
    """The end of a library's log."""

    def __init__(self, descriptor: int, noise: str) -> None:
        """`noise`: what the first line says, which means nothing."""
        self._descriptor = descriptor
        self._noise = noise

    def mark(self) -> int:
        """The place after all lines so far."""
        return os.fstat(self._descriptor).st_size

    def lines(self, since: int = 0) -> list[str]:
        """The last lines behind a mark, as "file:line words"."""
        end = self.mark()
        begin = max(since, end - _READ)
        text = os.pread(self._descriptor, end - begin, begin).replace(b"\0", b"").decode(errors="replace")
        found: list[str] = []
        for line in text.splitlines():
            match = _LINE.search(line)
            words = (f"{match[1]} {match[2]}" if match[1] else match[2]) if match else line
            words = " ".join(words.split())[:_WIDTH]
            if words and self._noise not in words and words not in found[-1:]:
                found.append(words)
        self._trim(end)
        return found[-_LINES:]

    def trim(self) -> None:
        """Keeps it small. Costs nothing while it is."""
        self._trim(self.mark())

    def _trim(self, end: int) -> None:
        # The library goes on writing at the place where it is: what is before that takes no memory.
        if end > _MOST_BYTES and os.fstat(self._descriptor).st_blocks * 512 > _MOST_BYTES:
            os.ftruncate(self._descriptor, 0)

    def is_noise(self, words: str) -> bool:
        return words == self._noise


def listen(native: Any) -> LibraryLog | None:
    """Has the library write its log to memory; None where the log is somebody else's.

    To be called before anything else of the library that may write.
    """
    with _lock:
        if native.file not in _logs:
            _logs[native.file] = _listen(native)
        return _logs[native.file]


def _listen(native: Any) -> LibraryLog | None:
    if any(name in os.environ for name in _SETTINGS) or _in_settings_files():
        return None
    try:
        descriptor = os.memfd_create("nccl-log")
    except OSError:
        return None
    os.environ.update(zip(_SETTINGS, ("WARN", f"/proc/self/fd/{descriptor}"), strict=True))
    try:
        native.count(0)  # of no communicator, which it complains about
    finally:
        for name in _SETTINGS:
            del os.environ[name]
    if not os.fstat(descriptor).st_size:
        os.close(descriptor)
        return None
    return LibraryLog(descriptor, native.last_error(0))


def _in_settings_files() -> bool:
    """Whether the files that the library takes settings from say where its log goes."""
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
