"""torch.distributed over the mock NCCL: the consumers' call paths, futures and batches on streams."""

from __future__ import annotations

import json
import os
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from tests.commands import torchrun
from tests.mocks.nccl.backend import HostStreams, make
from tests.mocks.nccl.kinds import streams_of
from tests.processes.forked_interpreters import run
from unicomm import Communicator, UnsupportedError
from unicomm.c10d.compat import BATCHES_FOUND
from unicomm.c10d.process_group import UnicommProcessGroup
from unicomm.testing import run_ranks

HERE = Path(__file__).parent
_made: list[object] = []


@pytest.fixture
def mock_nccl() -> str:
    if not _made:
        _made.append(make("nccl-torch"))
    return "nccl-torch"


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_consumers_give_stock_gloos_numbers(mock_nccl_library):
    mock_nccl_library()  # built before the ranks need it
    done = run(
        [*torchrun(2), HERE / "programs" / "mock_consumers.py"],
        within=220,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(said) == 2
    for rank in said:
        assert rank["groups"] == ["ProcessGroup", "nccl-host-device"]
        assert len(rank["same"]) == 8, rank


def test_torchs_batches_are_understood():
    assert BATCHES_FOUND


def test_a_future_is_there_at_once_and_ordered_by_its_stream(mock_nccl, monkeypatch):
    """As torch's own NCCL has it: DistributedDataParallel waits for none on the host."""
    seen = []

    def future(self: HostStreams) -> torch.futures.Future:
        seen.append("made")
        return torch.futures.Future()

    monkeypatch.setattr(HostStreams, "future", future)

    def program(comm: Communicator) -> None:
        released = threading.Event()
        streams = streams_of(comm)
        streams.call(lambda: released.wait(60))
        x = torch.ones(4)
        options = dist.AllreduceOptions()
        options.asyncOp = True
        work = UnicommProcessGroup(comm).allreduce([x], options)
        done = work.get_future()
        assert done.done()  # the device has not begun
        assert not work.is_completed()
        assert done.value()[0] is x
        released.set()

    run_ranks(program, 1, backend=mock_nccl)
    assert seen == ["made"]


def test_a_future_without_streams_comes_when_the_device_is_done(mock_nccl):
    def program(comm: Communicator) -> None:
        released = threading.Event()
        streams_of(comm).call(lambda: released.wait(60))
        options = dist.AllreduceOptions()
        options.asyncOp = True
        future = UnicommProcessGroup(comm).allreduce([torch.ones(4)], options).get_future()
        assert not future.done()
        released.set()
        assert future.wait()[0].tolist() == [1.0] * 4

    run_ranks(program, 1, backend=mock_nccl)


def test_what_is_coalesced_for_a_device(mock_nccl):
    """Both ranks send first: one after the other, the messages would wait for each other."""

    def program(comm: Communicator) -> None:
        group, mine = UnicommProcessGroup(comm), float(comm.get_rank())
        sent, got = torch.full((1 << 18,), mine), torch.empty(1 << 18)
        both = [torch.full((4,), mine), torch.full((4,), 10 + mine)]
        with _coalescing_manager(group, comm.get_device(), async_ops=True) as coalesced:
            kept = group.send([sent], 1 - comm.get_rank(), 0)
            group.recv([got], 1 - comm.get_rank(), 0)
            for x in both:
                dist.all_reduce(x, group=group)
        coalesced.wait()
        for work in (kept, *coalesced.works):
            work.wait(timedelta(seconds=60))
        assert got.unique().tolist() == [1 - mine]
        assert [x.tolist() for x in both] == [[1.0] * 4, [21.0] * 4]
        group.send([sent], 1 - comm.get_rank(), 0) if mine else group.recv([got], 1 - comm.get_rank(), 0)
        comm.barrier(False)

    run_ranks(program, 2, backend=mock_nccl)


@pytest.mark.parametrize("method", ["wait", "synchronize", "block_current_stream"])
def test_whatever_a_work_is_told_to_wait_by(method):
    def program(comm: Communicator) -> None:
        x, options = torch.ones(4), dist.AllreduceOptions()
        options.asyncOp = True
        if comm.get_rank() == 1:
            assert begun.wait(60)
        work = UnicommProcessGroup(comm).allreduce([x], options)
        if comm.get_rank() == 0:
            assert not work.is_completed()
            begun.set()
        getattr(work, method)()
        assert work.is_completed()
        assert x.tolist() == [2.0] * 4

    begun = threading.Event()
    run_ranks(program, 2)


def test_a_device_without_streams_coalesces_by_its_own_calls():
    def program(comm: Communicator) -> None:
        group = UnicommProcessGroup(comm)
        with pytest.raises(UnsupportedError, match="leave out device="):
            group._start_coalescing(comm.get_device())

    run_ranks(program, 1)


def test_a_gather_that_torch_coalesces_runs_beside_the_caller():
    """Up to 2.11 torch passes no options with it."""

    def program(comm: Communicator) -> None:
        group, out = UnicommProcessGroup(comm), torch.empty(2)
        if comm.get_rank() == 1:
            assert ready.wait(60)
        work = group.allgather_into_tensor_coalesced([out], [torch.full((1,), float(comm.get_rank()))])
        ready.set()
        work.wait()
        assert out.tolist() == [0.0, 1.0]

    ready = threading.Event()
    run_ranks(program, 2)
    assert ready.is_set()
