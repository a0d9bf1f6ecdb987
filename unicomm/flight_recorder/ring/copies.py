"""Copies of rings: of one moment, for another place, and each says how its process was then.

A ring's process is looked up on the host that it runs on, while it can be. A copy carries that along, so that
it can be read elsewhere and later: its flags have the state of the process, and its last pair of clocks the
time of the copy. A copy may hold fewer records than the ring, the newest.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np

from .folder import SUFFIX
from .reader import COPY_MASK, COPY_SHIFT, COPY_STATES, HEADER, RECORD, Ring, RingError, State, read_ring

_UNDER_WAY = (State.CREATED, State.STARTED)
_STATE_OF = {"dead": "killed"}


def copied(data: bytes, process: str, records: int = 0) -> bytes:
    """A copy of a ring, as of now.

    Args:
        process: running, sleeping, stopped, killed or ended.
        records: how many of the newest the copy holds, and as many more as reach back to the oldest one that
            is not over; 0: all.

    Raises `RingError` for bytes that are no ring, `ValueError` for an unknown state.
    """
    if process not in COPY_STATES[1:]:
        raise ValueError(f"'{process}' is no state of a process; known: {', '.join(COPY_STATES[1:])}")
    ring = Ring(data)
    out = np.frombuffer(data, np.uint8)
    head = ring.header.copy()
    if records:
        out, head = _newest(ring, out, head, records)
    flags = int(head["flags"]) & ~COPY_MASK
    head["flags"] = flags | COPY_STATES.index(process) << COPY_SHIFT
    head["last_mono_ns"], head["last_real_ns"] = time.monotonic_ns(), time.time_ns()
    return bytes(head.tobytes()) + out[HEADER.itemsize :].tobytes()


def _newest(ring: Ring, data: np.ndarray, head: np.void, records: int) -> tuple[np.ndarray, np.void]:
    """The ring with fewer places, as a writer with so few would have left it."""
    kept, newest = ring.records, int(head["rec_next"])
    under_way = kept["id"][np.isin(kept["state"], _UNDER_WAY)]
    if len(under_way):
        records = max(records, newest - int(under_way[0]) + 1)
    cap, begin = min(max(records, 1), int(head["rec_cap"])), int(head["rec_off"])
    if cap == int(head["rec_cap"]):
        return data, head
    table = np.zeros(cap, RECORD)
    kept = kept[kept["id"] > max(newest - cap, 0)]
    table[((kept["id"] - 1) % cap).astype(np.intp)] = kept
    head["rec_cap"], head["file_bytes"] = cap, begin + table.nbytes
    return np.concatenate([data[:begin], table.view(np.uint8)]), head


def folder_copies(
    folder: Path, records: int = 0, running: Collection[int] = ()
) -> Iterator[tuple[str, bytes]]:
    """(name, copy) of each ring in a folder, as `copied` makes them; what is unreadable is left out.

    `running`: pids of processes that count as running, whatever they are now.
    """
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            ring = read_ring(path)
            state = "running" if ring.pid in running else ring.process_activity
            yield path.name, copied(bytes(ring.data), _STATE_OF.get(state, state), records)
        except RingError:
            continue


def freeze(folder: Path, target: Path, running: Collection[int] = ()) -> bool:
    """Copies the rings of a folder to `target`, a new folder, which appears whole or not at all.

    Who comes second changes nothing; returns whether this was the first. Raises `OSError`.
    """
    if target.exists():
        return False
    part = Path(tempfile.mkdtemp(prefix=".part-", dir=target.parent))
    try:
        for name, data in folder_copies(folder, running=running):
            (part / name).write_bytes(data)
        os.rename(part, target)
    except FileExistsError:
        return False
    except OSError:
        if target.exists():  # another one was faster, and its folder is not empty
            return False
        raise
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(part)
    return True
