"""Symmetric memory between processes: the same results, and a dead rank is noticed."""

import signal

import pytest

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("n", [2, 4])
def test_exchanges(start, n):
    job = start("symmetric.py", n, "exchange")
    for said in job.next("over"):
        assert said["total"] == 1000 * n
        assert said["after"] == said["before"]
    assert job.end() == [0] * n


@pytest.mark.parametrize("n", [2, 4])
def test_beside_gloo(start, n):
    job = start("symmetric.py", n, "gloo")
    job.next("over")
    assert job.end() == [0] * n


@pytest.mark.parametrize("n", [2, 3])
def test_a_circle_through_the_communicator(start, n):
    """Said when all of them wait, long before the deadline."""
    job = start("symmetric.py", n, "circle")
    said = job.next("error")
    # Who is in no circle itself hears of it from one who is.
    assert {error["type"] for error in said} <= {"DeadlockError", "AbortedError"}
    assert any("wait for each other forever" in error["text"] for error in said)
    job.end()


def test_a_rank_that_dies(start):
    job = start("symmetric.py", 2, "wait")
    job.next("ready")
    job[0].tell()
    job[1].signal(signal.SIGKILL)
    error = job[0].next("error")
    assert (error["type"], error["culprits"]) == ("PeerLostError", [1])
    assert error["op"] == "wait_signal"
    assert job.end() == [0, -signal.SIGKILL]
