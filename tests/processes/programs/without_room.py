"""Rank 1 may map no more memory, and rank 0 offers it a tensor to read where it lies."""

import resource
from pathlib import Path

import unicomm
from tests.processes.programs.common import reporting

comm = unicomm.new_comm("shm", "cpu", name="main", timeout=60)
x, out = (comm.mem_allocator.empty(1 << 20).fill_(1.0) for _ in range(2))
comm.barrier(False)
if comm.get_rank() == 1:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    room = pages * resource.getpagesize() + (1 << 24)
    resource.setrlimit(resource.RLIMIT_AS, (room, resource.RLIM_INFINITY))
with reporting():
    comm.all_to_all_single(out, x, False)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
comm.finalize(1.0)
