"""new_window: opens a tensor to one-sided access, over symmetric memory or over a library's own windows."""

from __future__ import annotations

from typing import Any

import torch

from .backend import HasOneSided, HasSymmetricMemory
from .errors import MismatchError
from .execution.engine import Engine
from .memory.heap_window import HeapWindow
from .memory.library_window import LibraryWindow
from .memory.symmetric import attached
from .memory.window import Window, WindowAccess, WindowAttr
from .options import Hints, Timeout

__all__ = ["Window", "WindowAccess", "WindowAttr", "new_window"]


def new_window(engine: Engine, tensor: Any, hints: Hints, timeout: Timeout) -> Window:
    """See `Communicator.new_window`."""
    engine.check_open("new_window")
    engine.refuse_capture("new_window")
    with engine.located("new_window"):
        engine.per_op("new_window", hints, timeout)
        heap, backend = attached(engine), engine.backend
        window: Window
        if heap is not None and isinstance(tensor, torch.Tensor) and heap.holds(tensor):
            window = HeapWindow.of(engine, tensor, timeout)
        elif isinstance(backend, HasOneSided):
            window = LibraryWindow.of(engine, backend.one_sided(), tensor)
        elif isinstance(backend, HasSymmetricMemory):
            backend.symmetric_table()  # raises where these ranks cannot have it
            window = HeapWindow.of(engine, tensor, timeout)
        else:
            engine.refuse("new_window", f"backend '{backend.name}' has no one-sided access")
    if tensor is not None:
        try:
            window.tensor_register(tensor, timeout)
        except MismatchError:
            window.free(timeout)  # on all ranks
            raise
    return window
