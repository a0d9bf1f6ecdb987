"""Rank 1 may map no more memory, when more messages are on their way to it than it has room for."""

import resource
from pathlib import Path

import torch

import unicomm
from tests.processes.programs.common import hear, reporting, say

MESSAGES, COUNT = 400, 12_000  # 48 kB each

comm = unicomm.new_comm("ucx", "cpu", name="main", timeout=60, hints={"tls": "tcp"})
x = torch.ones(COUNT)
comm.barrier(False)
if comm.get_rank() == 0:
    works = [comm.send(x, 1, True) for _ in range(MESSAGES)]
    say("sent")
    with reporting():
        for work in works:
            work.wait()
        comm.barrier(False)
else:
    hear()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    room = pages * resource.getpagesize() + (1 << 17)
    resource.setrlimit(resource.RLIMIT_AS, (room, resource.RLIM_INFINITY))
    with reporting():
        for _ in range(MESSAGES):
            comm.recv(x, 0, False)
        comm.barrier(False)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
comm.finalize(1.0)
