"""The communicator's native methods do what the methods written in Python do, without a Python frame."""

from __future__ import annotations

import inspect
import sys
import weakref

import pytest
import torch

from tests.comms import inside
from unicomm import Communicator, MismatchError, ReduceOp, Work, new_comm
from unicomm.comms.execution.fast_path import SHORT
from unicomm.testing import run_ranks

ONE = {
    "all_reduce": lambda comm: comm.all_reduce(torch.ones(3), ReduceOp.SUM),
    "broadcast": lambda comm: comm.broadcast(torch.ones(3), 0),
    "all_gather_single": lambda comm: comm.all_gather_single(torch.ones(3), torch.ones(3)),
    "reduce_scatter_single": lambda comm: comm.reduce_scatter_single(
        torch.ones(3), torch.ones(3), ReduceOp.SUM
    ),
    "all_to_all_single": lambda comm: comm.all_to_all_single(torch.ones(3), torch.ones(3)),
    "barrier": lambda comm: comm.barrier(),
}


@pytest.fixture
def comm():
    with new_comm("shm", torch.device("cpu")) as comm:
        yield comm


def frames_of(call):
    """The names of the Python functions that run in `call`."""
    names = []

    def note(frame, event, _):
        if event == "call":
            names.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names[1:]  # without `call` itself


@pytest.mark.parametrize("name", ONE)
def test_no_python_frame_on_the_common_way(comm, name):
    ONE[name](comm)
    assert frames_of(lambda: ONE[name](comm)) == ["<lambda>"]


def test_no_python_frame_for_messages():
    def program(comm: Communicator) -> None:
        x = torch.full((3,), float(comm.get_rank()))
        if comm.get_rank() == 0:
            assert frames_of(lambda: comm.send(x, 1)) == []
        else:
            assert frames_of(lambda: comm.recv(x, 0)) == []
            assert x.tolist() == [0.0] * 3

    run_ranks(program, 2)


@pytest.mark.parametrize("name", SHORT)
def test_the_method_looked_up_is_the_one_in_python(comm, name):
    assert inspect.isfunction(getattr(Communicator, name))
    assert getattr(comm, name).__doc__
    assert "timeout" in inspect.signature(getattr(comm, name)).parameters
    assert vars(Communicator)[name].__name__ == name


def test_arguments_in_every_form(comm):
    x = torch.ones(3)
    for call in (
        lambda: comm.all_reduce(x, ReduceOp.SUM),
        lambda: comm.all_reduce(x, op=ReduceOp.SUM),
        lambda: comm.all_reduce(op=ReduceOp.SUM, tensor=x, timeout=None),
        lambda: comm.all_reduce(x, ReduceOp.SUM, False, None, None),
        lambda: comm.all_reduce(x, ReduceOp.SUM, timeout=5.0),
        lambda: comm.all_reduce(x, ReduceOp.SUM, async_op=True),
        lambda: comm.all_reduce(**{"".join(["ten", "sor"]): x, "op": ReduceOp.SUM}),
    ):
        before = inside.fast_path(comm).seq
        work = call()
        work.wait()
        assert (type(work), work.name, work.seq) == (Work, "all_reduce", before + 1)


def test_wrong_arguments_are_told_by_the_method_in_python(comm, raised):
    x = torch.ones(3)
    for args, named in (
        ((), {}),
        ((x,), {}),
        ((x, ReduceOp.SUM), {"op": ReduceOp.SUM}),
        ((x, ReduceOp.SUM), {"wrong": 1}),
        ((x, ReduceOp.SUM, False, None, None, None), {}),
    ):
        error = raised(lambda args=args, named=named: comm.all_reduce(*args, **named))
        in_python = raised(lambda args=args, named=named: Communicator.all_reduce(comm, *args, **named))
        assert type(error) is type(in_python) is TypeError
        assert str(error) == str(in_python)
    assert inside.fast_path(comm).seq == 0


def test_a_work_that_somebody_keeps_stays_what_it_is(comm):
    kept = [call(comm) for _ in range(3) for call in ONE.values()]
    assert [work.seq for work in kept] == list(range(1, len(kept) + 1))
    assert [work.name for work in kept] == [*ONE, *ONE, *ONE]
    assert len({id(work) for work in kept}) == len(kept)


def test_nothing_is_left_of_a_dropped_work(comm):
    work = comm.barrier()
    work.mark = 1
    seen = weakref.ref(work)
    del work
    later = comm.barrier()
    assert not hasattr(later, "mark")
    assert seen() is None
    called = []
    later.add_done_callback(called.append)
    assert called == [later]
    assert (later.seq, later.is_completed(), later.exception(), later.peer) == (2, True, None, -1)


def test_hooks_send_a_call_the_general_way(comm):
    names = []
    hook = comm.register_pre_hook(lambda name, op_id, args: names.append((str(name.value), args.seq)))
    comm.barrier()
    assert names == [("barrier", 1)]
    hook.remove()
    comm.barrier()
    assert (names, inside.fast_path(comm).seq) == ([("barrier", 1)], 2)


def test_an_error_is_the_one_of_the_method_in_python(raised):
    def program(comm: Communicator) -> None:
        x, me = torch.ones(3), comm.get_rank()
        errors = [
            raised(lambda: comm.broadcast(x, me)),
            raised(lambda: Communicator.broadcast(comm, x, me)),
        ]
        assert [type(e) for e in errors] == [MismatchError] * 2
        assert [e.seq for e in errors] == [1, 2]
        assert str(errors[0]).replace("#1", "#2") == str(errors[1])

    run_ranks(program, 2)


def test_a_finalized_communicator_says_so(comm, raised):
    comm.finalize()
    barrier = comm.barrier  # the method in Python
    error = raised(lambda: comm.barrier())  # noqa: PLW0108 (the native one)
    assert str(error) == str(raised(barrier))
    assert "finalized" in str(error)
