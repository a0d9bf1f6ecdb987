"""Messages of the user and those that a collective is composed of never go to each other's receives.

A message that is small is over before its receiver has come, so a program may send, enter a collective, and
have the message received after it. Its receiver then got the message as its part of the collective.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from unicomm import Communicator, MismatchError, ReduceOp
from unicomm.testing import run_ranks

RANKS = 3
Collective = Callable[[Communicator, int], bool]


def _all_to_all(comm: Communicator, count: int) -> bool:
    me, outs = comm.get_rank(), _zeros(count)
    comm.all_to_all(outs, [torch.full((count,), 10.0 * me + r) for r in range(RANKS)], False)
    return all(bool((out == 10 * r + me).all()) for r, out in enumerate(outs))


def _all_to_all_single(comm: Communicator, count: int) -> bool:
    me, out = comm.get_rank(), torch.zeros(RANKS * count)
    comm.all_to_all_single(out, torch.arange(RANKS).repeat_interleave(count) + 10.0 * me, False)
    return bool((out == torch.arange(RANKS).repeat_interleave(count) * 10 + me).all())


def _all_gather(comm: Communicator, count: int) -> bool:
    outs = _zeros(count)
    comm.all_gather(outs, torch.full((count,), float(comm.get_rank())), False)
    return all(bool((out == r).all()) for r, out in enumerate(outs))


def _gather(comm: Communicator, count: int) -> bool:
    me = comm.get_rank()
    outs = _zeros(count) if me == 1 else []
    comm.gather(outs, torch.full((count,), float(me)), 1, False)
    return all(bool((out == r).all()) for r, out in enumerate(outs))


def _scatter(comm: Communicator, count: int) -> bool:
    me, out = comm.get_rank(), torch.zeros(count)
    comm.scatter(out, [torch.full((count,), 5.0 + r) for r in range(RANKS)] if me == 0 else [], 0, False)
    return bool((out == 5 + me).all())


def _reduce(comm: Communicator, count: int) -> bool:
    x = torch.full((count,), float(comm.get_rank()))
    comm.reduce(x, 0, ReduceOp.SUM, False)
    return comm.get_rank() != 0 or bool((x == 3).all())


def _broadcast(comm: Communicator, count: int) -> bool:
    x = torch.full((count,), float(comm.get_rank()))
    comm.broadcast(x, 0, False)
    return bool((x == 0).all())


def _barrier(comm: Communicator, count: int) -> bool:
    comm.barrier(False)
    return True


def _zeros(count: int) -> list[torch.Tensor]:
    return [torch.zeros(count) for _ in range(RANKS)]


COLLECTIVES = [
    *(_all_to_all, _all_to_all_single, _all_gather, _gather, _scatter, _reduce, _broadcast, _barrier)
]


@pytest.mark.parametrize("compares", [True, False], ids=["compared", "not compared"])
@pytest.mark.parametrize("count", [1, 3000])
@pytest.mark.parametrize("collective", COLLECTIVES, ids=[each.__name__[1:] for each in COLLECTIVES])
def test_a_message_that_is_received_after_a_collective(
    backend: str, collective: Collective, count: int, compares: bool
) -> None:
    def program(comm: Communicator) -> None:
        me = comm.get_rank()
        to, source = (me + 1) % RANKS, (me - 1) % RANKS
        got = torch.zeros(count)
        sent = comm.send(torch.full((count,), 100.0 + me), to, True)
        assert collective(comm, count)
        comm.recv(got, source, False)
        sent.wait()
        assert got.tolist() == [100.0 + source] * count

    hints = {"check_mismatch": str(compares).lower()}
    run_ranks(program, RANKS, backend=backend, timeout=60, hints=hints)


@pytest.mark.parametrize("backend", ["tcp", "ucx", "auto"])
@pytest.mark.parametrize("given", [0, 3])
@pytest.mark.parametrize("name", ["all_to_all_v_single", "all_to_all"])
@pytest.mark.parametrize("wire", [False, True], ids=["as they are", "in a wire format"])
def test_sizes_that_do_not_fit_where_calls_are_not_compared(
    backend: str, given: int, name: str, wire: bool
) -> None:
    """A part of which one of two ranks does not know, here of two hosts, must not meet a later collective."""

    def program(comm: Communicator) -> list[float] | None:
        me = comm.get_rank()
        sent = [0 if (me, r) != (0, 1) else given for r in range(RANKS)]
        expected = [0 if (me, r) != (1, 0) else 3 - given for r in range(RANKS)]
        call(comm, sent, expected, 7.0)
        right = [3] * RANKS
        return call(comm, right, right, 1.0)

    def call(comm: Communicator, sent: list[int], expected: list[int], value: float) -> list[float]:
        ins = [torch.full((n,), value) for n in sent]
        outs = [torch.zeros(n) for n in expected]
        if name == "all_to_all":
            comm.all_to_all(outs, ins, False)
            return torch.cat(outs).tolist()
        out = torch.zeros(sum(expected))
        comm.all_to_all_v_single(out, torch.cat(ins), expected, sent, False)
        return out.tolist()

    hints: dict[str, str | bool] = {"check_mismatch": False}
    if backend == "auto":
        hints["hosts"] = "a,b,a"
    if wire:
        hints["wire"] = "bfloat16"
    with pytest.raises(MismatchError, match="bytes"):
        run_ranks(program, RANKS, backend=backend, timeout=10, hints=hints)
