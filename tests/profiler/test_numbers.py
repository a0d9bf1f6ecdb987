"""An operation has the same number in the profiler, the recorder, its Work and its error, on all ranks."""

import io
import re
import threading

import pytest
import torch
from torch._C._distributed_c10d import AllgatherOptions, AllreduceCoalescedOptions, ReduceScatterOptions

import unicomm
from unicomm import CommTimeoutError, MismatchError, ReduceOp, new_comm
from unicomm.c10d.process_group import UnicommProcessGroup
from unicomm.flight_recorder.recording.writer import recorder_path
from unicomm.flight_recorder.ring.reader import read_ring
from unicomm.hooks import clog
from unicomm.profiler import events
from unicomm.testing import run_ranks

CPU = torch.device("cpu")
BACKENDS = ["shm", "gloo"]


def recorded(*uids):
    """Returns (uid, rank, operation, number, peer) of the recorder's records of some communicators."""
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


@pytest.mark.parametrize("backend", BACKENDS)
def test_profiler_and_recorder_agree(backend):
    """Synchronous, asynchronous and coalesced operations, batches, queued messages, a sub-group."""
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.timeout(120)
def test_a_compiled_program_on_all_ranks(backend):
    """Compiled operations, also coalesced ones, in a sub-group and after eager ones."""
    uids = []

    def rank(comm):
        child = comm.split([2, 0], "pair") if comm.get_rank() != 1 else None
        comm.barrier(False)

        @torch.compile(backend="eager", fullgraph=True)
        def step(x):
            x = unicomm.functional.all_reduce(x, "sum", comm)
            xs = unicomm.functional.all_reduce_coalesced([x, x * 2], "max", comm)
            return xs if child is None else [*xs, unicomm.functional.all_gather_single(x, child)]

        for _ in range(2):
            step(torch.ones(4))
        comm.barrier(False)
        uids.extend(c.get_uid() for c in (comm, child) if c is not None)
        if child is not None:
            child.finalize()

    with torch.profiler.profile() as prof:
        run_ranks(rank, 3, backend=backend, timeout=60)
    told = profiled(prof)
    assert told == recorded(*uids)
    main = {
        r: [(e.op, e.seq_num) for e in events(prof) if (e.group.name, e.rank) == ("ranks", r)]
        for r in range(3)
    }
    assert main[0] == main[1] == main[2]
    assert [n for _, n in main[0]] == list(range(1, len(main[0]) + 1))
    assert [op for op, _ in main[0]].count("barrier") == 2
    assert len(main[0]) > 5
    pair = [(e.rank, e.op, e.seq_num) for e in events(prof) if e.group.name == "pair"]
    assert sorted(pair) == [(r, "all_gather_single", n) for r in range(2) for n in (1, 2)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_coalesced_form(backend):
    """Operations of torch's coalescing manager, between operations of the communicator itself."""
    uids = []

    def rank(comm):
        group = UnicommProcessGroup(comm)
        xs, wide = [torch.ones(2), torch.ones(3)], [torch.ones(4), torch.ones(6)]
        later = comm.all_reduce(torch.ones(4), ReduceOp.SUM, True)
        works = [group.allreduce_coalesced(xs, AllreduceCoalescedOptions())]
        works.append(group.allgather_into_tensor_coalesced(wide, xs, AllgatherOptions()))
        works.append(group.reduce_scatter_tensor_coalesced(xs, wide, ReduceScatterOptions()))
        [w.wait() for w in (later, *works)]
        last = comm.all_reduce(torch.ones(1), ReduceOp.SUM, False)
        uids.append(comm.get_uid())
        return last.seq

    with torch.profiler.profile() as prof:
        last = run_ranks(rank, 2, backend=backend)
    told = profiled(prof)
    assert told == recorded(*uids)
    of = [[(op, n) for _, r, op, n, _ in told if r == me] for me in range(2)]
    assert of[0] == of[1]
    assert sorted({n for _, n in of[0]}) == list(range(1, last[0] + 1))
    assert {op for op, _ in of[0]} == {"all_reduce", "all_gather_single", "reduce_scatter_single"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_log_has_the_same_numbers(backend):
    logs = [io.StringIO() for _ in range(3)]

    def rank(comm):
        clog(logs[comm.get_rank()]).register_with_comm(comm)
        works = [comm.all_reduce(torch.ones(4), ReduceOp.SUM, True) for _ in range(3)]
        comm.barrier(False)
        [w.wait() for w in works]
        comm.broadcast(torch.ones(2), 1, False)

    with torch.profiler.profile() as prof:
        run_ranks(rank, 3, backend=backend)
    for me, log in enumerate(logs):
        ops = dict(re.findall(r"^C(\d+)\|sig\|(\w+)", log.getvalue(), re.MULTILINE))
        queued = re.findall(r"^C(\d+)\|Q\|op_id=\d+\|seq=(\d+)", log.getvalue(), re.MULTILINE)
        logged = [(ops[number], int(seq)) for number, seq in queued]
        assert logged == [(e.op, e.seq_num) for e in events(prof) if e.rank == me]
        assert [seq for _, seq in logged] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("later", [False, True])
def test_a_mismatch_has_one_number(backend, later):
    """A mismatch in a sub-group that is behind its parent: all places have the sub-group's number."""
    said, uids = {}, []

    def rank(comm):
        for _ in range(3):
            comm.barrier(False)
        child = comm.split([2, 0], "pair") if comm.get_rank() != 1 else None
        if child is None:
            return
        child.barrier(False)
        uids.append(child.get_uid())
        count = 4 if comm.get_rank() == 0 else 5
        with pytest.raises(MismatchError) as caught:
            child.all_reduce(torch.ones(count), ReduceOp.SUM, later).wait()
        said[child.get_rank()] = caught.value.seq

    with torch.profiler.profile() as prof:
        run_ranks(rank, 3, backend=backend)
    assert said == {0: 2, 1: 2}
    failed = [(e.group.name, e.rank, e.op, e.seq_num) for e in events(prof) if e.state == "failed"]
    assert sorted(failed) == [("pair", r, "all_reduce", 2) for r in range(2)]
    assert {(op, n) for _, _, op, n, _ in recorded(*uids)} == {("barrier", 1), ("all_reduce", 2)}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("later", [False, True])
def test_the_error_of_an_operation_has_its_number(backend, later):
    """An operation that ends with an error has its number in the profile, too."""
    left = threading.Event()

    def rank(comm):
        comm.barrier(False)
        if comm.get_rank() == 1:
            assert left.wait(30)
            return
        with torch.profiler.profile() as prof, pytest.raises(CommTimeoutError) as caught:
            comm.all_reduce(torch.ones(4), ReduceOp.SUM, later, timeout=0.2).wait()
        left.set()
        (event,) = events(prof)
        assert (caught.value.seq, event.seq_num, event.state, event.finished) == (2, 2, "failed", True)
        return

    run_ranks(rank, 2, backend=backend)
