# A job that hangs on purpose: unicomm run --nproc-per-node 2 hang.py
import datetime
import time

import torch
import torch.distributed as dist


def load_batch(step):
    if step == 3 and dist.get_rank() == 1:
        time.sleep(3600)  # a file system that does not answer, say
    return torch.ones(1000)


dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=10))
for step in range(10):
    batch = load_batch(step)
    dist.all_reduce(batch)
