"""A training loop in which one rank gets a fault: program.py FAULT CULPRIT."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

fault, culprit = sys.argv[1], int(sys.argv[2])
me = int(os.environ["RANK"])
# Short where the other ranks notice the fault by it alone.
DEADLINE = timedelta(seconds={"hang": 8, "raise-early": 20}.get(fault, 100))
STEPS = 4
LIMIT = 600 << 20  # bytes, more than a rank needs to start


def fill_memory() -> None:
    """Moves this process into a control group with a limit, and exceeds it."""
    group = Path(f"/sys/fs/cgroup/memory/unicomm-test-{os.getpid()}")
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(LIMIT))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    time.sleep(1.0)  # the launcher notes the groups of its ranks a few times a second
    held = []
    while True:
        held.append(bytearray(os.urandom(1 << 20)) * 16)


def load_batch() -> None:
    if fault == "raise":
        raise ValueError("bad batch 7")  # fault: raise
    if fault == "exit":
        sys.exit(3)  # fault: exit
    if fault == "os-exit":
        os._exit(5)
    if fault == "crash":
        ctypes.string_at(0)  # fault: crash
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)  # fault: terminate
    if fault == "memory":
        fill_memory()
    if fault == "hang":
        time.sleep(1000)  # fault: hang


def train() -> None:
    gradients = torch.ones(1000)
    for step in range(STEPS):
        dist.all_reduce(gradients)  # the last operation
        if step == STEPS - 2 and fault == "raise-everywhere":
            raise KeyError("weights")  # fault: raise-everywhere
        if step == STEPS - 2 and me == culprit:
            load_batch()


if fault == "raise-early" and me == culprit:
    raise RuntimeError("no such dataset")  # fault: raise-early
with contextlib.ExitStack() as at_end:
    dist.init_process_group("gloo", timeout=DEADLINE)
    at_end.callback(dist.destroy_process_group)
    train()
