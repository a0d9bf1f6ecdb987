"""The ring of this process's recorder, read from outside as another process reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unicomm import Communicator
from unicomm.flight_recorder.recording import writer
from unicomm.flight_recorder.ring.reader import Ring, read_ring


def ring() -> Ring:
    return read_ring(writer.ring_bytes())


def path() -> Path:
    """The ring's file."""
    found = writer.recorder_path()
    assert found is not None
    return found


def of(comm: Communicator) -> list[Any]:
    """The records of one rank's communicator, in order."""
    found = ring()
    [mine] = [c for c in found.comms if (c.uid, c.rank) == (comm.get_uid(), comm.get_rank())]
    # The ring uses the place of a finalized communicator again.
    records = (record for record in found.records if record["comm"] == mine.index)
    return [record for record in records if record["created_ns"] >= mine.created_ns]


def total() -> int:
    """The number of operations that this process has recorded so far."""
    return int(ring().header["rec_next"])
