"""Collectives that a dispatch mode or a tensor subclass looks at.

observed.py FOLDER: each rank writes its results to FOLDER/RANK.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import CommDebugMode
from torch.fx.experimental.proxy_tensor import make_fx

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
results = []


def mine(n=4):
    return torch.full((n,), float(rank + 1))


def every_operation():
    x = mine()
    dist.all_reduce(x)
    dist.all_reduce(x, dist.ReduceOp.MAX, async_op=True).wait()
    dist.broadcast(x, 1)
    dist.reduce(mine(), 0)
    outs = [mine() for _ in range(size)]
    dist.all_gather(outs, mine())
    flat = mine(4 * size)
    dist.all_gather_into_tensor(flat, mine())
    part = mine(4)
    dist.reduce_scatter(part, list(flat.chunk(size)))
    dist.reduce_scatter_tensor(part, flat)
    dist.all_to_all_single(torch.empty_like(flat), flat)
    dist.gather(mine(), outs if rank == 0 else None, 0)
    dist.scatter(part, outs if rank == 1 else None, 1)
    other = (rank + 1) % size
    requests = [dist.isend(mine(), other), dist.irecv(part, (rank - 1) % size)]
    for request in requests:
        request.wait()
    dist.barrier()
    with dist._coalescing_manager():
        dist.all_reduce(x)
        dist.all_reduce(part)
    functional.all_reduce(x, "sum", dist.group.WORLD).sum()
    return [t.tolist() for t in (x, *outs, flat, part)]


plain = every_operation()
with CommDebugMode() as mode:
    assert every_operation() == plain
results.append(plain)
results.append(sorted((str(op), n) for op, n in mode.get_comm_counts().items()))


def step(x):
    dist.all_reduce(x)
    return x * 2


traced = make_fx(step)(mine())
results.append([str(node.target) for node in traced.graph.nodes if node.op == "call_function"])
x = mine()
traced(x)  # stock Gloo may still be at it when it returns
dist.barrier()
results.append(x.tolist())

with FakeTensorMode():
    x = torch.empty(5)
    dist.all_reduce(x)
    outs = [torch.empty(5) for _ in range(size)]
    dist.all_gather(outs, x)
    results.append([type(x).__name__, list(outs[0].shape)])

# The result of a functional collective that nobody has waited for.
pending = functional.all_reduce(mine(), "sum", dist.group.WORLD)
assert type(pending).__name__ == "AsyncCollectiveTensor"
dist.all_reduce(pending)
results.append((pending + 0).tolist())

# What Inductor makes of FSDP's collectives.
out = torch.empty(4 * size)
ops, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
gathered = ops.all_gather_into_tensor_out(mine(), size, name, out=out)
results.append(ops.wait_tensor(gathered).tolist())
part = torch.empty(4)
reduced = ops.reduce_scatter_tensor_out(out, "sum", size, name, out=part)
results.append(ops.wait_tensor(reduced).tolist())

(Path(sys.argv[1]) / str(rank)).write_text(json.dumps(results))
dist.barrier()
dist.destroy_process_group()
