"""A rank is stopped (SIGSTOP): the others time out and name it; when it goes on, it learns that they have."""

import os
import signal

import pytest

from tests.processes.waits import slowdown

pytestmark = pytest.mark.processes

VICTIM = 1
TIMEOUT = 2.0


@pytest.mark.parametrize("backend", ["shm", "gloo", "tcp"])
@pytest.mark.parametrize("moment", ["collective", "p2p", "transfer"])
def test_stopped(start, moment, backend):
    """Within two seconds of the deadline, in one of three jobs; more where cores have more to run."""
    took = []
    for _ in range(3):
        took.append(last_error(start, moment, backend) - TIMEOUT)
        if took[-1] < 2.0 * slowdown():
            return
    raise AssertionError(f"{took} s after the deadline, with a load of {os.getloadavg()}")


def last_error(start, moment, backend):
    """Seconds from the stop to the last rank's error, in a job that went as it should."""
    job = start("faults.py", 4, moment, VICTIM, "SIGSTOP", TIMEOUT, backend)
    job.next("ready")
    if moment == "transfer":
        stopped_at = job[VICTIM].next("struck")["at"]
    else:
        job[VICTIM].signal(signal.SIGSTOP)
        for other in job.but(VICTIM):
            other.tell()
        stopped_at = min(other.next("calling")["at"] for other in job.but(VICTIM))
    took = []
    for other in job.but(VICTIM):
        error = other.next("error")
        assert error["type"] == "CommTimeoutError"
        assert error["culprits"] == [VICTIM], error
        assert f"rank {VICTIM} had not arrived" in error["text"]
        verdict = error["text"].partition("verdict (ranks of the whole job): ")[2].splitlines()
        assert verdict, error
        assert verdict[0].startswith(f"Rank {VICTIM}"), verdict
        took.append(error["at"] - stopped_at)
        # In the transfer the clock ran before the stop.
        assert moment == "transfer" or took[-1] >= TIMEOUT
    if moment != "transfer":
        job[VICTIM].tell()
    job[VICTIM].signal(signal.SIGCONT)
    if moment != "transfer":
        job[VICTIM].next("calling")
    error = job[VICTIM].next("error")
    assert error["type"] in ("CommTimeoutError", "PeerLostError")
    assert job.end() == [0, 0, 0, 0]
    return max(took)
