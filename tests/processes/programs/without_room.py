"""Rank 1 may map no more memory, and rank 0 offers it a tensor to read where it lies."""

import unicomm
from tests.processes.programs.common import lift_limit, limit_memory, reporting

comm = unicomm.new_comm("shm", "cpu", name="main", timeout=60)
x, out = (comm.mem_allocator.empty(1 << 20).fill_(1.0) for _ in range(2))
comm.barrier(False)
if comm.get_rank() == 1:
    limit_memory(1 << 24)
with reporting():
    comm.all_to_all_single(out, x, False)
lift_limit()
comm.finalize(1.0)
