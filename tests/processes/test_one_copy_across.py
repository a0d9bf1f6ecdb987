"""Long messages are read where they lie, and staged where the kernel forbids that; a rank may be killed."""

import random
import signal

import pytest

pytestmark = pytest.mark.processes

LONG = 3  # messages of the program that do not fit into a ring; each goes both ways, and again in a batch


@pytest.mark.parametrize("forbidden", ["never", "before", "after"])
def test_messages_arrive_whether_the_kernel_permits_reading_or_not(start, forbidden):
    job = start("one_copy.py", 2, "moved", forbidden)
    said = job.next("moved")
    assert [one["right"] for one in said] == [True, True]
    assert [one["read"] for one in said] == [2 * LONG, 2 * LONG if forbidden == "never" else 0]
    assert job.end() == [0, 0]


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_a_rank_is_killed_in_the_midst_of_messages(start, victim, seed):
    """Whatever has been received before is right, and the other rank names the one that is gone."""
    job = start("one_copy.py", 2, "killed")
    job.next("ready")
    job.tell()
    assert job[1].next("reading")["read"] == 2
    for _ in range(random.Random(10 * seed + victim).randrange(20_000)):
        pass  # a moment, which no clock measures
    job[victim].signal(signal.SIGKILL)
    error = job[1 - victim].next("error")
    assert (error["type"], error["culprits"]) == ("PeerLostError", [victim])
    assert job[victim].end() == -signal.SIGKILL
    assert job[1 - victim].end() == 0
