"""Failures that ranks have survived: they caught the error and went on with other communicators."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from tests.flight_recorder.rings import ALL_REDUCE, META
from unicomm import _core
from unicomm.comms.operations import recording
from unicomm.flight_recorder.analysis.analyze import analyze
from unicomm.flight_recorder.analysis.blocking_ranks import health
from unicomm.flight_recorder.analysis.verdict import Verdict
from unicomm.flight_recorder.ring.endings import Ending, Raised
from unicomm.flight_recorder.ring.places import Place
from unicomm.flight_recorder.ring.reader import PEER_LOST
from unicomm.flight_recorder.ring.stacks import Stacks, Thread
from unicomm.flight_recorder.table.load import load
from unicomm.flight_recorder.table.table import KILLED, RUNNING, Table

TENSOR = [torch.ones(2)]


class Rank:
    """The ring of one rank."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        self.ring = _core.Recorder(str(folder / f"r{rank}.ring"), META, rank, world, 64)
        self.rank = rank
        self._seq = 0

    def joins(self, name: str, ranks: list[int]) -> int:
        """Returns the index of a new communicator."""
        listed = ",".join(map(str, ranks))
        at = ranks.index(self.rank)
        return self.ring.add_comm(name=name, backend="shm", uid=name, ranks=listed, rank=at, size=len(ranks))

    def issues(self, comm: int, seq: int, ends: tuple[int, int] | None = None) -> None:
        """Issues all_reduce number `seq`. `ends`: its last state, and the error."""
        time.sleep(0.001)  # so that clocks tell what came first
        self._seq += 1
        record = self.ring.begin(comm, ALL_REDUCE, seq, self._seq, TENSOR, TENSOR, 1)
        if ends is not None:
            self.ring.finish(record, *ends)


COMPLETED = (recording.COMPLETED, 0)
LOST = (recording.FAILED, PEER_LOST)


@pytest.fixture
def ranks(tmp_path: Path) -> list[Rank]:
    return [Rank(tmp_path, rank, 3) for rank in range(3)]


def read(ranks: list[Rank], tmp_path: Path) -> Table:
    """The table of the rings, as of a job whose ranks are processes that run."""
    table = load([tmp_path])
    assert not table.remarks
    for source in table.sources:
        source.pid = 1000 + source.rank
    return table


def test_a_survived_failure_is_no_wait(ranks, tmp_path):
    """Rank 2 is missing now in the second communicator; the first one failed by rank 0."""
    first = [rank.joins("first", [0, 1, 2]) for rank in ranks]
    for rank, comm in zip(ranks[1:], first[1:], strict=True):
        rank.issues(comm, 1, LOST)
    second = [rank.joins("second", [0, 1, 2]) for rank in ranks]
    for rank, comm in zip(ranks, second, strict=True):
        rank.issues(comm, 1, COMPLETED)
    for rank, comm in zip(ranks[:2], second[:2], strict=True):
        rank.issues(comm, 2)
    report = analyze(read(ranks, tmp_path), stuck_after=0)
    assert [finding.culprits for finding in report.findings] == [[2]]
    assert report.main.group == "second"
    assert report.main.victims == [0, 1]


def test_failures_that_ended_ranks_are_waits(ranks, tmp_path):
    """Rank 0 raised because of its failure; another thread issued something in the meantime."""
    first = [rank.joins("first", [0, 1, 2]) for rank in ranks]
    second = [rank.joins("second", [0, 1, 2]) for rank in ranks]
    for rank, comm in zip(ranks[:2], first[:2], strict=True):
        rank.issues(comm, 1, LOST)
    for rank, comm in zip(ranks, second, strict=True):
        rank.issues(comm, 1, COMPLETED)
    table = read(ranks, tmp_path)
    assert analyze(table, stuck_after=0).main.verdict is Verdict.GOOD
    raised = Raised("PeerLostError", "lost", (), consequence=True)
    table.endings = [Ending(rank=rank, pid=1000 + rank, raised=raised) for rank in (0, 1)]
    main = analyze(table, stuck_after=0).main
    assert main.culprits == [2]
    assert main.victims == [0, 1]
    assert main.group == "first"


def test_who_survived_a_failure_may_be_killed_later(ranks, tmp_path):
    first = [rank.joins("first", [0, 1, 2]) for rank in ranks]
    for rank, comm in zip(ranks, first, strict=True):
        rank.issues(comm, 1, (recording.FAILED, 1))
    second = [rank.joins("second", [0, 1, 2]) for rank in ranks]
    for rank, comm in zip(ranks[:2], second[:2], strict=True):
        rank.issues(comm, 1, LOST)
    ranks[2].issues(second[2], 1)
    table = read(ranks, tmp_path)
    table.source_of[2].process = KILLED
    assert health(table).dead == {2}
    main = analyze(table, stuck_after=0).main
    assert (main.verdict, main.culprits) == (Verdict.PROCESS_DEAD, [2])


def test_a_rank_that_was_started_again_is_not_blamed(ranks, tmp_path):
    """Its new process does not have the communicator in which the others wait."""
    first = [rank.joins("first", [0, 1, 2]) for rank in ranks[:2]]
    ranks[2].joins("newer", [2])
    for rank, comm in zip(ranks[:2], first, strict=True):
        rank.issues(comm, 1, LOST)
    main = analyze(read(ranks, tmp_path), stuck_after=0).main
    assert main.culprits == []
    assert "so it was most likely started again and cannot join all_reduce #1 of 'first'" in main.sentence


TIMED_OUT = (recording.FAILED, 1)


@pytest.mark.parametrize("how", [{"exit_call": (Place("/job/train.py", 9, "train"),)}, {"exit_code": 1}])
def test_who_catches_a_failure_and_exits_is_a_victim(ranks, tmp_path, how):
    """Ranks 0 and 1 caught their timeouts and exited; rank 2 never came."""
    first = [rank.joins("first", [0, 1, 2]) for rank in ranks]
    for rank, comm in zip(ranks[:2], first[:2], strict=True):
        rank.issues(comm, 1, TIMED_OUT)
    table = read(ranks, tmp_path)
    table.endings = [Ending(rank=rank, pid=1000 + rank, name="r", **how) for rank in (0, 1)]
    found = analyze(table, stuck_after=0).findings
    assert [(one.culprits, one.victims) for one in found] == [([2], [0, 1])]
    # A rank whose own fault follows a failure that it has survived is to blame.
    ranks[0].issues(ranks[0].joins("second", [0]), 1, COMPLETED)
    table = read(ranks, tmp_path)
    table.endings = [Ending(rank=0, pid=1000, name="r", **how)]
    assert analyze(table, stuck_after=0).main.culprits == [0]


def test_who_aborts_and_exits_is_to_blame(ranks, tmp_path):
    """`abort` ends the own operations with an error, too."""
    first = [rank.joins("first", [0, 1, 2]) for rank in ranks]
    ranks[0].issues(first[0], 1, (recording.FAILED, 4))
    table = read(ranks, tmp_path)
    table.endings = [Ending(rank=0, pid=1000, name="r", exit_code=3)]
    main = analyze(table, stuck_after=0).main
    assert (main.verdict, main.culprits) == (Verdict.EXITED, [0])


def test_who_was_told_to_end_is_not_who_died(ranks, tmp_path):
    """Rank 2 was killed, and the launcher ended rank 1, which waited for it; rank 0 still waits."""
    first = [rank.joins("first", [0, 1, 2]) for rank in ranks]
    for rank, comm in zip(ranks[:2], first[:2], strict=True):
        rank.issues(comm, 1)
    table = read(ranks, tmp_path)
    for rank in (1, 2):
        table.source_of[rank].process = KILLED
    table.source_of[0].process = RUNNING
    assert health(table).dead == set()  # most ranks are gone
    stacks = Stacks((Thread((Place("/job/train.py", 9, "train"),)),), terminated=True, at_ns=1)
    table.endings = [Ending(rank=1, pid=1001, name="r", stacks=stacks)]
    assert health(table).dead == {2}
