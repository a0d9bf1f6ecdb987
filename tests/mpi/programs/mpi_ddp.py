"""An unchanged torch.distributed program under mpiexec: what mpiexec tells, in torch's own variables."""

import os
import runpy
import sys

from unicomm.comms.environment import detect_environment

place = detect_environment()
os.environ |= {"RANK": str(place.rank), "WORLD_SIZE": str(place.size), "LOCAL_RANK": str(place.local_rank)}
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
