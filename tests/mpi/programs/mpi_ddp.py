"""An unchanged torch.distributed program under mpiexec: what mpiexec tells, in torch's own variables."""

import os
import runpy
import sys

from mpi4py import MPI

from unicomm.comms.environment import detect_environment

assert MPI.Is_initialized()  # by the program, and so it is mpi4py that finalizes it
place = detect_environment()
os.environ |= {"RANK": str(place.rank), "WORLD_SIZE": str(place.size), "LOCAL_RANK": str(place.local_rank)}
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
