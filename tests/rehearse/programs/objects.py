"""Objects, groups, messages and communicators of unicomm, in a correct program."""

import torch
import torch.distributed as dist

import unicomm

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()

everyone = [None] * size
dist.all_gather_object(everyone, {"rank": 10**rank})
assert everyone == [{"rank": 10**rank}] * size, everyone  # of the own rank
settings = [{"width": 8, "name": "x" * 100} if rank == 0 else None]
dist.broadcast_object_list(settings, src=0)
assert settings[0]["width"] == 8, settings
last = [rank]
dist.broadcast_object_list(last, src=size - 1)
assert last == [size - 1], last

half = dist.new_group(list(range(size // 2)))
if rank < size // 2:
    dist.all_reduce(torch.ones(3), group=half)
following, previous = (rank + 1) % size, (rank - 1) % size
works = [dist.isend(torch.ones(4), following), dist.irecv(torch.empty(4), previous)]
for work in works:
    work.wait()

with unicomm.new_comm("shm", "cpu", name="own") as comm:
    gathered = torch.zeros(size * 2)
    comm.all_gather_single(gathered, torch.ones(2), async_op=False)
    assert gathered.sum() == 2 * size
    unicomm.objcol.broadcast_object_list(comm, [{"from": rank}], 0)
dist.destroy_process_group()
