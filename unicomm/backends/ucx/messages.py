"""Messages over UCX that complete one by one. Each is one request of UCX; none has a thread."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from unicomm import _core
from unicomm.backends.out_of_band import OutOfBandExchange
from unicomm.comms.backend import Completed
from unicomm.comms.operations.call import Message

if TYPE_CHECKING:
    from .operations import Operations

_SLICE = 1.0  # seconds of waiting, after which the ranks' wishes for more time are looked at
_LONGEST = 1e6


class UcxExchange(OutOfBandExchange):
    def __init__(self, operations: Operations) -> None:
        super().__init__(operations)
        self._operations = operations
        self._native = _core.UcxMessages(operations.worker)
        self._messages: dict[int, Message] = {}

    def _start(self, number: int, message: Message) -> None:
        self._messages[number] = message
        self._operations._memory = self._messages
        self._operations.start(self._native, number, message)

    def _wait(self, timeout: float, limit: float) -> list[Completed]:
        channel = self._backend.channel
        began = time.monotonic()
        while True:
            now = time.monotonic()
            left = max(began + timeout, channel.patience()) - now
            over = self._native.wait(max(0.0, min(left, began + limit - now, _SLICE)), False)
            if over is None:
                raise RuntimeError("the communicator has ended")
            if over:
                return sorted(self._take(*one) for one in over)
            channel.check_finalized(list(self._running.values()))
            now = time.monotonic()
            if now >= began + limit or self._interrupted:
                self._interrupted = False
                return []
            if now >= max(began + timeout, channel.patience()):
                raise self._overdue(timeout)

    _interrupted = False

    def _take(self, number: int, peer: int, length: int) -> Completed:
        self._operations.check_size(self._messages[number], peer, length)
        del self._messages[number]
        return self._completed(number, peer)

    def interrupt(self) -> None:
        self._interrupted = True
        self._operations.worker.rouse()
