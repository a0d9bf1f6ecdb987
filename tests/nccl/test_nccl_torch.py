"""torch.distributed over the double: the consumers' call paths, futures and batches on streams."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from double_backend import HostStreams, make

from unicomm import Communicator
from unicomm.comms.process_group import UnicommProcessGroup
from unicomm.comms.torch_batches import understood
from unicomm.testing import run_ranks

HERE = Path(__file__).parent
_made: list[object] = []


@pytest.fixture
def double() -> str:
    if not _made:
        _made.append(make("nccl-torch"))
    return "nccl-torch"


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_consumers_give_stock_gloos_numbers(nccl_double):
    nccl_double()  # built before the ranks need it
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        + [str(HERE / "double_consumers.py")],
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(said) == 2
    for rank in said:
        assert rank["groups"] == ["ProcessGroup", "nccl-host-device"]
        assert len(rank["same"]) == 8, rank


def test_torchs_batches_are_understood():
    assert understood


def test_a_future_is_there_at_once_and_ordered_by_its_stream(double, monkeypatch):
    """As torch's own NCCL has it: DistributedDataParallel waits for none on the host."""
    seen = []

    def future(self: HostStreams) -> torch.futures.Future:
        seen.append("made")
        return torch.futures.Future()

    monkeypatch.setattr(HostStreams, "future", future)

    def program(comm: Communicator) -> None:
        released = threading.Event()
        streams = comm._engine.queue.streams
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

    run_ranks(program, 1, backend=double)
    assert seen == ["made"]


def test_a_future_without_streams_comes_when_the_device_is_done(double):
    def program(comm: Communicator) -> None:
        released = threading.Event()
        comm._engine.queue.streams.call(lambda: released.wait(60))
        options = dist.AllreduceOptions()
        options.asyncOp = True
        future = UnicommProcessGroup(comm).allreduce([torch.ones(4)], options).get_future()
        assert not future.done()
        released.set()
        assert future.wait()[0].tolist() == [1.0] * 4

    run_ranks(program, 1, backend=double)
