"""Rank 1 may map no more memory, when more messages are on their way to it than it has room for.

As a program: without_memory.py alone|hosts, UCX by itself or between two hosts.
"""

import sys

import torch

import unicomm
from tests.processes.programs.common import hear, lift_limit, limit_memory, reporting, say

MESSAGES, COUNT = 400, 12_000  # 48 kB each

WAYS = {"alone": ("ucx", {"tls": "tcp"}), "hosts": ("auto", {"hosts": "a,b", "between": "ucx", "tls": "tcp"})}

backend, hints = WAYS[sys.argv[1]]
comm = unicomm.new_comm(backend, "cpu", name="main", timeout=60, hints=hints)
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
    limit_memory(1 << 17)
    with reporting():
        for _ in range(MESSAGES):
            comm.recv(x, 0, False)
        comm.barrier(False)
    lift_limit()
comm.finalize(1.0)
