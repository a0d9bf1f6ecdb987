"""Operations in torch.profiler: the events, the table, and the records made of both."""

import json
import threading
import weakref
from dataclasses import replace
from decimal import Decimal

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from tests.old_torch import OLD_TORCH
from unicomm import CommError, ReduceOp, new_comm
from unicomm.c10d.process_group import UnicommProcessGroup
from unicomm.comms.execution.profiling import events as profiling
from unicomm.comms.execution.profiling import session as profiling_session
from unicomm.profiler import TraceError, events, merge, read_events
from unicomm.profiler.records import NOT_IN_OLD_TORCH
from unicomm.profiler.trace_table import KEY
from unicomm.testing import run_ranks

CPU = torch.device("cpu")
PROFILER = threading.Lock()  # torch has one at a time


def profile(**options):
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **options)


def raw(prof, path):
    """Returns our events in a trace, and the whole trace, as any other reader sees them."""
    prof.export_chrome_trace(str(path))
    trace = json.loads(path.read_text(), parse_float=Decimal)
    return [
        e for e in trace["traceEvents"] if e.get("ph") == "X" and e["name"].startswith("unicomm::")
    ], trace


def as_live(read):
    """Returns the events of a file, after a comparison with those of the profiler itself."""
    if not OLD_TORCH:
        return read
    untold = {name: kind() for name, kind in NOT_IN_OLD_TORCH.items()}
    return [replace(one, stack=(), **untold) for one in read]


@pytest.fixture
def comm(monkeypatch):
    # A test worker may have communicators of other tests, which are other ranks.
    monkeypatch.setattr(profiling, "_engines", weakref.WeakSet())
    comm = new_comm("fake", CPU, rank=3, size=8, name='wo"r\\ld% \u00e9')
    yield comm
    comm.finalize()


def some_of_each(comm):
    """Issues one operation of each kind: synchronous, asynchronous, rooted, with splits, a batch, ..."""
    n = comm.get_size()
    comm.all_reduce(torch.ones(4, 2), ReduceOp.SUM, False)
    comm.all_gather_single(torch.ones(3 * n), torch.ones(3), True).wait()
    comm.broadcast(torch.ones(5, dtype=torch.float16), 1, False)
    rows = [2] * n
    comm.all_to_all_v_single(torch.ones(2 * n, 3), torch.ones(2 * n, 3), rows, rows, False)
    comm.send(torch.ones(3), 1, False)
    batch = comm.batch_op_create()
    batch.send(torch.ones(2), 5)
    batch.recv(torch.ones(7), 5)
    batch.issue(False)
    comm.barrier(False)


@pytest.mark.parametrize("shapes", [False, True])
@pytest.mark.parametrize("stack", [False, True])
def test_the_profiler_and_its_trace_say_the_same(comm, tmp_path, shapes, stack):
    with profile(record_shapes=shapes, with_stack=stack) as prof:
        some_of_each(comm)
    path = tmp_path / "trace.json"
    plain, trace = raw(prof, path)
    mine, theirs = events(prof), read_events(path)
    assert mine == as_live(theirs)  # field by field: they are dataclasses
    ops = [
        "all_reduce",
        "all_gather_single",
        "broadcast",
        "all_to_all_v_single",
        "send",
        "send",
        "recv",
        "barrier",
    ]
    assert [e.op for e in mine] == ops
    assert [e["name"] for e in plain] == [e.name for e in mine]
    base = trace["baseTimeNanoseconds"]
    for event, json_event, read in zip(mine, plain, theirs, strict=True):
        assert event.start_ns == base + json_event["ts"] * 1000
        assert event.duration_ns == json_event["dur"] * 1000
        assert event.thread == json_event["tid"] == threading.get_native_id()
        if not OLD_TORCH:
            assert event.external_id == json_event["args"]["External id"] > 0
            assert event.activity_type == json_event["cat"] == "cpu_op"
        assert event.finished
        assert event.state == "completed"
        assert event.issued_ns <= event.started_ns <= event.completed_ns
        assert event.arguments.items() <= json_event["args"].items()
        assert bool(event.arguments) == shapes
        if shapes:
            said = event.arguments
            assert (said["seq_num"], said["rank"], said["bytes"]) == (event.seq_num, 3, event.bytes)
            assert said["group_ranks"] == "0-7"
            assert said["comm_uid"] == comm.get_uid()
            assert said["is_async"] is event.is_async
            assert said.get("root", -1) == (-1 if event.root is None else event.root)
            assert said.get("peer", -1) == (-1 if event.peer is None else event.peer)
        assert any("some_of_each" in frame for frame in read.stack) == stack
    by_op = {e.op: e for e in mine}
    assert by_op["all_reduce"].bytes == 32
    assert by_op["all_reduce"].dtype == "float32"
    gathered = by_op["all_gather_single"]
    assert (gathered.in_elements, gathered.out_elements, gathered.is_async) == (3, 24, True)
    assert by_op["broadcast"].root == 1
    assert by_op["broadcast"].bytes == 10
    assert by_op["all_to_all_v_single"].in_splits == (2,) * 8
    assert [(e.peer, e.seq_num, e.batch) for e in mine if e.op == "send"] == [(1, 1, 0), (5, 1, 1)]
    assert (by_op["recv"].peer, by_op["recv"].batch) == (5, 1)
    group = by_op["barrier"].group
    assert (group.name, group.uid, group.ranks) == (comm.get_name(), comm.get_uid(), tuple(range(8)))
    assert (group.rank, group.backend, by_op["barrier"].dtype) == (3, "fake", "")


def test_the_table_is_what_the_table_says(comm, tmp_path):
    with profile() as prof:
        comm.barrier(False)
    _, trace = raw(prof, tmp_path / "a.json")
    assert KEY == profiling_session.KEY
    assert tuple(trace[KEY]["columns"]) == profiling_session.COLUMNS
    assert len(trace[KEY]["rows"]) == 1


def test_what_has_not_ended(tmp_path):
    """A recording that stops while an operation waits for its peer."""
    stopped = threading.Event()
    issued = threading.Barrier(2)
    found = {}

    def rank(comm):
        if comm.get_rank() == 0:
            with profile() as prof:
                work = comm.all_reduce(torch.ones(4), ReduceOp.SUM, True)
                issued.wait(20)
            stopped.set()
            found["prof"] = prof
            work.wait()
            raw(prof, tmp_path / "a.json")
            return events(prof)
        issued.wait(20)
        assert stopped.wait(20)
        comm.all_reduce(torch.ones(4), ReduceOp.SUM, False)
        return []

    (event,) = run_ranks(rank, 2)[0]
    assert not event.finished
    assert event.completed_ns == 0
    assert event.state in ("created", "started")
    assert as_live(read_events(tmp_path / "a.json")) == [event]


def test_an_operation_that_fails_is_there(comm):
    with profile() as prof:
        comm.abort()
        with pytest.raises(CommError):
            comm.barrier(False)
    assert events(prof) == []  # refused before it had a number

    def rank(comm):
        if comm.get_rank() == 1:
            comm.broadcast(torch.ones(4), 0, False)
            return None
        with profile() as prof:
            comm.all_reduce(torch.ones(4), ReduceOp.SUM, False)
        return events(prof)

    with pytest.raises(CommError):
        run_ranks(rank, 2)
    rows = [
        dict(zip(profiling_session.COLUMNS, row, strict=True)) for row in profiling.finished[-1].table["rows"]
    ]
    assert [row["state"] for row in rows if row["op"] == "all_reduce"] == [profiling_session.FAILED]


def test_numbers_are_those_of_the_recorder(comm):
    """Includes operations before and after the recording, and those of a sub-group."""
    comm.barrier(False)
    child = comm.split([1, 3, 5], "odd")
    with profile() as prof:
        works = [comm.all_reduce(torch.ones(2), ReduceOp.SUM, True) for _ in range(3)]
        child.barrier(False)
        [w.wait() for w in works]
    after = comm.all_reduce(torch.ones(2), ReduceOp.SUM, False)
    assert after.seq == 5
    found = events(prof)
    assert [(e.op, e.seq_num) for e in found if e.group.name != "odd"] == [
        ("all_reduce", w.seq) for w in works
    ]
    (odd,) = [e for e in found if e.group.name == "odd"]
    assert (odd.seq_num, odd.group.ranks, odd.rank, odd.group.global_rank) == (1, (1, 3, 5), 1, 3)
    child.finalize()


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_all_ranks_have_the_same_numbers(backend):
    """With ranks as threads, one after the other under the profiler, the table has the operations of all."""
    inside, outside = threading.Barrier(3), threading.Barrier(3)

    def rank(comm):
        child = comm.split([0, 2], "pair") if comm.get_rank() != 1 else None
        comm.barrier(False)
        prof = profile(record_shapes=True)
        if comm.get_rank() == 0:
            prof.start()
        inside.wait(30)
        comm.all_reduce(torch.ones(8), ReduceOp.SUM, False)
        later = comm.all_gather_single(torch.empty(6), torch.ones(2), True)
        if child is not None:
            child.all_reduce(torch.ones(1), ReduceOp.MAX, False)
        later.wait()
        if comm.get_rank() == 0:
            comm.send(torch.ones(4), 2, False)
        if comm.get_rank() == 2:
            comm.recv(torch.ones(4), 0, False)
        outside.wait(30)
        if comm.get_rank() == 0:
            prof.stop()
        inside.wait(30)
        if child is not None:
            child.finalize()
        return events(prof) if comm.get_rank() == 0 else None

    found = run_ranks(rank, 3, backend=backend)[0]
    main = [
        (e.rank, e.op, e.seq_num) for e in found if e.group.name == "ranks" and e.op not in ("send", "recv")
    ]
    assert sorted(main) == [
        (r, op, s) for r in range(3) for op, s in (("all_gather_single", 3), ("all_reduce", 2))
    ]
    assert sorted((e.rank, e.seq_num, e.group.ranks) for e in found if e.group.name == "pair") == [
        (0, 1, (0, 2)),
        (1, 1, (0, 2)),
    ]
    assert [(e.op, e.rank, e.peer, e.seq_num) for e in found if e.op in ("send", "recv")] in (
        [("send", 0, 2, 1), ("recv", 2, 0, 1)],
        [("recv", 2, 0, 1), ("send", 0, 2, 1)],
    )
    assert all(e.finished and e.group.backend == backend for e in found)
    # torch records the thread that started it alone; the table has them all.
    assert {e.rank for e in found if e.start_ns is not None} == {0}


def test_a_schedule_gives_a_table_a_cycle(comm, tmp_path):
    seen = []

    def ready(prof):
        path = tmp_path / f"{len(seen)}.json"
        raw(prof, path)
        seen.append([e.seq_num for e in events(prof)])
        assert [e.seq_num for e in read_events(path)] == seen[-1]

    plan = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=2)
    with profile(schedule=plan, on_trace_ready=ready) as prof:
        for _ in range(8):
            comm.barrier(False)
            prof.step()
    assert seen == [[3, 4], [7, 8]]


def test_process_groups_give_their_names():
    pytest.importorskip("torch.testing._internal.distributed.fake_pg")  # which registers "fake"
    comm = new_comm("fake", CPU, rank=0, size=2, name="world")
    dist.init_process_group("fake", rank=0, world_size=1, store=HashStore())
    try:
        group = UnicommProcessGroup(comm)
        group._set_group_name("17")
        group._set_group_desc("tensor parallel")
        dist.distributed_c10d._world.pg_names[group] = "17"
        with profile() as prof:
            dist.all_reduce(torch.ones(3), group=group)
            dist.isend(torch.ones(2), 1, group=group).wait() if False else group.send(
                [torch.ones(2)], 1, 0
            ).wait()
        reduced, sent = events(prof)
        assert (reduced.group.group_name, reduced.group.description) == ("17", "tensor parallel")
        assert (sent.op, sent.peer, sent.is_async, sent.finished) == ("send", 1, True, True)
    finally:
        dist.destroy_process_group()
        comm.finalize()


def test_nothing_recorded_is_said(comm, tmp_path):
    with pytest.raises(TraceError, match="after its block"):
        events(profile())
    with profile() as prof:
        torch.ones(3)
    assert events(prof) == []
    prof.export_chrome_trace(str(tmp_path / "a.json"))
    assert read_events(tmp_path / "a.json") == []  # whose rank it is stands there
    assert merge([tmp_path / "a.json"], tmp_path / "m.json").ranks == [3]
    (tmp_path / "b.json").write_text('{"traceEvents": []}')
    with pytest.raises(TraceError, match="holds no table"):
        read_events(tmp_path / "b.json")
    first = profile()
    with first:
        comm.barrier(False)
    for _ in range(4):
        with profile():
            comm.barrier(False)
    with pytest.raises(TraceError, match="too old"):
        events(first)
