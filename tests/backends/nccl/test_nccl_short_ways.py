"""The short ways of operations on a device: nothing that can be seen differs from the long one."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

import unicomm
from tests import recorded
from tests.mocks.nccl.graphs import Together
from unicomm import Communicator
from unicomm.backends.nccl import collectives
from unicomm.comms.errors import AbortedError, BackendError, InvalidArgumentError
from unicomm.comms.execution.device.fast import SHORT
from unicomm.comms.operations.check import Checker
from unicomm.comms.operations.table import OPERATIONS
from unicomm.testing import drain, run_ranks

SUM = unicomm.ReduceOp.SUM
MOVED = ("broadcast", "all_gather_single", "all_to_all_single", "send")


class Calls:
    """The operations of one rank of two, on tensors of its own; a message goes from rank 0 to rank 1."""

    def __init__(self, comm: Communicator, dtype: torch.dtype = torch.float32) -> None:
        me = comm.get_rank()
        self.comm, self.dtype = comm, dtype
        x = self.x = torch.full((4,), me + 1, dtype=dtype)
        self.wide = (torch.arange(8) + 10 * me).to(dtype)
        self.out = torch.zeros(8, dtype=dtype)
        self.by_name = {
            "all_reduce": (x, SUM),
            "broadcast": (x, 1),
            "all_gather_single": (self.out, x),
            "reduce_scatter_single": (x, self.wide, SUM),
            "all_to_all_single": (self.out, self.wide),
            "barrier": (),
            "send": (x, 1) if me == 0 else (x, 0),
        }

    def __call__(self, name: str, async_op: bool = False, **more) -> unicomm.Work:
        arguments = self.by_name[name]
        if name == "send" and self.comm.get_rank() == 1:
            name = "recv"
        return getattr(self.comm, name)(*arguments, async_op, **more)

    def result(self, name: str) -> list[list[complex]]:
        return [t.tolist() for t in self.by_name[name] if isinstance(t, torch.Tensor)]


@pytest.fixture
def checked(monkeypatch):
    """Names of the operations whose arguments were checked the long way, for each thread."""
    seen = threading.local()

    def noted() -> list[str]:
        if not hasattr(seen, "names"):
            seen.names = []
        return seen.names

    for method in ("call", "check_tensor"):
        real = getattr(Checker, method)

        def watched(self, what, *a, real=real, **k):
            noted().append(getattr(what, "name", what))
            return real(self, what, *a, **k)

        monkeypatch.setattr(Checker, method, watched)
    return noted


NAMES = [name for name in SHORT if name != "recv"]


@pytest.mark.parametrize("name", NAMES)
def test_the_short_way_does_what_the_long_one_does(mock_nccl, checked, name):
    def program(comm: Communicator) -> None:
        results = []
        for async_op in (False, True):
            for more in ({}, {"timeout": comm.get_timeout()}):
                calls = Calls(comm)
                work = calls(name, async_op, **more)
                assert bool(checked()) == bool(more), more
                checked().clear()
                work.wait_blocking()
                assert work.seq == len(results) + 1
                assert work.name in (name, "recv")
                results.append(calls.result(name))
        assert all(result == results[0] for result in results)
        drain(comm)

    run_ranks(program, 2, backend=mock_nccl)
    ring = recorded.ring()
    own = {"id", "seq", "op_id", "frame", "created_ns", "started_ns", "completed_ns"}
    for comm in ring.comms:
        rows = ring.records[ring.records["comm"] == comm.index]
        assert [int(row["seq"]) for row in rows] == [1, 2, 3, 4]
        assert {int(row["state"]) for row in rows} == {3}
        for short, long in ((0, 1), (2, 3)):
            for column in set(rows.dtype.names) - own:
                assert (rows[short][column] == rows[long][column]).all(), column


def test_results_are_right(mock_nccl):
    def program(comm: Communicator) -> list:
        calls, me = Calls(comm), comm.get_rank()
        calls("all_gather_single").wait_blocking()
        calls.x += me
        calls("broadcast").wait_blocking()
        found = [calls.out.tolist(), calls.x.tolist()]
        calls("all_to_all_single").wait_blocking()
        found.append(calls.out.tolist())
        calls("reduce_scatter_single").wait_blocking()
        found.append(calls.x.tolist())
        calls.x += me
        calls("send").wait_blocking()
        return [*found, calls.x.tolist()]

    first, second = run_ranks(program, 2, backend=mock_nccl)
    assert first[:2] == second[:2] == [[1.0] * 4 + [2.0] * 4, [3.0] * 4]
    assert first[2:] == [[0, 1, 2, 3, 10, 11, 12, 13], [10, 12, 14, 16], [10, 12, 14, 16]]
    assert second[2:] == [[4, 5, 6, 7, 14, 15, 16, 17], [18, 20, 22, 24], [10, 12, 14, 16]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int16, torch.complex64, torch.bool], ids=str)
def test_element_types_that_need_the_long_way_take_it(mock_nccl, checked, dtype):
    """What the library moves goes the short way, and what it does not reduce by itself does not."""

    def program(comm: Communicator) -> None:
        calls = Calls(comm, dtype)
        for name in MOVED:
            calls(name).wait_blocking()
            assert not checked()
        assert calls.x.tolist() == torch.full((4,), 2).to(dtype).tolist()
        x = torch.ones(4, dtype=dtype)
        comm.all_reduce(x, SUM, False).wait_blocking()
        assert x.tolist() == torch.full((4,), 2).to(dtype).tolist()
        assert bool(checked()) == (dtype != torch.bfloat16)

    run_ranks(program, 2, backend=mock_nccl)


def test_a_part_of_the_other_tensor_is_this_ranks_own_or_refused(mock_nccl, checked, raised):
    def program(comm: Communicator) -> None:
        me = comm.get_rank()
        whole = torch.zeros(8)
        own = whole[4 * me : 4 * me + 4]
        own += me + 1
        comm.all_gather_single(whole, own, False).wait_blocking()
        assert whole.tolist() == [1.0] * 4 + [2.0] * 4
        comm.reduce_scatter_single(own, whole, SUM, False).wait_blocking()
        assert own.tolist() == [2.0 * (me + 1)] * 4
        assert not checked()
        other = whole[4 - 4 * me : 8 - 4 * me]
        wrong = [
            lambda: comm.all_gather_single(whole, other, False),
            lambda: comm.reduce_scatter_single(other, whole, SUM, False),
            lambda: comm.all_to_all_single(whole, whole, False),
            lambda: comm.all_gather_single(whole, whole[1:5], False),
        ]
        for call in wrong:
            error = raised(call)
            assert type(error) is InvalidArgumentError
            assert "share memory" in error.message
        assert comm.all_reduce(own, SUM, False).seq == 3

    run_ranks(program, 2, backend=mock_nccl)


def test_what_is_wrong_is_told_as_ever(mock_nccl, raised):
    def program(comm: Communicator) -> None:
        x, me = torch.ones(4), comm.get_rank()
        turned = torch.ones(4, dtype=torch.complex64).conj()
        tensors = [
            *(torch.ones(8)[::2], turned, turned.imag, x.to_sparse(), torch.ones(4, device="meta")),
            *("x", None, [x]),
        ]
        for name in NAMES[:-1]:
            row = OPERATIONS[name]
            if name == "barrier":
                continue
            for wrong in tensors:
                given = [torch.ones(8) if arg.size.value == "n x count" else x for arg in row.tensors]
                for i in range(len(given)):
                    mixed = [*given[:i], wrong, *given[i + 1 :]]
                    more = [0] * row.rooted + [SUM] * row.reduces
                    error = raised(getattr(comm, name), *mixed, *more, False)
                    assert type(error) is InvalidArgumentError, (name, wrong)
        calls = [
            lambda: comm.send(x, me, False),
            lambda: comm.recv(x, 2, False),
            lambda: comm.broadcast(x, -1, False),
            lambda: comm.broadcast(x, 1.0, False),
            lambda: comm.all_reduce(x, "sum", False),
            lambda: comm.all_gather_single(torch.ones(7), x, False),
            lambda: comm.all_gather_single(torch.ones(8, dtype=torch.float64), x, False),
            lambda: comm.reduce_scatter_single(x, torch.ones(9), SUM, False),
            lambda: comm.all_to_all_single(torch.ones(3), torch.ones(3), False),
        ]
        for call in calls:
            assert type(raised(call)) is InvalidArgumentError
        assert comm.barrier(False).seq == 1  # nothing was recorded or numbered

    run_ranks(program, 2, backend=mock_nccl)


def test_arrays_and_numbers_of_other_libraries_are_taken_as_ever(mock_nccl, checked):
    def program(comm: Communicator) -> None:
        x = np.full(4, comm.get_rank() + 1.0)
        comm.broadcast(x, np.int64(1), False).wait_blocking()
        assert x.tolist() == [2.0] * 4
        assert checked() == ["broadcast"] * 2
        empty = torch.ones(0)
        assert comm.all_gather_single(empty, empty, False).seq == 2

    run_ranks(program, 2, backend=mock_nccl)


def test_hooks_see_each_operation(mock_nccl, checked):
    def program(comm: Communicator) -> None:
        calls, seen = Calls(comm), []
        with comm.register_pre_hook(lambda name, _, args: seen.append(args.name)):
            for name in NAMES:
                calls(name).wait_blocking()
        assert seen == [*NAMES[:-1], "send" if comm.get_rank() == 0 else "recv"]
        checked().clear()
        calls("broadcast").wait_blocking()
        assert not checked()

    run_ranks(program, 2, backend=mock_nccl)


@pytest.mark.parametrize("name", NAMES)
def test_an_error_of_the_library_ends_the_communicator(mock_nccl, raised, name, monkeypatch):
    real = collectives.library_calls

    def failing(*arguments):
        return {one: call._replace(function=lambda *_: 3) for one, call in real(*arguments).items()}

    monkeypatch.setattr("unicomm.backends.nccl.backend.library_calls", failing)

    def program(comm: Communicator) -> None:
        backend = comm.unsafe_backend
        backend._handle.native = FailingMeeting(backend._handle.native)
        error = raised(Calls(comm), name)
        assert type(error) is BackendError
        assert (error.op, error.seq) == (name if comm.get_rank() == 0 or name != "send" else "recv", 1)
        assert raised(comm.barrier, False).message == f"broken earlier: {error.message}"

    run_ranks(program, 2, backend=mock_nccl)
    assert {int(row["state"]) for row in recorded.ring().records} == {4}


class FailingMeeting:
    """The library's functions, but for the one that a barrier is made of."""

    def __init__(self, native) -> None:
        self._native = native

    def __getattr__(self, name: str):
        return (lambda *_: 3) if name == "all_reduce" else getattr(self._native, name)


def test_after_the_end_each_operation_says_so(mock_nccl, raised):
    def program(comm: Communicator) -> None:
        calls = Calls(comm)
        comm.abort()
        for name in NAMES:
            assert type(raised(calls, name)) is AbortedError

    run_ranks(program, 2, backend=mock_nccl)


def test_graphs_take_each_operation_down(mock_nccl):
    together = Together(2)

    def program(comm: Communicator) -> None:
        calls, kept = Calls(comm), Calls(comm)
        names = [name for name in NAMES if name != "barrier"]
        graph = together.capture(comm, lambda: [calls(name) for name in names])
        (found,) = [vars(graph)["_unicomm_operations"].operations]
        assert [one.described[0].op for one in found[:-1]] == names[:-1]
        assert [one.described[0].bytes for one in found] == [16, 16, 32, 32, 32, 16]
        assert [one.described[0].root for one in found] == [-1, 1, -1, -1, -1, -1]
        assert found[-1].described[0].peer == 1 - comm.get_rank()
        graph.replay()
        for name in names:
            kept(name).wait_blocking()
        drain(comm)
        assert calls.x.tolist() == kept.x.tolist()
        assert calls.out.tolist() == kept.out.tolist()

    run_ranks(program, 2, backend=mock_nccl)
