"""What a forked child must not do with its parent's things."""

from __future__ import annotations

import ctypes


def never_destroy(thing: object) -> None:
    """Keeps `thing` from ever being destroyed in this process, not even when the interpreter ends.

    In a forked child the destructor of a torch store or process group would wait for threads that the fork
    did not copy, or stop, through a descriptor that both share, those of the parent.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
