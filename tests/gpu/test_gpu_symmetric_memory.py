"""Symmetric memory on GPUs, by the kernels that cupy compiles: against numpy, on one GPU and on several."""

import pytest

from tests.symm.device import device_bodies
from unicomm import symm


def one_rank(comm):
    symm.init(comm)
    device_bodies.exchanges(comm)
    symm.synchronize(comm)
    return symm.Capability.POINTER in symm.capabilities(comm)


@pytest.mark.timeout(180)  # with the compilation of the kernels
def test_one_rank(kit):
    assert kit.symmetric(1, one_rank) == [True]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("n", [2, 4])
def test_a_gpu_for_each_rank_of_symmetric_memory(kit, n):
    kit.symmetric(n, lambda comm: device_bodies.all_of_it(comm, more=True))
