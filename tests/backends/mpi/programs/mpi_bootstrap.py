"""Ranks that know of no common host and no store: they find each other by the process manager, or by MPI.

Argument: launcher, for backends over what the launcher offers; program or unicomm, for MPI, by whom it is
initialised.
"""

import json
import os
import sys

# As if they were on several hosts.
for name in (
    "MPI_LOCALNRANKS",
    "MPI_LOCALRANKID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
):
    os.environ.pop(name, None)

import torch  # noqa: E402

import unicomm  # noqa: E402
from unicomm.backends.bootstrap import mpi_library  # noqa: E402
from unicomm.backends.bootstrap import store as bootstrap  # noqa: E402
from unicomm.c10d.compat import base_store  # noqa: E402
from unicomm.c10d.process_group import UnicommProcessGroup  # noqa: E402
from unicomm.comms.membership.environment import detect_environment  # noqa: E402

way = sys.argv[1]
store = None
if way != "launcher":
    if way == "program":
        from mpi4py import MPI  # noqa: F401
    # As if the launcher had nothing: only the copy of the environment loses it, for MPI needs it.
    poor = {k: v for k, v in os.environ.items() if k not in ("PMI_FD", "PMIX_NAMESPACE")}
    store = bootstrap.store_of_job(detect_environment(), 60, poor)
for backend in ("gloo", "shm", "mpi", "gloo") if store is None else ("gloo", "mpi"):
    with unicomm.new_comm(backend, "cpu", timeout=60, store=store) as comm:
        x = torch.ones(3)
        comm.all_reduce(x, unicomm.ReduceOp.SUM, False)
        assert x.tolist() == [float(comm.get_size())] * 3
        told = {"event": "met", "rank": comm.get_rank(), "backend": backend}
        met_by = UnicommProcessGroup(comm).get_group_store() if store is None else store
        told["host"] = base_store(met_by).host
        told["mpi"] = mpi_library.running() is not None
        os.write(1, json.dumps(told).encode() + b"\n")
if way == "program":
    assert mpi_library.running() is not None
