"""Examples of the reference: torch.distributed."""

import torch
import torch.distributed as dist

import unicomm
from unicomm.c10d.device_mesh import init_device_mesh

# %% c10d.device_mesh.init_device_mesh
with unicomm.new_comm("shm", torch.device("cpu")) as world:
    mesh = init_device_mesh([world], ["dp"])
    assert mesh["dp"].get_group().get_comm() is world
    dist.destroy_process_group()

# %% c10d.process_group.UnicommProcessGroup.get_comm
dist.init_process_group("unicomm", store=dist.HashStore(), rank=0, world_size=1)
group = dist.group.WORLD
assert group.get_comm(torch.device("cpu")).size == 1
dist.destroy_process_group()
