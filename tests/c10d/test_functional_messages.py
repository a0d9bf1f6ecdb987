"""Messages and the barrier as functions: values; compilers keep all of them, in the program's order."""

from __future__ import annotations

import re

import pytest
import torch

from tests.c10d.test_functional import group_of
from tests.old_torch import not_with_old_torch
from unicomm import Communicator, functional, new_comm
from unicomm.testing import run_ranks


@pytest.mark.parametrize("kind", ["communicator", "process group"])
def test_values(kind):
    def program(comm: Communicator) -> None:
        group, me = group_of(comm, kind), comm.get_rank()
        x = torch.arange(6.0).reshape(2, 3).T.requires_grad_()
        functional.barrier(group)
        if me == 0:
            assert functional.send(x, 1, group) is None
            y = functional.recv(torch.empty(2, dtype=torch.int64), 1, group)
            assert y.tolist() == [7, 8]
        else:
            y = functional.recv(x, 0, group)
            assert not y.requires_grad
            assert torch.equal(y, x)
            functional.send(torch.tensor([7, 8]), 0, group)

    run_ranks(program, 2)


def talk(x: torch.Tensor, group: object) -> torch.Tensor:
    functional.send(x * 2, 1, group)
    y = functional.recv(x, 1, group)
    functional.send(y, 1, group)
    functional.barrier(group)
    functional.recv(x + 1, 1, group)
    functional.send(x * 3, 1, group)
    functional.gather(x, 1, group)
    return (x + 1).sum() + y.sum()


CALLS = ["send", "recv", "send", "barrier", "recv", "send", "gather"]


@not_with_old_torch("has no custom operators that take process groups")
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("kind", ["communicator", "process group"])
def test_inductor_keeps_all_in_order(kind, gradients):
    """Also those whose results nobody uses, on this rank."""
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    with new_comm("fake", torch.device("cpu"), rank=0, size=2) as comm:
        x = torch.ones(4, requires_grad=gradients)
        _, code = run_and_get_code(torch.compile(talk, fullgraph=True), x, group_of(comm, kind))
    found = re.findall(r"= torch\.ops\.unicomm\.(\w+)\.\w+\(|\btorch\.ops\.unicomm\.(\w+)\.\w+\(", code[0])
    assert sorted("".join(names) for names in found) == sorted(CALLS)
    assert ["".join(names) for names in found if "gather" not in names] == CALLS[:-1]
