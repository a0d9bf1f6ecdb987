"""Defects that the sanitizers have to report: `python -m tests.core.sanitizer_defects overflow` or `race`.

The native core is right; its caller gives it memory that ends too early, or that another thread writes to.
"""

import ctypes
import sys
import threading

import torch

from unicomm import _core
from unicomm.comms.operations.reduction import RedOpType

_MANY = 1 << 16  # elements: a sum of so many releases the GIL


def overflow() -> None:
    """Sums 64 floats of which 16 are allocated."""
    malloc = ctypes.CDLL(None).malloc
    malloc.restype = ctypes.c_void_p
    short = torch.frombuffer((ctypes.c_float * 64).from_address(malloc(16 * 4)), dtype=torch.float32)
    _core.fold(torch.empty(64), [short, short], int(RedOpType.SUM), None, 2)


def race() -> None:
    """Two threads sum into the same memory at the same time. This is repeated until their sums overlap.

    The sanitizer takes a thread that acquires the GIL as ordered after those that released it. So it sees no
    race if one sum ended before the other one began.
    """
    sys.setswitchinterval(60)  # a thread keeps the GIL until its sum releases it
    out, ones = torch.zeros(_MANY), torch.ones(_MANY)
    second_began = threading.Event()
    raced = False

    def add() -> None:
        _core.fold(out, [ones, ones], int(RedOpType.SUM), None, 2)

    def add_first() -> None:
        nonlocal raced
        add()
        raced = second_began.is_set()

    while not raced:
        second_began.clear()
        first = threading.Thread(target=add_first)
        first.start()
        second_began.set()
        add()
        first.join()


if __name__ == "__main__":
    {"overflow": overflow, "race": race}[sys.argv[1]]()
