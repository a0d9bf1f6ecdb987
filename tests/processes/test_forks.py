"""fork() in a rank: neither its communicator nor its ring suffers."""

import pytest

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("how", "backend", "outcome"),
    [
        ("exit", "shm", 5),
        ("use", "shm", 7),
        ("multiprocessing", "shm", 4.0 * sum(range(8))),
        ("multiprocessing", "gloo", 4.0 * sum(range(8))),
    ],
)
def test_fork(start, rings, how, backend, outcome):
    job = start("forks.py", 2, how, backend)
    for said in job.next("child"):
        assert said["outcome"] == outcome
    for said in job.next("parent"):
        assert said["before"] == said["after"] == 20.0
        assert said["ring"]
    assert job.end() == [0, 0]
    assert not list(rings.glob("*.ucring"))
