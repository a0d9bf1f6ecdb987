"""A device mesh from communicators, without init_process_group: sharded data, tensor and 2-D parallel."""

import faulthandler
import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import unicomm
from unicomm.c10d.device_mesh import init_device_mesh

faulthandler.dump_traceback_later(100, exit=True)
world = unicomm.new_comm("auto", torch.device("cpu"), name="world", timeout=60)
me = world.get_rank()
row, column = divmod(me, 2)
dp = world.split([column, 2 + column], "dp")
tp = world.split([2 * row, 2 * row + 1], "tp")
mesh = init_device_mesh((dp, tp), ("dp", "tp"), global_comm=world)
assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
assert tuple(mesh.get_coordinate()) == (row, column)
assert mesh["dp"].get_group().get_comm() is dp
assert (dist.get_rank(), dist.get_world_size()) == (me, 4)

whole = torch.arange(64.0).reshape(8, 8)
parts = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
assert torch.equal(parts.to_local(), whole[4 * row : 4 * row + 4, 4 * column : 4 * column + 4])
assert torch.equal(parts.redistribute(mesh, [Shard(1), Replicate()]).full_tensor(), whole)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


alone, both = model(), model()
parallelize_module(both, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
fully_shard(both, mesh=mesh["dp"])
x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
both(x).pow(2).mean().backward()
alone(x).pow(2).mean().backward()
for p, q in zip(both.parameters(), alone.parameters(), strict=True):
    torch.testing.assert_close(p.grad.full_tensor(), q.grad)
operations = dp.barrier(False).seq - 1, tp.barrier(False).seq - 1
dist.destroy_process_group()
print(json.dumps({"operations": operations}), flush=True)
