"""fork() in a rank: neither its communicator nor its ring suffers."""

import pytest

from tests.ports import free_port

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("how", "outcomes"),
    [
        ("exit", [5, 5]),  # the exit codes of the two ranks' children
        ("use", [4, 3]),  # how many uses they were refused
        ("multiprocessing", [112.0, 112.0]),  # what the workers loaded
    ],
)
@pytest.mark.parametrize("backend", ["shm", "gloo", "tcp", "ucx"])
def test_fork(start, rings, backend, how, outcomes):
    job = start("forks.py", 2, how, backend)
    assert [said["outcome"] for said in job.next("child")] == outcomes
    for said in job.next("parent"):
        assert said["before"] == said["after"] == 20.0
        assert said["received"] == 1.0
        assert said["ring"]
    assert job.end() == [0, 0]
    assert not list(rings.glob("*.ucring"))


def test_fork_of_the_rank_that_hosts_the_store(start):
    """A store's server ends with the process that made it, not with a child of that."""
    address = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    job = start("forks.py", None, "exit", "shm", environments=[{"RANK": str(r)} | address for r in range(2)])
    assert [said["outcome"] for said in job.next("child")] == [5, 5]
    job.next("parent")
    assert job.end() == [0, 0]
