"""rocSHMEM's unit, built as a user builds it over a mock of the library: it moves data between processes.

The mock (tests/mocks/rocshmem) is ours: this proves the unit, and nothing about AMD's library or GPUs.
"""

import os

import pytest

from tests.mocks.rocshmem.install import unit
from unicomm.symm import Capability

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
ALL = ~Capability.POINTER


def settings(name, wave=64):
    """What mpirun would tell, and the mock's waves."""
    return {"ROCSHMEM_MOCK_JOB": f"/rocshmem-mock-{os.getpid()}-{name}", "HIP_MOCK_WAVE": str(wave)}


@pytest.fixture
def play(start):
    def run(version, n, how, wave=64):
        return start("rocshmem.py", n, unit(version), how, settings=settings(f"{version}-{n}-{how}", wave))

    return run


def test_a_rank_that_does_not_come(play):
    job = play(30000, 2, "absent")
    said = job[0].next("fault", within=60)
    assert said["fault"] == [1, [1]]  # a timeout, for which rank 1 is to blame
    assert "rocSHMEM cannot be interrupted" in said["text"]
    assert "end the processes" in job[0].next("again")["text"]


@pytest.mark.parametrize(
    ("version", "n", "wave", "has"),
    [
        (20001, 3, 64, ALL),  # names of 2.x, ranks by MPI, no pointers on the host
        (30000, 2, 32, ALL | Capability.POINTER),
        (30300, 4, 64, ALL | Capability.POINTER),  # functions on streams
        (30500, 2, 64, ALL | Capability.POINTER),  # and barriers of teams among them
    ],
)
def test_the_unit_over_the_double(play, version, n, wave, has):
    job = play(version, n, "all", wave)
    for said in job.next("over", within=120):
        assert Capability(said["capabilities"]) == has
    assert job.end() == [0] * n
