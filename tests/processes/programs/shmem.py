"""Ranks over a SHMEM library's table: shmem.py MODULE BACKEND HOW

MODULE, of tests/mocks/shmem, registers BACKEND. HOW:
conform   every operation, at sizes that take several chunks
briefly   the same at fewer sizes
symmetric symmetric memory over the same library, and teams of it
joined    a world of NVSHMEM that something else in the process has made, and finalizes
splits    parts of the ranks, in any order; more than there is room for
absent    rank 0 waits for the others in a collective, to which they never come
killed    all but rank 1 wait for it in a broadcast
aborted   rank 1 aborts while the others wait for it
abandoned rank 1 aborts while rank 0 waits for it in an allocation
"""

import importlib
import os
import sys
import time

import torch

import unicomm
from tests.mocks.nccl.kinds import streams_of
from tests.processes.programs.common import describe, hear, reporting, say
from tests.processes.programs.foreign_nvshmem import Foreign
from unicomm.testing import conformance

MODULE, BACKEND, HOW = sys.argv[1:]
importlib.import_module(MODULE)
TIMEOUT = 1.0 if HOW == "absent" else 60.0
HINTS = {"staging_bytes": "64K", "communicators": "3"}
if HOW == "joined":
    beside = unicomm.new_comm("shm", torch.device("cpu"), name="beside", timeout=60.0)
    theirs = Foreign(os.environ["NVSHMEM_MOCK"], beside)
    theirs.begin(beside.rank, beside.size)
comm = unicomm.new_comm(BACKEND, torch.device("cpu"), timeout=60.0, hints=HINTS)
me, n = comm.get_rank(), comm.get_size()


def summed(part):
    x = torch.full((5000,), float(me + 1))
    part.all_reduce(x, unicomm.ReduceOp.SUM, False).wait_blocking()
    return float(x[-1])


def begin():
    """What waits for rank 1, on the host or on the stream."""
    return comm.broadcast(torch.ones(1000), 1, True, timeout=TIMEOUT)


def wait(work):
    """Says what comes of it, and after an abort whether the stream waits no more."""
    with reporting():
        work.wait_blocking()
    if HOW == "aborted" and hasattr(work, "_after"):  # on a stream
        streams, end = streams_of(comm), time.monotonic() + 20
        while not streams.is_over(work._after) and time.monotonic() < end:
            time.sleep(0.02)
        say("released" if streams.is_over(work._after) else "still waits")


def world_stays():
    """All ranks can meet again in the library's world, and none can make another. Returns the refusal."""
    again = unicomm.new_comm(BACKEND, torch.device("cpu"), name="again", hints=HINTS)
    assert summed(again) == n * (n + 1) / 2
    again.finalize()
    try:
        unicomm.new_comm(BACKEND, torch.device("cpu"), name="other", rank=0, size=1)
    except unicomm.BackendError as error:
        text = str(error)
    else:
        raise RuntimeError("the library has one world")
    assert "has one world a process" in text, text
    return text


def captured(comm):
    """Operations of symmetric memory are captured; those that count are refused, and leave nothing there."""
    streams, sum_ = streams_of(comm), unicomm.ReduceOp.SUM
    graph, y = HostGraph(streams), torch.ones(4)
    x, total = (device_bodies.shared(comm, torch.zeros(4)) for _ in range(2))
    refused = (
        lambda: comm.broadcast(y, 0, False),
        lambda: comm.all_reduce(y, sum_, True),  # whose own stream must not become a part of the graph
        lambda: comm.barrier(False),
        lambda: comm.send(y, (me + 1) % n, True),
        lambda: comm.recv(y, (me + 1) % n, False),
    )
    seq = comm.barrier(False).seq

    def capture(body):
        graph = HostGraph(streams)
        with graph.capture():
            body()
        return graph

    with graph.capture():
        for call in refused:
            try:
                call()
            except unicomm.UnsupportedError as error:
                text = str(error)
            else:
                raise RuntimeError("a replay would repeat the counts")
            assert f"operations of backend '{BACKEND}' cannot be captured in a graph" in text, text
        symm.one_shot_all_reduce(x, comm, out=total)
    assert comm.barrier(False).seq == seq + 1
    with streams.use(streams.new()):
        for step in range(3):
            x.fill_(step + me)
            comm.barrier(False)
            graph.replay()
            symm.synchronize(comm)
            assert total[0] == n * step + n * (n - 1) / 2
            comm.barrier(False)
    graph.reset()
    check_life(comm, capture, symmetric=True)


if HOW in ("conform", "briefly"):
    few = (0, 1, 17, 67, 1000, 70001) if HOW == "conform" else (0, 1000, 70001)
    done = [conformance.check(comm, op, lambda case: case.count in few) for op in conformance.OPERATIONS]
    say("conforms", fewest=min(done))
elif HOW == "symmetric":
    from tests.mocks.nccl.graphs import HostGraph, check_life
    from tests.symm.device import device_bodies
    from unicomm import symm

    symm.init(comm)
    device_bodies.check_collectives(comm, torch.float32, (5, 3), seed=5)
    device_bodies.windows(comm)
    assert summed(comm) == n * (n + 1) / 2
    alone = comm.split([me])
    symm.init_team(alone, comm)
    x = device_bodies.shared(comm, torch.full((4,), me + 1.0))
    assert symm.one_shot_all_reduce(x, alone).tolist() == [me + 1.0] * 4
    symm.synchronize(alone)
    alone.finalize()
    part = comm.split(list(range(n))[::-1])
    try:
        symm.init(part)
        raise RuntimeError("the library has one symmetric memory")
    except unicomm.UnsupportedError as error:
        hint = error.hint
    assert "init_team" in hint
    part.finalize()
    text = world_stays()
    assert ": split that" in text, text
    captured(comm)
    assert summed(comm) == n * (n + 1) / 2
    say("over")
elif HOW == "joined":
    from unicomm import symm

    conformance.check(comm, "all_gather", lambda case: case.count == 1000)
    symm.init(comm)
    x = symm.empty(4, comm=comm).fill_(me + 1.0)
    assert symm.one_shot_all_reduce(x, comm).tolist() == [n * (n + 1) / 2] * 4
    symm.synchronize(comm)
    comm.finalize()
    world_stays()
    theirs.end()
    beside.finalize()
    say("over")
elif HOW == "splits":
    assert summed(comm) == n * (n + 1) / 2
    for _ in range(3):  # what is finalized leaves its room
        first = comm.split(list(range(n))[::-1])
        assert (first.get_rank(), summed(first)) == (n - 1 - me, n * (n + 1) / 2)
        second = comm.split([0, 1] if me < 2 else list(range(2, n)))
        assert summed(second) == (3 if me < 2 else sum(range(3, n + 1)))
        conformance.check(second, "all_to_all_v_single", lambda case: case.count == 1000)
        try:
            comm.split(list(range(n)))
            raise RuntimeError("there was room for it")
        except unicomm.UnsupportedError as error:
            hint = error.hint
        assert "'communicators'" in hint
        second.finalize()
        first.finalize()
    say("over")
elif HOW == "absent":
    if me == 0:
        wait(begin())
    else:
        hear()
        say("done")
elif HOW == "abandoned":
    from unicomm import symm

    symm.init(comm)
    say("ready")
    hear()
    if me == 1:
        comm.abort()
        say("done")
    else:
        say("begins")
        with reporting():
            symm.empty(1000, comm=comm)
else:
    summed(comm)
    work = None if me == 1 else begin()
    say("ready")
    hear()
    if me == 1:
        comm.abort()
        say("done")
    else:
        wait(work)
try:
    comm.finalize()
except unicomm.CommError as error:
    say("late", **describe(error))
