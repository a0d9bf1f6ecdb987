"""`dist.batch_isend_irecv` on devices: all its messages are issued as one group.

Before 2.14 torch groups the messages of a batch only for process groups of its own class, and passes them to
others one by one. On the CPU messages run side by side anyway. On a stream each message would wait for the
one before it, and two ranks that both send first would wait for each other for ever. So a message from within
`batch_isend_irecv` is kept until the last one of its batch has come.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from unicomm.comms.execution.point_to_point import messages
from unicomm.comms.execution.point_to_point import post as send_or_receive
from unicomm.comms.work import Work, WorkStatus

from .compat import end_coalescing, messages_of_batch, start_coalescing

if TYPE_CHECKING:
    from unicomm.comms.execution.engine import Engine

_here = threading.local()


class _Batch:
    """A batch that is being collected. `key`: torch's list of messages, or a list with the engine.

    The identity of `key` is the identity of the batch.
    """

    def __init__(self, key: list[Any]) -> None:
        self.key = key
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
    """The Work of one message of a batch. It completes with the batch."""

    def __init__(self, name: str, peer: int) -> None:
        super().__init__(name, 0, False)
        self.peer = peer
        self.whole: Work | None = None

    def _issued(self) -> Work:
        assert self.whole is not None, "torch has not issued the last message of its batch"
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


def post(engine: Engine, kind: str, tensor: torch.Tensor, peer: Any, tag: int) -> Work:
    """Issues a message of a process group, or adds it to the batch that it belongs to.

    On devices tags have no meaning, as with NCCL.
    """
    if engine.executor.streams is None:
        return send_or_receive(engine, kind, tensor, peer, None, tag)
    opened: _Batch | None = getattr(_here, "opened", None)
    if opened is not None and opened.key[0] is engine:
        return opened.add(kind, tensor, peer)
    found = messages_of_batch()
    if found is None:
        return send_or_receive(engine, kind, tensor, peer, None)
    batch: _Batch | None = getattr(_here, "batch", None)
    if batch is None or batch.key is not found:  # the batch before may have ended with an error
        batch = _here.batch = _Batch(found)
    work = batch.add(kind, tensor, peer)
    if len(batch.items) == len(found):
        _here.batch = None
        batch.issue(engine)
    return work


def pass_on(backend: Any, name: str, arguments: Sequence[Any]) -> Any:
    """Passes a message to one of torch's own backends, which groups a batch between a start and an end.

    Returns None for all messages of a batch but the last. The Work of the last is that of the whole batch.
    """
    found = messages_of_batch() if getattr(backend, "supports_coalescing", False) else None
    if found is None or getattr(_here, "told", None) is backend:
        return getattr(backend, name)(*arguments)
    passed, of = getattr(_here, "passed", (0, None))
    passed = passed if of is found else 0  # the batch before may have ended with an error
    if passed == 0:
        start_coalescing(backend)
    getattr(backend, name)(*arguments)
    _here.passed = (passed + 1, found)
    if passed + 1 < len(found):
        return None
    del _here.passed
    return end_coalescing(backend)


def tell_start(backend: Any) -> None:
    """Starts a batch on one of torch's own backends, when torch itself says where the batch begins."""
    start_coalescing(backend)
    _here.told = backend


def tell_end(backend: Any) -> Any:
    """Ends the batch that `tell_start` started, and returns its Work."""
    _here.told = None
    return end_coalescing(backend)


def start(engine: Engine) -> None:
    """Keeps this thread's messages until `end`: the beginning of torch's `_coalescing_manager`."""
    _here.opened = _Batch([engine])


def end(engine: Engine) -> None:
    """Issues the messages kept since `start`."""
    opened: _Batch | None = getattr(_here, "opened", None)
    _here.opened = None
    if opened is not None and opened.key[0] is engine and opened.items:
        opened.issue(engine)
