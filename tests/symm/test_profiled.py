"""Operations on symmetric memory in torch.profiler's trace."""

import weakref

import torch

from tests.symm.exchanges import shared
from unicomm import symm
from unicomm.comms.execution.profiling import events as profiling
from unicomm.profiler import events
from unicomm.testing import run_ranks


def test_events(monkeypatch):
    """Also what else takes the fast path is there, with sizes and peers, and without a number."""
    # A test worker may have communicators of other tests, which are other ranks.
    monkeypatch.setattr(profiling, "_engines", weakref.WeakSet())

    def program(comm):
        symm.init(comm)
        n, me = comm.get_size(), comm.get_rank()
        x, out = shared(comm, torch.ones(6, 2)), shared(comm, torch.zeros(6, 2))
        splits, there = shared(comm, [1] * n), symm.empty(2, n, dtype=torch.int64, comm=comm)
        window = comm.new_window(out)
        for _ in range(2):
            symm.all_to_all_vdev(x, out, splits, there, comm)
        window.put(torch.ones(3), 1 - me, 0, False)
        window.signal(1 - me, True).wait()
        window.wait_signal(1 - me, False)
        comm.barrier(False)

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
        run_ranks(program, 2)
    found = [(e.op, e.seq_num, e.peer, e.bytes, e.is_async) for e in events(prof) if e.rank == 0]
    exchange = ("all_to_all_vdev", 0, None, (12 + 4) * 4, False)
    assert found.count(exchange) == 2
    assert ("put", 0, 1, 12, False) in found
    assert ("signal", 0, 1, 0, True) in found
    assert ("wait_signal", 0, 1, 0, False) in found
    numbered = [seq for op, seq, *_ in found if op == "barrier"]
    assert numbered == sorted(set(numbered))
    assert 0 not in numbered
