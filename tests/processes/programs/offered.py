"""Rank 0 offers a tensor where it lies, and is killed before rank 1 has opened its memory."""

from common import hear, reporting, say

import unicomm

comm = unicomm.new_comm("shm", "cpu", timeout=60)
me = comm.get_rank()
mine = unicomm.empty(100_000, comm=comm).fill_(me)
parts = list(unicomm.empty(2, 100_000, comm=comm)) if me == 1 else []
comm.barrier(False)
say("ready")
if me == 1:
    hear()
with reporting():
    comm.gather(parts, mine, 1, False)
