"""A rank on one of several hosts: conformance, splits and messages; says what it saw."""

import json

import torch

import unicomm
from unicomm.c10d.process_group import UnicommProcessGroup
from unicomm.testing import conformance

torch.set_num_threads(1)
comm = unicomm.new_comm("auto", "cpu", timeout=60)
me, layout = comm.get_rank(), comm.unsafe_backend.layout
cases = sum(
    conformance.check(comm, operation, lambda case: case.count in (17, 70001))
    for operation in (
        "all_reduce",
        "all_gather_v",
        "broadcast",
        "reduce_scatter_single",
        "all_to_all",
        "batch",
    )
)
for ranks, kind in (([0, 2], "shm"), ([3, 5, 0], "tcp"), ([4, 3, 1], "hosts")):
    child = comm.split(ranks if me in ranks else [])
    if child is not None:
        assert child.get_backend() == kind, (ranks, child.get_backend())
        x = torch.full((20_000,), float(me))
        child.all_reduce(x, unicomm.ReduceOp.SUM, False)
        assert torch.all(x == sum(ranks))
        child.finalize()
comm.barrier(False)
store = UnicommProcessGroup(comm).get_group_store()
print(
    json.dumps(
        {
            "hosts": json.dumps([list(ranks) for ranks in layout.hosts]),
            "cases": cases,
            "address": unicomm.backends.bootstrap.addresses.here(store).address,
        }
    ),
    flush=True,
)
comm.finalize()
