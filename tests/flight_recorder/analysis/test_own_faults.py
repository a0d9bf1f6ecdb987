"""Which ranks the analyzer blames when several were ended by SIGTERM."""

from types import SimpleNamespace
from typing import Any

from unicomm.flight_recorder.analysis.own_faults import own_faults
from unicomm.flight_recorder.ring.endings import Ending
from unicomm.flight_recorder.ring.places import Place
from unicomm.flight_recorder.ring.stacks import Stacks, Thread

LOADS = Place("/job/train.py", 47, "load_batch")
WRITES = Place("/packages/unicomm/flight_recorder/recording/ending.py", 107, "_write")
NOTES = Place("/packages/unicomm/flight_recorder/recording/ending.py", 120, "note_exception")


def _ended(rank: int, *frames: Place) -> Ending:
    """Returns the ending of a rank that got SIGTERM 10 ms after the previous rank did."""
    stacks = Stacks((Thread(frames),), terminated=True, at_ns=1_000_000_000 + rank * 10_000_000)
    return Ending(rank, pid=7, host="node0", stacks=stacks)


def _culprits(*endings: Ending) -> list[list[int]]:
    table: Any = SimpleNamespace(endings=list(endings), ranks=list(range(len(endings))))
    return [one.culprits for one in own_faults(table)]


def test_a_rank_that_notes_its_exception_is_not_to_blame_for_the_signal():
    assert _culprits(_ended(0, LOADS), _ended(1, WRITES, NOTES)) == [[0]]
    assert _culprits(_ended(0, WRITES, NOTES), _ended(1, LOADS)) == [[1]]


def test_all_ranks_that_are_ended_at_once_are_named():
    assert _culprits(_ended(0, LOADS), _ended(1, LOADS)) == [[0, 1]]
