"""A program of torch.distributed with a fault on one rank: faulty.py FAULT RANK [FILE]."""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

fault, culprit = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", timeout=timedelta(seconds=8 if fault == "hangs" else 100))
me, x = dist.get_rank(), torch.ones(10)
for _ in range(3):
    dist.all_reduce(x)
if me == culprit:
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "raises" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError("the first time only")
    elif fault in ("hangs", "waits"):
        Path(sys.argv[3]).write_text(str(os.getpid()))
        time.sleep(1000)
dist.all_reduce(x)  # the line that the others wait at
if me != culprit:
    print(f"rank {me} is done, {type(dist.group.WORLD).__name__}", flush=True)
dist.destroy_process_group()
