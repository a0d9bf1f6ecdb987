"""Events of torch.profiler under the names that torch's own groups give theirs, such as "gloo:all_reduce".

Programs and tools look for these names. A group that a program has asked for by the name of one of torch's
backends has them, beside the events `unicomm::<operation>`. As with torch's Gloo they count as asynchronous
and carry the shapes of the inputs. They span a synchronous operation; of an asynchronous one they stand where
it was issued, since events of one thread must not overlap. They are for CPU tensors: on GPUs tools look for
kernels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from unicomm.c10d.choice import NAME
from unicomm.c10d.compat import backend_name, close_event_with, open_event
from unicomm.comms.failures.daemon_pool import DaemonPool

from .layouts import tensors_in
from .table import METHODS

_closers = DaemonPool("unicomm-events")


def titled(group: dist.ProcessGroup, name: str, arguments: Sequence[Any], run: Callable[[], Any]) -> Any:
    """Runs method `name` of `group`, under the title that torch's groups give it. Returns its Work."""
    # What an operation reads is its second argument, where there are two with tensors, else the first.
    inputs = next((found for a in arguments[1::-1] if (found := list(tensors_in(a)))), [])
    backend = "" if any(not t.is_cpu for t in inputs) else backend_name(group, "cpu")
    if backend in ("", NAME):
        return run()
    done: torch.futures.Future[None] = torch.futures.Future()
    close_event_with(open_event(f"{backend}:{METHODS[name].title}", *inputs), done)
    try:
        return run()
    finally:
        _complete(done)


def _complete(future: torch.futures.Future[None]) -> None:
    """Completes a future in another thread, which makes its event asynchronous."""
    completed = threading.Event()

    def complete() -> None:
        future.set_result(None)
        completed.set()

    _closers.run(complete)
    completed.wait()
