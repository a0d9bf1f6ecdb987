"""The memory that readers may need: what is allowed, what is left of it, and what JSON needs once decoded.

A few bytes of a file can stand for many in memory. Readers therefore estimate what they are about to make,
and count what they keep, against one bound per command (`--memory`).
"""

from __future__ import annotations

import os
import re

import numpy as np

# Bytes that a value of JSON and what a reader makes of it need at most, by the character that comes with it:
# a list, an object (an entry of a dump also becomes a row), an element, a key, one of the two ends of a text.
_NEEDED = {ord("["): 112, ord("{"): 480, ord(","): 56, ord(":"): 100, ord('"'): 40}
_WIDE_ESCAPE = re.compile(rb"\\u[dD][89abAB]")
_MEMORY = "/proc/meminfo"


class TooMuchMemoryError(ValueError):
    """Reading something needs more memory than is allowed; the message says how to allow more."""


def allowed_memory() -> int:
    """Half of the memory that is free on this host, in bytes; what the kernel only caches counts as free."""
    try:
        with open(_MEMORY) as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024 // 2
    except (OSError, ValueError):
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


class Memory:
    """What reading may need together.

    Attributes:
        allowed: bytes.
        left: of these, the bytes that nothing has taken.
    """

    def __init__(self, allowed: int | None = None, error: type[ValueError] = TooMuchMemoryError) -> None:
        """`allowed`: bytes, by default half of the memory that is free on this host; `error`: its class."""
        self.allowed = self.left = allowed_memory() if allowed is None else allowed
        self._error = error

    def check(self, size: int, path: object = "") -> None:
        """Raises an error if the file `path` needs more bytes for a moment than are left."""
        if size > self.left:
            raise self.too_much(path)

    def take(self, size: int, path: object = "") -> None:
        """Counts bytes that are kept, of the file `path`; raises as `check`."""
        self.check(size, path)
        self.left -= size

    def give_back(self, size: int) -> None:
        self.left += size

    def too_much(self, path: object = "") -> ValueError:
        """Returns the error for a file that needs more than what is left."""
        return self._error(
            f"{path or 'it'} needs more than the {self.allowed >> 20} MiB that may be used together; read"
            " fewer files at once, or allow more by --memory"
        )


def needed_by_json(data: bytes | bytearray | memoryview) -> int:
    """Returns the bytes that a JSON text, its values and what a reader makes of them need at most.

    Punctuation within texts counts, too, because finding the texts would take as long as decoding.
    """
    text = data if isinstance(data, bytes | bytearray) else bytes(data)
    # Python stores a text with as many bytes for each character as the widest one needs.
    width = made = 1 if text.isascii() else 4
    if width == 1 and b"\\" in text:
        made = 4 if _WIDE_ESCAPE.search(text) else 2
    characters = np.frombuffer(text, np.uint8)  # numpy counts them six times as fast as Python
    marks = sum(size * int(np.count_nonzero(characters == mark)) for mark, size in _NEEDED.items())
    return len(text) * (1 + width + 2 * made) + marks
