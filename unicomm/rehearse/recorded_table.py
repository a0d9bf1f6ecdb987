"""The table of a rehearsal: what its ranks have recorded, before any schedule is played."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from unicomm.flight_recorder.formats.operation_names import OpKind
from unicomm.flight_recorder.ring.call_path import CallPath
from unicomm.flight_recorder.ring.endings import ENDING
from unicomm.flight_recorder.ring.folder import SUFFIX
from unicomm.flight_recorder.ring.reader import InputRemark, Ring, RingError
from unicomm.flight_recorder.table.builder import TableBuilder
from unicomm.flight_recorder.table.table import UNKNOWN, Table

from .details import Details
from .rank import Job
from .values.reads import FROM_ANY, HOLLOW, RECEIVED


def read_details(job: Job, ranks: Iterable[int]) -> dict[int, Details]:
    """Reads what the ranks have noted beside their rings."""
    return {rank: Details.read(job.details(rank)) for rank in ranks}


def add_details(table: Table, details: Mapping[int, Details]) -> dict[int, int]:
    """Adds the sizes of parts to a table. Returns the tags of messages by row, and numbers these by tags."""
    tags: dict[int, int] = {}
    for source in table.sources:
        if (one := details.get(source.rank)) is None:
            continue
        first = source.begin - source.overwritten
        table.parts |= {first + at: parts for at, parts in one.parts.items() if first + at >= source.begin}
        tags |= {first + at: tag for at, tag in one.tags.items() if first + at >= source.begin}
    senders = _senders(table, details)
    if senders:
        table.peer[list(senders)] = list(senders.values())
    if tags or senders:
        _number_by_tags(table, tags)
    return tags


def _senders(table: Table, details: Mapping[int, Details]) -> dict[int, int]:
    """Returns whose message each receive from any rank got, by row; nothing if that makes no difference.

    It makes one if the program looks at what it has received, or if a rank's next messages go to the sender.
    After the message of another sender, the program would then do something else than what was recorded.
    """
    found: dict[int, int] = {}
    depends = any(f"depends on {FROM_ANY}" in remark.message for remark in table.remarks)
    for source in table.sources:
        one = details.get(source.rank)
        if one is None or not one.senders:
            continue
        first = source.begin - source.overwritten
        here = {first + at: sender for at, sender in one.senders.items() if first + at >= source.begin}
        ends = [*sorted(here), source.end]
        depends |= any((table.peer[row + 1 : end] == here[row]).any() for row, end in pairwise(ends))
        found |= here
    if not found or not depends:
        return {}
    text = (
        "receives from any rank got the messages of this run: after others, the program may do other things"
    )
    table.remarks.append(InputRemark("", text))
    return found


def _number_by_tags(table: Table, tags: Mapping[int, int]) -> None:
    """Gives a receive the number of the send with the same tag; a ring numbers them in their order."""
    kinds = table.kind
    channels: dict[tuple[int, int, int], tuple[list[int], list[int]]] = {}
    for row in np.flatnonzero(((kinds == OpKind.SEND) | (kinds == OpKind.RECV)) & (table.peer >= 0)).tolist():
        send, rank, peer = bool(kinds[row] == OpKind.SEND), int(table.rank[row]), int(table.peer[row])
        key = (int(table.group[row]), rank if send else peer, peer if send else rank)
        channels.setdefault(key, ([], []))[0 if send else 1].append(row)
    for sends, receives in channels.values():
        open_sends: dict[int, list[int]] = {}
        for number, row in enumerate(sends, 1):
            table.seq[row] = number
            open_sends.setdefault(tags.get(row, 0), []).append(number)
        lone = len(sends)
        for row in receives:
            if waiting := open_sends.get(tags.get(row, 0)):
                table.seq[row] = waiting.pop(0)
            else:
                lone += 1
                table.seq[row] = lone


_INSTEAD = {
    RECEIVED: "values made up from each rank's own",
    HOLLOW: "a made-up value",
    FROM_ANY: "what came first",
}


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
    table = builder.finish()
    table.stacks = [_from_program(path, job.program) for path in table.stacks]
    return table


def _from_program(path: CallPath, program: object) -> CallPath:
    """Returns a call path without what has started the program, which differs between ranks."""
    inside = [at for at, frame in enumerate(path) if frame.file == program]
    return path[: inside[-1] + 1] if inside else path


def read_remarks(job: Job, ranks: Iterable[int]) -> list[InputRemark]:
    """Returns a remark for each line of the program that reads made-up data."""
    places: dict[tuple[str, int, str, str], list[int]] = {}
    for rank in ranks:
        if (path := job.reads(rank)).exists():
            for file, line, what, why, _ in json.loads(path.read_text()):
                places.setdefault((file, line, what, why), []).append(rank)
    return [
        InputRemark(
            f"{file}:{line}",
            f"{what} depends on {why} ({len(found)} rank{'s' * (len(found) > 1)}): rehearsed with"
            f" {_INSTEAD[why]}",
        )
        for (file, line, what, why), found in sorted(places.items())
    ]


def end_remarks(ends: Mapping[int, str], output: Mapping[int, Path]) -> list[InputRemark]:
    """Returns a remark for each rank that did not end by itself."""
    return [InputRemark(str(output[rank]), f"rank {rank} {why}") for rank, why in sorted(ends.items())]
