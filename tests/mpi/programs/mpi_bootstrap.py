"""Ranks that know of no common host and no store: every backend finds the others by the process manager."""

import os

for name in ("MPI_LOCALNRANKS", "MPI_LOCALRANKID"):  # as if they were on several hosts
    os.environ.pop(name, None)

import torch  # noqa: E402

import unicomm  # noqa: E402

for backend in ("gloo", "shm", "auto", "mpi", "gloo"):
    with unicomm.new_comm(backend, "cpu", timeout=60) as comm:
        x = torch.ones(3)
        comm.all_reduce(x, unicomm.ReduceOp.SUM, False)
        assert x.tolist() == [3.0] * 3
        host = comm._member.store.underlying_store.host
        os.write(
            1,
            (
                f'{{"event": "met", "rank": {comm.get_rank()}, "backend": "{backend}", "host": "{host}"}}\n'
            ).encode(),
        )
