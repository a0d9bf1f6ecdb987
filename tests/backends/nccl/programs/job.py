"""One rank of a job over the mock: conformance of some operations, a split, and the death of rank 1."""

import os
import signal
import sys

import torch

import unicomm
from tests.mocks.nccl.backend import make
from unicomm.testing import conformance

KILLED = 1


def main(fault: str) -> None:
    make("nccl-process-mock")
    comm = unicomm.new_comm("nccl-process-mock", torch.device("cpu"), name="job", timeout=60)
    for operation in ("all_reduce", "all_to_all_v_single", "reduce_scatter", "batch"):
        assert conformance.check(comm, operation, lambda case: case.count in (0, 17)) > 3
    half = comm.split([r for r in range(comm.get_size()) if r % 2 == comm.get_rank() % 2], "half")
    assert half is not None
    half.barrier(False)
    half.finalize()
    if fault != "none":
        if comm.get_rank() == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            comm.all_reduce(torch.ones(4), unicomm.ReduceOp.SUM, True).wait_blocking()
        except unicomm.CommError as error:
            print("caught", type(error).__name__, comm.is_aborted(), error.dead, flush=True)
            comm.abort()
    comm.finalize()
    print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
