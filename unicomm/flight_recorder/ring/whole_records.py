"""Which of a ring's records are whole, and which are older than those that would fill the ring.

The process may write while its ring is read. It overwrites the oldest record whose operation is over. The
record of an operation under way keeps its place (csrc/recorder/ring.hpp).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
_LATEST = np.uint64((1 << 63) - 1)


def passed(header: np.void, ids: Any) -> Any:
    """Whether records are older than those that would fill the ring."""
    return ids <= np.uint64(max(int(header["rec_next"]) - int(header["rec_cap"]), 0))


def whole(
    header: np.void,
    table: npt.NDArray[Any],
    created_ns: npt.NDArray[np.uint64],
    under_way: Collection[int],
    ids_now: Callable[[], Any] | None,
) -> Bools:
    """Returns which records are whole, and belong to a communicator in the ring.

    Args:
        header: of the ring, with `rec_next` as it was when the records had been read.
        table: all places for records.
        created_ns: when each communicator was created.
        under_way: the states of records whose operation is under way.
        ids_now: returns the present ids of the places, or raises `OSError`; None for a copy of a ring.
    """
    ids = table["id"].astype(np.uint64)
    places = np.arange(len(table), dtype=np.uint64)
    # A record that is not at the place of its id was being written when the ring was read.
    good: Bools = (ids - np.uint64(1)) % np.uint64(len(table)) == places
    good &= (ids > 0) & (ids <= header["rec_next"]) & (table["comm"] < max(len(created_ns), 1))
    if len(created_ns):
        # Older records of the same number belong to a communicator that is not in the table any more.
        good &= table["created_ns"] >= created_ns[np.where(good, table["comm"], 0)]
    old = good & passed(header, ids)
    if not old.any():
        return good
    # The places of old records were given to newer ones, or left out. In the file the others still have their
    # ids. In a copy they are known by their times: what overwrites a record is newer than all others.
    if ids_now is not None:
        with contextlib.suppress(OSError):
            good &= ~old | (ids_now() == ids)
            return good
    oldest = table["created_ns"][good & ~old].min(initial=_LATEST)
    good &= ~old | (np.isin(table["state"], list(under_way)) & (table["created_ns"] < oldest))
    return good
