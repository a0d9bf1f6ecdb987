"""The operation that a rank is in, and the messages that it waits for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from unicomm.comms.operations.call import PART
from unicomm.comms.operations.table import OPERATIONS, Kind

from .channel_thread import FOREVER


class Awaited(NamedTuple):
    """A message that a rank waits for; `peer` is -1 for a receive from any rank.

    `number`: among the messages without a tag that go one way between two ranks, or among those that are
    parts of collectives; 0 if it has none.
    """

    peer: int
    send: bool
    number: int
    nbytes: int
    tag: int = 0

    @property
    def part(self) -> bool:
        """Whether it is a part of a collective."""
        return self.tag == PART

    @property
    def name(self) -> str:
        return "send" if self.send else "recv"


@dataclasses.dataclass(eq=False, slots=True)
class Operation:
    """The operation that a rank is in.

    Attributes:
        number: of a collective; 0 for messages.
        timeout: seconds it may take. deadline: when they are over, by this process's monotonic clock.
        awaits: the messages of the operation.
        compare: when to ask the messages' peers what they wait for themselves.
        whole: whether it is one of which this communicator's operations are parts.
    """

    name: str
    number: int
    timeout: float
    deadline: float
    awaits: list[Awaited] = dataclasses.field(default_factory=list)
    compare: float = FOREVER
    whole: bool = False


def needed(awaits: Sequence[Awaited]) -> tuple[int, ...]:
    """Returns the peers of messages that all have to come; none if one of them may come from any rank."""
    peers = {message.peer for message in awaits}
    return () if -1 in peers else tuple(sorted(peers))


def is_collective(name: str) -> bool:
    return name in OPERATIONS and OPERATIONS[name].kind is Kind.COLLECTIVE
