"""Symmetric memory on devices with ranks as processes, over the mocks: memory is opened by its handle."""

import signal

import pytest

from tests.mocks.device import backend as device_mock

pytestmark = pytest.mark.processes
SETTINGS = {"NCCL_MOCK_PEER_ERRORS": "0"}  # a real NCCL does not notice who dies


@pytest.fixture(scope="session", autouse=True)
def built():
    """Before the ranks need it. Once a worker of tests, to whom a module may come twice; so are others."""
    try:
        device_mock.make("symm-device-built")
        device_mock.kernels()
    except device_mock.NoCompiler as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("n", [2, 3, 4])
def test_everything(start, n):
    job = start("symm_device.py", n, "all", settings=SETTINGS)
    job.next("over", 90)
    assert job.end() == [0] * n


def test_a_rank_that_dies(start):
    """Long before the operation's timeout, on all that wait for it on their devices."""
    job = start("symm_device.py", 3, "kill", settings=SETTINGS)
    job.next("ready")
    job[0].tell()
    job[2].tell()
    job[1].signal(signal.SIGKILL)
    for rank in (0, 2):
        error = job[rank].next("error")
        assert (error["type"], error["culprits"]) == ("PeerLostError", [1])
        assert error["op"] == "one_shot_all_reduce"


def test_a_rank_that_is_late(start):
    job = start("symm_device.py", 2, "late", settings=SETTINGS)
    job.next("ready")
    job[0].tell()
    error = job[0].next("error")
    assert (error["type"], error["culprits"]) == ("CommTimeoutError", [1])
    assert "rank 1 did not come to it on the device" in error["text"]
