"""Table: the operations of all ranks as columns.

A row is one operation of one rank. Rows are sorted by rank, and within a rank by the order of issue. Values
that repeat from step to step (an operation with its arguments, call stacks, shapes) are stored once, and rows
hold their index, so that 16384 ranks x 2000 operations take about 2 GB.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from unicomm.flight_recorder.ring.call_path import CallPath
from unicomm.flight_recorder.ring.endings import Ending
from unicomm.flight_recorder.ring.reader import ASYNC, InputRemark

from .checksums import Checksums

Column = npt.NDArray[Any]


# States of the process of a source.
RUNNING, STOPPED, KILLED, ENDED, UNKNOWN = "running", "stopped", "killed", "ended", "unknown"


Shapes = tuple[tuple[int, ...], ...]  # one shape per tensor


@dataclass
class Group:
    """A communicator.

    Attributes:
        name: what reports call it, "default" for the default group; no two groups of a table share it.
        desc: what the program says of it, "" if it says nothing.
        ranks: the members' ranks in the job, by their rank in the group.
        recorded: its name in the source.
    """

    name: str
    desc: str
    uid: str
    ranks: Column
    backend: str
    recorded: str = ""

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass
class Source:
    """The operations of one rank, from one file.

    Attributes:
        path: the file.
        format: "ring", "torch pickle" or "JSON".
        rank: the rank in the job; -1 if it is unknown (the source then has no rows).
        process: RUNNING, STOPPED, KILLED (ended without closing its ring), ENDED or UNKNOWN.
        wrapped: whether records were overwritten.
        overwritten: how many.
        begin, end: the range of the rows.
        first_seq: the number of the first recorded collective, by group.
        created, started, completed: the number of the newest collective in that state, by group. The file
            may store it apart from the records; it is then right also for overwritten records.
        members: the groups that the source lists; the value is the source's list of members if it differs
            from that of the other sources, else None.
        closed: the groups that the rank has finalized.
        as_of_ns: the wall-clock time of the source's state; 0 if unknown.
        host_ranks: the ranks of its host, if the launcher told how many there are; launchers number the ranks
            of a host consecutively.
        exact_p2p: whether `seq` of P2P rows counts per pair and direction.
        runs_here: whether the process runs on this host now, so that advice may name it.
        retired_only: whether completed rows are only known to be over, and may have failed (torch's Gloo).
    """

    path: str
    format: str
    rank: int
    pid: int = 0
    host: str = ""
    process: str = UNKNOWN
    wrapped: bool = False
    overwritten: int = 0
    begin: int = 0
    end: int = 0
    first_seq: dict[int, int] = field(default_factory=dict)
    created: dict[int, int] = field(default_factory=dict)
    started: dict[int, int] = field(default_factory=dict)
    completed: dict[int, int] = field(default_factory=dict)
    members: dict[int, Column | None] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)
    as_of_ns: int = 0
    host_ranks: range = range(0)
    exact_p2p: bool = False
    runs_here: bool = False
    retired_only: bool = False


@dataclass
class Calls:
    """The distinct calls, that is, operations with their arguments. `Table.call` holds indices into them.

    Attributes:
        kind: an `OpKind`.
        op, red, in_dtype, out_dtype: indices into the table's `ops`, `reductions`, `dtypes`.
        root: the root's rank in the job, -1 for operations without a root.
        in_numel, out_numel: the number of elements of all tensors.
        in_shape, out_shape: indices into the table's `shapes`.
    """

    kind: Column
    op: Column
    red: Column
    root: Column
    in_dtype: Column
    out_dtype: Column
    in_numel: Column
    out_numel: Column
    in_shape: Column
    out_shape: Column

    def __len__(self) -> int:
        return len(self.op)


@dataclass
class Table:
    """Columns of equal length, and the lists that they index.

    Attributes:
        rank: the rank in the job, int32.
        group: index into `groups`, int32; -1 if unknown.
        call: index into `calls`, int32.
        seq: the number of a collective in its group, or of a P2P operation as recorded, without torch's base;
        int64. peer: the peer's rank in the job for a send or receive, else -1; int32. state: `State`, uint8.
        error: a code of `ring.reader.ERRORS`, uint8. flags: ASYNC, BATCH, CAPTURED, REPLAYED and REPLAY of
        `ring.reader`, uint8. created_ns, started_ns, completed_ns: wall-clock times, int64, 0
        if unknown. frame: index into `stacks`, int32; stack 0 is empty. thread: index into `threads`, int32.
    """

    rank: Column
    group: Column
    call: Column
    seq: Column
    peer: Column
    state: Column
    error: Column
    flags: Column
    created_ns: Column
    started_ns: Column
    completed_ns: Column
    frame: Column
    thread: Column
    calls: Calls
    ops: list[str]
    reductions: list[str]
    dtypes: list[str]
    shapes: list[Shapes]
    stacks: list[CallPath]
    threads: list[str]
    groups: list[Group]
    sources: list[Source]
    remarks: list[InputRemark]
    endings: list[Ending] = field(default_factory=list)  # how the processes of ranks ended, by rank
    #: The elements that an exchange sends to and receives from each member, by row, where a source tells.
    parts: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)
    #: Messages whose other side would come later, by row: a rehearsal knows the rest of the program.
    coming: frozenset[int] = frozenset()
    checksums: Checksums = field(default_factory=lambda: Checksums.joined([]))

    def __len__(self) -> int:
        return len(self.rank)

    # Columns of `calls`, for each row. Each access computes the column: keep it to use it twice.

    @property
    def kind(self) -> Column:
        return self.calls.kind[self.call]

    @property
    def is_async(self) -> Column:
        asynchronous: Column = (self.flags & ASYNC) != 0
        return asynchronous

    @cached_property
    def source_of(self) -> dict[int, Source]:
        """The sources by rank."""
        return {source.rank: source for source in self.sources if source.rank >= 0}

    @property
    def empty(self) -> bool:
        """Whether nothing is known: there are neither sources nor endings."""
        return not self.sources and not self.endings

    @cached_property
    def ranks(self) -> Column:
        """The sorted ranks that have a source, are members of a group, or whose end is known."""
        found = [np.asarray(sorted(self.source_of), np.int64)]
        found.append(np.asarray([ending.rank for ending in self.endings], np.int64))
        found += [np.asarray(group.ranks, np.int64) for group in self.groups]
        return np.unique(np.concatenate(found)) if found else np.zeros(0, np.int64)

    @cached_property
    def not_read(self) -> frozenset[int]:
        """The ranks without a source of whose host no source is known to be.

        Nothing is known of them. A rank without a source on a host that was read left no file.
        """
        missing = set(self.ranks.tolist()) - set(self.source_of)
        return frozenset(missing.difference(*(source.host_ranks for source in self.sources)))

    # --- single rows and calls ---------------------------------------------------------------------

    def op_name(self, row: int) -> str:
        return self.ops[int(self.calls.op[self.call[row]])]

    def stack(self, row: int) -> CallPath:
        return self.stacks[int(self.frame[row])]

    def describe(self, row: int) -> str:
        """Returns the call of a row with its arguments: `all_reduce float32[1024] SUM`."""
        return self.describe_call(int(self.call[row]))

    def describe_call(self, call: int) -> str:
        """Returns the call `call` with its arguments, as `describe` does."""
        calls = self.calls
        side = "in" if int(calls.in_numel[call]) or self.shapes[int(calls.in_shape[call])] else "out"
        dtype = self.dtypes[int(getattr(calls, f"{side}_dtype")[call])]
        shapes = self.shapes[int(getattr(calls, f"{side}_shape")[call])]
        parts = [self.ops[int(calls.op[call])]]
        if shapes or dtype:
            text = "x".join(map(str, shapes[0])) if shapes else ""
            parts.append(f"{dtype}[{text}]" + (f" x{len(shapes)}" if len(shapes) > 1 else ""))
        if red := self.reductions[int(calls.red[call])]:
            parts.append(red)
        if int(calls.root[call]) >= 0:
            parts.append(f"root {int(calls.root[call])}")
        return " ".join(parts)
