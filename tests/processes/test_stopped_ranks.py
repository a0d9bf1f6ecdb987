"""A rank is stopped (SIGSTOP): the others time out and name it; when it goes on, it learns that they have."""

import signal

import pytest

pytestmark = pytest.mark.processes

VICTIM = 1
TIMEOUT = 2.0


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("moment", ["collective", "p2p", "transfer"])
def test_stopped(start, moment, backend):
    """Within two seconds of the deadline, in one of three jobs: a machine may be busy with something else."""
    assert any(last_error(start, moment, backend) < TIMEOUT + 2.0 for _ in range(3))


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
