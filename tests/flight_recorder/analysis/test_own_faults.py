"""Which ranks the analyzer blames when several were ended by SIGTERM."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from unicomm.flight_recorder.analysis.own_faults import own_faults
from unicomm.flight_recorder.ring.endings import Ending, Raised
from unicomm.flight_recorder.ring.places import Place
from unicomm.flight_recorder.ring.stacks import Stacks, Thread
from unicomm.flight_recorder.table.clocks import ahead_by_host

LOADS = Place("/job/train.py", 47, "load_batch")
TRAINS = Place("/job/train.py", 57, "train")
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


def test_the_first_of_two_that_were_ended_nearly_at_once_leads():
    """A launcher may look just when a rank has got SIGTERM, and end the others 10 ms later."""
    first, second = _ended(0, LOADS), _ended(1, TRAINS)
    first.rank, second.rank = 1, 0
    assert _culprits(second, first) == [[1], [0]]


def test_clocks_of_hosts_are_compared():
    """The exception of rank 1 came first: the clock of its host is 5 s ahead."""

    def raised(rank: int, seconds: float, what: str) -> Ending:
        return Ending(rank, 7, f"node{rank}", ended_ns=int(seconds * 1e9), raised=Raised(what, "", (LOADS,)))

    table: Any = SimpleNamespace(
        endings=[raised(0, 100, "KeyError"), raised(1, 104, "OSError")], ranks=[0, 1]
    )
    assert [one.culprits for one in own_faults(table)] == [[0], [1]]
    assert [one.culprits for one in own_faults(table, {0: 0, 1: 5 * 10**9})] == [[1], [0]]


def test_the_clock_of_a_host_is_that_of_its_ranks():
    sources = [SimpleNamespace(rank=rank, host="a" if rank < 3 else "b") for rank in range(5)]
    table: Any = SimpleNamespace(sources=sources)
    offset = np.array([-10.0, 0.0, 10.0, 5e9, np.nan])
    assert ahead_by_host(table, offset) == {0: 0, 1: 0, 2: 0, 3: 5 * 10**9}
    table.sources = sources[:3]
    assert ahead_by_host(table, offset) == {}


def test_all_ranks_that_are_ended_at_once_are_named():
    assert _culprits(_ended(0, LOADS), _ended(1, LOADS)) == [[0, 1]]
