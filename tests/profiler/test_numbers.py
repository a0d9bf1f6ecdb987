"""One number for an operation: in the profiler, the recorder, its Work and its error, on all ranks."""

import threading

import pytest
import torch
from torch._C._distributed_c10d import AllreduceCoalescedOptions

import unicomm
from unicomm import CommTimeoutError, ReduceOp, new_comm
from unicomm.comms.process_group import UnicommProcessGroup
from unicomm.flight_recorder.ring import read_ring
from unicomm.flight_recorder.writer import recorder_path
from unicomm.profiler import events
from unicomm.testing import run_ranks

CPU = torch.device("cpu")


def recorded(*uids):
    """(uid, rank, operation, number, peer) of what the recorder holds of some communicators."""
    ring = read_ring(recorder_path())
    found = []
    for record in ring.records:
        comm = ring.comms[record["comm"]]
        if comm.uid in uids:
            peer = int(record["peer"]) if ring.op(record) in ("send", "recv") else None
            found.append((comm.uid, comm.rank, ring.op(record), int(record["seq"]), peer))
    return sorted(found, key=str)


def profiled(prof):
    return sorted(((e.group.uid, e.rank, e.op, e.seq_num, e.peer) for e in events(prof)), key=str)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_profiler_and_recorder_agree(backend):
    """Synchronous and asynchronous operations, coalesced ones, batches, messages of lanes, a sub-group."""
    ready, over = threading.Barrier(4), threading.Barrier(4)
    uids = []

    def rank(comm):
        me = comm.get_rank()
        child = comm.split([2, 0], "pair") if me != 1 else None
        ready.wait(30)  # the profiler starts now
        ready.wait(30)
        group = UnicommProcessGroup(comm)
        works = [comm.all_reduce(torch.ones(4), ReduceOp.SUM, True)]
        comm.barrier(False)
        options = AllreduceCoalescedOptions()
        group.allreduce_coalesced([torch.ones(3), torch.ones(5)], options).wait()
        works.append(comm.broadcast(torch.ones(2), 1, True))
        if child is not None:
            child.all_gather_single(torch.empty(4), torch.ones(2), False)
        [w.wait() for w in works]
        if me < 2:
            batch = comm.batch_op_create()
            for _ in range(2):
                batch.send(torch.ones(2), 1 - me)
                batch.recv(torch.ones(2), 1 - me)
            batch.issue(False)
            x = torch.ones(6)
            (group.send if me == 0 else group.recv)([x], 1 - me, 0).wait()
        uids.extend(c.get_uid() for c in (comm, child) if c is not None)
        over.wait(30)
        over.wait(30)
        if child is not None:
            child.finalize()

    def observe():
        ready.wait(30)
        prof = torch.profiler.profile()
        prof.start()
        ready.wait(30)
        over.wait(30)
        prof.stop()
        over.wait(30)
        found.append(prof)

    found = []
    observer = threading.Thread(target=observe)
    observer.start()
    run_ranks(rank, 3, backend=backend)
    observer.join(30)
    told = profiled(found[0])
    main = next(e.group.uid for e in events(found[0]) if e.group.name == "ranks")
    collectives = {
        r: [(op, n) for u, k, op, n, p in told if u == main and k == r and p is None] for r in range(3)
    }
    assert collectives[0] == collectives[1] == collectives[2]
    assert {n for _, n in collectives[0]} == {1, 2, 3, 4, 5}
    sent = sorted((op, n) for u, k, op, n, p in told if k == 0 and u == main and p == 1)
    assert sent == [("recv", 1), ("recv", 2), ("send", 1), ("send", 2), ("send", 3)]
    assert told == recorded(*uids)


def test_a_compiled_program():
    comm = new_comm("fake", CPU, rank=1, size=4, name="compiled")

    @torch.compile(backend="eager", fullgraph=True)
    def step(x):
        return unicomm.functional.all_reduce(unicomm.functional.all_reduce(x, "sum", comm) * 2, "max", comm)

    step(torch.ones(4))
    with torch.profiler.profile() as prof:
        step(torch.ones(4))
    assert [(e.op, e.seq_num) for e in events(prof)] == [("all_reduce", 3), ("all_reduce", 4)]
    assert recorded(comm.get_uid())[-2:] == profiled(prof)
    comm.finalize()


def test_the_error_of_an_operation_has_its_number():
    """Also the one that ends with an error stands in the profile under it."""
    left = threading.Event()

    def rank(comm):
        comm.barrier(False)
        if comm.get_rank() == 1:
            assert left.wait(30)
            return
        with torch.profiler.profile() as prof, pytest.raises(CommTimeoutError) as caught:
            comm.all_reduce(torch.ones(4), ReduceOp.SUM, False, timeout=0.2)
        left.set()
        (event,) = events(prof)
        assert (caught.value.seq, event.seq_num, event.state, event.finished) == (2, 2, "failed", True)
        return

    run_ranks(rank, 2)
