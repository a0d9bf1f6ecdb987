"""Symmetric memory of CUDA devices: on a GPU where there is one, and over a mock of the CUDA runtime."""

import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch

from tests.commands import run
from tests.mocks.device import backend as device_mock
from tests.mocks.device.backend import NoCompiler
from unicomm import _core

pytestmark = pytest.mark.processes
LOST = 2


def on_the_gpu():
    """The runtime that torch has loaded."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU that torch can use here")
    maps = Path("/proc/self/maps").read_text().splitlines()
    found = [line.split(maxsplit=5)[-1] for line in maps if "libcudart" in line]
    return found[0] if found else pytest.skip("torch has the CUDA runtime built in")


def mock():
    try:
        return device_mock.runtime()
    except NoCompiler as error:
        pytest.skip(str(error))


@pytest.fixture(params=[pytest.param(on_the_gpu, marks=pytest.mark.gpu, id="gpu"), mock])
def cudart(request):
    return request.param()


@pytest.mark.parametrize("n", [2, 4])
def test_processes_share_device_memory(cudart, start, n):
    job = start("cuda_ipc.py", n, cudart, "all")
    for said in job.next("over"):
        # A driver keeps threads and descriptors of its own.
        assert "mock" not in str(cudart) or said["after"] == said["before"]
    assert job.end() == [0] * n


def test_a_rank_that_dies(cudart, start):
    job = start("cuda_ipc.py", 2, cudart, "wait")
    job.next("ready")
    job[0].tell()
    job[1].signal(signal.SIGKILL)
    assert job[0].next("fault")["fault"] == [LOST, [1]]


def test_what_is_no_runtime():
    with pytest.raises(OSError, match="no-such-runtime"):
        _core.symm_cuda_ipc("libno-such-runtime.so")
    with pytest.raises(OSError, match="is no runtime of this device: it has no cudaFree"):
        _core.symm_cuda_ipc("libc.so.6")


SECOND = """
import sys
from unicomm import _core
one, other = sys.argv[1:]
for path in (one, one, other, "libno-such-runtime.so"):
    try:
        _core.symm_cuda_ipc(path)
        print("good")
    except OSError as error:
        print(error)
"""


def test_one_runtime_for_a_process(tmp_path):
    """A table of another library, asked for by name, is never the first one's without a word."""
    one, other = str(mock()), str(tmp_path / "libother.so")
    shutil.copy(one, other)
    command = [sys.executable, "-c", SECOND, one, other]
    said = run(command, check=True).stdout.splitlines()
    assert said[:2] == ["good", "good"]
    assert said[2] == f"{other} would be this process's second runtime for device memory, after {one}"
    assert said[3].startswith("libno-such-runtime.so:")
