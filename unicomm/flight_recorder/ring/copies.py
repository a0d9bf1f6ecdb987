"""Copies of rings, which keep the state of their process for readers on other hosts and at later times.

The state of a ring's process can be looked up only on its host, and only now. A copy therefore stores that
state in its flags, and the time of the copy in its last pair of clocks. A copy may keep only the newest
records of the ring.
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

from .endings import side_files
from .files import MOST_SIDE_BYTES, UnsafeFileError, read_file, trusted_owners
from .folder import SUFFIX
from .reader import COPY_MASK, COPY_SHIFT, COPY_STATES, HEADER, RECORD, Ring, RingError, State, read_ring
from .stacks import ask_for_stacks

_UNDER_WAY = (State.CREATED, State.STARTED)
_STATE_OF = {"dead": "killed"}


def copied(data: bytes, process: str, records: int = 0) -> bytes:
    """Returns a copy of a ring, with the current time.

    Args:
        process: the state of the process: running, sleeping, stopped, killed or ended.
        records: the number of newest records to keep; all if 0. The copy keeps more if an older record is
            still unfinished.

    Raises `RingError` for bytes that are not a ring, `ValueError` for an unknown state.
    """
    if process not in COPY_STATES[1:]:
        raise ValueError(f"'{process}' is not a state of a process; known are {', '.join(COPY_STATES[1:])}")
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
    """Returns data and header of the ring reduced to `records` records, as a writer would have left them."""
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
    """Yields (file name, copy) for each readable ring in a folder.

    Processes whose pid is in `running` count as running, whatever their state is.
    """
    paths = sorted(folder.glob(f"*{SUFFIX}"))
    owners = trusted_owners(folder) if paths else ()
    for path in paths:
        try:
            ring = read_ring(path, owners)
            # With the header as it was in the end, which tells which records may have been overwritten.
            data = ring.header.tobytes() + bytes(ring.data[HEADER.itemsize :])
            if ring.copied_as or (ring.process_state == "elsewhere" and ring.pid not in running):
                yield path.name, data  # its state is that of the copy, or unknown here
                continue
            state = "running" if ring.pid in running else ring.process_activity
            yield path.name, copied(data, _STATE_OF.get(state, state), records)
        except RingError:
            continue


def copy_side_files(folder: Path, target: Path) -> None:
    """Copies the ending files of `folder` into the folder `target`. Raises `OSError`."""
    owners = trusted_owners(folder)
    for path in side_files(folder):
        # A process that ends well removes its files.
        with contextlib.suppress(FileNotFoundError, UnsafeFileError):
            data, info = read_file(path, owners, MOST_SIDE_BYTES), path.lstat()
            (target / path.name).write_bytes(data)
            os.utime(target / path.name, ns=(info.st_atime_ns, info.st_mtime_ns))


def freeze(folder: Path, target: Path, running: Collection[int] = ()) -> bool:
    """Copies the rings of `folder` into the new folder `target`, which appears complete or not at all.

    Then asks the processes that still run for their stacks, and copies the ending files (endings.py).

    Returns False, and changes nothing, if `target` exists already. Raises `OSError` when it cannot be
    written. Processes whose pid is in `running` count as running.
    """
    if target.exists():
        return False
    part = Path(tempfile.mkdtemp(prefix=".part-", dir=target.parent))
    try:
        for name, data in folder_copies(folder, running=running):
            (part / name).write_bytes(data)
        # Afterwards: a signal may end a wait, which the rings should still show.
        ask_for_stacks(folder)
        copy_side_files(folder, part)
        os.rename(part, target)
    except FileExistsError:
        return False
    except OSError:
        if target.exists():  # another caller has created it in the meantime
            return False
        raise
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(part)
    return True
