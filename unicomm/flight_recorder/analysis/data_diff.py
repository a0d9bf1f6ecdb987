"""compare_data: the first operation of two runs whose data differ, by the checksums in their records."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from unicomm.flight_recorder.formats.operation_names import OpKind
from unicomm.flight_recorder.ring.reader import INPUT_CHECKSUM, OUTPUT_CHECKSUM
from unicomm.flight_recorder.table import clocks
from unicomm.flight_recorder.table.collectives import CollectiveIndex
from unicomm.flight_recorder.table.rows import place
from unicomm.flight_recorder.table.table import Column, Table

HOW = "UNICOMM_CHECKSUM=1, or the hint checksum"


@dataclass
class DataDifference:
    """The first operation whose data differ between two runs that called the same.

    Attributes:
        input_ranks: the ranks whose input differs. If there are none, only the outputs differ: the operation,
            or what happened to its result, made the difference.
        output_ranks: the ranks whose output differs.
        group, seq_num: of the operation; of a message, its number in the pair.
        operation: with its arguments.
        where: file:line in run A on the first of these ranks; b_where: in run B; "" if unknown.
        a_ns: when the operation began, or ended if only its output differs, after run A's first operation.
        later: how many of the operations of both runs have other data, this one included.
    """

    input_ranks: list[int]
    output_ranks: list[int]
    group: str
    seq_num: int
    operation: str
    where: str
    b_where: str
    a_ns: int
    later: int

    @property
    def only_output(self) -> bool:
        return not self.input_ranks


@dataclass
class DataComparison:
    """The first operation of two runs whose data differ, by the checksums in their records.

    Attributes:
        first: the first difference; None if there is none.
        compared: the number of operations whose checksums both runs have.
        missing: if there are none, which run lacks checksums and how to get them, as one sentence; else "".
    """

    first: DataDifference | None
    compared: int
    missing: str


def compare_data(a: Table, b: Table, a_rows: Column, b_rows: Column) -> DataComparison:
    """Compares the data of operations that are in both runs: row `a_rows[i]` of A with `b_rows[i]` of B."""
    at_a, at_b = a.checksums.find(a_rows), b.checksums.find(b_rows)
    both = (at_a >= 0) & (at_b >= 0)
    if not both.any():
        return DataComparison(None, 0, _missing(a, b))
    a_rows, b_rows, at_a, at_b = a_rows[both], b_rows[both], at_a[both], at_b[both]
    differs = {}
    for side, flag in (("input", INPUT_CHECKSUM), ("output", OUTPUT_CHECKSUM)):
        known = a.checksums.flags[at_a] & b.checksums.flags[at_b] & np.uint16(flag)
        values = getattr(a.checksums, side)[at_a], getattr(b.checksums, side)[at_b]
        differs[side] = (known > 0) & (values[0] != values[1])
    other = differs["input"] | differs["output"]
    first = None
    if other.any():
        first = _first(a, b, a_rows[other], b_rows[other], differs["input"][other], differs["output"][other])
    return DataComparison(first, int(both.sum()), "")


def _missing(a: Table, b: Table) -> str:
    which = [run for run, table in (("A", a), ("B", b)) if not len(table.checksums)]
    if not which:
        return (
            "The checksums of the two runs belong to different operations, so their data were not compared."
        )
    who = "Neither run has checksums" if len(which) == 2 else f"Run {which[0]} has no checksums"
    return f"{who}, so the data were not compared: run it with {HOW}."


def _first(a: Table, b: Table, a_rows: Column, b_rows: Column, ins: Column, outs: Column) -> DataDifference:
    # An input is there when its operation begins, an output when it is over, by clocks made alike.
    offset = _offsets(a)[a.rank[a_rows]]
    times = (
        np.where(ins, a.created_ns[a_rows], np.maximum(a.created_ns[a_rows], a.completed_ns[a_rows])) - offset
    )
    lead = int(np.lexsort((a_rows, ~ins, times))[0])
    same = _operation(a, a_rows) == _operation(a, a_rows)[lead]
    same = same.all(axis=1)
    input_ranks, output_ranks = (sorted(int(r) for r in a.rank[a_rows[same & side]]) for side in (ins, outs))
    # The operation itself, with all its ranks: a receive may have been called before the send that feeds it.
    named = np.flatnonzero(same & (ins if input_ranks else outs))
    at = int(named[np.argmin(a.rank[a_rows[named]])])
    row, other = int(a_rows[at]), int(b_rows[at])
    return DataDifference(
        input_ranks,
        output_ranks,
        a.groups[int(a.group[row])].name,
        int(a.seq[row]),
        a.describe(row),
        place(a, row),
        place(b, other),
        int(times[lead] - (a.created_ns - _offsets(a)[a.rank]).min()),
        len(np.unique(_operation(a, a_rows), axis=0)),
    )


def _operation(table: Table, rows: Column) -> Column:
    """Returns (group, sender, receiver, number) of each row's operation; -1 for the ranks of a collective."""
    kind = table.calls.kind[table.call[rows]]
    rank, peer = table.rank[rows].astype(np.int64), table.peer[rows].astype(np.int64)
    message = (kind == OpKind.SEND) | (kind == OpKind.RECV)
    source = np.where(message, np.where(kind == OpKind.RECV, peer, rank), -1)
    target = np.where(message, np.where(kind == OpKind.RECV, rank, peer), -1)
    return np.stack([table.group[rows].astype(np.int64), source, target, table.seq[rows]], axis=1)


def _offsets(table: Table) -> Column:
    """Returns each rank's clock minus the typical clock in nanoseconds, 0 where it is unknown."""
    found = np.zeros(int(table.rank.max()) + 1)
    known = clocks.offsets(table, *clocks.sample(table, CollectiveIndex(table)))
    n = min(len(found), len(known))
    found[:n] = np.nan_to_num(known[:n])
    return found.astype(np.int64)
