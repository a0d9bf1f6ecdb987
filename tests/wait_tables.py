"""How often the ranks that wait on shared memory have looked for a deadlock, read from their wait tables.

A test that no deadlock is reported has to give the search for one its chance, however slow the machine is: it
waits for looks, not for seconds.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence

_NAME = "memfd:unicomm-waits"
_INTERVAL = 0.05  # seconds; longer than a rank's pause between searches (csrc/shm/waiting/deadlock.cpp)
_TURNS = 20  # a search takes three looks at most, and the ranks of a circle tell each other for some more


class _Awaited(ctypes.Structure):
    _fields_ = (
        ("table", ctypes.c_uint64),
        ("pid", ctypes.c_int32),
        ("fd", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("unused", ctypes.c_uint32),
    )


class _WaitSlot(ctypes.Structure):
    """`WaitSlot` of csrc/shm/waiting/wait_table.hpp."""

    _fields_ = (
        ("version", ctypes.c_uint64),  # the number of the wait; 0 if there is none
        ("comm", ctypes.c_uint64),
        ("thread", ctypes.c_uint64),
        ("rank", ctypes.c_int32),
        ("op", ctypes.c_uint32),
        ("joinable", ctypes.c_uint32),
        ("any", ctypes.c_uint16),
        ("open", ctypes.c_uint16),
        ("seq", ctypes.c_uint64),
        ("line", ctypes.c_uint32),
        ("awaited_count", ctypes.c_uint32),
        ("name", ctypes.c_char * 48),
        ("file", ctypes.c_char * 96),
        ("awaited", _Awaited * 64),
        ("looks", ctypes.c_uint64),
        ("found", ctypes.c_uint64),
        ("left", ctypes.c_uint64),
        ("failed", ctypes.c_uint64),
        ("taken", ctypes.c_uint64),
        ("padding", ctypes.c_char * 16),
    )


class _Page(ctypes.Structure):
    _fields_ = (("head", ctypes.c_char * 128), ("waits", _WaitSlot * 64))


def _slots(pid: int) -> list[_WaitSlot]:
    """The slots of the waits of a process; none if it has no wait table."""
    page = _Page()
    for name in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{name}"
        try:
            if _NAME not in os.readlink(path):
                continue
            with open(path, "rb") as file:
                file.readinto(page)  # type: ignore[attr-defined]
        except OSError:  # closed meanwhile
            continue
        return [slot for slot in page.waits if slot.version and slot.taken]
    return []


def looks(pid: int) -> dict[tuple[int, int], int]:
    """The looks of each rank of a process that waits, by the numbers of process and wait."""
    return {(pid, slot.version): slot.looks for slot in _slots(pid)}


def waits(pid: int) -> set[tuple[int, int]]:
    """The ranks of a process that wait, with the segments that their communicators share."""
    return {(slot.comm, slot.rank) for slot in _slots(pid)}


class Looks:
    """Counts how often ranks that wait have had a chance to find a deadlock.

    `waits`: how many ranks have to have had it; `pids`: their processes, by default this one.
    """

    def __init__(self, waits: int, pids: Sequence[int] = ()) -> None:
        self._waits, self._pids = waits, pids or (os.getpid(),)
        self._last: dict[tuple[int, int], int] = {}
        self._turns: dict[tuple[int, int], int] = {}

    def enough(self) -> bool:
        """To be asked again and again, with at least 50 ms in between."""
        now = {key: count for pid in self._pids for key, count in looks(pid).items()}
        for key, count in now.items():
            self._turns[key] = self._turns.get(key, 0) + (count > self._last.get(key, count))
        self._last = now
        return sum(turns >= _TURNS for turns in self._turns.values()) >= self._waits

    def wait(self, within: float = 40.0, over: Callable[[], bool] = lambda: False) -> None:
        """Returns when there have been enough, or when it is over. Fails when it takes longer."""
        end = time.monotonic() + within
        while not (over() or self.enough()):
            assert time.monotonic() < end, f"no {_TURNS} looks within {within:g} s: {self._turns}"
            time.sleep(_INTERVAL)
