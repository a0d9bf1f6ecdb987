"""Ranks with symmetric memory: symmetric.py HOW

exchange  every composite, compared with numpy, with a fork between; what is left after finalize
gloo      every composite, compared with Gloo
circle    rank 0 waits in the communicator for the others, which wait for its signal
wait      rank 0 waits for a signal of rank 1, which never sends one
stop      rank 2 waits for a signal of rank 1, which is stopped, rank 3 for one of rank 2, rank 0 in a barrier
stop late the same, and the deadline of rank 0 is the last that passes
"""

import gc
import os
import sys
import time

import torch

import unicomm
from tests.processes.programs.common import hear, holdings, reporting, say, settled, threads
from tests.symm.exchanges import check_collectives, check_experts
from tests.symm.gloo_exchanges import check_against_gloo
from tests.symm.matrices import check_tiles
from unicomm import symm

HOW = sys.argv[1]


# What the first one leaves for the later ones is no leak, but its idle threads end.
alone = threads()
unicomm.new_comm("shm", "cpu", name="first").finalize()
settled(alone, threads)
before = holdings()
comm = unicomm.new_comm("shm", torch.device("cpu"), name="main", timeout=100)
symm.init(comm)
if HOW == "exchange":
    check_experts(comm, 2, [1, 8, 16, 128], seed=5)
    check_collectives(comm, torch.float32, (5, 3), seed=5)
    check_tiles(comm, torch.float32, seed=5)
    window = comm.new_window(symm.empty(4, dtype=torch.int64, comm=comm).zero_())
    window.barrier()
    for _ in range(1000):
        window.fetch_add(0, 0, 1)
    window.barrier()
    total = int(window.map_remote_tensor(0)[0])
    window.free()
    if (child := os.fork()) == 0:
        comm.abort()
        del window, comm
        gc.collect()
        os._exit(0)  # and has not left for its parent
    os.waitpid(child, 0)
    symm.empty(3, comm=comm)
    comm.finalize()
    del window, comm
    say("over", total=total, before=before, after=settled(before))
elif HOW == "gloo":
    with unicomm.new_comm("gloo", "cpu", name="gloo", timeout=60) as gloo:
        check_against_gloo(comm, gloo, seed=5, aligns=(16,))
    comm.finalize()
    say("over")
elif HOW == "circle":
    window = comm.new_window()
    with reporting():
        if comm.get_rank() == 0:
            comm.barrier(False)
        else:
            window.wait_signal(0, False)
elif HOW in ("stop", "stop late"):
    pad = symm.empty(1, dtype=torch.int64, comm=comm).zero_()
    comm.barrier(False)
    comm.set_timeout(3)
    say("ready")
    hear()
    with reporting():
        if (comm.get_rank() > 1) == (HOW == "stop"):
            time.sleep(0.5)  # the deadlines of the others pass first
        if comm.get_rank() > 1:
            symm.wait_signal(pad[0], 1, comm.get_rank() - 1, comm)
        comm.barrier(False)
else:
    window = comm.new_window()
    say("ready")
    hear()
    with reporting():
        window.wait_signal(1 - comm.get_rank(), False)
    comm.finalize()
