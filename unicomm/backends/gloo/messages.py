"""Gloo's messages: waiting for them in threads, and messages that complete one by one."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from unicomm.backends.out_of_band import Awaited, OutOfBandBackend, OutOfBandExchange
from unicomm.comms.backend import Completed
from unicomm.comms.failures.daemon_pool import DaemonPool
from unicomm.comms.operations.call import Message

from .waits import Waits

_LONGEST = 1e6  # seconds; a queue takes no more than some centuries
_TAGS = (1 << 31) - 1  # Gloo's
_SPREAD = 0x9E3779B1  # an odd number, so that no two tags of one size become one

Results = queue.SimpleQueue[RuntimeError | None]


def tag(message: Message) -> int:
    """Returns the tag that Gloo gets for a message. It combines the message's size and tag.

    Both ends must have the size in common, as Gloo ends the process where the sizes differ. So a message of
    another size is another message, which nobody waits for; the fault channel finds out.
    """
    return (message.tensor.nbytes ^ message.tag * _SPREAD) & _TAGS


class GlooExchange(OutOfBandExchange):
    """A thread waits for each message, or for some that are `joint`: Gloo tells nobody else of their end."""

    def __init__(
        self, backend: OutOfBandBackend, group: Callable[[], Any], limit: timedelta, waits: Waits
    ) -> None:
        """`group` returns Gloo's group, which this object must not hold. `limit`: of Gloo's own waiting."""
        super().__init__(backend)
        self._group, self._limit, self._waits = group, limit, waits
        self._results: queue.SimpleQueue[tuple[int, int, RuntimeError | None] | None] = queue.SimpleQueue()
        self._started: list[tuple[Any, int, int]] = []  # for whom no thread waits yet: work, number, peer

    def _start(self, number: int, message: Message) -> None:
        send, peer, tensor, _ = message
        self._group().set_timeout(self._limit)
        if send:
            work = self._group().send([tensor], peer, tag(message))
        elif peer < 0:
            work = self._group().recv_anysource([tensor], tag(message))
        else:
            work = self._group().recv([tensor], peer, tag(message))
        self._waits.add(work)
        self._started.append((work, number, peer))

    def _wait(self, timeout: float, limit: float) -> list[Completed]:
        started, self._started = self._started, []
        for together in [started] if self.joint else [[one] for one in started]:
            if together:
                waiters.run(partial(_await_messages, together, self._limit, self._results))
        del started
        channel = self._backend.channel
        timeout = max(timeout, channel.patience() - time.monotonic())
        try:
            result = self._results.get(timeout=min(timeout, limit, _LONGEST))
        except queue.Empty:
            asked_for_time = channel.patience() > time.monotonic()  # by a rank, meanwhile
            if asked_for_time or timeout > min(limit, _LONGEST):
                return []
            raise self._overdue() from None
        if result is None:
            return []
        number, peer, failure = result
        if failure is not None:
            self._about = number
            raise failure
        return [self._completed(number, peer)]

    def _abandon(self) -> None:
        self._started.clear()

    def interrupt(self) -> None:
        self._results.put(None)


waiters = DaemonPool("unicomm-gloo")

_ENDED = "Gloo's wait for a message was ended"


def await_all(works: list[Any], awaits: list[Awaited], limit: timedelta, results: Results) -> None:
    """Waits for all works, and removes each with its entry in `awaits`. Puts None, or the first failure."""
    failure = None
    try:
        while works:
            if not works[0].wait(limit):
                raise RuntimeError(_ENDED)
            del works[0], awaits[0]
    except RuntimeError as error:
        failure = error
        works.clear()
    results.put(failure)


def _await_messages(started: list[tuple[Any, int, int]], limit: timedelta, results: Any) -> None:
    while started:
        work, number, peer = started.pop(0)
        failure = None
        try:
            if not work.wait(limit):  # here, as an error keeps the names of its functions, thus the work
                raise RuntimeError(_ENDED)
            if peer < 0:
                peer = int(work._source_rank())
        except RuntimeError as error:
            failure = error
        del work  # it holds the group open
        results.put((number, peer, failure))
