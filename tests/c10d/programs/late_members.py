"""Two groups without a common member, of each of which one member comes late: late_members.py SECONDS."""

import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("unicomm")
rank = dist.get_rank()
if rank in (1, 2):
    time.sleep(float(sys.argv[1]))
groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
mine = groups[rank // 2]
comm = mine._get_backend(torch.device("cpu")).get_comm()
x = torch.full((3,), float(rank))
dist.all_reduce(x, group=mine)
print(f"rank {rank} of {comm.get_ranks()}: {x[0].item():g}")
dist.destroy_process_group()
