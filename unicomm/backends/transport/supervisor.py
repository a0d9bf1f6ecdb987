"""What the fast path over a transport asks of its backend: deadlines, and the causes of failures.

The native core (csrc/transport/fast.hpp) calls it in the thread of the operation, once an operation takes
longer than a moment, and when something is wrong.
"""

from __future__ import annotations

import time
from typing import Protocol

from unicomm import _core
from unicomm.backends.out_of_band import COMPARE, Awaited, FaultChannel, Operation


class Supervised(Protocol):
    """The backend."""

    transport: _core.Transport
    channel: FaultChannel

    def abort(self) -> None:
        """Ends the communicator."""

    def size_differs(self, peer: int, expected: int, length: int) -> None:
        """Breaks the communicator: a receive of `expected` bytes got a message of `length` bytes."""


class Supervisor:
    """Each method returns whether the operation must fail. The backend's `raise_fault` then raises the error.

    Attributes:
        native: the operations of the native core.
        fast: the fast path, once the communicator has one.
    """

    def __init__(self, backend: Supervised, compares: bool) -> None:
        self._backend = backend
        self.native = _core.TransportFast(backend.transport, compares, backend.channel.counts, self)
        self.native.hear([s.fileno() for _, s in backend.channel.sockets()])
        self.fast: _core.FastPath | None = None
        self._operation: Operation | None = None  # the messages that are under supervision

    def awaited(self) -> list[Awaited]:
        """Returns the messages of the operation that are not over."""
        return [Awaited(*message) for message in self.native.awaited]

    def begin(self, deadline: float) -> bool:
        """Called when the operation takes longer than a moment, or has failed.

        `deadline`: in seconds, on the clock of `time.monotonic()`.
        """
        backend, awaits = self._backend, self.awaited()
        counts = backend.channel.counts
        timeout = 0.0 if self.fast is None else self.fast.timeout
        if awaits:
            name = "batch" if len(awaits) > 1 else awaits[0].name
            operation = Operation(name, 0, timeout, deadline, awaits, time.monotonic() + COMPARE)
            self._operation = operation
        else:
            operation = Operation(counts.running, counts.entered, timeout, deadline)
        backend.channel.begin(operation)
        return backend.channel.fault is not None

    def completed(self) -> bool:
        """Some messages of a long operation are over: others that ask where this rank is hear of the rest."""
        if self._operation is not None:
            self._operation.awaits[:] = self.awaited()
        return False

    def end(self) -> bool:
        self._operation = None
        self._backend.channel.end()
        return False

    def given_up(self, number: int) -> bool:
        """Whether other ranks have given up the collective with this number."""
        channel = self._backend.channel
        channel.catch_up()
        return channel.fault is not None and channel.fault.after < number

    def odd_size(self, peer: int, expected: int, length: int) -> bool:
        """A receive got a message of another size."""
        self._backend.size_differs(peer, expected, length)
        return True

    def abort(self) -> bool:
        """Ends the communicator, as of an operation in which a signal handler has raised."""
        self._backend.abort()
        return True
