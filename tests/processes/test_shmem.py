"""The SHMEM backends with ranks as processes: over this host's memory, and over the double of NVSHMEM."""

import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "nvshmem_double"))
import build_nvshmem

pytestmark = pytest.mark.processes
HOST, DEVICE = ("host_shmem", "host-shmem"), ("nvshmem_backend", "nvshmem-double")
BOTH = pytest.mark.parametrize("table", [HOST, DEVICE], ids=["host", "nvshmem"])


@pytest.fixture
def job(start):
    def start_job(table, n, how, **settings):
        if table is DEVICE:
            try:
                settings["NVSHMEM_DOUBLE"] = str(build_nvshmem.library())
            except build_nvshmem.NoCompiler as error:
                pytest.skip(str(error))
        return start("shmem.py", n, *table, how, settings=settings)

    return start_job


@pytest.mark.parametrize(
    ("table", "settings"),
    [(HOST, {}), (DEVICE, {}), (DEVICE, {"NVSHMEM_DOUBLE_NO_P2P": "1"})],
    ids=["host", "nvshmem", "nvshmem-staging"],
)
def test_conformance(job, table, settings):
    ranks = job(table, 3, "conform", **settings)
    assert all(said["fewest"] >= 30 for said in ranks.next("conforms", 100.0))
    assert ranks.end() == [0, 0, 0]


@BOTH
def test_splits(job, table):
    ranks = job(table, 4, "splits")
    ranks.next("over")
    assert ranks.end() == [0] * 4


def test_symmetric_memory_over_the_same_library(job):
    ranks = job(DEVICE, 2, "symmetric", NVSHMEM_DOUBLE_HOST_STREAM="1")
    ranks.next("over", 100.0)
    assert ranks.end() == [0, 0]


def test_several_ranks_on_one_gpu_are_refused(job):
    ranks = job(DEVICE, 2, "conform", NVSHMEM_DOUBLE_LIMITED="1")
    assert ranks.end() == [1, 1]
    for rank in (0, 1):
        assert "BackendError" in ranks[rank].complaints
        assert "nvidia-cuda-mps-control" in ranks[rank].complaints


@BOTH
def test_who_waits_in_vain_says_for_whom(job, table):
    ranks = job(table, 2, "absent")
    said = ranks[0].next("error")
    assert (said["type"], said["culprits"]) == ("CommTimeoutError", [1])
    ranks[1].tell()
    ranks[1].next("done")


@BOTH
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


@BOTH
def test_an_abort_is_an_error_on_the_others(job, table):
    ranks = job(table, 3, "aborted")
    ranks.next("ready")
    ranks.tell()
    ranks[1].next("done")
    for rank in (0, 2):
        said = ranks[rank].next("error")
        assert (said["type"], said["culprits"]) == ("AbortedError", [1])
        assert ranks[rank].end() == 0
