"""One rank computes its loss in double precision before the loss is averaged over the ranks.

kind: DDP
verdict: dtype-mismatch
line: dist.all_reduce(total, dist.ReduceOp.AVG)
culprits: 5
"""

import torch
import torch.distributed as dist
from small_models import batches, perceptron
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(perceptron())
for batch in batches(2):
    loss = model(batch).square().mean()
    loss.backward()
    weight = torch.tensor(0.5, dtype=torch.float64) if rank == 5 else torch.tensor(0.5)
    total = (loss.detach() * weight).to(weight.dtype)
    dist.all_reduce(total, dist.ReduceOp.AVG)
dist.destroy_process_group()
