"""`dist.batch_isend_irecv` on devices: all its messages as one group.

torch groups the messages of a batch for groups of its own class only (until 2.14), and otherwise passes them
on one by one. On the CPU messages run side by side anyhow; on a stream each would wait for the one before,
and two ranks that both send first would wait for ever. So a message that comes from within that function
is kept until its last one is there.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from unicomm.comms.execution.point_to_point import messages
from unicomm.comms.execution.point_to_point import post as send_or_receive
from unicomm.comms.work import Work, WorkStatus

if TYPE_CHECKING:
    from unicomm.comms.execution.engine import Engine

_LIST = "p2p_op_list"  # what torch's function calls its argument
_DEEP = 8  # frames between that function and us at most
_batch_code = inspect.unwrap(dist.batch_isend_irecv).__code__
_here = threading.local()

#: Whether torch's function is as it was read; otherwise messages go one by one.
understood = _LIST in _batch_code.co_varnames


class _Batch:
    """`asked`: whose batch it is, by identity: torch's list of messages, or one with the engine."""

    def __init__(self, asked: list[Any]) -> None:
        self.asked = asked
        self.items: list[tuple[str, torch.Tensor, Any]] = []
        self.works: list[BatchedWork] = []

    def add(self, kind: str, tensor: torch.Tensor, peer: Any) -> BatchedWork:
        work = BatchedWork(kind, peer)
        self.items.append((kind, tensor, peer))
        self.works.append(work)
        return work

    def issue(self, engine: Engine) -> None:
        whole = messages(engine, self.items, True, None, None, batch=len(self.items) > 1)
        for one in self.works:
            one.whole = whole


class BatchedWork(Work):
    """A message of a batch; over when the batch is."""

    def __init__(self, name: str, peer: int) -> None:
        super().__init__(name, 0, False)
        self.peer = peer
        self.whole: Work | None = None

    def _issued(self) -> Work:
        assert self.whole is not None, "torch has not come to the end of its batch"
        return self.whole

    def wait(self, timeout: timedelta | float | None = None) -> None:
        self._issued().wait(timeout)

    def wait_blocking(self, timeout: timedelta | float | None = None) -> None:
        self._issued().wait_blocking(timeout)

    def is_completed(self) -> bool:
        return self._issued().is_completed()

    @property
    def status(self) -> WorkStatus:
        return self._issued().status

    def exception(self) -> BaseException | None:
        return self._issued().exception()

    def add_done_callback(self, callback: Callable[[Work], None]) -> None:
        self._issued().add_done_callback(lambda _: callback(self))


def post(engine: Engine, kind: str, tensor: torch.Tensor, peer: Any) -> Work:
    """Sends or receives for a process group."""
    if engine.executor.streams is None:
        return send_or_receive(engine, kind, tensor, peer, None)
    opened: _Batch | None = getattr(_here, "opened", None)
    if opened is not None and opened.asked[0] is engine:
        return opened.add(kind, tensor, peer)
    asked = _asked() if understood else None
    if asked is None:
        return send_or_receive(engine, kind, tensor, peer, None)
    batch: _Batch | None = getattr(_here, "batch", None)
    if batch is None or batch.asked is not asked:  # one before may have ended with an error
        batch = _here.batch = _Batch(asked)
    work = batch.add(kind, tensor, peer)
    if len(batch.items) == len(asked):
        _here.batch = None
        batch.issue(engine)
    return work


def pass_on(backend: Any, name: str, arguments: Sequence[Any]) -> Any:
    """A message for a backend of torch's own, which puts a batch together itself when it is told to.

    Returns nothing for those of a batch but the last, whose Work is that of all.
    """
    asked = _asked() if understood and getattr(backend, "supports_coalescing", False) else None
    if asked is None or getattr(_here, "told", None) is backend:
        return getattr(backend, name)(*arguments)
    passed, of = getattr(_here, "passed", (0, None))
    passed = passed if of is asked else 0  # one before may have ended with an error
    if passed == 0:
        backend._start_coalescing()
    getattr(backend, name)(*arguments)
    _here.passed = (passed + 1, asked)
    if passed + 1 < len(asked):
        return None
    del _here.passed
    return backend._end_coalescing()


def tell_start(backend: Any) -> None:
    """torch itself says where a batch begins, to a backend of its own."""
    backend._start_coalescing()
    _here.told = backend


def tell_end(backend: Any) -> Any:
    _here.told = None
    return backend._end_coalescing()


def start(engine: Engine) -> None:
    """From now on this thread's messages are kept, until `end`: within torch's `_coalescing_manager`."""
    _here.opened = _Batch([engine])


def end(engine: Engine) -> None:
    """Issues what was kept since `start`."""
    opened: _Batch | None = getattr(_here, "opened", None)
    _here.opened = None
    if opened is not None and opened.asked[0] is engine and opened.items:
        opened.issue(engine)


def _asked() -> list[Any] | None:
    """The messages of torch's function, when it is what calls."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_DEEP):
        if frame is None:
            return None
        if frame.f_code is _batch_code:
            found: list[Any] = frame.f_locals[_LIST]
            return found
        frame = frame.f_back
    return None
