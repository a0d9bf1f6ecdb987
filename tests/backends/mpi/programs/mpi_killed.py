"""Rank 2 is killed, and the others raise.

The end of one may have mpiexec end the other, so each first waits until both have said what they got.

`in an operation`: rank 2 is killed while the others wait for it, and what they raise ends them.
`between operations`: they know of its end before they call the next one, catch its error, and end as if
nothing had happened.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

import unicomm
from tests.backends.mpi.programs.mpi_common import comm, describe, say
from tests.comms.inside import engine

folder, when = Path(sys.argv[1]), sys.argv[2]
x = torch.ones(1000)
comm.all_reduce(x, unicomm.ReduceOp.SUM, False)
if comm.get_rank() == 2:
    os.kill(os.getpid(), signal.SIGKILL)
end = time.monotonic() + 60
while when == "between operations" and engine(comm).backend.fault() is None and time.monotonic() < end:
    time.sleep(0.01)
try:
    comm.all_reduce(x, unicomm.ReduceOp.SUM, False)
except unicomm.CommError as error:
    say("error", comm.get_rank(), **describe(error))
    (folder / str(comm.get_rank())).touch()
    while not all((folder / rank).exists() for rank in "01") and time.monotonic() < end:
        time.sleep(0.01)
    if when == "in an operation":
        raise
