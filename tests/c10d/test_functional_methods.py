"""Methods of a Communicator in compiled graphs: the operators they become, and their effects."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

from tests.old_torch import not_with_old_torch
from unicomm import Communicator, InvalidArgumentError, ReduceOp, functional, new_comm
from unicomm.c10d.functional import messages as functional_messages
from unicomm.c10d.functional import methods as functional_methods
from unicomm.c10d.functional.declare import TRACED
from unicomm.c10d.process_group import UnicommProcessGroup
from unicomm.testing import run_ranks

N = 2


def reductions(comm, x):
    y = x * 1
    work = comm.all_reduce(y, ReduceOp.SUM, async_op=True)
    work.wait()
    comm.reduce(y, 1, ReduceOp.MAX)
    return y


def gathers(comm, x):
    whole, mine = x.new_zeros(N * x.numel()), torch.zeros_like(x)
    comm.all_gather_single(whole, x)
    comm.reduce_scatter_single(mine, whole, ReduceOp.AVG)
    comm.broadcast(mine, 1)
    return torch.cat([whole, mine.reshape(-1)])


def exchanges(comm, x):
    first, second = torch.zeros_like(x), torch.zeros_like(x)
    comm.all_to_all_single(first, x)
    comm.all_to_all_v_single(second, x, [1, 1], [1, 1])
    comm.barrier()
    return first - 3 * second


def roots(comm, x):
    me = comm.get_rank()
    whole = x.new_zeros(N * x.shape[0], *x.shape[1:]) if me == 1 else None
    comm.gather_single(whole, x, 1)
    part = torch.zeros_like(x)
    comm.scatter(part, [] if whole is None else [whole[2:], whole[:2]], 1)
    return part


def messages(comm, x):
    y = torch.zeros_like(x)
    if comm.get_rank() == 0:
        comm.send(x * 2, 1)
        comm.recv(y, 1)
    else:
        comm.recv(y, 0)
        comm.send(y + 1, 0)
    return y


PROGRAMS = {
    "reductions": (reductions, ["all_reduce_", "reduce"]),
    "gathers": (gathers, ["all_gather_single", "reduce_scatter_single", "broadcast_"]),
    "exchanges": (exchanges, ["all_to_all_single", "all_to_all_v_single", "barrier"]),
    "roots": (roots, ["gather", "scatter"]),
    "messages": (messages, ["send", "recv"]),
}


def traced(program, comm, x):
    """The operators in the graph, and the graph."""
    graphs = []

    def note(module, inputs):
        graphs.append(module)
        return module

    torch._dynamo.reset()
    torch.compile(program, fullgraph=True, backend=note)(comm, x)
    (graph,) = graphs
    targets = [str(n.target).split(".") for n in graph.graph.nodes]
    return [t[1] for t in targets if t[0] == "unicomm"], graph


@not_with_old_torch("has no custom operators that take process groups")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_graph_does_what_the_methods_do(name):
    program, operators = PROGRAMS[name]
    graphs = []
    for rank in range(N):
        with new_comm("fake", torch.device("cpu"), rank=rank, size=N) as comm:
            found, graph = traced(program, comm, torch.ones(2, 2))
            assert sorted(found) == sorted(operators)
            graphs.append(graph)

    def run(comm: Communicator) -> None:
        x = torch.arange(4.0).reshape(2, 2) + 10 * comm.get_rank()
        graph = graphs[comm.get_rank()]
        inputs = [
            functional_messages._order if "order" in n.name else (x if "x" in n.name else comm)
            for n in graph.graph.nodes
            if n.op == "placeholder"
        ]
        torch.testing.assert_close(graph(*inputs)[0], program(comm, x))

    run_ranks(run, N)


def test_all_methods_are_tested_and_have_the_methods_parameters():
    names = " ".join(inspect.getsource(program) for program, _ in PROGRAMS.values())
    for name in TRACED:
        assert f"comm.{name}(" in names
        own = inspect.signature(getattr(functional_methods, name)).parameters.values()
        real = inspect.signature(getattr(Communicator, name)).parameters.values()
        assert [(p.name, p.default) for p in own] == [(p.name, p.default) for p in real]


@not_with_old_torch("has no custom operators that take process groups")
@pytest.mark.parametrize("arguments", [{"timeout": 3}, {"hints": {"a": "b"}}])
def test_what_a_graph_cannot_have_is_said(arguments, raised):
    def program(comm, x):
        comm.all_reduce(x, ReduceOp.SUM, **arguments)
        return x

    with new_comm("fake", torch.device("cpu"), rank=0, size=N) as comm:
        assert "neither hints nor a timeout" in str(raised(traced, program, comm, torch.ones(2)))


WRONG = {
    "inputs of other sizes": lambda c, x: c.scatter(x.new_zeros(2), [x[:1], x[:3]], 0),
    "too few inputs": lambda c, x: c.scatter(x.new_zeros(4), [x], 0),
    "inputs of another type": lambda c, x: c.scatter(x.new_zeros(2), [x[:2], x[2:].int()], 0),
    "no output at the root": lambda c, x: c.gather_single(None, x, 0),
    "an output of another type": lambda c, x: c.all_gather_single(x.new_zeros(8, dtype=torch.int32), x),
}


@not_with_old_torch("has no custom operators that take process groups")
@pytest.mark.parametrize("case", WRONG)
def test_what_a_method_refuses_is_refused_in_a_graph(case, raised):
    def program(comm, x):
        WRONG[case](comm, x)
        return x

    with new_comm("fake", torch.device("cpu"), rank=0, size=N) as comm:
        assert type(raised(program, comm, torch.ones(4))) is InvalidArgumentError
        said = str(raised(traced, program, comm, torch.ones(4)))
        assert re.search("the root has to|each input has to|the output is of", said), said


@not_with_old_torch("has no custom operators that take process groups")
@pytest.mark.parametrize("kind", ["communicator", "process group"])
def test_another_place_gets_another_graph(kind):
    """The gradient of a broadcast is zero on all ranks but the root, so a graph serves one place."""
    compiled = torch.compile(
        lambda x, g: functional.broadcast(x, 0, g) * 2, fullgraph=True, backend="aot_eager"
    )
    torch._dynamo.reset()
    device = torch.device("cpu")
    for rank, size in ((0, 2), (2, 3)):
        with new_comm("fake", device, rank=rank, size=size) as comm:
            x = torch.ones(2, requires_grad=True)
            group = comm if kind == "communicator" else UnicommProcessGroup(comm)
            compiled(x, group).sum().backward()
            assert x.grad is not None
            assert x.grad.tolist() == ([2.0, 2.0] if rank == 0 else [0.0, 0.0])
