"""Collectives of tensors in other layouts than contiguous: permuted, sparse, meta, with gaps.

layouts.py FOLDER: each rank writes its results to FOLDER/RANK.
"""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
results = []


def values(shape, scale=1.0):
    n = torch.Size(shape).numel()
    return (torch.arange(n, dtype=torch.float32) + 100 * rank).reshape(shape) * scale


def channels_last(scale=1.0):
    return values((2, 3, 4, 2), scale).to(memory_format=torch.channels_last)


def transposed(scale=1.0):
    return values((3, 5), scale).t()


def keep(*tensors):
    results.append([[list(t.shape), list(t.stride()), t.tolist()] for t in tensors])


for make in (channels_last, transposed):
    x = make()
    dist.all_reduce(x)
    keep(x)
    x = make()
    work = dist.all_reduce(x, dist.ReduceOp.MAX, async_op=True)
    work.wait()
    keep(x)
    x = make()
    dist.broadcast(x, 1)
    keep(x)
    x = make()
    dist.reduce(x, 0)
    keep(*([x] if rank == 0 else []))
    outs = [make(0.0) for _ in range(size)]
    dist.all_gather(outs, make())
    keep(*outs)
    outs = [make(0.0) for _ in range(size)] if rank == 0 else None
    dist.gather(make(), outs, 0)
    keep(*(outs or []))
    out = make(0.0)
    dist.scatter(out, [make(float(r)) for r in range(size)] if rank == 1 else None, 1)
    keep(out)

if os.environ.get("TORCH_DISTRIBUTED_USE_TORCHCOMMS") == "1":  # stock Gloo overwrites what is in the gaps
    with pytest.raises(ValueError, match="contiguous"):
        dist.all_reduce(torch.zeros(4, 6)[:, ::2])


torch.sparse.check_sparse_tensor_invariants.enable()


def sparse():
    indices = torch.tensor([[rank, 3, rank], [0, 2, 0]])
    return torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0, 3.0]) + rank, (5, 3))


x = sparse()
dist.all_reduce(x)
keep(x.to_dense())
x = sparse()
dist.all_reduce(x, async_op=True).wait()
keep(x.to_dense())
x = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.full((1, 4), rank + 1.0), (6, 4))
dist.all_reduce(x)
keep(x.to_dense())
empty = torch.sparse_coo_tensor(torch.empty((1, 0)), torch.empty(0), (4,))
dist.all_reduce(empty)
keep(empty.to_dense())

torch.manual_seed(3)
model = torch.nn.Sequential(
    torch.nn.Embedding(20, 4, sparse=True), torch.nn.Flatten(), torch.nn.Linear(12, 1)
)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    ddp(torch.tensor([[rank, step, 7], [rank + 3, 7, step]])).square().sum().backward()
    optimizer.step()
keep(*(p.detach() for p in model.parameters()))

# Meta tensors: nothing is sent, so ranks may differ.
meta = torch.empty(3, device="meta")
dist.all_reduce(meta)
dist.broadcast(meta, rank)
dist.all_gather_into_tensor(torch.empty(3 * size, device="meta"), meta)
results.append(list(meta.shape))

(Path(sys.argv[1]) / str(rank)).write_text(json.dumps(results))
dist.barrier()
dist.destroy_process_group()
