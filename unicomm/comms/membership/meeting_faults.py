"""MeetingFaults: why a meeting cannot succeed, found before its deadline.

A member that waits looks, after about half a second and then again and again, for three reasons:

- The process of a member that has come has ended. Members on the same host see that.
- A member that has come passes other options, and the count is not complete.
- A member that has not come waits in another meeting for this one, and neither has another thread that may
  call. So that the others know it, a member that waits puts its call into the store, under its global rank.

In a large group a member looks at some of the others only: those at distances of powers of two. Each member
is thus looked at by several. docs/design/store-waits.md has the reasons.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unicomm.comms.failures import thread_quiescence
from unicomm.comms.failures.store_client import StoreClient

from .processes import Process
from .rendezvous_parts import compare, encode, ranges_of

PAUSE = 0.4  # seconds from one look to the next, and some for each member
_FEW = 16  # members of which each looks at all others
_MOST_CALLS = 256  # members up to which calls are put into the store
_PATIENCE = 0.8  # seconds from a difference to its error, in which the other members may come
_CALLS = "unicomm-waits-in"  # keys: the call in which a rank waits

#: Threads that wait in a meeting.
_waiting: set[int] = set()
os.register_at_fork(after_in_child=_waiting.clear)


@dataclass(frozen=True)
class _Call:
    """A meeting in which a rank waits: `at` is the place of its keys, `key` makes the entry unique."""

    at: str
    name: str
    ranks: list[int]
    alone: bool
    process: Process
    key: str

    @property
    def header(self) -> bytes:
        return encode({"name": self.name, "ranks": str(self.ranks)})


@dataclass
class MeetingFaults:
    """What one member has seen of a meeting. `at`: the place of the meeting's keys."""

    client: StoreClient
    name: str
    at: str
    rank: int
    labels: Sequence[int]
    process: Process
    known: dict[int, Process] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = len(self.labels)
        # All ranks together ask the store some ten thousand times a second at most.
        self.interval = min(PAUSE + 0.02 * size, 5 + size / 1000)
        steps = range(1, size) if size <= _FEW else (1 << i for i in range(size.bit_length() - 1))
        self._watched = [(self.rank + step) % size for step in steps]
        self._headers: dict[int, bytes] = {}
        self._differ_since: float | None = None
        self._last: dict[int, str] = {}  # calls of the last look, by global rank
        self._told: _Call | None = None

    def dead(self) -> dict[str, Any] | None:
        """The failure if the process of a member has ended."""
        dead = [r for r in self._watched if r in self.known and self.known[r].has_ended(self.process)]
        return {"kind": "dead", "culprits": ranges_of(sorted(dead))} if dead else None

    def look(
        self, header: bytes, read_post: Callable[[int], tuple[bytes, bytes] | None], all_: Callable[[], Any]
    ) -> dict[str, Any] | None:
        """Looks once for a failure, while members are missing.

        `header`: of this member. `read_post`: returns header and value of a member that has come. `all_`:
        returns the failure if the headers of those that have come differ.
        """
        for r in self._watched:
            if r not in self._headers and (post := read_post(r)) is not None:
                self._headers[r] = post[0]
                self.known[r] = Process.read(post[1])
        if failure := self.dead():
            return failure
        if any(other != header for other in self._headers.values()):
            self._differ_since = self._differ_since or time.monotonic()
            if time.monotonic() - self._differ_since >= _PATIENCE and (failure := all_()):
                return failure  # type: ignore[no-any-return]
        missing = [r for r in self._watched if r not in self._headers]
        return self._elsewhere(missing) if missing and len(self.labels) <= _MOST_CALLS else None

    def _elsewhere(self, missing: Sequence[int]) -> dict[str, Any] | None:
        """The failure if a missing member waits for this one in another meeting."""
        mine = self._tell()
        found: dict[int, _Call] = {}
        for r in missing:
            call = self._read(self.labels[r])
            if call is not None and call.alone and self.labels[self.rank] in call.ranks:
                found[self.labels[r]] = call
        before, self._last = self._last, {label: call.key for label, call in found.items()}
        sure = {label: call for label, call in found.items() if before.get(label) == call.key}
        if not mine.alone or not sure:
            return None
        return self._end(mine, sure)

    def _end(self, mine: _Call, sure: Mapping[int, _Call]) -> dict[str, Any] | None:
        """Ends the other meetings, and returns the failure of all."""
        headers = {self.labels[r]: mine.header for r in (self.rank, *self._headers)}
        headers |= {label: call.header for label, call in sure.items()}
        for call in {call.at: call for call in sure.values()}.values():
            for i, label in enumerate(call.ranks[:_MOST_CALLS]):
                if label not in headers and self.client.peek(f"{call.at}/0/{i}"):
                    headers[label] = call.header
        failure = compare(headers)
        if failure is None:
            return None
        failure["global"] = True
        for at in {call.at for call in sure.values()}:
            end_meeting(self.client, at, failure)
        return failure

    def _tell(self) -> _Call:
        """Puts this member's call into the store, if it has changed."""
        alone = thread_quiescence.threads_that_stay(list(_waiting), {}, 0, self.rank) is not None
        if self._told is None or self._told.alone != alone:
            call = _Call(self.at, self.name, list(self.labels), alone, self.process, secrets.token_hex(4))
            fields = {**vars(call), "process": call.process.pack().hex()}
            self.client.put(self._key(self.labels[self.rank]), encode(fields))
            self._told = call
        return self._told

    def _key(self, label: int) -> str:
        return f"{_CALLS}/{label}"

    def _read(self, label: int) -> _Call | None:
        """The call in which a rank waits now."""
        text = self.client.peek(self._key(label))
        try:
            fields = json.loads(text)
            call = _Call(**{**fields, "process": Process.read(bytes.fromhex(fields["process"]))})
            if not isinstance(call.at, str) or not all(type(r) is int for r in call.ranks):
                return None
            base, generation = place_of(call.at)
            # An attempt that failed, and was erased by the next success, is over too.
            decided = int(self.client.peek(f"{base}/generation") or 0) > generation
        except (ValueError, TypeError, KeyError, RecursionError):  # none, or no member wrote it
            return None
        over = decided or call.at == self.at or call.process.has_ended(self.process)
        return None if over or self.client.peek(f"{call.at}/0/result") else call

    def close(self) -> None:
        """The members have met. After a failure the call stays, for members that have not seen it yet."""
        if self._told is not None:
            self.client.delete([self._key(self.labels[self.rank])])
            self._told = None


class Waiting:
    """Around the wait of a member: its thread is in a meeting."""

    def __enter__(self) -> None:
        _waiting.add(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        _waiting.discard(threading.get_ident())


def place_of(at: str) -> tuple[str, int]:
    """The place of a meeting's name, and its generation; raises `ValueError` if `at` is none."""
    base, _, generation = at.rpartition("/")
    return base, int(generation)


def end_meeting(client: StoreClient, at: str, failure: Mapping[str, Any]) -> None:
    """Makes `failure` the outcome of a meeting of other members, unless it has one."""
    base, generation = place_of(at)
    mine = b"-" + encode(failure)
    if client.put_first(f"{at}/0/result", mine) == mine:
        client.put(f"{at}/failed", b"0")
        client.replace(f"{base}/generation", b"%d" % generation, b"%d" % (generation + 1))
