"""Collectives and messages of objects whose sizes differ from rank to rank.

kind: objects
verdict: all-good
"""

import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
names = [None] * size
dist.all_gather_object(names, "x" * (rank + 1))
settings = [{"seed": 1}, "a"] if rank == 0 else [None, None]
dist.broadcast_object_list(settings, 0)
mine = [None]
dist.scatter_object_list(mine, [f"part-{n}" for n in range(size)] if rank == 0 else None, 0)
gathered = [None] * size if rank == size - 1 else None
dist.gather_object({"rank": rank, "name": "y" * rank}, gathered, size - 1)
if rank == 0:
    dist.send_object_list([settings[0]["seed"], "z"], 1)
elif rank == 1:
    got = [None, None]
    dist.recv_object_list(got, 0)
    print(got)
dist.destroy_process_group()
