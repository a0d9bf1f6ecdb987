"""The store's process ends: who is missing on gloo is known without it, and in time."""

import pytest

pytestmark = pytest.mark.processes

VICTIM = 1
TIMEOUT = 2.0


def test_the_absent_are_named(start):
    job = start("faults.py", 3, "collective", VICTIM, "SIGSTOP", TIMEOUT, "gloo")
    job.next("ready")
    job.close_store()
    for other in job.but(VICTIM):
        other.tell()
    called_at = max(other.next("calling")["at"] for other in job.but(VICTIM))
    for other in job.but(VICTIM):
        error = other.next("error")
        assert error["type"] == "CommTimeoutError"
        assert error["culprits"] == [VICTIM]
        assert "rank 1 is at " in error["text"]
        assert "common.py" in error["text"]  # where it waits to be told
        assert error["at"] - called_at < TIMEOUT + 10
        other.next("finalized")
    job[VICTIM].tell()
    job[VICTIM].next("calling")
    assert job[VICTIM].next("error")["type"] == "CommTimeoutError"
    assert job.end() == [0, 0, 0]
