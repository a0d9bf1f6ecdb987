"""All operations of all ranks as columns, whatever file they came from.

A row is one operation of one rank. Rows are sorted by rank, and within a rank they stand in the order in
which it issued them. What repeats from step to step (the operation and its arguments, call stacks, shapes) is
stored once and rows hold its number, so that 16384 ranks x 2000 operations take about 2 GB.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from unicomm.flight_recorder.ring.reader import ASYNC, Frame, InputRemark

Ints = npt.NDArray[np.int64]
Column = npt.NDArray[Any]


# What is known of the process behind a source.
RUNNING, STOPPED, KILLED, ENDED, UNKNOWN = "running", "stopped", "killed", "ended", "unknown"


Stack = tuple[Frame, ...]  # the innermost call first
Shapes = tuple[tuple[int, ...], ...]  # one shape a tensor


@dataclass
class Group:
    """A communicator. `ranks` are its members' ranks in the whole job, by their rank in the group."""

    name: str
    desc: str
    uid: str
    ranks: Column
    backend: str

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass
class Source:
    """One file.

    Attributes:
        rank: in the whole job; -1 where nothing tells it (the file then has no rows).
        process: RUNNING, STOPPED, KILLED (it ended without closing its recorder), ENDED or UNKNOWN.
        wrapped: older records were overwritten.
        begin, end: its rows.
        first_seq: of each group, the first collective that is kept.
        created, started, completed: of each group, the highest collective in that state, where the file says
            so apart from its records. They outlive records that were overwritten.
        members: the groups that this source lists, with the members as it has them where it disagrees with
            the other sources (else None).
        closed: groups that it has finalized.
        as_of_ns: the time (wall clock) that the source shows; 0 where it is not known.
        exact_p2p: `seq` of P2P rows counts per pair and direction.
    """

    path: str
    format: str
    rank: int
    pid: int = 0
    host: str = ""
    process: str = UNKNOWN
    wrapped: bool = False
    begin: int = 0
    end: int = 0
    first_seq: dict[int, int] = field(default_factory=dict)
    created: dict[int, int] = field(default_factory=dict)
    started: dict[int, int] = field(default_factory=dict)
    completed: dict[int, int] = field(default_factory=dict)
    members: dict[int, Column | None] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)
    as_of_ns: int = 0
    exact_p2p: bool = False
    findings: list[InputRemark] = field(default_factory=list)


@dataclass
class Calls:
    """Distinct calls: an operation with its arguments. One entry an index that `Table.call` holds.

    Attributes:
        kind: `OpKind`.
        op, red, in_dtype, out_dtype: indices into the table's `ops`, `reductions`, `dtypes`.
        root: rank in the job, -1 for operations without one.
        in_numel, out_numel: elements of all tensors together.
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
    """The columns, all of one length, and what they point to.

    Attributes:
        rank: in the whole job, int32.
        group: index into `groups`, int32; -1 where the file does not say.
        call: index into `calls`, int32.
        seq: of the group's collectives, or the P2P number as recorded without any base; int64.
        peer: of a send or receive, rank in the job, int32; -1 for other rows.
        state: `State`, uint8.
        error: a code of `ring.reader.ERRORS`, uint8.
        flags: ASYNC, BATCH and those of graphs, uint8.
        created_ns, started_ns, completed_ns: wall clock, int64, 0 where unknown.
        frame: index into `stacks`, int32; stack 0 is empty.
        thread: index into `threads`, int32.
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
    stacks: list[Stack]
    threads: list[str]
    groups: list[Group]
    sources: list[Source]
    findings: list[InputRemark]

    def __len__(self) -> int:
        return len(self.rank)

    # Columns that stand in `calls`; each access makes the column, so keep it where it is used twice.

    @property
    def kind(self) -> Column:
        return self.calls.kind[self.call]

    @property
    def op(self) -> Column:
        """Index into `ops`."""
        return self.calls.op[self.call]

    @property
    def root(self) -> Column:
        return self.calls.root[self.call]

    @property
    def red(self) -> Column:
        """Index into `reductions`."""
        return self.calls.red[self.call]

    @property
    def in_dtype(self) -> Column:
        """Index into `dtypes`."""
        return self.calls.in_dtype[self.call]

    @property
    def out_dtype(self) -> Column:
        return self.calls.out_dtype[self.call]

    @property
    def in_numel(self) -> Column:
        return self.calls.in_numel[self.call]

    @property
    def out_numel(self) -> Column:
        return self.calls.out_numel[self.call]

    @property
    def in_shape(self) -> Column:
        """Index into `shapes`."""
        return self.calls.in_shape[self.call]

    @property
    def out_shape(self) -> Column:
        return self.calls.out_shape[self.call]

    @property
    def is_async(self) -> Column:
        asynchronous: Column = (self.flags & ASYNC) != 0
        return asynchronous

    @cached_property
    def source_of(self) -> dict[int, Source]:
        """The source of each rank that has one."""
        return {source.rank: source for source in self.sources if source.rank >= 0}

    @cached_property
    def ranks(self) -> Column:
        """All ranks that a source stands for or a group names, in order."""
        found = [np.asarray(sorted(self.source_of), np.int64)]
        found += [np.asarray(group.ranks, np.int64) for group in self.groups]
        return np.unique(np.concatenate(found)) if found else np.zeros(0, np.int64)

    # --- one row, for people -----------------------------------------------------------------------

    def op_name(self, row: int) -> str:
        return self.ops[int(self.calls.op[self.call[row]])]

    def stack(self, row: int) -> Stack:
        return self.stacks[int(self.frame[row])]

    def where(self, row: int) -> Frame | None:
        """The line of the user's program that issued the operation, or None where it is not known."""
        return user_frame(self.stack(row))

    def describe(self, row: int) -> str:
        """The call with its arguments: `all_reduce float32[1024] SUM`."""
        return self.describe_call(int(self.call[row]))

    def describe_call(self, call: int) -> str:
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


# Code between the user's call and the recorder: a report shows the first line outside.
_LIBRARY = ("/torch/", "/unicomm/", "/torchcomms/", "<frozen")


def user_frame(stack: Stack) -> Frame | None:
    """The innermost frame that is not a communication library's; the innermost one where all are."""
    for frame in stack:
        if not any(part in frame.file for part in _LIBRARY):
            return frame
    return stack[0] if stack else None
