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


@pytest.mark.parametrize("how", ["stop", "stop late"])
def test_a_stopped_rank_is_named_from_a_barrier(start, how):
    """Rank 0 waits in the communicator for ranks that wait for signals, one after the other, of rank 1."""
    job = start("symmetric.py", 4, how)
    job.next("ready")
    job[1].signal(signal.SIGSTOP)
    for other in job.but(1):
        other.tell()
    first, *others = (other.next("error") for other in job.but(1))
    assert (first["type"], first["culprits"]) == ("CommTimeoutError", [1]), first
    for error in others:  # they may hear of rank 0's end before their own deadlines
        said = error["type"], error["culprits"]
        assert said in [("CommTimeoutError", [1]), ("AbortedError", [0])], error
    job[1].tell()
    job[1].signal(signal.SIGCONT)
    job[1].next("error")
    job.end()
