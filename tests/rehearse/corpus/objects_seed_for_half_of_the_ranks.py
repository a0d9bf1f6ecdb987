"""Only ranks that restart from a checkpoint receive the seed from rank 0, which always sends it.

kind: objects
verdict: wrong-operation
line: dist.all_reduce(torch.ones(4)) | dist.broadcast_object_list(seed, 0)
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
restarted = rank < 4
seed = [17]
if restarted:
    dist.broadcast_object_list(seed, 0)
dist.all_reduce(torch.ones(4))
dist.barrier()
dist.destroy_process_group()
