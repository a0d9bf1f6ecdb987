"""Who still needs the store of an epoch: the first rank of a reconfiguration holds it in its memory.

Splits of the epoch's communicator, and splits of these, meet in that store. The first rank may be through
with its part, and even have no part in a split, while another rank has yet to read the outcome.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from unicomm.c10d.compat import HashStore, Store, base_store
from unicomm.comms.errors import CommError
from unicomm.comms.failures.store_client import StoreClient

from .remote_store import RemoteStore

_USERS = "unicomm-users"  # how many ranks are within a split
_PATIENCE = 2.0  # seconds for them to leave it; one that was killed there never does
_LOOK = 0.002  # seconds between two looks
_STOPPED = 0.1  # seconds between two looks, beyond which this process was stopped


@contextlib.contextmanager
def using(
    store: Store | None, name: str, size: int, timeout: float, check: Callable[[], None]
) -> Iterator[None]:
    """The rank that holds the store keeps it for the ranks within the block. For other stores nothing.

    `check`: as for `StoreClient`.
    """
    base = base_store(store)
    if not isinstance(base, (HashStore, RemoteStore)):
        yield
        return
    client = StoreClient(base, name, size, timeout, check)
    with contextlib.suppress(CommError):  # the block meets the same error
        client.add(_USERS)
    try:
        yield
    finally:
        with contextlib.suppress(CommError):
            client.add(_USERS, -1)


def await_users(store: Store | None, seconds: float) -> None:
    """Returns when no rank is in a `using` block of a store that this rank holds, or after `seconds`.

    Time in which this process is stopped does not count: the others got no answers in it.
    """
    base: Any = base_store(store)
    if not isinstance(base, HashStore):
        return
    now, patience = time.monotonic(), min(seconds, _PATIENCE)
    while base.add(_USERS, 0) > 0 and patience > 0:
        time.sleep(_LOOK)
        before, now = now, time.monotonic()
        patience -= min(now - before, _STOPPED)
