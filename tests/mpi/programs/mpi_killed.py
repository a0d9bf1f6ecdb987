"""Rank 2 is killed in the middle; the others raise, and what they raise ends them."""

import os
import signal

import torch
from mpi_common import comm, describe, say

import unicomm

x = torch.ones(1000)
comm.all_reduce(x, unicomm.ReduceOp.SUM, False)
if comm.get_rank() == 2:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    comm.all_reduce(x, unicomm.ReduceOp.SUM, False)
except unicomm.CommError as error:
    say("error", comm.get_rank(), **describe(error))
    raise
