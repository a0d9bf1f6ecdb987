"""The SHMEM backends with ranks as processes: over this host's memory, and over the mocks of two libraries.

For rocSHMEM `unicomm build rocshmem` makes the unit of csrc/rocshmem over a mock of ours: this says nothing
about AMD's library or GPUs.
"""

import os
import signal

import pytest

from tests.mocks.nvshmem import build as build_nvshmem
from tests.mocks.rocshmem.install import unit

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
HOST = "tests.mocks.shmem.host_shmem", "host-shmem"
NVIDIA = "tests.mocks.shmem.backends", "nvshmem-mock"
AMD = "tests.mocks.shmem.backends", "rocshmem-mock"
BOTH = pytest.mark.parametrize("table", [HOST, NVIDIA], ids=["host", "nvshmem"])
DEVICES = pytest.mark.parametrize("table", [NVIDIA, AMD], ids=["nvshmem", "rocshmem"])
ALL = pytest.mark.parametrize("table", [HOST, NVIDIA, AMD], ids=["host", "nvshmem", "rocshmem"])


@pytest.fixture
def job(start):
    def start_job(table, n, how, version=30300, **settings):
        if table is NVIDIA:
            try:
                settings["NVSHMEM_MOCK"] = str(build_nvshmem.library())
            except build_nvshmem.NoCompiler as error:
                pytest.skip(str(error))
        if table is AMD:
            settings["XDG_CACHE_HOME"] = str(unit(version).parents[2])
            settings["ROCSHMEM_MOCK_JOB"] = f"/rocshmem-mock-{os.getpid()}-{version}-{how}"  # by mpirun
        return start("shmem.py", n, *table, how, settings=settings)

    return start_job


@pytest.mark.parametrize(
    ("table", "n", "how", "settings"),
    [
        (HOST, 3, "conform", {}),
        (NVIDIA, 3, "conform", {}),
        (NVIDIA, 3, "conform", {"NVSHMEM_MOCK_NO_P2P": "1"}),
        (AMD, 3, "briefly", {}),
        # Without pointers, and with kernels for all that is put on a stream.
        (AMD, 2, "briefly", {"version": 20001, "HIP_MOCK_WAVE": "32"}),
    ],
    ids=["host", "nvshmem", "nvshmem-staging", "rocshmem", "rocshmem-staging"],
)
def test_conformance(job, table, n, how, settings):
    ranks = job(table, n, how, **settings)
    least = 30 if how == "conform" else 10
    assert all(said["fewest"] >= least for said in ranks.next("conforms", 100.0))
    assert ranks.end() == [0] * n


@BOTH
def test_splits(job, table):
    ranks = job(table, 4, "splits")
    ranks.next("over")
    assert ranks.end() == [0] * 4


@DEVICES
def test_symmetric_memory_over_the_same_library(job, table):
    ranks = job(table, 2, "symmetric", NVSHMEM_MOCK_HOST_STREAM="1", HIP_MOCK_HOST_STREAM="1")
    ranks.next("over", 100.0)
    assert ranks.end() == [0, 0]


def test_a_world_of_somebody_else_is_joined(job):
    ranks = job(NVIDIA, 2, "joined", NVSHMEM_MOCK_HOST_STREAM="1")
    ranks.next("over", 100.0)
    assert ranks.end() == [0, 0]


def test_several_ranks_on_one_gpu_are_refused(job):
    ranks = job(NVIDIA, 2, "conform", NVSHMEM_MOCK_LIMITED="1")
    assert ranks.end() == [1, 1]
    for rank in (0, 1):
        assert "UnsupportedError" in ranks[rank].complaints
        assert "nvidia-cuda-mps-control" in ranks[rank].complaints


@BOTH
def test_who_waits_in_vain_says_for_whom(job, table):
    ranks = job(table, 2, "absent")
    said = ranks[0].next("error")
    assert (said["type"], said["culprits"]) == ("CommTimeoutError", [1])
    ranks[1].tell()
    ranks[1].next("done")


@ALL
def test_a_killed_rank_is_an_error_on_the_others(job, table):
    ranks = job(table, 3, "killed")
    ranks.next("ready")
    for rank in (0, 2):
        ranks[rank].tell()
    ranks[1].signal(signal.SIGKILL)
    for rank in (0, 2):
        said = ranks[rank].next("error")
        assert (said["type"], said["culprits"]) == ("PeerLostError", [1])
        assert ranks[rank].end() == 0


@ALL
def test_an_abort_is_an_error_on_the_others(job, table):
    # rocSHMEM 2.x ends with the process, in a meeting to which not all would come.
    ranks = job(table, 3, "aborted", **({"version": 20001} if table is AMD else {}))
    ranks.next("ready")
    ranks.tell()
    ranks[1].next("done")
    for rank in (0, 2):
        said = ranks[rank].next("error")
        assert (said["type"], said["culprits"]) == ("AbortedError", [1])
        if table is not HOST:  # its stream has come to the end of what nobody will send
            ranks[rank].next("released")
    assert ranks.end() == [0, 0, 0], str(ranks)


@DEVICES
def test_an_abort_ends_a_wait_in_an_allocation(job, table):
    ranks = job(table, 2, "abandoned", NVSHMEM_MOCK_HOST_STREAM="1", HIP_MOCK_HOST_STREAM="1")
    ranks.next("ready")
    ranks[0].tell()
    ranks[0].next("begins")
    ranks[1].tell()
    ranks[1].next("done")
    said = ranks[0].next("error")  # long before the allocation's deadline
    assert (said["type"], said["culprits"]) == ("AbortedError", [1])
    assert ranks.end() == [0, 0]
