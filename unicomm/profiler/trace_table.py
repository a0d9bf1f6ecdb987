"""The table of operations that comms/execution/profiling writes into a trace: read and checked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import chain
from typing import Any
from urllib.parse import unquote

from unicomm.flight_recorder.ring.reader import STATES
from unicomm.flight_recorder.texts import MOST_RANKS, rank_ranges

from .chrome import LATEST, TraceError

KEY = "unicomm"
VERSIONS = (1, 2, 3)  # 2 added captured_seq and replay, 3 wire and wire_bytes
_MOST_MEMBERS = 1 << 23  # of all groups together: 512 groups of 16 384 ranks
_TIMES = ("issued_ns", "started_ns", "completed_ns")
_TEXTS = ("op", "dtype", "in_splits", "out_splits", "wire")
_NUMBERS = (
    *("seq_num", "group", "thread", "traced", "issued_ns", "started_ns", "completed_ns", "state"),
    *("is_async", "in_elements", "out_elements", "root", "peer", "bytes", "batch"),
    *("captured_seq", "replay", "wire_bytes"),
)
_SPLITS = re.compile(r"(?:\d{1,19}(?:,\d{1,19})*)?", re.ASCII)
# What columns hold that a version does not have, by the version that brought them.
_SINCE: dict[int, dict[str, int | str]] = {
    2: {"captured_seq": 0, "replay": 0},
    3: {"wire": "", "wire_bytes": 0},
}
REPLAY = "replay"  # the operation of a row that stands for the whole replay of a graph


@dataclass(frozen=True)
class Group:
    """A communicator. `ranks` are its members' ranks in the whole job; `rank` is the index of this one."""

    uid: str
    name: str
    group_name: str
    description: str
    backend: str
    ranks: tuple[int, ...]
    rank: int

    @property
    def global_rank(self) -> int:
        return self.ranks[self.rank]


@dataclass
class TraceTable:
    """One recording of one process. `columns` have a value for each operation; times in ns since 1970.

    Recordings with the same `clock` share a clock; "" when the clock is not known.
    """

    rank: int
    host: str
    pid: int
    clock: str
    started_ns: int
    stopped_ns: int
    dropped: int
    groups: list[Group]
    columns: dict[str, tuple[Any, ...]]

    def __len__(self) -> int:
        return len(self.columns["op"])


def read(data: Any, where: str) -> TraceTable:
    """Reads the table from the value of `KEY` in a trace. Raises `TraceError`, which names `where`."""
    try:
        if data["version"] not in VERSIONS:
            raise TraceError(
                f"{where}: version {data['version']} of the table is not known here ({VERSIONS[-1]} is);"
                " read it with the unicomm that wrote it"
            )
        members = [rank_ranges(str(entry["ranks"]), MOST_RANKS) for entry in data["groups"]]
        if sum(len(part) for parts in members for part in parts) > _MOST_MEMBERS:  # before they take memory
            raise ValueError("the groups have more members than a job can have")
        groups = [_group(*each) for each in zip(data["groups"], members, strict=True)]
        columns = _columns(data["columns"], data["rows"], data["version"])
        if any(not 0 <= group < len(groups) for group in set(columns["group"])):
            raise ValueError("a row belongs to no group")
        spans = [(data["started_ns"], data["stopped_ns"])]
        spans += [(min(columns[name]), max(columns[name])) for name in _TIMES if columns[name]]
        if any(not isinstance(t, int) or not 0 <= t < LATEST for span in spans for t in span):
            raise ValueError("a time is out of range")
        if not all(_SPLITS.fullmatch(text) for text in {*columns["in_splits"], *columns["out_splits"]}):
            raise ValueError("the parts of a row are no numbers")
        if not set(columns["state"]) <= set(STATES):
            raise ValueError("a row has an unknown state")
        widest = max(groups, key=lambda g: len(g.ranks), default=None)
        return TraceTable(
            rank=-1 if widest is None else widest.global_rank,
            host=unquote(str(data["host"])),
            pid=_number(data["pid"]),
            clock=unquote(str(data.get("clock", ""))),
            started_ns=int(data["started_ns"]),
            stopped_ns=int(data["stopped_ns"]),
            dropped=_number(data["dropped"]),
            groups=groups,
            columns=columns,
        )
    except TraceError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise TraceError(f"{where}: the table of operations is damaged ({error!r}); record it anew") from None


def _columns(names: list[str], rows: list[list[Any]], version: int) -> dict[str, tuple[Any, ...]]:
    """Returns the columns, also those that the table's version does not have.

    Checks that numbers are integers of 64 bits and that texts are texts.
    """
    if rows and {len(row) for row in rows} != {len(names)}:
        raise ValueError("a row has a wrong number of columns")
    columns = dict(zip(names, zip(*rows, strict=True) if rows else [()] * len(names), strict=True))
    for since, absent in _SINCE.items():
        if version < since:
            columns |= {name: (value,) * len(rows) for name, value in absent.items()}
    for known, kinds in ((_TEXTS, {str}), (_NUMBERS, {int, bool})):
        for name in known:
            if not set(map(type, columns[name])) <= kinds:
                raise ValueError(f"'{name}' of a row has a wrong type")
    if any(
        not -(1 << 63) <= edge < 1 << 63
        for n in _NUMBERS
        if rows
        for edge in (min(columns[n]), max(columns[n]))
    ):
        raise ValueError("a number of more than 64 bits")
    return columns


def _number(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise ValueError(f"{str(value)[:20]} is no number of 63 bits")
    return int(value)


def _group(entry: dict[str, Any], members: list[range]) -> Group:
    ranks = tuple(chain.from_iterable(members))
    texts = ("uid", "name", "group_name", "description", "backend")
    group = Group(**{key: unquote(str(entry[key])) for key in texts}, ranks=ranks, rank=int(entry["rank"]))
    if not 0 <= group.rank < len(ranks):
        raise ValueError(f"rank {group.rank} is not one of {len(ranks)}")
    return group
