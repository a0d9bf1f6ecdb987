"""Messages over MPI that complete one by one. Each message is one MPI request."""

from __future__ import annotations

import time
from typing import Any

from unicomm.backends.bootstrap import mpi_library
from unicomm.backends.out_of_band import OutOfBandExchange
from unicomm.comms.backend import Completed
from unicomm.comms.operations.call import Message

from .operations import Operations

_HOT = 0.0002  # seconds of polling without a nap


class MpiExchange(OutOfBandExchange):
    def __init__(self, operations: Operations) -> None:
        super().__init__(operations)
        self._operations = operations
        self._requests: dict[int, tuple[Any, Message]] = {}  # by the message's number
        self._interrupted = False

    def _start(self, number: int, message: Message) -> None:
        self._requests[number] = self._operations.start(message), message

    def _wait(self, timeout: float, limit: float) -> list[Completed]:
        operations, MPI = self._operations, self._operations.MPI  # noqa: N806
        began = time.monotonic()
        numbers = list(self._requests)
        requests = [request for request, _ in self._requests.values()]
        statuses = [MPI.Status() for _ in requests]
        while not self._interrupted:
            done = MPI.Request.Testsome(requests, statuses) or []
            if done:
                found = [(numbers[i], status) for i, status in zip(done, statuses, strict=False)]
                return sorted(self._take(number, status) for number, status in found)
            operations.channel.check_finalized(self._running.values())
            operations.check_fault()
            now = time.monotonic()
            if now >= began + limit:
                return []
            if now >= max(began + timeout, operations.channel.patience()):
                raise self._overdue()
            operations.nap(began, began + _HOT)
        self._interrupted = False
        return []

    def _take(self, number: int, status: Any) -> Completed:
        _, message = self._requests[number]
        self._operations.check_size(message, status)
        del self._requests[number]
        return self._completed(number, status.Get_source() if message.peer < 0 else message.peer)

    def _abandon(self) -> None:
        requests = [request for request, _ in self._requests.values()]
        mpi_library.abandon(requests, [message for _, message in self._requests.values()])
        self._requests.clear()

    def interrupt(self) -> None:
        self._interrupted = True
