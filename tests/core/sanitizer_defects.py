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
    """Two threads sum into the same memory."""
    out, ones = torch.zeros(_MANY), torch.ones(_MANY)
    together = threading.Barrier(2)

    def add() -> None:
        for _ in range(3):
            together.wait()
            _core.fold(out, [ones, ones], int(RedOpType.SUM), None, 2)

    threads = [threading.Thread(target=add) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    {"overflow": overflow, "race": race}[sys.argv[1]]()
