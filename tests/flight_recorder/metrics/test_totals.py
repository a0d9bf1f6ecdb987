"""Counters and states from rings: exact numbers, times with a known cause, and bounded labels."""

import time

import pytest
import torch

from tests.flight_recorder.rings import ALL_REDUCE, BROADCAST, META, write_ring
from unicomm import _core
from unicomm.flight_recorder.analysis.analyze import analyze
from unicomm.flight_recorder.metrics import catalogue
from unicomm.flight_recorder.metrics.samples import of_table
from unicomm.flight_recorder.metrics.totals import MOST_COMMUNICATORS, MOST_OPERATIONS, Totals
from unicomm.flight_recorder.table.load import load

X = [torch.ones(2, 3)]
LATE = 0.05  # seconds


def values(samples, metric):
    """The samples of a metric: labels -> value."""
    found = {labels: value for one, labels, value in samples if one is metric}
    assert len(found) == sum(one is metric for one, _, _ in samples), "a label set occurs twice"
    return found


def exported(folder):
    table = load([folder])
    return of_table(table, analyze(table)).samples


def test_operations_and_bytes_are_exact(tmp_path):
    kept = [write_ring(tmp_path / f"h-rank0000{r}-{r}.ucring", r, 2, 5, unfinished=r == 0) for r in (0, 1)]
    found = exported(tmp_path)
    assert values(found, catalogue.OPERATIONS) == {
        ("0", "main", "all_reduce"): 4,
        ("1", "main", "all_reduce"): 5,
    }
    assert values(found, catalogue.IO)["1", "main", "all_reduce"] == 5 * 6 * 4
    assert values(found, catalogue.COLLECTIVES) == {("0", "main"): 5, ("1", "main"): 5}
    assert set(values(found, catalogue.FAILURES).values()) == {0}
    del kept


def test_a_rank_that_waits_says_in_what_and_since_when(tmp_path):
    before = time.time()
    kept = write_ring(tmp_path / "h-rank00000-0.ucring", 0, 2, 5, unfinished=True)
    found = exported(tmp_path)
    states = values(found, catalogue.STATE)
    assert {state for (rank, state), value in states.items() if value} == {"waiting"}
    assert {state for _, state in states} == set(catalogue.STATES)
    [(labels, started)] = values(found, catalogue.STARTED).items()
    assert labels == ("0", "main", "all_reduce")
    assert before - 1 <= started <= time.time()
    assert values(found, catalogue.NUMBER) == {labels: 5}
    del kept


def test_waiting_is_the_time_before_the_last_rank(tmp_path):
    """Rank 1 comes `LATE` later; both need `LATE` more."""
    recorders = [_core.Recorder(str(tmp_path / f"h-rank0000{r}-{r}.ucring"), META, r, 2, 64) for r in (0, 1)]
    comms = [
        recorder.add_comm(name="main", backend="shm", uid="u", ranks="0-1", rank=r, size=2)
        for r, recorder in enumerate(recorders)
    ]
    begun = []
    for recorder, comm in zip(recorders, comms, strict=True):
        begun.append(recorder.begin(comm, ALL_REDUCE, 1, 1, X, X, 1))
        time.sleep(LATE)
    for recorder, record in zip(recorders, begun, strict=True):
        recorder.finish(record)
    found = exported(tmp_path)
    waited = values(found, catalogue.WAITING)
    lasted = values(found, catalogue.TIME)
    first, second = ("0", "main", "all_reduce"), ("1", "main", "all_reduce")
    assert LATE <= waited[first] < lasted[first]
    assert lasted[first] >= 2 * LATE
    assert waited[second] < LATE / 2 < lasted[second]


def test_a_rank_that_is_late_is_measured(tmp_path):
    recorders = [
        _core.Recorder(str(tmp_path / f"h-rank0000{r}-{r}.ucring"), META, r, 3, 256) for r in range(3)
    ]
    comms = [
        recorder.add_comm(name="main", backend="shm", uid="u", ranks="0-2", rank=r, size=3)
        for r, recorder in enumerate(recorders)
    ]
    for seq in range(1, 31):
        order = (0, 1, 2)
        begun = {}
        for rank in order:
            if rank == 2:
                time.sleep(0.002)
            begun[rank] = recorders[rank].begin(comms[rank], ALL_REDUCE, seq, seq, X, X, 1)
        for rank in order:
            recorders[rank].finish(begun[rank])
    found = exported(tmp_path)
    late = values(found, catalogue.LATENESS)
    assert late["2",] > 0.0015
    assert abs(late["0",]) < 0.001
    assert values(found, catalogue.LAST)["2",] > 0.9
    assert values(found, catalogue.LOST_TIME)["2",] > 0.5
    [(verdict, *_)] = values(found, catalogue.VERDICT)
    assert values(found, catalogue.CULPRIT) == {(verdict, "2"): 1}
    assert verdict == "alive-but-slow"


def test_labels_are_bounded(tmp_path):
    """A program may create communicators without end; dumps may have any operations."""
    recorder = _core.Recorder(str(tmp_path / "h-rank00000-0.ucring"), META, 0, 1, 1024)
    made = MOST_COMMUNICATORS + 20
    for number in range(made):
        comm = recorder.add_comm(
            name=f"g{number}", backend="shm", uid=f"u{number}", ranks="0", rank=0, size=1
        )
        recorder.finish(recorder.begin(comm, BROADCAST, 1, 1, X, X, 1))
    found = values(exported(tmp_path), catalogue.OPERATIONS)
    names = {communicator for _, communicator, _ in found}
    assert len(names) == MOST_COMMUNICATORS + 1
    assert catalogue.OTHER in names
    assert sum(found.values()) == made
    totals = Totals()
    labels = {totals.operation(f"op{n}") for n in range(MOST_OPERATIONS + 20)}
    assert len(labels) == MOST_OPERATIONS + 1
    assert catalogue.OTHER in labels


def test_counters_go_on_after_a_restart(tmp_path):
    totals = Totals()
    for attempt in ("0", "1"):
        folder = tmp_path / attempt
        folder.mkdir()
        recorder = _core.Recorder(str(folder / "h-rank00000-0.ucring"), META, 0, 1, 64)
        comm = recorder.add_comm(name="main", backend="shm", uid=attempt, ranks="0", rank=0, size=1)
        for seq in (1, 2, 3):
            recorder.finish(recorder.begin(comm, ALL_REDUCE, seq, seq, X, X, 1))
        totals.add(load([folder]))
    found = list(totals.samples())
    assert values(found, catalogue.OPERATIONS) == {("0", "main", "all_reduce"): 6}
    assert values(found, catalogue.COLLECTIVES) == {("0", "main"): 6}


def test_a_wrapped_ring_says_how_much_is_missing(tmp_path):
    kept = write_ring(tmp_path / "h-rank00000-0.ucring", 0, 1, 100, records=64)
    found = exported(tmp_path)
    assert values(found, catalogue.OPERATIONS) == {("0", "main", "all_reduce"): 64}
    assert values(found, catalogue.LOST) == {("0",): 36}
    assert values(found, catalogue.COLLECTIVES) == {("0", "main"): 100}
    del kept


@pytest.mark.parametrize("metric", catalogue.METRICS, ids=lambda m: m.name)
def test_names_follow_the_conventions(metric):
    """Base units as suffix, and nothing after them but what the kind demands."""
    assert metric.name.startswith("unicomm.")
    suffix = {"s": "_seconds", "By": "_bytes", "1": "_ratio"}.get(metric.unit, "")
    assert metric.family.endswith(suffix)
    ends = {catalogue.Kind.COUNTER: "_total", catalogue.Kind.INFO: "_info"}
    assert metric.sample == metric.family + ends.get(metric.kind, "")
    assert not set(metric.labels) - {"rank", "communicator", "operation", "state", "host", "verdict"}
