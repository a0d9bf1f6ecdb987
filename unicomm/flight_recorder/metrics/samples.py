"""The samples of a table: counters, states and lateness of ranks, and the verdict."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from unicomm.flight_recorder.analysis.stragglers import lateness
from unicomm.flight_recorder.analysis.verdict import Report
from unicomm.flight_recorder.ring.reader import CAPTURED, State
from unicomm.flight_recorder.table import clocks
from unicomm.flight_recorder.table.collectives import CollectiveIndex
from unicomm.flight_recorder.table.table import ENDED, KILLED, RUNNING, STOPPED, Column, Source, Table

from .catalogue import (
    CONFIDENCE,
    CULPRIT,
    LAST,
    LATENESS,
    LOST_TIME,
    NUMBER,
    RANK,
    STARTED,
    STATE,
    STATES,
    VERDICT,
)
from .totals import Sample, Totals

_NS = 1e-9
_MOST_LATENESS_ROWS = 200_000
_STATE_OF = {RUNNING: "running", STOPPED: "stopped", KILLED: "dead", ENDED: "ended"}


@dataclass
class Samples:
    """Samples, and what they are of.

    Attributes:
        samples: by metric, in the order of the catalogue within each part.
        began_ns: the wall-clock time from which the counters count.
        taken_ns: the wall-clock time of the samples.
        hosts: the hosts whose ranks were read.
    """

    samples: list[Sample] = field(default_factory=list)
    began_ns: int = 0
    taken_ns: int = 0
    hosts: list[str] = field(default_factory=list)


def of_table(table: Table, report: Report | None) -> Samples:
    """Returns the samples of a table, whose operations are all counted, and of its report."""
    totals = Totals()
    totals.add(table, offsets=offsets_of(table))
    for source in table.sources:
        totals.lose(source.rank, source.overwritten)
    return samples(table, report, totals)


def offsets_of(table: Table) -> Column:
    """Returns each rank's clock minus the typical one, in nanoseconds, by rank; nan if unknown."""
    return clocks.offsets(table, *clocks.sample(table, CollectiveIndex(table), _MOST_LATENESS_ROWS))


def samples(table: Table, report: Report | None, totals: Totals) -> Samples:
    """Returns the counters of `totals`, the state of a table's ranks, and the report's main finding."""
    found = list(totals.samples())
    for source in table.sources:
        found += _rank(table, source, totals)
    without_ring = {e.rank: e for e in table.endings if e.rank >= 0 and e.rank not in table.source_of}
    for rank, ending in sorted(without_ring.items()):
        found += _states(rank, "unknown" if not ending.over else "dead" if ending.exit_code != 0 else "ended")
    found += _lateness(table)
    if report is not None:
        found += _verdict(table, report, totals)
    created = table.created_ns[table.created_ns > 0]
    return Samples(
        found,
        began_ns=int(created.min()) if len(created) else 0,
        taken_ns=_newest_ns(table) or time.time_ns(),
        hosts=sorted({s.host for s in table.sources if s.host}),
    )


def _newest_ns(table: Table) -> int:
    """Returns the wall-clock time of what is known: dumps may be old; 0 if it is unknown."""
    times = (int(column.max(initial=0)) for column in (table.created_ns, table.completed_ns))
    return max([*times, *(source.as_of_ns for source in table.sources)])


def _states(rank: int, state: str) -> Iterator[Sample]:
    for each in STATES:
        yield STATE, (str(rank), each), float(each == state)


def _rank(table: Table, source: Source, totals: Totals) -> Iterator[Sample]:
    rank, state = str(source.rank), _STATE_OF.get(source.process, "unknown")
    row = None if state in ("dead", "ended") else _current(table, source)
    yield from _states(source.rank, "waiting" if row is not None and state != "stopped" else state)
    if source.host:
        yield RANK, (rank, source.host), 1.0
    if row is not None:
        group = int(table.group[row])
        communicator = totals.communicator(table.groups[group] if group >= 0 else None)
        labels = (rank, communicator, totals.operation(table.op_name(row)))
        yield STARTED, labels, float(table.created_ns[row]) * _NS
        yield NUMBER, labels, float(table.seq[row])


def _current(table: Table, source: Source) -> int | None:
    """Returns the oldest started row of a rank that is unfinished, else the oldest created one, else None."""
    span = slice(source.begin, source.end)
    executed = (table.flags[span] & CAPTURED) == 0
    for state in (State.STARTED, State.CREATED):
        found = np.flatnonzero((table.state[span] == state) & executed)
        if len(found):
            return source.begin + int(found[0])
    return None


def _lateness(table: Table) -> Iterator[Sample]:
    rows, cell = clocks.sample(table, CollectiveIndex(table), _MOST_LATENESS_ROWS)
    late = lateness(table, rows, cell, clocks.offsets(table, rows, cell))
    if late is None:
        return
    for number in np.flatnonzero(late.count > 0).tolist():
        rank = (str(number),)
        yield LATENESS, rank, float(late.late_ns[number]) * _NS
        yield LAST, rank, float(late.last[number])
        yield LOST_TIME, rank, min(1.0, float(late.lost_ns[number]) / max(late.span_ns, 1.0))


def _verdict(table: Table, report: Report, totals: Totals) -> Iterator[Sample]:
    main = report.main
    verdict = main.verdict.value
    group = next((g for g in table.groups if g.name == main.group), None)
    communicator = totals.communicator(group) if main.group else ""
    operation = totals.operation(main.operation) if main.operation else ""
    yield VERDICT, (verdict, communicator, operation), 1.0
    yield CONFIDENCE, (verdict,), main.confidence
    for rank in main.culprits:
        yield CULPRIT, (verdict, str(rank)), 1.0
