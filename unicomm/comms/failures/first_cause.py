"""FirstCause: the error that all ranks of a communicator raise when one of them knows the cause.

A communicator that is made of several (backends/hosts), or whose library names nobody (on devices), ends all
its parts when one fails. The other ranks then only see consequences, such as a closed connection. So the rank
that knows the cause at first hand puts it into the store before it ends anything. The first cause in the
store stands, and all ranks raise that one. If no rank knows the cause, as when a whole host is gone, the
remaining ranks report in the store, and the ranks that do not report are the culprits.
"""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from unicomm.c10d.compat import PrefixStore, Store
from unicomm.comms.errors import AbortedError, CommError

from .daemon_pool import DaemonPool
from .faults import error_from_dict, error_to_dict
from .store_client import StoreClient

T = TypeVar("T")

GRACE = 1.0  # seconds that the other ranks have to publish a cause, or to report
_PATIENCE = 2.0  # seconds for an answer of the store, whose process may be the one that is gone
_LONGEST = 30.0  # seconds in which a cause is published after all, when nobody waits for the answer any more
_LOOK = 0.01  # seconds between two looks
#: Seconds in which a rank hears on its own connections why another one has left, or why the store failed.
#: After a link was cut, these ended 0.5 to 1.1 s after the store's.
_CAUSE = 3.0
_pool = DaemonPool("unicomm-first-cause", awaited=True)


def await_cause(check: Callable[[], None], seconds: float) -> None:
    """Raises what `check` finds soon, at most within `seconds`: the cause of a failure that has been seen."""
    end = time.monotonic() + min(seconds, _CAUSE)
    while True:
        check()
        if time.monotonic() >= end:
            return
        time.sleep(2 * _LOOK)


class FirstCause:
    """The first cause of one communicator's failure. No method raises when the store fails."""

    def __init__(self, store: Store, uid: str, name: str, rank: int, size: int) -> None:
        self._store, self._name = PrefixStore(f"unicomm-verdict/{uid}", store), name
        self._rank, self._size = rank, size

    def publish(self, error: CommError) -> CommError:
        """Publishes the cause that this rank knows. Returns the first cause, which may be another rank's."""
        text = json.dumps(error_to_dict(error)).encode()
        return self._read(self._ask(lambda client: client.put_first("cause", text)), error)

    def published(self, error: CommError, seconds: float) -> CommError | None:
        """The first cause; waits for it at most `seconds`. None if no rank has published one."""

        def look(client: StoreClient) -> bytes:
            until = time.monotonic() + seconds
            while not (text := client.peek("cause")) and time.monotonic() < until:
                time.sleep(_LOOK)
            return text

        text = self._ask(look, seconds)
        return self._read(text, error) if text else None

    def report(self, text: bytes = b"1") -> None:
        """Reports that this rank is alive and has failed, or waits as `text` says."""
        self._ask(lambda client: client.put(f"there/{self._rank}", text))

    def reports(self, ranks: Sequence[int]) -> dict[int, bytes] | None:
        """The reports of those of `ranks` that have reported; None if the store does not answer."""
        found = self._ask(lambda client: {r: client.peek(f"there/{r}") for r in ranks})
        return None if found is None else {rank: text for rank, text in found.items() if text}

    def unreported(self, ranks: Sequence[int]) -> list[int]:
        """Those of `ranks` that have not reported; all of them if the store does not answer."""
        reported = self.reports(ranks) or {}
        return [r for r in ranks if r not in reported]

    def _ask(self, job: Callable[[StoreClient], T], more: float = 0.0) -> T | None:
        answer: queue.SimpleQueue[T | None] = queue.SimpleQueue()

        def run() -> None:
            try:
                answer.put(job(StoreClient(self._store, self._name, self._size, _LONGEST)))
            except CommError:
                answer.put(None)

        _pool.run(run)
        try:
            return answer.get(timeout=_PATIENCE + more)
        except queue.Empty:
            return None

    def _read(self, text: bytes | None, fallback: CommError) -> CommError:
        if not text:
            return fallback
        try:
            error = error_from_dict(json.loads(text), self._size)
        except ValueError:
            return fallback
        if isinstance(error, AbortedError) and error.culprits == (self._rank,):
            error = error.again("aborted by this rank")
        return error
