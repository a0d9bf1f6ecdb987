"""A test of torch's kind, on the base class that torch has for torchcomms: two ranks on the CPU."""

import torch
import torch.distributed as dist

import unicomm.torchcomms

assert not unicomm.torchcomms.install()

from torch.testing._internal.common_distributed import C10dTorchCommsTestBase  # noqa: E402
from torch.testing._internal.common_utils import run_tests  # noqa: E402


class AllReduce(C10dTorchCommsTestBase):
    world_size = 2
    device_type = "cpu"

    def test_all_reduce(self):
        x = torch.ones(3)
        dist.all_reduce(x)
        assert x.tolist() == [2.0] * 3
        assert type(dist.group.WORLD).__name__ == "UnicommProcessGroup"


if __name__ == "__main__":
    run_tests()
