"""Gloo's messages that run side by side, each of which is over by itself."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from unicomm.backends.out_of_band.fault_channel import Awaited, Operation
from unicomm.comms.backend import Exchange
from unicomm.comms.errors import CommError
from unicomm.comms.failures.threads import Threads
from unicomm.comms.operations.call import Message

if TYPE_CHECKING:
    from .backend import GlooBackend

_LONGEST = 1e6  # seconds; a queue takes no more than some centuries
_MOST_TAG = (1 << 31) - 1


def tag(tensor: torch.Tensor) -> int:
    """What a message's two ends must have in common: their size, for Gloo ends the process where it differs.

    So a message of another size is another message, which nobody waits for; the watch finds out.
    """
    return tensor.nbytes & _MOST_TAG


class GlooExchange(Exchange):
    """Each message has a thread that waits for it: Gloo can say that one is over only to who waits for it."""

    def __init__(self, backend: GlooBackend) -> None:
        self._backend = backend
        self._over: queue.SimpleQueue[tuple[int, int, RuntimeError | None] | None] = queue.SimpleQueue()
        self._fresh: list[Message] = []
        self._running: dict[int, Awaited] = {}
        self._added = 0

    def add(self, messages: Sequence[Message]) -> None:
        self._fresh += messages

    def run(self, timeout: float, limit: float) -> list[tuple[int, int, CommError | None]]:
        fresh, self._fresh = self._fresh, []
        backend = self._backend
        backend._check()
        if fresh:
            try:
                self._start(fresh)
            except RuntimeError as error:
                raise backend._failure(error, list(self._running.values())) from error
        timeout = max(timeout, backend._watch.patience() - time.monotonic())
        try:
            item = self._over.get(timeout=min(timeout, limit, _LONGEST))
        except queue.Empty:
            if backend._watch.patience() > time.monotonic():  # somebody has asked for time meanwhile
                return []
            if timeout <= min(limit, _LONGEST):
                late = Operation("messages", 0, timeout, 0.0, list(self._running.values()))
                raise backend._overdue(late) from None
            return []
        if item is None:
            return []
        number, peer, failure = item
        if failure is not None:
            raise backend._failure(failure, list(self._running.values())) from failure
        if self._running.pop(number).peer < 0:
            backend._count(peer, send=False)
        return [(number, peer, None)]

    def _start(self, messages: Sequence[Message]) -> None:
        backend = self._backend
        group, limit = backend._group, backend._limit
        group.set_timeout(limit)
        for send, peer, tensor in messages:
            if send:
                work = group.send([tensor], peer, tag(tensor))
            elif peer < 0:
                work = group.recv_anysource([tensor], tag(tensor))
            else:
                work = group.recv([tensor], peer, tag(tensor))
            number = backend._count(peer, send) if peer >= 0 else 0
            self._running[self._added] = Awaited(peer, send, number, tensor.nbytes)
            waiters.run(partial(_await_message, work, self._added, peer, limit, self._over))
            self._added += 1

    def interrupt(self) -> None:
        self._over.put(None)


waiters = Threads("unicomm-gloo")


def await_messages(works: list[Any], awaits: list[Awaited], limit: timedelta, over: Any) -> None:
    """Waits for all; `works` and `awaits` are emptied on the way. Puts None, or the first failure."""
    failure = None
    try:
        while works:
            works[0].wait(limit)
            del works[0], awaits[0]
    except RuntimeError as error:
        failure = error
        works.clear()
    over.put(failure)


def _await_message(work: Any, number: int, peer: int, limit: timedelta, over: Any) -> None:
    failure = None
    try:
        work.wait(limit)
        if peer < 0:
            peer = int(work._source_rank())
    except RuntimeError as error:
        failure = error
    del work  # it holds the group open
    over.put((number, peer, failure))
