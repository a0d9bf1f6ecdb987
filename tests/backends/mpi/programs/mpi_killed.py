"""Rank 2 is killed in the middle; the others raise, and what they raise ends them.

The end of one may have mpiexec end the other, so each first waits until both have said what they got.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

import unicomm
from tests.backends.mpi.programs.mpi_common import comm, describe, say

x = torch.ones(1000)
comm.all_reduce(x, unicomm.ReduceOp.SUM, False)
if comm.get_rank() == 2:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    comm.all_reduce(x, unicomm.ReduceOp.SUM, False)
except unicomm.CommError as error:
    say("error", comm.get_rank(), **describe(error))
    folder = Path(sys.argv[1])
    (folder / str(comm.get_rank())).touch()
    end = time.monotonic() + 60
    while not all((folder / rank).exists() for rank in "01") and time.monotonic() < end:
        time.sleep(0.01)
    raise
