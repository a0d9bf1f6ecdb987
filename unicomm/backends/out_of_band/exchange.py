"""The base class of exchanges with out-of-band connections: messages that complete one by one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

from unicomm.comms.backend import Completed, Exchange
from unicomm.comms.errors import CommError
from unicomm.comms.operations.call import Message

from .backend import OutOfBandBackend
from .operation import Awaited, Operation


def awaited_in(exchange: Exchange, running: Mapping[int, Awaited]) -> list[Awaited]:
    """The messages for which the program waits, as other ranks hear that ask where this one is.

    `running`: those under way, by their number in the exchange.
    """
    return [found for number in exchange.waited_for() if (found := running.get(number)) is not None]


class OutOfBandExchange(Exchange):
    """Starts messages by `_start` and waits for them by `_wait`, whose errors it explains."""

    def __init__(self, backend: OutOfBandBackend) -> None:
        self._backend = backend
        self._fresh: list[Message] = []
        self._running: dict[int, Awaited] = {}
        self._added = 0
        self._about = -1  # the number of the message that the library starts, or says has failed
        self._given = 0.0  # seconds, of the message that is due first

    @abstractmethod
    def _start(self, number: int, message: Message) -> None:
        """Gives a message to the library. The peer of a receive is -1 for any rank."""

    @abstractmethod
    def _wait(self, timeout: float, limit: float) -> list[Completed]:
        """See `Exchange.run`. Raises the library's `RuntimeError`, or `_overdue`."""

    def _abandon(self) -> None:
        """Gives up all messages, after an error."""

    def add(self, messages: Sequence[Message]) -> None:
        self._fresh += messages

    def run(self, timeout: float, limit: float, given: float) -> list[Completed]:
        backend, self._given = self._backend, given
        backend.channel.messages = self._awaited
        try:
            backend.check_fault()
            self._begin()
            return self._wait(timeout, limit)
        except CommError:
            self._abandon()
            raise
        except RuntimeError as error:
            self._abandon()
            raise backend.failure(error, self._failed()) from error
        except BaseException:  # of a signal handler
            self._abandon()
            raise

    def _begin(self) -> None:
        fresh, self._fresh = dict(enumerate(self._fresh, self._added)), []
        self._added += len(fresh)
        # Noted before they start, so that the fault channel can explain why a message could not start.
        self._running |= {number: self._backend.awaited(message) for number, message in fresh.items()}
        # Otherwise a small message to a rank that has finalized would seem to have arrived.
        self._backend.channel.check_finalized(self._running.values())
        self._backend.check_fault()
        for self._about, message in fresh.items():
            self._start(self._about, message)
        self._about = -1

    def _failed(self) -> list[Awaited]:
        """Returns the message that has failed, or all under way if the library has not said which."""
        about = self._running.get(self._about)
        return list(self._running.values()) if about is None or about.peer < 0 else [about]

    def _awaited(self) -> list[Awaited]:
        return awaited_in(self, self._running)

    def close(self) -> None:
        self._backend.channel.messages = list  # none

    def _completed(self, number: int, source: int) -> Completed:
        """Takes note that a message has completed. `source`: its peer, also for a receive from any rank."""
        awaited = self._running.pop(number)
        if awaited.peer < 0 and not awaited.tag:
            self._backend.count(source, send=False)
        return number, source, None

    def _overdue(self) -> CommError:
        """Returns the error of messages that did not complete in time."""
        awaits = list(self._running.values())
        return self._backend.overdue(Operation(awaits[0].name, 0, self._given, 0.0, awaits))
