"""Signals that come while a rank waits: their handlers run at once, and Ctrl-C ends the wait.

A rank that nobody interrupts waits for minutes here, beyond the tests' own limits.
"""

import signal
import time

import pytest

pytestmark = pytest.mark.processes

KINDS = [
    *[(kind, "shm") for kind in ("all_reduce", "message", "general", "batch", "async", "wait_signal")],
    *[(kind, "tcp") for kind in ("all_reduce", "message", "general", "batch", "async")],
]


def until_it_waits(rank):
    """It is about to; so that nothing else is interrupted, it is let run for so many signals."""
    began = at = rank.next("calling")["at"]
    count = 0
    while count < 10 or at < began + 0.3:
        rank.signal(signal.SIGUSR1)
        at = rank.next("handled")["at"]
        count += 1
        time.sleep(0.03)  # enough, and not more, is what it says about them


@pytest.mark.parametrize(("kind", "backend"), KINDS)
def test_a_handler_runs_while_its_rank_waits(start, kind, backend):
    """And the operation goes on, with the right result."""
    job = start("signals.py", 2, kind, backend)
    until_it_waits(job[0])
    job[1].tell()
    job[1].next("calling")
    job.next("done")
    values = {"all_reduce": 2.0, "general": 2.0, "async": 2.0}.get(kind, 1.0)
    assert all(said["values"] == [values] * 5 for said in job.next("end"))
    assert job.end() == [0, 0]


@pytest.mark.parametrize(("kind", "backend"), KINDS)
def test_an_interrupted_rank_ends_its_wait(start, kind, backend):
    """KeyboardInterrupt there, and everybody is told that the communicator is no more."""
    job = start("signals.py", 2, kind, backend)
    until_it_waits(job[0])
    job[0].signal(signal.SIGINT)
    job[0].next("interrupted")
    if kind == "async":  # the operation waits on: only its waiting was interrupted
        job[1].tell()
        job[1].next("calling")
        job.next("done")
    else:
        error = job[0].next("error")
        assert error["type"] in ("AbortedError", "BackendError"), error
        job[1].tell()
        job[1].next("calling")
        error = job[1].next("error")
        assert (error["type"], error["culprits"]) == ("AbortedError", [0]), error
        assert "rank 0" in error["text"]
    assert job.end() == [0, 0]
