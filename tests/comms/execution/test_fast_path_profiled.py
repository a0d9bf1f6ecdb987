"""The native fast path takes no operation while torch.profiler records."""

import threading

import torch
from torch._C._distributed_c10d import HashStore
from torch.profiler import ProfilerActivity, profile

from tests.comms import inside
from unicomm import ReduceOp, new_comm
from unicomm.comms.execution.profiling import events as profiling
from unicomm.profiler import events
from unicomm.testing import run_ranks


def test_the_fast_path_stays_out_only_while_it_runs():
    profiler = threading.Lock()  # torch has one at a time

    def rank(comm):
        x = torch.ones(4)
        counts = []

        def count():
            counts.append(inside.fast_path(comm).all_reduce(x, ReduceOp.SUM, False, None, None) is not False)

        count()
        with profiler:
            with profile(activities=[ProfilerActivity.CPU]) as prof:
                count()
                other = new_comm("shm", "cpu", name="new", store=HashStore(), rank=0, size=1)
                assert inside.fast_path(other).all_reduce(x, ReduceOp.SUM, False, None, None) is False
            assert inside.fast_path(other).all_reduce(x, ReduceOp.SUM, False, None, None) is not False
            count()
            other.finalize()
        assert events(prof) == []
        return counts

    assert run_ranks(rank, 1) == [[True, False, True]]
    assert profiling.session is None
