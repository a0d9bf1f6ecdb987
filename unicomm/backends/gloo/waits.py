"""Gloo's waits for messages, and an end to them.

When a connection ends, Gloo tells the messages that have not begun. One of which some bytes have gone or come
is on no list of Gloo's by then, so its thread would wait for ever and keep the group from being freed
(gloo/transport/tcp/pair.cc: `signalException` looks at what is pending, not at what it writes or reads).
torch's works have an `abort` for that, which Python cannot call; but the library has it as a symbol.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed import Work

_CLASSES = ("8SendWork", "8RecvWork")  # of c10d::ProcessGroupGloo, as the C++ ABI writes names
_VTABLE_BEGINS = 16  # bytes into a vtable's symbol, where objects point


class Waits:
    """The messages of one communicator that threads wait for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._works: weakref.WeakSet[Any] = weakref.WeakSet()  # a work holds the group open

    def add(self, work: Any) -> None:
        with self._lock:
            self._works.add(work)

    def end(self) -> None:
        """Has each `wait` return False that has not returned. Does not wait."""
        with self._lock:
            works = list(self._works)
        for work in works:
            end_wait(work)


def end_wait(work: Any) -> bool:
    """Has a message's `wait` return False, now or as soon as it is called; returns whether that is possible.

    Nothing is called unless the object has the vtable of the class whose function this is.
    """
    if not isinstance(work, Work):
        return False
    # pybind11's instance: Python's header, then the address of the C++ object.
    instance = ctypes.c_void_p.from_address(id(work) + object.__basicsize__).value
    if instance is None or not (aborts := _aborts()):
        return False
    abort = aborts.get(ctypes.c_void_p.from_address(instance).value or 0)
    if abort is None:
        return False
    abort(instance)
    return True


@functools.cache
def _aborts() -> dict[int, Callable[[int], None]]:
    """Returns the `abort` of each class by the vtable of its objects; nothing where torch hides them."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        found = {}
        for name in _CLASSES:
            vtable = ctypes.addressof(ctypes.c_char.in_dll(library, f"_ZTVN4c10d16ProcessGroupGloo{name}E"))
            abort = getattr(library, f"_ZN4c10d16ProcessGroupGloo{name}5abortEv")
            abort.argtypes, abort.restype = [ctypes.c_void_p], None
            found[vtable + _VTABLE_BEGINS] = abort
    except (OSError, ValueError, AttributeError):
        return {}
    return found
