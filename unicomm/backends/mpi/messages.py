"""Messages of a process group over MPI: each is a request, and whichever is over first is over first."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from unicomm.backends.bootstrap import mpi_library
from unicomm.backends.out_of_band.fault_channel import Awaited, Operation
from unicomm.comms.backend import Exchange
from unicomm.comms.errors import CommError
from unicomm.comms.operations.call import Message

if TYPE_CHECKING:
    from .backend import MpiBackend

_HOT = 0.0002  # seconds of polling without a nap


class MpiExchange(Exchange):
    def __init__(self, backend: MpiBackend) -> None:
        self._backend = backend
        self._fresh: list[Message] = []
        self._numbers: list[int] = []  # of what runs, as the next two
        self._messages: list[tuple[Message, int]] = []  # with its number in its pair
        self._requests: list[Any] = []
        self._added = 0
        self._interrupted = False

    def add(self, messages: Sequence[Message]) -> None:
        self._fresh += messages

    def run(self, timeout: float, limit: float) -> list[tuple[int, int, CommError | None]]:
        backend = self._backend
        try:
            backend._check()
            self._start()
            return self._poll(timeout, limit)
        except CommError:
            self._abandon()
            raise
        except RuntimeError as error:
            self._abandon()
            raise backend._failure(error, self._awaits()) from error

    def _start(self) -> None:
        fresh, self._fresh = self._fresh, []
        for message in fresh:
            number = self._backend._count(message.peer, message.send) if message.peer >= 0 else 0
            self._requests.append(self._backend.start(message))
            self._numbers.append(self._added)
            self._messages.append((message, number))
            self._added += 1

    def _poll(self, timeout: float, limit: float) -> list[tuple[int, int, CommError | None]]:
        backend, MPI = self._backend, self._backend._MPI  # noqa: N806
        began = time.monotonic()
        statuses = [MPI.Status() for _ in self._requests]
        while not self._interrupted:
            over = MPI.Request.Testsome(self._requests, statuses) or []
            if over:
                return self._take(over, statuses)
            backend._check()
            now = time.monotonic()
            if now >= began + limit:
                return []
            if now >= max(began + timeout, backend._watch.patience()):
                raise backend._overdue(Operation("messages", 0, timeout, 0.0, self._awaits()))
            backend.nap(began, began + _HOT)
        self._interrupted = False
        return []

    def _take(self, over: list[int], statuses: list[Any]) -> list[tuple[int, int, CommError | None]]:
        finished: list[tuple[int, int, CommError | None]] = []
        for index, status in zip(over, statuses, strict=False):
            message = self._messages[index][0]
            self._backend.check_size(message, status)
            peer = message.peer
            if peer < 0:
                peer = status.Get_source()
                self._backend._count(peer, send=False)
            finished.append((self._numbers[index], peer, None))
        left = [i for i in range(len(self._requests)) if i not in set(over)]
        self._requests = [self._requests[i] for i in left]
        self._numbers = [self._numbers[i] for i in left]
        self._messages = [self._messages[i] for i in left]
        return sorted(finished)

    def _awaits(self) -> list[Awaited]:
        return [Awaited(m.peer, m.send, number, m.tensor.nbytes) for m, number in self._messages]

    def _abandon(self) -> None:
        mpi_library.abandon(self._requests, [message for message, _ in self._messages])
        self._requests = []

    def interrupt(self) -> None:
        self._interrupted = True
