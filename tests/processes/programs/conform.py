"""Every operation at small sizes on each of the named backends: conform.py BACKEND..."""

import sys

import torch

import unicomm
from tests.processes.programs.common import say
from unicomm.testing import conformance

SIZES = (0, 1, 17, 67)

for backend in sys.argv[1:]:
    with unicomm.new_comm(backend, torch.device("cpu"), name=f"conform-{backend}", timeout=60) as comm:
        cases = {
            operation: conformance.check(comm, operation, lambda case: case.count in SIZES)
            for operation in conformance.OPERATIONS
        }
        say(
            "conforms",
            backend=backend,
            rank=comm.get_rank(),
            size=comm.get_size(),
            operations=len(cases),
            fewest=min(cases.values()),
        )
