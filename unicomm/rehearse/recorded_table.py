"""The table of a rehearsal: what its ranks have recorded, before any schedule is played."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from unicomm.flight_recorder.ring.endings import ENDING
from unicomm.flight_recorder.ring.folder import SUFFIX
from unicomm.flight_recorder.ring.reader import InputRemark, Ring, RingError
from unicomm.flight_recorder.table.builder import TableBuilder
from unicomm.flight_recorder.table.table import UNKNOWN, Table

from .rank import Job


def read_table(job: Job) -> Table:
    """Reads the rings of all ranks.

    The ranks have not met, so each has named its communicators alone. The k-th communicator of a name and
    list of ranks is the same on all ranks.
    """
    builder = TableBuilder()
    rings = []
    for path in job.rings.glob(f"*{SUFFIX}"):
        try:
            rings.append(Ring(path.read_bytes(), str(path)))
        except RingError as error:
            builder.remarks.append(InputRemark(str(path), str(error)))
    for ring in sorted(rings, key=lambda ring: ring.rank):
        seen: Counter[tuple[str, str]] = Counter()
        comms = []
        for comm in ring.comms:
            key = (comm.name, comm.ranks_text)
            seen[key] += 1
            comms.append(replace(comm, uid=f"{comm.name}/{comm.ranks_text}/{seen[key]}"))
        ring.comms = comms
        builder.add_ring(ring, process=UNKNOWN)
    for path in job.rings.glob(f"*{ENDING}"):
        builder.endings.add(str(path), path.read_bytes())
    return builder.finish()


def read_remarks(job: Job, ranks: Iterable[int]) -> list[InputRemark]:
    """Returns a remark for each line of the program that reads received data."""
    places: dict[tuple[str, int, str], list[int]] = {}
    for rank in ranks:
        if (path := job.reads(rank)).exists():
            for file, line, what, _ in json.loads(path.read_text()):
                places.setdefault((file, line, what), []).append(rank)
    return [
        InputRemark(
            f"{file}:{line}",
            f"{what} depends on received data ({len(found)} rank{'s' * (len(found) > 1)}): rehearsed with"
            " values made up from each rank's own",
        )
        for (file, line, what), found in sorted(places.items())
    ]


def end_remarks(ends: Mapping[int, str], output: Mapping[int, Path]) -> list[InputRemark]:
    """Returns a remark for each rank that did not end by itself."""
    return [InputRemark(str(output[rank]), f"rank {rank} {why}") for rank, why in sorted(ends.items())]
