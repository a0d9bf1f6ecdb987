"""On a GPU, torchcomms' allocators go into `torch.cuda.MemPool`."""

import pytest
import torch

from unicomm import torchcomms


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_allocator_makes_a_pool():
    comm = torchcomms.new_comm("nccl", torch.device("cuda", 0), "main", False)
    for allocator in (comm.get_mem_allocator(), torchcomms.get_mem_allocator("nccl")):
        with torch.cuda.use_mem_pool(torch.cuda.MemPool(allocator)):
            x = torch.ones(1024, device="cuda")
        comm.all_reduce(x, torchcomms.ReduceOp.PREMUL_SUM(2.0), False).wait_blocking()
        assert x.sum().item() == 2048
    comm.finalize()
