"""The last rank has a file of its own and does not take part when the others get theirs.

kind: objects
verdict: never-joined
line: dist.scatter_object_list(mine, files, 0)
culprits: last
"""

import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
files = [f"part-{number}" for number in range(size)] if rank == 0 else None
mine = [None]
if rank < size - 1:
    dist.scatter_object_list(mine, files, 0)
