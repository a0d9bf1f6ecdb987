"""What a rank's ring has no room for: tags of messages, sizes of parts, and which groups are made where."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unicomm.comms.operations.call import Call

from .places import user_path, user_place

#: The name of a group and its members' ranks in the job, as text.
GroupKey = tuple[str, str]
Event = tuple[int, int, int]
STEP = -(1 << 40)  # a step of an optimizer is over


@dataclass
class Details:
    """The details of one rank.

    Attributes:
        tags: the tag of a message, by its place among the rank's operations; messages without a tag have 0.
        parts: the numbers of elements that an exchange sends to and receives from each rank of its group, by
            the operation's place.
        events: what the rank does, in its order: (the place of an operation that it issues, or -1 - the
            place of one that it waits for, or `STEP`; its processor time in nanoseconds before and after).
        groups: the line of the program that made a group first, "file:line".
        senders: the rank in the job whose message a receive from any rank got, by the operation's place; only
            with real values.
        new_groups: the calls of torch's `new_group` that all ranks have to make: the members' ranks in the
            job, as text, and the lines of the program that lead there, the innermost first.
    """

    tags: dict[int, int] = field(default_factory=dict)
    parts: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)
    groups: dict[GroupKey, str] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    new_groups: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    senders: dict[int, int] = field(default_factory=dict)
    _count: int = 0

    def add(self, calls: Sequence[Call]) -> range:
        """Adds operations and returns their places. Called once for all that are recorded, in their order."""
        first = self._count
        for call in calls:
            if call.tag:
                self.tags[self._count] = call.tag
            if call.name in ("all_to_all", "all_to_all_v_single"):
                sent, taken = _elements(call.in_splits, call.inputs), _elements(call.out_splits, call.outputs)
                self.parts[self._count] = (sent, taken)
            self._count += 1
        return range(first, self._count)

    def add_events(self, places: Iterable[int], begin: int) -> None:
        """Adds what a rank has done since its processor time was `begin`: the places as in `events`."""
        for place in places:
            self.events.append((place, begin, begin := time.process_time_ns()))

    def add_group(self, name: str, ranks: Sequence[int]) -> None:
        """Adds a group that the program makes at this moment."""
        self.groups.setdefault((name, ",".join(map(str, ranks))), user_place())

    def add_new_group(self, ranks: Sequence[int]) -> None:
        """Adds a call of `new_group` that the program makes at this moment."""
        self.new_groups.append((",".join(map(str, ranks)), user_path()))

    def write(self, path: Path) -> None:
        groups = [[*key, where] for key, where in self.groups.items()]
        tables = [
            [[at, *value] for at, value in self.parts.items()],
            list(self.tags.items()),
            groups,
            self.events,
            self.new_groups,
            list(self.senders.items()),
        ]
        path.write_text(json.dumps(tables))

    @classmethod
    def read(cls, path: Path) -> Details:
        """Reads a file; a rank that has left none has no details."""
        if not path.exists():
            return cls()
        parts, tags, groups, events, new_groups, senders = json.loads(path.read_text())
        return cls(
            dict(tags),
            {at: (sent, taken) for at, sent, taken in parts},
            {(name, ranks): where for name, ranks, where in groups},
            [(what, begin, end) for what, begin, end in events],
            [(ranks, tuple(path)) for ranks, path in new_groups],
            dict(senders),
        )


def _elements(rows: Sequence[int] | None, tensors: Sequence[Any]) -> list[int]:
    """Returns the elements of each part: of a tensor each, or of one tensor that is cut by `rows`."""
    if rows is None:
        return [tensor.numel() for tensor in tensors]
    return [n * math.prod(tensors[0].shape[1:]) for n in rows]
