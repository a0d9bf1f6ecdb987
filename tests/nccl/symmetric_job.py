"""One rank of a job with symmetric memory on a window of the double's, and the death of rank 1."""

import os
import signal

import torch
from double_backend import make
from test_nccl_symmetric import Heap, T

import unicomm
from unicomm.comms.operations.symmetric_table import Compare, SignalOp

KILLED = 1


def main() -> None:
    make("nccl-symmetric-double")
    comm = unicomm.new_comm("nccl-symmetric-double", torch.device("cpu"), name="job", timeout=60)
    heap = Heap(comm)
    me, n = heap.rank, heap.size
    x, word = heap.words(n), heap.words(1)
    for pe in range(n):
        heap.write(x + 8 * me, [10 * me], pe)
    heap.do("barrier", T, 0)
    assert all(heap.read(x, n, pe) == [10 * r for r in range(n)] for pe in range(n))
    team = heap.do("team_split", 0, 2, 2 if me != KILLED else 0, T)
    if team is not None:
        assert team.put_signal(0, 0, 0, word, 1, SignalOp.ADD, 1 - me // 2, 0) is None
        assert team.wait_signal(word, Compare.GE, 1, 1 - me // 2, T, 0) is None
    heap.do("barrier", T, 0)
    if me == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    print("fault", heap.fault("allocate", 8, 64, T)[0], flush=True)
    comm.abort()
    comm.finalize()
    print("done", flush=True)
    os._exit(0)  # this job is about memory, not about what a process does at its end


if __name__ == "__main__":
    main()
