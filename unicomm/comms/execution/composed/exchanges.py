"""Exchanges of messages: one for each backend, and messages that travel while their rank computes."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import torch

from unicomm.comms.backend import Backend, Completed, Exchange, OpensExchange
from unicomm.comms.operations.call import Message

Tensor = torch.Tensor
#: Returns when what has begun is over.
Finish = Callable[[], None]
#: Returns the messages that send some tensors, and receive others, in the order of the ranks of a circle.
Trade = Callable[[list[Tensor], list[Tensor]], list[Message]]

_SLICE = 1.0  # seconds of waiting, after which the backend looks whether the operation has failed


class JointExchange(Exchange):
    """An exchange for backends without one: messages that are there when it runs complete together."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._messages: list[Message] = []
        self._completed = 0

    def add(self, messages: Sequence[Message]) -> None:
        self._messages += messages

    def run(self, timeout: float, limit: float, given: float) -> list[Completed]:
        messages, self._messages = self._messages, []
        first, self._completed = self._completed, self._completed + len(messages)
        self._backend.exchange(messages, timeout)
        return [(first + i, m.peer, None) for i, m in enumerate(messages)]


def open_exchange(backend: Backend) -> Exchange:
    """Returns the backend's own exchange, or a `JointExchange`."""
    return backend.open_exchange() if isinstance(backend, OpensExchange) else JointExchange(backend)


class Traffic(ABC):
    """How a rank swaps bytes with the ranks of a circle.

    Attributes:
        overlaps: whether a swap goes on while the rank computes.
    """

    overlaps = False

    @abstractmethod
    def begin(self, ins: list[Tensor], outs: list[Tensor]) -> Finish:
        """Begins to send `ins[i]` to the i-th rank and to receive `outs[i]` from it; empty ones are left out.

        All ranks of the circle begin their swaps in the same order. Nobody touches the tensors until the
        returned function returns, which raises the swap's error.
        """


class AtOnce(Traffic):
    """Traffic by a function that swaps and returns when that is over."""

    def __init__(self, swap: Callable[[list[Tensor], list[Tensor]], None]) -> None:
        self._swap = swap

    def begin(self, ins: list[Tensor], outs: list[Tensor]) -> Finish:
        self._swap(ins, outs)
        return nothing


class Overlapping(Traffic):
    """Traffic of messages that the backend moves while the rank computes."""

    overlaps = True

    def __init__(
        self,
        exchange: Exchange,
        trade: Trade,
        remaining: Callable[[], float],
        given: float,
    ) -> None:
        """`trade` makes the messages of a swap. `remaining` returns the seconds that are left of `given`."""
        exchange.joint = True
        self._exchange, self._trade = exchange, trade
        self._remaining, self._given = remaining, given
        self._added = 0
        self._running: dict[int, Message] = {}  # by number; they hold the tensors

    def begin(self, ins: list[Tensor], outs: list[Tensor]) -> Finish:
        messages = self._trade(ins, outs)
        if not messages:
            return nothing
        numbers = range(self._added, self._added + len(messages))
        self._added = numbers.stop
        self._running.update(zip(numbers, messages, strict=True))
        self._exchange.add(messages)
        self._run(0.0)

        def finish() -> None:
            while not self._running.keys().isdisjoint(numbers):
                self._run(_SLICE)

        return finish

    def _run(self, limit: float) -> None:
        for number, _, error in self._exchange.run(self._remaining(), limit, self._given):
            if error is not None:
                raise error
            del self._running[number]


@contextlib.contextmanager
def overlapping(
    backend: OpensExchange,
    trade: Trade,
    remaining: Callable[[], float],
    given: float,
) -> Iterator[Traffic]:
    """Opens an exchange of the backend for one operation."""
    exchange = backend.open_exchange()
    try:
        yield Overlapping(exchange, trade, remaining, given)
    finally:
        exchange.close()


def trade(
    peers: Sequence[int], mine: int, ins: list[Tensor], outs: list[Tensor], empty: bool = False
) -> list[Message]:
    """Returns messages that send the bytes `ins[i]` to `peers[i]` and receive `outs[i]` from it, except for
    i = `mine`. No tensors at all means empty ones. `empty`: also messages without bytes."""
    messages, n = [], len(peers)
    for step in range(1, n):  # staggered, so that ranks do not all send to the same one at once
        to, source = (mine + step) % n, (mine - step) % n
        if outs and (empty or outs[source].numel()):
            messages.append(Message.part(False, peers[source], outs[source]))
        if ins and (empty or ins[to].numel()):
            messages.append(Message.part(True, peers[to], ins[to]))
    return messages


def run_stages(count: int, ahead: int, *stages: Callable[[int], Finish]) -> None:
    """Runs each of `count` chunks through stages of computing, each of which begins what goes on after it.

    A chunk comes to its next stage when what its last one has begun is over, and `ahead` more chunks have
    begun it: so that long something is under way. The order is the same on all ranks.
    """
    if count == 1:
        for stage in stages[:-1]:
            stage(0)()
        stages[-1](0)
        return
    under_way: list[dict[int, Finish]] = [{} for _ in stages]
    last = len(stages) - 1
    for step in range(count + ahead * last):
        for number, stage in enumerate(stages):
            chunk = step - ahead * number
            if 0 <= chunk < count:
                if number:
                    under_way[number - 1].pop(chunk)()
                finish = stage(chunk)
                if number < last:
                    under_way[number][chunk] = finish


def nothing() -> None:
    """The end of what is over when it begins."""
