"""The conformance suite on the SHMEM backend over this host's memory: ranks are threads, tensors the CPU's.

tests/processes/test_shmem.py has ranks as processes, and the mock of NVSHMEM.
"""

import pytest

from tests.mocks.shmem import host_shmem
from unicomm.testing import conformance, run_ranks


@pytest.mark.parametrize("operation", conformance.OPERATIONS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_operation(world, operation):
    few = (0, 1, 17, 24, 1000) if world == 1 else (0, 1, 3, 17, 24, 67, 1000, 4099, 70001)
    counts = run_ranks(
        lambda comm: conformance.check(comm, operation, lambda case: case.count in few),
        world,
        backend=host_shmem.NAME,
    )
    assert len(set(counts)) == 1
    assert counts[0] > 20


@pytest.mark.parametrize("backend", [host_shmem.HostShmem.name, host_shmem.Staging.name])
@pytest.mark.parametrize("operation", ["batch", "broadcast", "all_gather_v", "all_to_all_v_single", "gather"])
def test_many_chunks(backend, operation):
    """A region of 6 KiB for three ranks has chunks of 768 bytes."""
    run_ranks(
        lambda comm: conformance.check(comm, operation, lambda case: case.count in (1000, 70001)),
        3,
        backend=backend,
        hints={"staging_bytes": "6K"},
    )
