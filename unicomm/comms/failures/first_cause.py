"""Verdict: what ended a communicator that is made of several, the same on all its ranks.

When one part fails, the others are ended too, and everyone hears of a closed connection or of a neighbour
that gave up: consequences. The cause is what somebody knew first hand. It goes into the store before that
rank ends anything, the first one stands, and all ranks raise that one. Where nobody knows, as when a whole
host is gone, the ranks that are left report there, and those that do not are the culprits.
"""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from unicomm.c10d.compat import PrefixStore, Store
from unicomm.comms import errors
from unicomm.comms.errors import BackendError, CommError
from unicomm.comms.membership.rendezvous_parts import StoreClient

from .threads import Threads

T = TypeVar("T")

GRACE = 1.0  # seconds that the other ranks get to say what they know, or that they are there
_PATIENCE = 2.0  # seconds for the store, whose host may be what is gone
_LOOK = 0.01  # seconds between two looks
_RANKS = ("culprits", "dead", "absent", "late")  # fields of an error
_threads = Threads("unicomm-verdict", awaited=True)


class Verdict:
    """The one of a communicator. Never raises for a store that fails, but knows nothing then."""

    def __init__(self, store: Store, uid: str, name: str, rank: int, size: int) -> None:
        self._client = StoreClient(PrefixStore(f"unicomm-verdict/{uid}", store), name, size)
        self._rank, self._size = rank, size

    def pronounce(self, error: CommError) -> CommError:
        """This rank knows the cause. Returns the error to raise, which somebody else's may be."""
        said: dict[str, Any] = {"type": type(error).__name__, "message": error.message, "hint": error.hint}
        said |= {kind: list(getattr(error, kind)) for kind in _RANKS}
        text = json.dumps(said).encode()
        return self._read(self._ask(lambda: self._client.put_first("cause", text)), error)

    def report(self, text: bytes = b"1") -> None:
        """This rank is there, and has failed, or waits as `text` says."""
        self._ask(lambda: self._client.put(f"there/{self._rank}", text))

    def reports(self, ranks: Sequence[int]) -> dict[int, bytes] | None:
        """What those of `ranks` said that have reported; None when the store cannot tell."""
        found = self._ask(lambda: {r: self._client.peek(f"there/{r}") for r in ranks})
        return None if found is None else {rank: text for rank, text in found.items() if text}

    def hear(self, error: CommError, seconds: float) -> CommError | None:
        """What somebody pronounced; waits for that `seconds`. None when nobody did."""

        def listen() -> bytes:
            until = time.monotonic() + seconds
            while not (text := self._client.peek("cause")) and time.monotonic() < until:
                time.sleep(_LOOK)
            return text

        text = self._ask(listen, seconds)
        return self._read(text, error) if text else None

    def silent(self, ranks: Sequence[int]) -> list[int]:
        """Those of `ranks` that have not reported; all of them, when the store cannot tell."""
        there = self.reports(ranks) or {}
        return [r for r in ranks if r not in there]

    def _ask(self, job: Callable[[], T], more: float = 0.0) -> T | None:
        answer: queue.SimpleQueue[T | None] = queue.SimpleQueue()

        def run() -> None:
            try:
                answer.put(job())
            except BackendError:
                answer.put(None)

        _threads.run(run)
        try:
            return answer.get(timeout=_PATIENCE + more)
        except queue.Empty:
            return None

    def _read(self, text: bytes | None, fallback: CommError) -> CommError:
        if not text:
            return fallback
        said = json.loads(text)
        kind: type[CommError] = getattr(errors, said["type"])
        message = said["message"]
        if kind is errors.AbortedError and said["culprits"] == [self._rank]:
            message = "aborted by this rank"
        return kind(message, hint=said["hint"], **{ranks: said[ranks] for ranks in _RANKS})
