"""A rank of data-parallel training under torch.profiler, in which one rank is late in some steps.

It sleeps when the others have called their first all-reduce of the step, so it is late by SECONDS at least,
however long a busy machine takes for the others' steps.

torchrun --nproc-per-node 4 ddp.py FOLDER LATE_RANK SECONDS
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from unicomm import OpName
from unicomm.profiler import events

LATE_STEPS = (2, 3, 4)


def main():
    folder, late, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    # Buckets of about two layers: several all-reduces a step.
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.03)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.01)

    def step():
        optimizer.zero_grad()
        ddp(torch.ones(8, 64)).sum().backward()
        optimizer.step()

    step()
    step()  # DDP has its final buckets now
    posted: list[int] = []  # when this rank called each all-reduce, by its own clock
    slow: list[int] = []  # which of them a sleep was before

    def before(name, _, __):
        if name is OpName.all_reduce:
            posted.append(time.monotonic_ns())
            if slow and len(posted) == slow[-1] + 2:  # the first call of this step has returned
                come(rank).touch()

    def come(other):
        return folder / f"come-{len(slow)}-{other}"

    dist.group.WORLD.get_comm().register_pre_hook(before)
    dist.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
        for i in range(6):
            if i in LATE_STEPS:
                dist.barrier()
                slow.append(len(posted))
                if rank == late:
                    while not all(come(other).exists() for other in range(4) if other != late):
                        time.sleep(0.001)
                    time.sleep(seconds)
            step()
    prof.export_chrome_trace(str(folder / f"rank{rank}.json"))
    found = events(prof)
    told = {
        "posted": posted,
        "slow": slow,
        "reduced": [e.seq_num for e in found if e.op == "all_reduce"],
        "seq": dist.group.WORLD._get_sequence_number_for_group(),
        "kinds": sorted({(e.group.backend, e.group.description) for e in found}),
        "all_async": all(e.is_async for e in found if e.op == "all_reduce"),
        "pid": os.getpid(),
    }
    (folder / f"told{rank}").write_text(json.dumps(told))
    dist.destroy_process_group()


main()
