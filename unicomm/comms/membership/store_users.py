"""Who still needs the store of an epoch: the first rank of a reconfiguration holds it in its memory.

Splits of the epoch's communicator, and splits of these, meet in that store. The first rank may be through
with its part, and even have no part in a split, while another rank has yet to read the outcome.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from unicomm.c10d.compat import HashStore, Store, base_store
from unicomm.comms.errors import CommError, NotReadyError
from unicomm.comms.failures.store_client import StoreClient
from unicomm.comms.failures.store_requests import host_of

from .remote_store import RemoteStore

# Keys: how many ranks are within splits with the rank that holds the store; and within splits without it.
_WITH_HOLDER, _APART = "unicomm-users", "unicomm-users-apart"
_ENDED = "unicomm-ended"  # a key: the store is served no longer
_PATIENCE = 2.0  # seconds for them to leave it; one that was killed there never does
_LOOK = 0.002  # seconds between two looks
_STOPPED = 0.1  # seconds between two looks, beyond which this process was stopped


@contextlib.contextmanager
def using(
    store: Store | None, name: str, labels: Sequence[int], timeout: float, check: Callable[[], None]
) -> Iterator[None]:
    """The rank that holds the store keeps it for the ranks within the block. For other stores nothing.

    `labels`: the global ranks that meet in the store. `check`: as for `StoreClient`. Raises `NotReadyError`
    if this rank holds the store and has ended it: it would wait for ranks that cannot reach it.
    """
    base: Any = base_store(store)
    if not isinstance(base, (HashStore, RemoteStore)):
        yield
        return
    if isinstance(base, HashStore) and base.check([_ENDED]):
        text = "the epoch in whose store the ranks would meet has ended"
        raise NotReadyError(text, comm=name, hint="split the communicator that was reconfigured once more")
    key = _WITH_HOLDER if host_of(base).rank in labels else _APART
    # Not the whole timeout: the block waits as long again for a store that does not answer.
    client = StoreClient(base, name, len(labels), min(timeout, _PATIENCE), check)
    counted = False
    with contextlib.suppress(CommError):  # the block meets the same error
        client.add(key)
        counted = True
    try:
        yield
    finally:
        if counted:
            with contextlib.suppress(CommError):
                client.add(key, -1)


def end(store: HashStore) -> None:
    """Notes that this rank serves the store to others no longer."""
    store.set(_ENDED, "1")


def await_users(store: Store | None, seconds: float, asked: Callable[[], int]) -> None:
    """Returns when no rank is in a `using` block of a store that this rank holds, or after a while.

    That is `_PATIENCE`, and `seconds` at most. Where ranks are in a split in which this one has no part, they
    may wait for one that comes later; so it counts from the last request: `asked` returns how many there
    were. Time in which this process is stopped does not count: the others got no answers in it.
    """
    base: Any = base_store(store)
    if not isinstance(base, HashStore):
        return
    now, patience, requests = time.monotonic(), _PATIENCE, asked()
    while seconds > 0 and patience > 0:
        apart = base.add(_APART, 0)
        if apart + base.add(_WITH_HOLDER, 0) <= 0:
            return
        time.sleep(_LOOK)
        before, now = now, time.monotonic()
        spent = min(now - before, _STOPPED)
        seconds, patience = seconds - spent, patience - spent
        if apart > 0 and (count := asked()) != requests:
            patience, requests = _PATIENCE, count
