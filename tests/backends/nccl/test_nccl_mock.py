"""The NCCL and RCCL backends over a mock of their library: no GPU is needed, and none is proved to work."""

from __future__ import annotations

import ctypes
import json
import threading
import time
from types import SimpleNamespace

import pytest
import torch

import unicomm
from tests import recorded
from tests.mocks.nccl.kinds import of, streams_of
from unicomm import Communicator
from unicomm.backends.nccl.backend import NcclBackend
from unicomm.c10d.process_group import UnicommProcessGroup
from unicomm.comms.errors import (
    AbortedError,
    BackendError,
    CommTimeoutError,
    InvalidArgumentError,
    UnsupportedError,
)
from unicomm.comms.membership.create import check_device
from unicomm.comms.work import WorkStatus
from unicomm.testing import conformance, drain, run_ranks

SUM = unicomm.ReduceOp.SUM


@pytest.fixture(params=["nccl-new", "nccl-old", "rccl-old"])
def backend(request) -> str:
    of(request.param)
    return request.param


@pytest.fixture
def new() -> str:
    of("nccl-new")
    return "nccl-new"


@pytest.mark.parametrize("operation", conformance.OPERATIONS)
@pytest.mark.parametrize("world", [1, 3])
def test_conformance(backend, operation, world):
    def few(case: conformance.Case) -> bool:
        return case.count < 5000 and (backend == "nccl-new" or case.count in (0, 17))

    counts = run_ranks(lambda comm: conformance.check(comm, operation, few), world, backend=backend)
    assert len(set(counts)) == 1
    assert counts[0] > 10


def test_calls_return_before_the_device_has_done_them(new):
    def program(comm: Communicator) -> None:
        released = threading.Event()
        streams_of(comm).call(lambda: released.wait(60))
        x = torch.full((4,), float(comm.get_rank() + 1))
        work = comm.all_reduce(x, SUM, False)
        assert not work.is_completed()
        assert work.status is WorkStatus.INPROGRESS
        assert x.tolist() == [float(comm.get_rank() + 1)] * 4
        released.set()
        work.wait_blocking()
        assert work.status is WorkStatus.COMPLETED
        assert x.tolist() == [3.0] * 4

    run_ranks(program, 2, backend=new)


def test_an_asynchronous_one_waits_for_the_current_stream_and_is_waited_for(new):
    def program(comm: Communicator) -> None:
        s, released = streams_of(comm), threading.Event()
        x, y = torch.ones(4), torch.ones(4)
        s.call(lambda: released.wait(60))
        first = comm.all_reduce(x, SUM, True)  # on a stream of its own, after what the stream waits for
        second = comm.all_reduce(x, SUM, False)  # on the current stream, after the first
        third = comm.all_reduce(y, SUM, True)
        assert not first.is_completed()
        released.set()
        third.wait()
        s.synchronize()  # the current stream waits for the third, which is after the others
        assert x.tolist() == [4.0] * 4
        assert y.tolist() == [2.0] * 4
        assert [w.is_completed() for w in (first, second, third)] == [True] * 3

    run_ranks(program, 2, backend=new)


def test_callbacks_come_when_it_is_over(new, eventually):
    def program(comm: Communicator) -> None:
        seen = []
        streams_of(comm).sleep(50)
        work = comm.all_reduce(torch.ones(4), SUM, True)
        work.add_done_callback(lambda w: seen.append(w.is_completed()))
        eventually(lambda: seen == [True])
        work.add_done_callback(lambda w: seen.append("at once"))
        assert seen == [True, "at once"]

    run_ranks(program, 2, backend=new)


def test_an_overdue_operation_breaks_the_communicator(new, raised):
    def program(comm: Communicator) -> None:
        if comm.get_rank() == 1:  # never comes
            assert late.wait(30)
            return
        x = torch.ones(4)
        work = comm.all_reduce(x, SUM, True, timeout=0.2)
        after = comm.all_reduce(x, SUM, True)
        error = raised(work.wait_blocking)
        assert type(error) is CommTimeoutError
        assert (error.op, error.seq, error.rank) == ("all_reduce", 1, 0)
        assert type(raised(after.wait_blocking)) is CommTimeoutError
        assert type(raised(comm.barrier, False)) is CommTimeoutError
        assert work.status is WorkStatus.TIMEDOUT
        late.set()

    late = threading.Event()
    run_ranks(program, 2, backend=new)


def test_late_errors_of_the_library_are_raised(new, raised):
    c = ctypes.CDLL(of("nccl-new").path)

    def program(comm: Communicator) -> None:
        comm.barrier(False)
        if comm.get_rank() == 0:
            work = comm.all_reduce(torch.ones(4), SUM, True)
            assert c.mock_inject_error(ctypes.c_void_p(comm.unsafe_backend._handle.comm), 2) == 0
            error = raised(work.wait_blocking)
            assert type(error) is BackendError
            assert "unhandled system error" in error.message
            assert "NCCL" in error.message
            assert error.hint
            told.set()
        else:
            assert told.wait(30)

    told = threading.Event()
    run_ranks(program, 2, backend=new)


def test_abort_ends_what_runs(new, raised):
    def program(comm: Communicator) -> None:
        if comm.get_rank() == 1:
            assert told.wait(30)
            return
        work = comm.all_reduce(torch.ones(4), SUM, True)
        comm.abort()
        assert type(raised(work.wait_blocking)) is AbortedError
        assert type(raised(comm.barrier, False)) is AbortedError
        told.set()

    told = threading.Event()
    run_ranks(program, 2, backend=new)


@pytest.mark.parametrize("blocking", ["1", "0"])
@pytest.mark.parametrize("by", ["split", "init"])
def test_split(backend, by, blocking):
    def program(comm: Communicator) -> list[float]:
        half = [r for r in range(4) if r % 2 == comm.get_rank() % 2] if comm.get_rank() < 3 else []
        if comm.get_rank() in (0, 2):
            half = [2, 0]
        elif comm.get_rank() == 1:
            half = [1]
        part = comm.split(half, "part")
        if part is None:
            assert comm.get_rank() == 3
            return []
        assert part.get_ranks() == half
        x = torch.tensor([float(comm.get_rank())])
        part.all_reduce(x, SUM, False).wait_blocking()
        part.finalize()
        return x.tolist()

    hints = {"split_by": by, "blocking": blocking}
    assert run_ranks(program, 4, backend=backend, hints=hints) == [[2.0], [1.0], [2.0], []]


def test_ranks_outside_a_group_take_part_in_the_librarys_split(new):
    def program(comm: Communicator) -> list[float]:
        part = UnicommProcessGroup(comm).split_group([0, 1])
        x = torch.ones(1)
        if part is not None:
            part.get_comm().all_reduce(x, SUM, False).wait_blocking()
            part.get_comm().finalize()
        return x.tolist()

    assert run_ranks(program, 3, backend=new, timeout=30) == [[2.0], [2.0], [1.0]]


def test_options_reach_the_library(new):
    c = ctypes.CDLL(of("nccl-new").path)
    c.mock_last_config.restype = ctypes.c_longlong
    c.mock_last_config_text.restype = ctypes.c_char_p

    def program(comm: Communicator) -> None:
        handle = ctypes.c_void_p(comm.unsafe_backend._handle.comm)
        seen = {n: c.mock_last_config(handle, n.encode()) for n in ("maxCTAs", "minCTAs", "trafficClass")}
        assert seen == {"maxCTAs": 4, "minCTAs": -(1 << 31), "trafficClass": 7}
        assert c.mock_last_config_text(handle, b"commName") == b"ranks"

    run_ranks(program, 2, backend=new, hints={"max_ctas": "4", "traffic_class": "7"})


def test_a_split_that_shares_resources_is_refused(new, raised):
    error = raised(unicomm.new_comm, new, "cpu", rank=0, size=1, hints={"split_share": "1"})
    assert type(error) is InvalidArgumentError
    assert "wrong data" in error.message
    unicomm.new_comm(new, "cpu", rank=0, size=1, hints={"split_share": "0"}).finalize()


def test_memory_is_all_that_the_library_holds(new):
    comm = unicomm.new_comm(new, "cpu", rank=0, size=1)
    native, handle = comm.unsafe_backend._handle.native, comm.unsafe_backend._handle.comm
    that_can_be_suspended, persistent = (native.mem_stats(handle, which)[1] for which in (0, 2))
    assert persistent
    assert comm.memory() == {"library": that_can_be_suspended + persistent}
    comm.abort()
    assert comm.memory() == {}
    comm.finalize()


def test_options_of_a_split_are_there_as_long_as_the_library_reads_them(new):
    """With blocking=0 it reads them when the call has returned."""
    c = ctypes.CDLL(of("nccl-new").path)
    c.mock_last_config_text.restype = ctypes.c_char_p

    def program(comm: Communicator) -> None:
        for i in range(10):
            name = f"{'a long name ' * i}{i}"
            part = comm.split([1, 0], name)
            handle = ctypes.c_void_p(part.unsafe_backend._handle.comm)
            assert c.mock_last_config_text(handle, b"commName") == part.get_name().encode()
            part.finalize()

    run_ranks(program, 2, backend=new, hints={"blocking": "0"})


def test_large_worlds_meet_at_several_roots(backend, monkeypatch, tmp_path):
    log = tmp_path / "calls"
    monkeypatch.setenv("NCCL_MOCK_LOG", str(log))

    def program(comm: Communicator) -> float:
        x = torch.ones(1)
        comm.all_reduce(x, SUM, False).wait_blocking()
        return x.item()

    assert run_ranks(program, 5, backend=backend, hints={"large_world": "4"}) == [5.0] * 5
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    made = [call for call in calls if call["function"].startswith("ncclCommInitRank")]
    assert len(made) == 5
    if backend == "nccl-new":
        assert {(call["function"], call["ids"]) for call in made} == {("ncclCommInitRankScalable", 2)}
        assert sum(call["function"] == "ncclGetUniqueId" for call in calls) == 2
    else:  # they are too old for it
        assert {call["function"] for call in made} == {"ncclCommInitRankConfig"}


def test_unknown_and_unreadable_options_are_refused(new, raised):
    for hints, words in (
        ({"max_cta": "4"}, "did you mean 'max_ctas'"),
        ({"max_ctas": "many"}, "unreadable value 'many'"),
        ({"split_by": "magic"}, "expected split or init"),
    ):
        error = raised(unicomm.new_comm, new, "cpu", rank=0, size=1, hints=hints)
        assert type(error) is InvalidArgumentError
        assert words in str(error)


def test_options_that_the_library_is_too_old_for_are_refused(raised):
    of("nccl-old")
    error = raised(unicomm.new_comm, "nccl-old", "cpu", rank=0, size=1, hints={"traffic_class": "1"})
    assert type(error) is UnsupportedError
    assert "NCCL 2.18.5 has no option trafficClass" in str(error)


def test_fp8_is_the_librarys_only_where_it_means_the_same():
    for name, own in (("nccl-new", True), ("nccl-old", False), ("rccl-old", False)):
        of(name)
        pairs = run_ranks(lambda c: c.unsafe_backend.capabilities.reductions, 1, backend=name)[0]
        assert ((torch.float8_e5m2, unicomm.RedOpType.SUM) in pairs) == own


def test_records_have_the_devices_times(new, fresh_recorder):
    def program(comm: Communicator) -> int:
        released = threading.Event()
        streams_of(comm).call(lambda: released.wait(60))
        work = comm.all_reduce(torch.ones(4), SUM, True)
        at = time.monotonic_ns()
        released.set()
        work.wait_blocking()
        drain(comm)
        return at

    (released_ns,) = run_ranks(program, 1, backend=new)

    ring = recorded.ring()
    (record,) = ring.records
    created, started, completed = (int(record[f"{name}_ns"]) for name in ("created", "started", "completed"))
    # The device's own events leave the wait for what was on the stream before out of the duration.
    assert created < released_ns <= started <= completed


def test_a_device_type_alone_is_the_current_device(monkeypatch):
    """At creation, once: tensors are on a device with a number."""
    current = SimpleNamespace(current_device=lambda: 3, is_available=lambda: True)
    monkeypatch.setattr(torch, "get_device_module", lambda device: current)
    assert check_device("cuda", NcclBackend) == torch.device("cuda", 3)
    assert check_device("cuda:1", NcclBackend) == torch.device("cuda", 1)
