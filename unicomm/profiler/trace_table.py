"""The table of operations in a trace (see comms/profiling.py), read and checked. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from unicomm.flight_recorder.ranks import parse_ranks

from .chrome import TraceError

KEY = "unicomm"
VERSION = 1
_MOST_RANKS = 1 << 22

CREATED, STARTED, COMPLETED, FAILED = 1, 2, 3, 4
STATES = {CREATED: "created", STARTED: "started", COMPLETED: "completed", FAILED: "failed"}


@dataclass(frozen=True)
class Group:
    """A communicator. `ranks` are its members' ranks in the whole job, `rank` this one among them."""

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
    """One recording of one process. `rows` are dictionaries of the columns; times in ns since 1970."""

    rank: int
    host: str
    pid: int
    started_ns: int
    stopped_ns: int
    dropped: int
    groups: list[Group]
    columns: list[str]
    rows: list[list[Any]]

    def column(self, name: str) -> list[Any]:
        at = self.columns.index(name)
        return [row[at] for row in self.rows]


def read(data: Any, where: str) -> TraceTable:
    """The table from what stands under `KEY`. Raises `TraceError`; `where` is for its message."""
    try:
        if data["version"] != VERSION:
            raise TraceError(
                f"{where}: version {data['version']} of the table is not known here ({VERSION} is);"
                " read it with the unicomm that wrote it"
            )
        groups = [_group(entry) for entry in data["groups"]]
        columns = [str(c) for c in data["columns"]]
        rows = data["rows"]
        if any(len(row) != len(columns) for row in rows):
            raise ValueError("a row has another number of columns")
        of = columns.index("group")
        if any(not 0 <= row[of] < len(groups) for row in rows):
            raise ValueError("a row belongs to no group")
        widest = max(groups, key=lambda g: len(g.ranks), default=None)
        return TraceTable(
            rank=-1 if widest is None else widest.global_rank,
            host=unquote(str(data["host"])),
            pid=int(data["pid"]),
            started_ns=int(data["started_ns"]),
            stopped_ns=int(data["stopped_ns"]),
            dropped=int(data["dropped"]),
            groups=groups,
            columns=columns,
            rows=rows,
        )
    except TraceError:
        raise
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise TraceError(f"{where}: the table of operations is damaged ({error!r}); record it anew") from None


def _group(entry: dict[str, Any]) -> Group:
    ranks = tuple(parse_ranks(str(entry["ranks"]), _MOST_RANKS))
    group = Group(
        uid=unquote(str(entry["uid"])),
        name=unquote(str(entry["name"])),
        group_name=unquote(str(entry["group_name"])),
        description=unquote(str(entry["description"])),
        backend=unquote(str(entry["backend"])),
        ranks=ranks,
        rank=int(entry["rank"]),
    )
    if not 0 <= group.rank < len(ranks):
        raise ValueError(f"rank {group.rank} is none of {len(ranks)}")
    return group
