"""Ranks that have a core each, as far as they know, and share it with others: of this job or of another."""

import os

import pytest

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        len(os.sched_getaffinity(0)) < 2, reason="one core: the ranks know that they share it"
    ),
]


def test_a_wait_does_not_spin_while_another_rank_wants_the_core(start):
    """The least time of 40 blocks each, in turn: 4 times as long if each wait spins, equal if none does."""
    job = start("shared_core.py", 2)
    for said in job.next("measured"):
        assert said["before"] < 2 * said["since"]
    assert job.end() == [0, 0]
