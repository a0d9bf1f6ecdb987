"""Records of small operations, which are written once the other ranks have been told of the operation."""

import threading

import pytest
import torch

from tests.comms import inside
from unicomm import AbortedError, ReduceOp
from unicomm.flight_recorder.recording import writer
from unicomm.flight_recorder.ring.reader import State, read_ring
from unicomm.testing import run_ranks


def newest(index):
    """The state of a communicator's newest record, and the function that the user called it in.

    None as long as it has no record: a rank that looks may be faster than one that writes the first.
    """
    ring = read_ring(writer.ring_bytes())
    records = ring.records[ring.records["comm"] == index]
    if not len(records):
        return None
    record = records[-1]
    return State(record["state"]), ring.call_path(record)[0].function.rpartition(".")[2]


def called_here(comm, what):
    if what == "recv":
        comm.recv(torch.ones(1), 1)
    elif what == "all_reduce":
        comm.all_reduce(torch.ones(1), ReduceOp.SUM)
    else:
        comm.barrier()


@pytest.mark.parametrize("what", ["barrier", "all_reduce", "recv"])
def test_an_operation_that_waits_is_on_record(what, eventually):
    index: list[int] = []

    def program(comm):
        if comm.get_rank() == 0:
            index.append(inside.engine(comm).member.recorder_index)
            called_here(comm, what)
            return
        eventually(lambda: index and newest(index[0]) == (State.STARTED, "called_here"))
        called_here(comm, what) if what != "recv" else comm.send(torch.ones(1), 0)

    run_ranks(program, 2)
    assert newest(index[0])[0] is State.COMPLETED


@pytest.mark.parametrize("what", ["barrier", "all_reduce", "recv"])
def test_an_operation_that_tells_nobody_is_on_record_as_failed(what):
    aborted = threading.Event()

    def program(comm):
        if comm.get_rank() == 1:
            comm.abort()
            aborted.set()
            return
        aborted.wait(60)
        with pytest.raises(AbortedError):
            called_here(comm, what)
        assert newest(inside.engine(comm).member.recorder_index) == (State.FAILED, "called_here")

    run_ranks(program, 2)
