"""Every operation of symmetric memory on devices, by processes that share one GPU, beside numpy.

With the mocks in place of the GPU it shows that the test is right, and nothing about a GPU.
"""

import pytest
import torch

from tests.mocks.device import backend as device_mock

pytestmark = pytest.mark.processes


@pytest.fixture(params=[pytest.param("gpu", marks=pytest.mark.gpu), "mock"])
def where(request):
    if request.param == "mock":
        try:
            device_mock.runtime(), device_mock.kernels()
        except device_mock.NoCompiler as error:
            pytest.skip(str(error))
    elif not torch.cuda.is_available():
        pytest.skip("no GPU that torch can use here")
    else:
        pytest.importorskip("cupy", reason="symmetric memory on devices needs cupy: unicomm[device]")
    return request.param


@pytest.mark.timeout(400)  # on a GPU processes take turns, and a kernel that waits uses up its own
@pytest.mark.parametrize("n", [2, 4])
def test_processes_share_one_gpu(start, where, n):
    job = start("one_gpu.py", n, where)
    job.next("over", 300)
    assert job.end() == [0] * n
