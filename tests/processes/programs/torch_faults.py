"""A program of torch.distributed with a fault on one rank: torch_faults.py FAULT RANK [FILE [HOST]]."""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

fault, culprit = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", timeout=timedelta(seconds=100))
me, x = dist.get_rank(), torch.ones(10)
for _ in range(3):
    dist.all_reduce(x)
if fault == "hangs":  # from here on, so that nothing else can time out
    dist.group.WORLD._get_backend(torch.device("cpu")).get_comm().set_timeout(2.0)
if me == culprit:
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "raises" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError("the first time only")
    elif fault in ("hangs", "waits"):
        Path(sys.argv[3] + ".part").write_text(" ".join([str(os.getpid()), *sys.argv[4:]]))
        os.rename(sys.argv[3] + ".part", sys.argv[3])
        signal.pause()
dist.all_reduce(x)  # the line that the others wait at
if me != culprit:
    print(f"rank {me} is done, {type(dist.group.WORLD).__name__}", flush=True)
dist.destroy_process_group()
