"""Messages over a transport that complete one by one. None has a thread."""

from __future__ import annotations

import time
from collections.abc import Callable

from unicomm import _core
from unicomm.backends.out_of_band import OutOfBandBackend, OutOfBandExchange
from unicomm.comms.backend import Completed
from unicomm.comms.operations.call import Message

_SLICE = 1.0  # seconds of waiting, after which the ranks' wishes for more time are looked at


def start(running: _core.TransportMessages, number: int, message: Message) -> None:
    """Gives a message to the transport under a number of the caller's."""
    send, peer, tensor, tag = message
    running.add(number, send, peer, tensor.data_ptr(), tensor.nbytes, tag)


class TransportExchange(OutOfBandExchange):
    """Attributes:
    messages: those that are under way, by their number.
    """

    def __init__(
        self,
        backend: OutOfBandBackend,
        transport: _core.Transport,
        check_size: Callable[[Message, int, int], None],
    ) -> None:
        """`check_size` takes a message that is over, its peer and its bytes; raises if they differ."""
        super().__init__(backend)
        self.messages: dict[int, Message] = {}
        self._transport, self._check_size = transport, check_size
        self._native = _core.TransportMessages(transport)
        self._interrupted = False

    def _start(self, number: int, message: Message) -> None:
        self.messages[number] = message
        start(self._native, number, message)

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
            channel.check_finalized(self._running.values())
            now = time.monotonic()
            if now >= began + limit or self._interrupted:
                self._interrupted = False
                return []
            if now >= max(began + timeout, channel.patience()):
                raise self._overdue()

    def _take(self, number: int, peer: int, length: int) -> Completed:
        self._check_size(self.messages[number], peer, length)
        del self.messages[number]
        return self._completed(number, peer)

    def interrupt(self) -> None:
        self._interrupted = True
        self._transport.rouse()
